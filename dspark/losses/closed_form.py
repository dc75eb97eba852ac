"""`eager.slot_distances` with the gradient written out, for large vocabularies.

Both distributions sum to 1, so ||q - p||_1 = 2·sum(q - min(p, q)). With u = 1 where q > p and the
gradient g of each distance, by row:

    d/dZ = g_ce·(q - onehot) + g_kl·(q - p) + 2·g_l1·q·(u - <q, u>)

Forward keeps q, min(p, q) - q and, for the KL, p; every other pass over the vocabulary is in place,
because on a CPU the passes are cheap and fresh memory is not. Against autograd through the softmax
it takes a third off the time of a chunk with its head products and more than half off its memory
(64 blocks of 8 slots, V = 49152, D = 576, one core), and its rounding errors are no larger.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dspark.losses.slots import SlotDistances

__all__ = ["slot_distances"]


def slot_distances(
    draft_logits: Tensor,  # [N, K, V]
    target_logits: Tensor,  # [N, K, V], without gradient
    labels: Tensor,  # [N, K] int64
    *,
    accept_temperature: float,
    with_kl: bool,
    with_labels: bool = False,
) -> SlotDistances:
    """As `eager.slot_distances`, differentiable once and with one backward pass."""
    ce, l1, accept_l1, kl, *of_labels = _Distances.apply(  # type: ignore[no-untyped-call]
        draft_logits, target_logits, labels, accept_temperature, with_kl, with_labels
    )
    return SlotDistances(ce, l1, l1 if accept_l1 is None else accept_l1, kl, *of_labels)


class _Distances(Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        target_logits: Tensor,
        labels: Tensor,
        accept_temperature: float,
        with_kl: bool,
        with_labels: bool,
    ) -> tuple[Tensor | None, ...]:
        def of_labels(log_probabilities: Tensor) -> Tensor:
            return -log_probabilities.gather(-1, labels[..., None])[..., 0]

        dtype = torch.promote_types(draft_logits.dtype, torch.float32)
        log_q = torch.log_softmax(draft_logits, -1, dtype=dtype)
        ce = of_labels(log_q)
        peak = -log_q.amax(-1) if with_labels else None
        log_p = torch.log_softmax(target_logits, -1, dtype=dtype)
        target_ce = of_labels(log_p) if with_labels else None
        kl = p = None
        if with_kl:
            p = log_p.exp()
            kl = (log_p - log_q).mul_(p).sum(-1)
        q = log_q.exp_()
        gaps = [_minimum_less_q(log_p.exp_(), q)]
        if accept_temperature != 1:
            log_p = torch.log_softmax(target_logits.to(dtype) / accept_temperature, -1)
            target_ce = of_labels(log_p) if with_labels else None
            gaps.append(_minimum_less_q(log_p.exp_(), q))
        # summed with `sum`: a CPU's vector_norm loses three digits over a large vocabulary
        l1, *accept_l1 = (-2 * gap.sum(-1) for gap in gaps)
        ctx.save_for_backward(labels, q, p, *gaps)
        ctx.logits_dtype = draft_logits.dtype
        ctx.set_materialize_grads(False)
        if peak is not None:
            ctx.mark_non_differentiable(target_ce, peak)
        return ce, l1, accept_l1[0] if accept_l1 else None, kl, target_ce, peak

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        labels, q, p, *gaps = ctx.saved_tensors
        by_ce, by_l1, by_accept_l1, by_kl, *_ = gradients
        # The saved tensors are used up; autograd's version check refuses a second backward pass.
        factor, total = torch.zeros_like(q[..., :1]), None
        if by_ce is not None:
            factor += by_ce[..., None]
        if by_kl is not None:
            factor += by_kl[..., None]
            total = p.mul_(-by_kl[..., None])
        for gap, by_gap in zip(gaps, (by_l1, by_accept_l1), strict=False):
            if by_gap is None:
                continue
            signed = gap.sign_().mul_(q)  # -q·u
            factor += 2 * by_gap[..., None] * signed.sum(-1, keepdim=True)
            signed.mul_(-2 * by_gap[..., None])
            total = signed if total is None else total.add_(signed)
        q.mul_(factor)
        total = q if total is None else total.add_(q)
        if by_ce is not None:
            total.scatter_add_(-1, labels[..., None], -by_ce[..., None])
        return total.to(ctx.logits_dtype), None, None, None, None, None


def _minimum_less_q(p: Tensor, q: Tensor) -> Tensor:
    """min(p, q) - q, in p's memory."""
    return torch.minimum(p, q, out=p).sub_(q)
