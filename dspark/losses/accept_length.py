"""Slot weights that come from the chance to be reached: for L_acc, and those of D-PACE.

With alpha_k the chance that slot k is accepted once slots 0..k-1 were, the expected number of
accepted drafts of a block is A = sum_k prod_{i<=k} alpha_i, and

    dA/dalpha_k = reach_k · continuation_k,
    reach_0 = 1,              reach_{k+1} = reach_k · alpha_k            (slots before k all kept)
    continuation_{K-1} = 1,   continuation_k = 1 + alpha_{k+1} · continuation_{k+1}

So sum_k sg[reach_k · continuation_k] · (1 - alpha_k) has the gradient of -A, without a product in
the graph: a slot-wise loss that can be computed in chunks. The identity is ours; losses on A
itself: DeepSpec pull request 58 and arXiv 2606.11552. The smoothed weights: D-PACE, arXiv
2605.18810, there with the data token's probability in place of alpha.

Symbols: K slots; sg stops the gradient.
"""

import torch
from torch import Tensor

__all__ = ["reach_times_continuation", "survival_weights"]


@torch.no_grad()
def reach_times_continuation(
    alpha: Tensor,  # [..., K] float in 0..1
    mask: Tensor,  # [..., K] bool, a contiguous supervised prefix
) -> Tensor:  # [..., K] in 0..K, alpha's dtype, no graph
    """Derivative of the expected accepted drafts by each slot's alpha; 0 on unsupervised slots.

    Only products and sums of numbers in 0..K: no division, no logarithm, nothing that an alpha
    of 0 could turn into NaN.
    """
    kept = (alpha * mask).unbind(-1)
    reach = [torch.ones_like(kept[0])]
    for value in kept[:-1]:
        reach.append(reach[-1] * value)
    continuation = [torch.ones_like(kept[0])]
    for value in reversed(kept[1:]):
        continuation.append(1 + value * continuation[-1])
    continuation.reverse()
    return torch.stack(reach, -1) * torch.stack(continuation, -1) * mask


@torch.no_grad()
def survival_weights(
    alpha: Tensor,  # [..., K] float in 0..1
    mask: Tensor,  # [..., K] bool, a contiguous supervised prefix
    *,
    smoothing: float,  # a in 0..1
) -> Tensor:  # [..., K] in 0..K, alpha's dtype, no graph
    """Suffix sums of the smoothed survival: w_k = sum_{j>=k} prod_{i<=j} ((1 - a)·alpha_i + a).

    The floor ``smoothing`` lets late slots learn while early ones still fail; 1 gives n, n-1, …,
    1 on the n supervised slots of a block, 0 the bare survival. 0 on unsupervised slots.
    """
    smoothed = (1 - smoothing) * alpha + smoothing
    survival = torch.cumprod(smoothed * mask, dim=-1)
    return survival.flip(-1).cumsum(-1).flip(-1) * mask
