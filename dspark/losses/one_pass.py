"""The objective and its gradient in one pass over the vocabulary per chunk, by kernels.

`chunked` computes a chunk's logits twice, forward and behind `backward`, since the slots' weights
are known only in between. Here they are known at once: they couple the slots of one block, a chunk
holds whole blocks, and what the sums are divided by is known before. So a chunk's logits are
computed once, its distances taken, the coefficients of its slots derived from them (the gradient
of `slots.numerators`), the gradient written over the draft's logits and multiplied on to the
hidden states and the Markov factors. `backward` only scales. That leaves the products that any
form needs (two forward and one backward of the head, three of the Markov rank) where computing the
logits again costs two products of the head more, 64 % on top; the price is that the loss comes out
whole, with its denominators inside, not as `Sums` to weigh later.

Logits are rounded to the head's dtype or autocast's, as `draft.slot_logits` rounds them, once for
product and bias together; so is their gradient. Everything between is float32, and so are the sums
of the Markov gradient over chunks.

Symbols: N blocks, K slots, D hidden, V vocabulary, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dspark import kernels
from dspark.config import LossSettings
from dspark.draft import DSparkDraftModel
from dspark.losses.slots import LK_SHARPNESS, NLA_FLOOR, SlotDistances, add_up, needs_labels
from dspark.losses.sums import Sums, loss_scales

__all__ = ["add_product", "objective_in_one_pass", "usable", "wide_product"]

_DTYPES = (torch.bfloat16, torch.float32)
"""Of logits: float16 has no room for their gradient, float64 no use for float32 kernels."""


def usable(draft: DSparkDraftModel, hidden: Tensor) -> bool:
    """Whether the kernels can take these hidden states; `chunked` takes all."""
    return hidden.is_cuda and kernels.installed() and logits_dtype(draft, hidden) in _DTYPES


def logits_dtype(draft: DSparkDraftModel, hidden: Tensor) -> torch.dtype:
    """Of the draft's logits here: autocast's, else the head's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    assert draft.head_weight is not None, "attach() the target's output head first"
    return draft.head_weight.dtype


def objective_in_one_pass(
    hidden: Tensor,  # [N, K, D] of the draft, behind its final norm
    target_hidden: Tensor,  # [N, K, D] of the target, behind its final norm, one before each label
    labels: Tensor,  # [N, K] int64
    mask: Tensor,  # [N, K] bool, a contiguous supervised prefix of each block
    prev_ids: Tensor,  # [N, K] int64, tokens that enter the slots' predictions
    *,
    draft: DSparkDraftModel,
    target_head: Callable[[Tensor], Tensor],  # [..., D] -> [..., V] logits
    settings: LossSettings,
    denominators: Tensor,  # [2] float64, of the whole step
    ramp: float,
) -> tuple[Tensor, Sums]:  # [] with a graph; without one
    """`Sums.loss` of `objective_chunked` of the same, and the sums.

    Gradients flow to the same places. Unsupervised slots are not looked at.
    """
    head = draft.markov_head
    embedding = None if head is None else head.embed(prev_ids)
    latent = factor = None
    if head is not None:
        assert embedding is not None
        latent, factor = head.latent(embedding, hidden), head.markov_w2.weight
    dtype = logits_dtype(draft, hidden)
    assert draft.head_weight is not None
    by_ce, by_l1, by_confidence, by_accept = loss_scales(
        denominators.float(), settings, ramp, mask.shape[-1]
    ).unbind()
    task = _Task(
        target_hidden=target_hidden,
        labels=labels,
        mask=mask,
        head=draft.head_weight.to(dtype),
        target_head=target_head,
        settings=settings,
        scales=torch.stack([by_ce, by_l1, by_accept]),
        graph=torch.is_grad_enabled(),
    )
    share, sums = _OnePass.apply(hidden, latent, factor, task)  # type: ignore[no-untyped-call]
    distances = _distances(sums, settings)
    total = add_up(distances, mask, draft.confidence_logits(hidden, embedding), settings)
    return share + by_confidence * total.confidence, total.detach()


@dataclass(frozen=True)
class _Task:
    """What has no gradient."""

    target_hidden: Tensor  # [N, K, D]
    labels: Tensor  # [N, K]
    mask: Tensor  # [N, K]
    head: Tensor  # [V, D] in the dtype of the logits
    target_head: Callable[[Tensor], Tensor]
    settings: LossSettings
    scales: Tensor  # [3] derivative of the loss by ce, l1, accept_length
    graph: bool


class _OnePass(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, K, D]
        latent: Tensor | None,  # [N, K, r]
        factor: Tensor | None,  # [V, r]
        task: _Task,
    ) -> tuple[Tensor, Tensor]:  # [], [4 or 6, N, K] distances
        needed = [task.graph and wanted for wanted in ctx.needs_input_grad[:3]]
        work = _Work(hidden, latent, factor, task, needed)
        for start in range(0, len(hidden), task.settings.chunk_blocks):
            work.chunk(slice(start, start + task.settings.chunk_blocks))
        kept = [one for one in work.gradients if one is not None]
        ctx.save_for_backward(*kept)
        ctx.given = [one is not None for one in work.gradients]
        ctx.dtypes = [None if one is None else one.dtype for one in (hidden, latent, factor)]
        distances = work.distances
        ctx.mark_non_differentiable(distances)
        return work.shares.sum(), distances

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_share: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        # In place: the one of the Markov factor is large. Autograd's version check refuses a
        # second backward pass.
        return (
            *(
                next(kept).mul_(by_share).to(dtype) if given else None
                for given, dtype in zip(ctx.given, ctx.dtypes, strict=True)
            ),
            None,
        )


class _Work:
    """One forward pass: what chunks add to."""

    def __init__(
        self,
        hidden: Tensor,
        latent: Tensor | None,
        factor: Tensor | None,
        task: _Task,
        needed: list[bool],
    ) -> None:
        self.task = task
        dtype = task.head.dtype
        self.hidden = hidden.detach().to(dtype)
        self.latent = None if latent is None else latent.detach().to(dtype)
        self.factor = None if factor is None else factor.detach().to(dtype)
        self.shares = hidden.new_empty(len(hidden), dtype=torch.float32)
        kinds = 6 if needs_labels(task.settings) else 4
        self.distances = hidden.new_empty((kinds, *task.mask.shape), dtype=torch.float32)
        by_hidden = torch.empty_like(hidden, dtype=torch.float32) if needed[0] else None
        by_latent = by_factor = None
        if latent is not None and needed[1]:
            by_latent = torch.empty_like(latent, dtype=torch.float32)
        if factor is not None and needed[2]:
            by_factor = torch.zeros_like(factor, dtype=torch.float32)
        self.gradients = (by_hidden, by_latent, by_factor)

    def chunk(self, blocks: slice) -> None:
        """Add the blocks' loss, distances and gradients; their logits end here."""
        from dspark.kernels.objective import SPLITS, SUMS, slot_sums, to_gradient_
        from dspark.kernels.slot_weights import slot_weights

        task, settings = self.task, self.task.settings
        target_logits = task.target_head(task.target_hidden[blocks])
        target_logits = target_logits.reshape(-1, target_logits.shape[-1]).contiguous()
        hidden = self.hidden[blocks].flatten(0, 1)
        latent = None if self.latent is None else self.latent[blocks].flatten(0, 1)
        mask = task.mask[blocks]
        labels, live = task.labels[blocks].reshape(-1), mask.reshape(-1)
        sums = hidden.new_empty((SUMS, len(hidden)), dtype=torch.float32)
        coefficients = hidden.new_empty((4, len(hidden)), dtype=torch.float32)
        scratch = hidden.new_empty((2, SPLITS, 5, len(hidden)), dtype=torch.float32)
        survival = settings.slot_weights == "survival"
        how: dict[str, Any] = {
            "accept_temperature": settings.accept_length_temperature,
            "with_kl": settings.distance == "lk_hybrid",
        }
        with torch.autocast(hidden.device.type, enabled=False):
            logits = hidden @ task.head.T
            if latent is not None and self.factor is not None:
                logits.addmm_(latent, self.factor.T)
            slot_sums(logits, target_logits, labels, live, scratch, sums, **how)
            self.distances[:4, blocks] = sums[:4].view(4, *mask.shape)
            if len(self.distances) == 6:
                self.distances[4, blocks] = sums[11].view(mask.shape)
                self.distances[5, blocks] = sums[8].view(mask.shape)
            slot_weights(
                sums,
                mask,
                task.scales,
                coefficients,
                self.shares[blocks],
                distance=settings.distance,
                form=settings.accept_length_form,
                focal=settings.accept_length_focal,
                decay=settings.decay,
                smoothing=settings.survival_smoothing if survival else None,
                sharpness=LK_SHARPNESS,
                floor=NLA_FLOOR,
            )
            if not any(one is not None for one in self.gradients):
                return
            to_gradient_(logits, target_logits, labels, live, sums, coefficients, **how)
            by_hidden, by_latent, by_factor = self.gradients
            if by_hidden is not None:
                by_hidden[blocks] = wide_product(logits, task.head).view_as(by_hidden[blocks])
            if by_latent is not None and self.factor is not None:
                by_latent[blocks] = wide_product(logits, self.factor).view_as(by_latent[blocks])
            if by_factor is not None and latent is not None:
                add_product(by_factor, logits.T, latent)


def _distances(sums: Tensor, settings: LossSettings) -> SlotDistances:
    ce, l1, accept_l1, kl, *of_labels = sums.unbind()
    given = kl if settings.distance == "lk_hybrid" else None
    return SlotDistances(ce, l1, accept_l1, given, *of_labels)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """The product in float32, without rounding it first where the device can."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total`` += ``left`` @ ``right``; ``total`` is float32."""
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
