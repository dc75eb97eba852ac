"""From the distances of each slot to the sums of the objective: everything past the vocabulary.

Here all tensors are [N, K] and small. The vocabulary-wide part that yields `SlotDistances` has
three forms, `eager.slot_distances`, `closed_form.slot_distances` and the kernels of `one_pass`; all
end up here.

Symbols: N blocks, K slots, p and q the target's and the draft's distribution of a slot.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dspark.acceptance import survival
from dspark.config import LossSettings
from dspark.losses.accept_length import accept_weights, first_errors, survival_weights
from dspark.losses.sums import Sums, position_weights

__all__ = ["SlotDistances", "add_up", "needs_labels", "numerators", "overlap"]

LK_SHARPNESS = 3.0  # eta of arXiv 2602.23881
NLA_FLOOR = 1e-5


@dataclass(frozen=True)
class SlotDistances:
    """Of each slot, with a graph to the draft's logits; at least float32."""

    ce: Tensor  # [N, K] -log q(label)
    l1: Tensor  # [N, K] sum_v |p(v) - q(v)|, 0..2
    accept_l1: Tensor  # [N, K] the same with the p that L_acc looks at
    kl: Tensor | None  # [N, K] KL(p || q); only for the distance that needs it
    # without a graph, and only where `needs_labels`:
    target_ce: Tensor | None = None  # [N, K] -log p(label), with the p that L_acc looks at
    peak: Tensor | None = None  # [N, K] -log max_v q(v)


def needs_labels(settings: LossSettings) -> bool:
    """Whether L_acc looks at more of the labels than their cross entropy."""
    return settings.accept_length_form.startswith("path") or settings.accept_length_focal > 0


def overlap(l1: Tensor) -> Tensor:
    """alpha = sum_v min(p(v), q(v)) = 1 - l1 / 2, the chance that a slot is accepted; 0..1."""
    return (1 - l1 / 2).clamp(0, 1)


def add_up(
    distances: SlotDistances,
    mask: Tensor,  # [N, K] bool, a contiguous supervised prefix of each block
    confidence_logits: Tensor | None,  # [N, K]
    settings: LossSettings,
) -> Sums:
    """The objective of `eager.objective` from what each slot contributes."""
    alpha = overlap(distances.l1)
    rated = alpha.detach()
    weight, (ce, l1, accept_length) = numerators(distances, mask, settings)
    # without a head there is nothing to learn; the 0 keeps dtype and device
    confidence = alpha.new_zeros(())
    if confidence_logits is not None:
        confidence_logits = confidence_logits.to(alpha.dtype)
        entropy = functional.binary_cross_entropy_with_logits(
            confidence_logits, rated, reduction="none"
        )
        confidence = (weight * entropy).sum()
    position = position_weights(mask, settings.decay)
    return Sums(
        ce=ce,
        l1=l1,
        confidence=confidence,
        accept_length=accept_length,
        **_statistics(rated, mask, position, confidence_logits),
    )


def numerators(
    distances: SlotDistances,
    mask: Tensor,  # [N, K] bool
    settings: LossSettings,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:  # [N, K]; [], [], []
    """Slot weights, and ce, l1 and accept_length of `Sums`; of whole blocks, so chunks add up."""
    alpha = overlap(distances.l1)
    accept_alpha = overlap(distances.accept_l1)
    if settings.slot_weights == "survival":
        weight = survival_weights(alpha.detach(), mask, smoothing=settings.survival_smoothing)
    else:
        weight = position_weights(mask, settings.decay)
    by_alpha, by_ce = accept_weights(
        settings.accept_length_form, accept_alpha, distances.ce, distances.target_ce, mask
    )
    if settings.accept_length_focal > 0:
        assert distances.peak is not None
        errors = first_errors(distances.ce, distances.peak, mask)
        by_ce = by_ce + settings.accept_length_focal * errors
    return weight, (
        (weight * distances.ce).sum(),
        (weight * _distance(distances, alpha, settings)).sum(),
        (by_alpha * (1 - accept_alpha) + by_ce * distances.ce).sum(),
    )


def _distance(distances: SlotDistances, alpha: Tensor, settings: LossSettings) -> Tensor:
    """[N, K]. Scaled as the full L1 = 2·TV is, so that one `l1_weight` fits all."""
    if settings.distance == "lk_hybrid":
        # KL where the draft misses the target's mass and TV has no gradient, TV where it fits
        assert distances.kl is not None
        blend = torch.exp(-LK_SHARPNESS * alpha.detach())
        return 2 * (blend * distances.kl + (1 - blend) * (1 - alpha))
    if settings.distance == "nla":
        # the floor also stops the gradient of hopeless slots, which CE still moves
        return -2 * alpha.clamp_min(NLA_FLOOR).log()
    return distances.l1


@torch.no_grad()
def _statistics(
    alpha: Tensor,  # [N, K]
    mask: Tensor,  # [N, K] bool
    position: Tensor,  # [N, K]
    confidence_logits: Tensor | None,  # [N, K]
) -> dict[str, Tensor]:
    """The detached fields of `Sums`."""
    alpha, position = alpha.double(), position.double()
    survived = survival(alpha, mask)
    zero = position.new_zeros(())
    statistics = {
        "alpha": (alpha * mask).sum(0),
        "slots": mask.sum(0).double(),
        "survival": survived.sum(0),
        "valid_blocks": mask.any(-1).sum().double(),
        "weight": position.sum(),
        "confidence_weight": zero,
        "confidence_abs_error": zero,
        "confidence_bias": zero,
        "confidence_cumprod_bias": zero,
    }
    if confidence_logits is not None:
        confidence = torch.sigmoid(confidence_logits.double())
        error = confidence - alpha
        statistics["confidence_weight"] = position.sum()
        statistics["confidence_abs_error"] = (position * error.abs()).sum()
        statistics["confidence_bias"] = (position * error).sum()
        gap = survival(confidence, mask) - survived
        statistics["confidence_cumprod_bias"] = (position * gap).sum()
    return statistics
