"""What a forward pass adds up: numerators of the loss terms, and statistics for the metrics.

A loss of the draft is a ratio of sums over all blocks of an optimizer step, whatever chunk,
forward pass or rank they were in. So nothing here is a mean: `Sums` add, `denominators` add (they
need the masks only and are known before any forward pass), and the division comes last.

Symbols: K slots of a block, N blocks.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dspark.config import LossSettings

__all__ = ["Sums", "denominators", "loss_scales", "position_weights"]


def position_weights(
    mask: Tensor,  # [N, K] bool
    decay: float,
) -> Tensor:  # [N, K] float32: exp(-k / decay), 0 on unsupervised slots
    """Stock weight of each slot; 1 at slot 0."""
    slots = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.float32)
    return torch.exp(-slots / decay) * mask


def denominators(
    mask: Tensor,  # [N, K] bool, a contiguous supervised prefix of each block
    settings: LossSettings,
) -> Tensor:  # [2] float64: sum of the position weights, number of blocks with a supervised slot
    """What the numerators of `Sums` are divided by.

    Add them over the ranks and over all forward passes of an optimizer step before the first
    backward pass. They depend on the masks only, also for ``slot_weights: survival``: there the
    weights are known only after the forward pass, so that their own sum can't be the divisor.
    Within one optimizer step that makes a difference of one common factor.
    """
    weight = position_weights(mask, settings.decay).sum(dtype=torch.float64)
    return torch.stack([weight, mask.any(-1).sum().double()])


def loss_scales(
    denominators: Tensor,  # [2], of the whole optimizer step over all ranks
    settings: LossSettings,
    ramp: float,
    block_size: int,
) -> Tensor:  # [4] of the same dtype
    """Factors of ce, l1, confidence and accept_length in `Sums.loss`, which has their meaning."""
    # slot 0 weighs 1, so both are at least 1 unless nothing at all is supervised
    weight, valid_blocks = denominators.clamp_min(1.0).unbind()
    return torch.stack(
        [
            settings.ce_weight / weight,
            settings.l1_weight / weight,
            settings.confidence_weight / weight,
            ramp * settings.accept_length_weight / (block_size * valid_blocks),
        ]
    )


@dataclass(frozen=True)
class Sums:
    """Sums over blocks. The four numerators carry a graph, all else is detached float64."""

    ce: Tensor  # [] cross entropy with the data's token, slot-weighted
    l1: Tensor  # [] distance of `settings.distance` (full L1: 0..2), slot-weighted
    confidence: Tensor  # [] BCE of the confidence head, slot-weighted; 0 without the head
    accept_length: Tensor  # [] `accept_length`: weights without a graph · (1 - alpha) and · ce

    alpha: Tensor  # [K] sum of alpha over supervised slots
    slots: Tensor  # [K] supervised slots
    survival: Tensor  # [K] sum over blocks of prod_{i<=k} alpha_i, 0 behind a block's end
    valid_blocks: Tensor  # [] blocks with a supervised slot
    weight: Tensor  # [] sum of the position weights
    confidence_weight: Tensor  # [] the same over slots that a confidence head rated
    # with c the confidence, weighted by position:
    confidence_abs_error: Tensor  # [] |c - alpha|
    confidence_bias: Tensor  # [] c - alpha
    confidence_cumprod_bias: Tensor  # [] prod_{i<=k} c_i - prod_{i<=k} alpha_i

    def __add__(self, other: "Sums") -> "Sums":
        """Of both together. Numerators keep their graphs; `detach` first what shall not."""
        return Sums(
            *(mine + theirs for mine, theirs in zip(self._all(), other._all(), strict=True))
        )

    def detach(self) -> "Sums":
        """The same without a graph."""
        return Sums(*(value.detach() for value in self._all()))

    def to_vector(self) -> Tensor:  # [3·K + 10] float64
        """Everything, detached, in one tensor that can be summed over ranks."""
        return torch.cat([value.detach().double().reshape(-1) for value in self._all()])

    @staticmethod
    def from_vector(vector: Tensor) -> "Sums":  # [3·K + 10]
        """The inverse of `to_vector`; zeros give the sums over nothing."""
        sizes = [1 if name not in _PER_SLOT else 0 for name in _NAMES]
        block_size, rest = divmod(len(vector) - sum(sizes), len(_PER_SLOT))
        assert rest == 0
        parts = vector.split([size or block_size for size in sizes])  # type: ignore[no-untyped-call]
        return Sums(
            *(
                part if name in _PER_SLOT else part[0]
                for name, part in zip(_NAMES, parts, strict=True)
            )
        )

    def loss(
        self,
        denominators: Tensor,  # [2], of the whole optimizer step over all ranks
        settings: LossSettings,
        ramp: float,  # 0..1, factor of the accept-length weight
    ) -> Tensor:  # [] numerators' dtype
        """This part's share of the loss; the shares of all parts and ranks add up to the loss.

            (ce_weight·ce + l1_weight·l1 + confidence_weight·confidence) / weight
            + ramp · accept_length_weight · accept_length / (K · valid_blocks)

        The second divisor has the constant K, not the block's own number of supervised slots,
        which would weigh the few slots of a truncated block up to K times more. Where gradients
        are averaged over ranks, multiply by the number of ranks. Without any supervised slot it
        is 0 and still has its graph. Its accept-length part has the gradient of minus the
        expected accepted drafts over K (by `accept_length_form`), but not its value: for that see
        ``accepted_drafts``.
        """
        scales = loss_scales(denominators.to(self.ce), settings, ramp, len(self.slots))
        terms = torch.stack([self.ce, self.l1, self.confidence, self.accept_length])
        return (scales * terms).sum()

    def metrics(self) -> dict[str, float]:
        """Figures by the names of `dspark.acceptance`, and the loss terms without their weights.

        ``accept_rate@k`` and the rest are teacher-forced expectations under the data's tokens,
        not counts of real decoding. Blocks cut by the end of a turn are in ``survival@k`` and
        ``tau`` and lower both. ``l1_loss`` is the distance that was set. Confidence entries are
        left out when no confidence head rated a slot; everything is 0 without a supervised slot.
        """
        host = Sums.from_vector(self.to_vector().cpu())
        blocks = host.valid_blocks.clamp_min(1)
        weight = host.weight.clamp_min(1)
        accepted = host.survival.sum() / blocks
        figures = {
            "tau": accepted + (host.valid_blocks > 0),
            "accepted_drafts": accepted,
            "ce_loss": host.ce / weight,
            "l1_loss": host.l1 / weight,
            "accept_length_loss": host.accept_length / (len(host.slots) * blocks),
        }
        if host.confidence_weight > 0:
            rated = host.confidence_weight
            figures["confidence_loss"] = host.confidence / rated
            figures["confidence_abs_error"] = host.confidence_abs_error / rated
            figures["confidence_bias"] = host.confidence_bias / rated
            figures["confidence_cumprod_bias"] = host.confidence_cumprod_bias / rated
        rates = host.alpha / host.slots.clamp_min(1)
        for k, (rate, survival) in enumerate(zip(rates, host.survival / blocks, strict=True)):
            figures[f"accept_rate@{k}"] = rate
            figures[f"survival@{k}"] = survival
        return {name: float(value) for name, value in figures.items()}

    def _all(self) -> list[Tensor]:
        return [getattr(self, name) for name in _NAMES]


_NAMES = tuple(field.name for field in fields(Sums))
_PER_SLOT = ("alpha", "slots", "survival")
