"""Decode many prompts at once with the target: the loop under the in-process sampler.

Prompts are padded on the left. Nothing waits for the device except a look at the finished rows
every few steps (and `Draw`, where a setting filters); when half of the rows are finished they are
handed out and the batch shrinks to the others.

A step works on buffers that stay where they are until they are full, so on a GPU it is recorded
once and replayed: launching the kernels of a small target takes the host several times longer than
running them.

Symbols: B rows of the batch, C positions that the buffers hold, G key/value heads, H query heads,
N head size.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dspark.corpus.draw import Draw
from dspark.corpus.ling_batch import LingBatch
from dspark.errors import RunError
from dspark.target import HFTarget, LingTarget, Target

__all__ = ["generate"]

log = logging.getLogger(__name__)

_CHECK_EVERY = 16
# A prefill holds activations of this many tokens at a time.
_PREFILL_TOKENS = 32768
# Buffers grow by this many positions; a step reads all they hold, filled or not.
_GROW = 128
_ATTENTION = "dspark_sampling"


def _attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, Q, N]
    key: Tensor,  # [B, G, C, N]
    value: Tensor,  # [B, G, C, N]
    attention_mask: Tensor | None,  # [B, 1, Q, C] bool
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, Q, H, N]
    """SDPA, but a single query of grouped heads reads keys and values as they lie.

    The general path repeats them for every query head, which costs more than everything else.
    """
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    if queries > 1 or heads == groups:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return out
    packed = query.reshape(batch, groups, heads // groups, size)
    mixed = F.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    return mixed.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@contextmanager
def _sampling_attention(config: Any) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a batch, [B, G, C, N], written in place.

    transformers' own layer concatenates, that is copies the whole cache at every token.
    """

    def __init__(self, batch: int, capacity: int, cursor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._capacity = batch, capacity
        self._cursor = cursor  # [1] int64 on the device: where the next token goes
        self.length = 0  # the same on the host
        self.prefill: slice | None = None
        """Rows that a prefill call fills; None: a step of one token for every row."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(self._batch, states.shape[1], self._capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.prefill is not None:
            self.keys[self.prefill, :, : key_states.shape[2]] = key_states
            self.values[self.prefill, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        self.keys.index_copy_(2, self._cursor, key_states)
        self.values.index_copy_(2, self._cursor, value_states)
        return self.keys, self.values

    def get_seq_length(self, *args: Any) -> int:
        return self.length

    def get_mask_sizes(self, query: Any, *args: Any) -> tuple[int, int]:
        # transformers 5.17 passes the positions themselves
        queries = query if isinstance(query, int) else len(query)
        return (self._capacity if self.prefill is None else queries), 0

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def grow(self, capacity: int) -> None:
        self._capacity = capacity
        more = capacity - self.keys.shape[2]
        self.keys, self.values = (F.pad(old, (0, 0, 0, more)) for old in (self.keys, self.values))


class _Batch:
    """The model, its cache, and what a step of the rows still running reads and writes."""

    def __init__(self, target: HFTarget, prompts: Sequence[Sequence[int]]) -> None:
        target.pack()
        self._target = target
        device = target.device
        takes = inspect.signature(target.model.forward).parameters
        # renamed in transformers 5.24
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        # a model that mixes attention windows needs transformers to build a mask for each
        self._plain_mask = getattr(target.config, "sliding_window", None) is None
        self._replays = self._plain_mask and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._longest = max(map(len, prompts))
        self._capacity = (self._longest // _GROW + 1) * _GROW
        mask = torch.zeros(len(prompts), self._capacity, dtype=torch.bool)
        ids = torch.zeros(len(prompts), self._longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, self._longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, self._longest - len(prompt) : self._longest] = True
        self._ids, self._mask = ids.to(device), mask.to(device)
        self._cursor = torch.tensor([self._longest], device=device)
        self._positions = self._mask.sum(-1)
        self._token = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        self._logits = torch.empty(0)
        count = target.num_layers
        self._layers = [_Layer(len(prompts), self._capacity, self._cursor) for _ in range(count)]
        self._cache = Cache(layers=list(self._layers))

    def prefill(self) -> Tensor:  # [B, V], the last token's logits
        step = max(1, _PREFILL_TOKENS // self._longest)
        logits = []
        for start in range(0, len(self._ids), step):
            part = slice(start, start + step)
            for layer in self._layers:
                layer.prefill = part
            mask = self._mask[part, : self._longest]
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            logits.append(self._forward(self._ids[part], mask, positions))
        for layer in self._layers:
            layer.prefill, layer.length = None, self._longest
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """[B] -> [B, V]; the result is overwritten by the next step."""
        if self._layers[0].length == self._capacity:
            self._forget()
            self._capacity += _GROW
            self._mask = F.pad(self._mask, (0, _GROW))
            for layer in self._layers:
                layer.grow(self._capacity)
        self._token.copy_(tokens)
        if self._replays and self._graph is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._logits = self._advance()
        for layer in self._layers:
            layer.length += 1
        return self._logits

    def keep(self, rows: list[int]) -> None:
        self._forget()
        index = torch.tensor(rows, device=self._mask.device)
        self._mask, self._positions = self._mask[index], self._positions[index]
        self._token = self._token[index]
        for layer in self._layers:
            layer.select(index)

    def _advance(self) -> Tensor:
        self._mask.index_fill_(1, self._cursor, True)
        mask = self._mask[:, None, None, :] if self._plain_mask else self._mask
        logits = self._forward(self._token[:, None], mask, self._positions[:, None])
        self._positions.add_(1)
        self._cursor.add_(1)
        return logits

    def _record(self) -> None:
        # libraries choose their kernels and work space at a first call, which can't be recorded
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance()
            self._positions.sub_(1)
            self._cursor.sub_(1)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._logits = self._advance()
        except RuntimeError as error:
            self._replays = False
            first = (str(error).splitlines() or ["?"])[0]
            log.warning("this target's step cannot be recorded, so sampling is slow: %s", first)
            return
        self._graph = graph

    def _forget(self) -> None:
        if self._graph is not None:
            # its memory is about to be used for something else
            torch.cuda.synchronize()
            self._logits = torch.empty(0)
            self._graph = None

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        with _sampling_attention(self._target.config):
            out = self._target.model(
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
    target: Target,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    draw: Draw,
    *,
    num_ids: int | None = None,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield lists of (index of the prompt, its new ids), as rows finish.

    A row ends with an id of ``target.eos_ids``, which is part of the new ids, or after its limit.

    Args:
        prompts: B non-empty lists of ids.
        limits: B numbers of new tokens, >= 1.
        draw: settings and uniform numbers of the B rows; rows that finish are taken out of it.
        num_ids: only ids below it are drawn; an embedding may be padded beyond the tokenizer.

    Raises:
        RunError: the target's logits are NaN.
    """
    batch: _Batch | LingBatch = (
        LingBatch(target, prompts)
        if isinstance(target, LingTarget)
        else _Batch(cast(HFTarget, target), prompts)
    )
    alive = list(range(len(prompts)))
    left = torch.tensor(limits, device=target.device)
    ends = torch.tensor(sorted(target.eos_ids), dtype=torch.int64, device=target.device)
    tokens = torch.zeros(len(prompts), max(limits), dtype=torch.int64, device=target.device)
    lengths = torch.zeros_like(left)
    logits = batch.prefill()
    for step in range(max(limits)):
        token = draw(logits[:, :num_ids], step)
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
