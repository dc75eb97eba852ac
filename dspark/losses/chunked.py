"""The objective without a [blocks, slots, vocabulary] tensor: whole blocks, chunk by chunk.

A chunk goes from hidden states to `SlotDistances` ([blocks, K], small) under activation
checkpointing: its logits exist in the forward pass, are dropped, and are computed again when its
backward pass comes. Everything that couples slots or blocks happens behind, on the whole.

Symbols: N blocks, K slots, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark.config import LossSettings
from dspark.draft import DSparkDraftModel
from dspark.losses.closed_form import slot_distances
from dspark.losses.slots import SlotDistances, add_up, needs_labels
from dspark.losses.sums import Sums

__all__ = ["objective_chunked"]


def objective_chunked(
    hidden: Tensor,  # [N, K, D] of the draft, behind its final norm
    target_hidden: Tensor,  # [N, K, D] of the target, behind its final norm, one before each label
    labels: Tensor,  # [N, K] int64
    mask: Tensor,  # [N, K] bool, a contiguous supervised prefix of each block
    prev_ids: Tensor,  # [N, K] int64, tokens that enter the slots' predictions
    *,
    draft: DSparkDraftModel,
    target_head: Callable[[Tensor], Tensor],  # [..., D] -> [..., V] logits
    settings: LossSettings,
) -> Sums:
    """`eager.objective` of the draft's and the target's logits over these hidden states.

    Gradients flow to ``hidden`` and to the draft's Markov and confidence heads. Blocks without a
    supervised slot are left out first; if none remains, the sums are zeros whose gradients are
    zeros as well, so that a rank with nothing to learn still takes part in every collective.
    """
    # An empty selection makes one empty chunk, which attaches every parameter all the same.
    rows = mask.any(-1).nonzero()[:, 0]
    hidden, target_hidden, labels, mask, prev_ids = (
        each[rows] for each in (hidden, target_hidden, labels, mask, prev_ids)
    )

    def distances(
        hidden: Tensor, target_hidden: Tensor, labels: Tensor, prev_ids: Tensor
    ) -> SlotDistances:
        with torch.no_grad():
            target_logits = target_head(target_hidden)
        return slot_distances(
            draft.slot_logits(hidden, prev_ids),
            target_logits,
            labels,
            accept_temperature=settings.accept_length_temperature,
            with_kl=settings.distance == "lk_hybrid",
            with_labels=needs_labels(settings),
        )

    inputs = (hidden, target_hidden, labels, prev_ids)
    *others, last = zip(*(torch.split(each, settings.chunk_blocks) for each in inputs), strict=True)
    parts = [
        checkpoint(distances, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in others
    ]
    # Its backward pass comes first, before any other chunk's logits exist again: no need to drop
    # them in between.
    parts.append(distances(*last))
    return add_up(_joined(parts), mask, _confidence_logits(draft, hidden, prev_ids), settings)


def _confidence_logits(draft: DSparkDraftModel, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
    head = draft.markov_head
    return draft.confidence_logits(hidden, None if head is None else head.embed(prev_ids))


def _joined(parts: list[SlotDistances]) -> SlotDistances:
    def joined(name: str) -> Any:
        given = [getattr(part, name) for part in parts]
        return None if given[0] is None else torch.cat(given)

    return SlotDistances(**{field.name: joined(field.name) for field in fields(SlotDistances)})
