"""A batch of sequences of a Ling-3.0 target, for the in-process sampler.

Prompts are padded on the left: padding writes nothing into a KDA state and is masked in MLA.

Symbols: B sequences, H heads of this rank, S longest prompt, V vocabulary, C chunk length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.target.ling import LingTarget, sequence_call
from dspark.target.rows import CHUNK
from dspark.target.state import Call

__all__ = ["LingBatch"]


class LingBatch:
    """The state of a batch, moved on one token at a time."""

    def __init__(self, target: LingTarget, prompts: Sequence[Sequence[int]]) -> None:
        target.pack()
        self._target = target
        self._heads = target.config.num_attention_heads // target.model.ranks
        device = target.device
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = True
        self._ids, self._mask = ids.to(device), mask.to(device)
        self._padding = (~self._mask).sum(-1)  # [B]
        self._cache = target.model.new_cache((), len(prompts), device, target.dtype)

    def prefill(self) -> Tensor:  # [B, V], the last token's logits
        """Read all prompts."""
        plain = sequence_call(self._ids.shape, self._ids.device, self._mask)
        call = Call(
            positions=plain.positions,
            valid=plain.valid,
            hidden=plain.hidden,
            kda=self._cache.kda,
            latents=self._cache.latents,
        )
        self._cache.begin(self._ids.shape[1])
        hidden, _ = self._target.model(self._ids, call)
        self._cache.commit(self._ids.shape[1])
        return self._target.logits(hidden[:, -1])

    def step(self, tokens: Tensor) -> Tensor:
        """[B] -> [B, V]."""
        length = self._cache.length
        call = Call(
            positions=(length - self._padding)[:, None],
            by_row=True,
            count=1,
            start=length,
            kda=self._cache.kda,
            latents=self._cache.latents,
            masks=self._masks(length + 1),
        )
        self._cache.begin(1)
        hidden, _ = self._target.model(tokens[:, None], call)
        self._cache.commit(1)
        return self._target.logits(hidden[:, 0])

    def keep(self, rows: list[int]) -> None:
        """Go on with these sequences."""
        index = torch.tensor(rows, device=self._padding.device)
        self._padding = self._padding[index]
        self._cache.select(index)

    def _masks(self, end: int) -> tuple[Tensor, ...]:  # each [B, H, C]
        masks = []
        for first in range(0, end, CHUNK):
            place = first + torch.arange(CHUNK, device=self._padding.device)
            hidden = (place >= end) | (place < self._padding[:, None])
            mask = torch.zeros(hidden.shape, device=place.device)
            mask = mask.masked_fill_(hidden, float("-inf"))
            masks.append(mask[:, None].expand(-1, self._heads, -1))
        return tuple(masks)
