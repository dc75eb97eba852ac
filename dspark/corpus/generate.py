"""Decode many prompts at once with the target: the loop under the in-process sampler.

Prompts are padded on the left. Nothing waits for the device except a look at the finished rows
every few steps (and `Draw`, where a setting filters); when half of the rows are finished they are
handed out and the batch shrinks to the others.

Symbols: B rows of the batch, S positions, G key/value heads, N head size.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from dspark.corpus.draw import Draw
from dspark.errors import RunError
from dspark.target import Target

__all__ = ["generate"]

_CHECK_EVERY = 16
# A prefill holds activations of this many tokens at a time.
_PREFILL_TOKENS = 32768
_GROW = 256


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a batch in buffers that are written in place.

    transformers' own layer concatenates, that is copies the whole cache at every token.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.buffers: list[Tensor] = []  # keys and values, [B, G, capacity, N]
        self.prefill: tuple[slice, int] | None = None
        """Rows that a prefill call fills, and B."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.prefill is not None:
            rows, batch = self.prefill
            self._reserve(batch, key_states.shape[-2], key_states, value_states)
            for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[rows, :, : states.shape[-2]] = states
            return key_states, value_states
        end = self.length + key_states.shape[-2]
        self._reserve(len(key_states), end, key_states, value_states)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = states
        self.length = end
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def select(self, rows: Tensor) -> None:
        self.buffers = [buffer[rows] for buffer in self.buffers]

    def _reserve(self, batch: int, needed: int, *like: Tensor) -> None:
        if self.buffers and self.buffers[0].shape[2] >= needed:
            return
        capacity = (needed // _GROW + 1) * _GROW
        grown = []
        for index, states in enumerate(like):
            shape = (batch, states.shape[1], capacity, states.shape[3])
            buffer = states.new_zeros(shape)
            if self.buffers:
                buffer[:, :, : self.length] = self.buffers[index][:, :, : self.length]
            grown.append(buffer)
        self.buffers = grown


class _Batch:
    """The model, its cache and the attention mask of the rows still running."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]]) -> None:
        self._model = target.model
        self._device = target.device
        takes = inspect.signature(self._model.forward).parameters
        # renamed in transformers 5.24
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        # a model that mixes attention windows needs transformers to build a mask for each
        self._plain_mask = getattr(target.config, "sliding_window", None) is None
        self._layers = [_Layer() for _ in range(target.num_layers)]
        self._cache = Cache(layers=list(self._layers))
        longest = max(map(len, prompts))
        self._mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            self._mask[row, longest - len(prompt) :] = True
        self._ids = ids.to(self._device)
        self._mask = self._mask.to(self._device)
        self._length = longest
        self._positions = self._mask.sum(-1)

    def prefill(self) -> Tensor:  # [B, V], the last token's logits
        rows, longest = self._ids.shape
        step = max(1, _PREFILL_TOKENS // longest)
        logits = []
        for start in range(0, rows, step):
            part = slice(start, start + step)
            for layer in self._layers:
                layer.prefill = (part, rows)
            mask = self._mask[part]
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            logits.append(self._forward(self._ids[part], mask, positions))
        for layer in self._layers:
            layer.prefill, layer.length = None, longest
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:  # [B] -> [B, V]
        if self._length == self._mask.shape[1]:
            self._mask = torch.nn.functional.pad(self._mask, (0, _GROW), value=True)
        self._length += 1
        mask = self._mask[:, : self._length]
        if self._plain_mask:
            mask = mask[:, None, None, :]
        logits = self._forward(tokens[:, None], mask, self._positions[:, None])
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._device)
        self._mask, self._positions = self._mask[index], self._positions[index]
        for layer in self._layers:
            layer.select(index)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        out = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        logits: Tensor = out.logits[:, -1]
        return logits


@torch.no_grad()
def generate(
    target: Target, prompts: Sequence[Sequence[int]], limits: Sequence[int], draw: Draw
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield lists of (index of the prompt, its new ids), as rows finish.

    A row ends with an id of ``target.eos_ids``, which is part of the new ids, or after its limit.

    Args:
        prompts: B non-empty lists of ids.
        limits: B numbers of new tokens, >= 1.
        draw: settings and uniform numbers of the B rows; rows that finish are taken out of it.

    Raises:
        RunError: the target's logits are NaN.
    """
    batch = _Batch(target, prompts)
    alive = list(range(len(prompts)))
    left = torch.tensor(limits, device=target.device)
    ends = torch.tensor(sorted(target.eos_ids), dtype=torch.int64, device=target.device)
    tokens = torch.zeros(len(prompts), max(limits), dtype=torch.int64, device=target.device)
    lengths = torch.zeros_like(left)
    logits = batch.prefill()
    for step in range(max(limits)):
        token = draw(logits, step)
        tokens[:, step] = token
        running = lengths == 0
        finished = (token[:, None] == ends).any(-1) | (left == step + 1)
        lengths = torch.where(running & finished, step + 1, lengths)
        if (step + 1) % _CHECK_EVERY == 0 or step + 1 == max(limits):
            if bool(logits.isnan().any()):
                raise RunError(f"target '{target.name}' computed NaN logits; check its weights")
            counts = lengths.tolist()
            done = [row for row, count in enumerate(counts) if count]
            if len(done) * 2 >= len(alive):
                kept = tokens[:, : step + 1].tolist()
                yield [(alive[row], kept[row][: counts[row]]) for row in done]
                rest = [row for row, count in enumerate(counts) if not count]
                if not rest:
                    return
                index = torch.tensor(rest, device=target.device)
                tokens, lengths, left = tokens[index], lengths[index], left[index]
                alive = [alive[row] for row in rest]
                draw.keep(rest)
                batch.keep(rest)
                token = token[index]
        logits = batch.step(token)
