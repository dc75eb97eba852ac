"""Anchors and blocks: which tokens a training step predicts, and from what.

The only place with slot and position arithmetic: slot k of the block at anchor a sits at position
a + k, takes the token at a + k in (the anchor's own for k = 0, the mask id behind it) and predicts
the token at a + k + 1. Source: DSpark, arXiv 2607.05147, and DeepSpec's training forward.

A row may hold several documents one behind the other. ``starts`` [B, S] names for every position
the first position of its document; None is one document a row. A block never leaves its document.

Symbols: B batch, S positions, A anchors, K slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Blocks", "allot", "block_positions", "blocks_at", "sample_blocks"]


@dataclass(frozen=True)
class Blocks:
    """The blocks of one batch."""

    anchors: Tensor  # [B, A] int64, rising; 0 where not kept
    keep: Tensor  # [B, A] bool
    anchor_ids: Tensor  # [B, A] int64, token at the anchor
    anchor_starts: Tensor  # [B, A] int64, first position of the anchor's document
    label_index: Tensor  # [B, A, K] int64, anchor + 1 + k, clamped to S - 1
    label_ids: Tensor  # [B, A, K] int64
    prev_ids: Tensor  # [B, A, K] int64, token that enters slot k's prediction
    mask: Tensor  # [B, A, K] bool, the supervised prefix of each block

    def to(self, device: torch.device) -> "Blocks":
        """The same on ``device``."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self.__dict__.items()}
        return replace(self, **moved)

    @property
    def target_index(self) -> Tensor:  # [B, A, K] int64
        """Positions whose target hidden state predicts the labels: one before each label."""
        return self.label_index - 1


def sample_blocks(
    input_ids: Tensor,  # [B, S] int64
    loss_mask: Tensor,  # [B, S] bool, true on supervised tokens
    *,
    num_anchors: int,
    block_size: int,
    generators: Sequence[torch.Generator],
    starts: Tensor | None = None,  # [B, S] int64
    width: int = 1,
) -> Blocks:
    """Draw up to ``num_anchors`` anchors a row, uniformly without replacement in each document.

    A position can be an anchor if it and the next one are supervised and of one document. A row's
    anchors are dealt out to its documents by `allot`. ``generators`` holds one CPU generator a
    row, so that a row's anchors do not depend on its neighbours in the batch. A is the largest
    number drawn in any row, at least ``width``.
    """
    loss_mask = loss_mask.bool()
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    if starts is not None:
        candidates &= starts[:, :-1] == starts[:, 1:]
    drawn = []
    for number, (row, generator) in enumerate(zip(candidates, generators, strict=True)):
        places = row.nonzero()[:, 0]
        groups = [places]
        if starts is not None and len(places):
            counts = torch.unique_consecutive(starts[number][places], return_counts=True)[1]
            groups = list(places.split(counts.tolist()))
        shares = allot(num_anchors, [len(group) for group in groups])
        chosen = [
            group[torch.randperm(len(group), generator=generator)[:share]]
            for group, share in zip(groups, shares, strict=True)
        ]
        drawn.append(torch.cat(chosen).sort().values)
    width = max(width, *(len(row) for row in drawn))
    anchors = torch.zeros(len(drawn), width, dtype=torch.int64)
    keep = torch.zeros(len(drawn), width, dtype=torch.bool)
    for index, row in enumerate(drawn):
        anchors[index, : len(row)] = row
        keep[index, : len(row)] = True
    return blocks_at(input_ids, loss_mask, anchors, keep, block_size, starts)


def allot(budget: int, candidates: Sequence[int]) -> list[int]:
    """Deal ``budget`` anchors out to documents in proportion to their ``candidates``.

    So a token of a short document is covered as often as one of a long document, to within
    rounding (largest remainders win, the first of equals). No document gets more than it has
    candidates, and one that has any gets at least one while the budget lasts.
    """
    total = sum(candidates)
    if total <= budget:
        return list(candidates)
    shares = [min(count, max(1, budget * count // total)) for count in candidates]
    owed = [budget * count / total - share for count, share in zip(candidates, shares, strict=True)]
    places = range(len(shares))
    while (missing := budget - sum(shares)) != 0:
        if missing > 0:
            chosen = max((i for i in places if shares[i] < candidates[i]), key=owed.__getitem__)
            step = 1
        else:
            most = [i for i in places if shares[i] > 1] or [i for i in places if shares[i]]
            chosen = min(most, key=owed.__getitem__)
            step = -1
        shares[chosen] += step
        owed[chosen] -= step
    return shares


def blocks_at(
    input_ids: Tensor,  # [B, S] int64
    loss_mask: Tensor,  # [B, S] bool
    anchors: Tensor,  # [B, A] int64
    keep: Tensor,  # [B, A] bool
    block_size: int,
    starts: Tensor | None = None,  # [B, S] int64
) -> Blocks:
    """Labels and masks of blocks at given anchors."""
    batch, length = input_ids.shape
    label_index = block_positions(anchors, block_size) + 1
    inside = label_index < length
    label_index = label_index.clamp(max=length - 1)
    flat = label_index.view(batch, -1)
    label_ids = input_ids.gather(1, flat).view_as(label_index)
    supervised = loss_mask.bool().gather(1, flat).view_as(label_index)
    anchor_starts = torch.zeros_like(anchors)
    if starts is not None:
        anchor_starts = starts.gather(1, anchors) * keep
        inside &= starts.gather(1, flat).view_as(label_index) == anchor_starts[..., None]
    # a block ends at its first unsupervised token: what comes behind is another turn
    mask = (keep[..., None] & inside & supervised).cumprod(-1).bool()
    anchor_ids = input_ids.gather(1, anchors)
    prev_ids = torch.cat([anchor_ids[..., None], label_ids[..., :-1]], dim=-1)
    return Blocks(anchors, keep, anchor_ids, anchor_starts, label_index, label_ids, prev_ids, mask)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of the slots, [...] -> [..., K]."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)
