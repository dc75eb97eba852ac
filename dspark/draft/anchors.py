"""Anchors and blocks: which tokens a training step predicts, and from what.

The only place with slot and position arithmetic: slot k of the block at anchor a sits at position
a + k, takes the token at a + k in (the anchor's own for k = 0, the mask id behind it) and predicts
the token at a + k + 1. Source: DSpark, arXiv 2607.05147, and DeepSpec's training forward.

Symbols: B batch, S positions, A anchors, K slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Blocks", "block_positions", "sample_blocks", "visible"]


@dataclass(frozen=True)
class Blocks:
    """The blocks of one batch."""

    anchors: Tensor  # [B, A] int64, rising; 0 where not kept
    keep: Tensor  # [B, A] bool
    anchor_ids: Tensor  # [B, A] int64, token at the anchor
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
) -> Blocks:
    """Draw up to ``num_anchors`` anchors a row, uniformly without replacement.

    A position can be an anchor if it and the next one are supervised. ``generators`` holds one
    CPU generator a row, so that a row's anchors do not depend on its neighbours in the batch.
    A is the largest number drawn in any row, at least 1.
    """
    loss_mask = loss_mask.bool()
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    drawn = []
    for row, generator in zip(candidates, generators, strict=True):
        places = row.nonzero()[:, 0]
        chosen = torch.randperm(len(places), generator=generator)[:num_anchors]
        drawn.append(places[chosen].sort().values)
    width = max(1, *(len(row) for row in drawn))
    anchors = torch.zeros(len(drawn), width, dtype=torch.int64)
    keep = torch.zeros(len(drawn), width, dtype=torch.bool)
    for index, row in enumerate(drawn):
        anchors[index, : len(row)] = row
        keep[index, : len(row)] = True
    return blocks_at(input_ids, loss_mask, anchors, keep, block_size)


def blocks_at(
    input_ids: Tensor,  # [B, S] int64
    loss_mask: Tensor,  # [B, S] bool
    anchors: Tensor,  # [B, A] int64
    keep: Tensor,  # [B, A] bool
    block_size: int,
) -> Blocks:
    """Labels and masks of blocks at given anchors."""
    batch, length = input_ids.shape
    label_index = block_positions(anchors, block_size) + 1
    inside = label_index < length
    label_index = label_index.clamp(max=length - 1)
    flat = label_index.view(batch, -1)
    label_ids = input_ids.gather(1, flat).view_as(label_index)
    supervised = loss_mask.bool().gather(1, flat).view_as(label_index)
    # a block ends at its first unsupervised token: what comes behind is another turn
    mask = (keep[..., None] & inside & supervised).cumprod(-1).bool()
    anchor_ids = input_ids.gather(1, anchors)
    prev_ids = torch.cat([anchor_ids[..., None], label_ids[..., :-1]], dim=-1)
    return Blocks(anchors, keep, anchor_ids, label_index, label_ids, prev_ids, mask)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute positions of the slots, [...] -> [..., K]."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def visible(
    anchors: Tensor,  # [B, A] int64
    length: int,
    block_size: int,
) -> Tensor:  # [B, A*K, S + A*K] bool, true where a slot may look
    """Context strictly before the anchor, and the whole of the own block in both directions.

    Blocks never see each other. The anchor's own feature is excluded: when the draft runs, the
    target has not consumed the anchor yet. Padding on the right lies behind every anchor and
    needs no mask. Blocks that are not kept see themselves, which keeps their softmax finite;
    nothing reads their output.
    """
    batch, count = anchors.shape
    device = anchors.device
    context = torch.arange(length, device=device) < anchors[..., None]  # [B, A, S]
    block = torch.eye(count, dtype=torch.bool, device=device)  # [A, A]
    context = context.repeat_interleave(block_size, dim=1)
    own = block.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    return torch.cat([context, own.expand(batch, -1, -1)], dim=-1)
