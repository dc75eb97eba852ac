"""Slot weights that come from the chance to be reached: for L_acc, and those of D-PACE.

With alpha_k the chance that slot k is accepted once slots 0..k-1 were, the expected number of
accepted drafts of a block is A = sum_k prod_{i<=k} alpha_i, and

    dA/dalpha_k = reach_k · continuation_k,
    reach_0 = 1,              reach_{k+1} = reach_k · alpha_k            (slots before k all kept)
    continuation_{K-1} = 1,   continuation_k = 1 + alpha_{k+1} · continuation_{k+1}

So sum_k sg[reach_k · continuation_k] · (1 - alpha_k) has the gradient of -A, without a product in
the graph: a slot-wise loss that can be computed in chunks. The identity is ours; a loss on A
itself: DeepSpec pull request 58. The smoothed weights: D-PACE, arXiv 2605.18810, there with the
data token's probability in place of alpha.

A takes alpha along the data as if every accepted prefix were the data's. Of tokens y that were
drawn from the p in question, exactly

    E[accepted] = E_y sum_k prod_{i<k} ratio_i · alpha_k,   ratio_i = min(1, q_i(y_i) / p_i(y_i))

since the draft proposes y and has it kept with the chance min(q, p)(y) = p(y) · ratio. ``path``
puts the products of ratios in place of reach and leaves the continuations those of alpha.
``path_exact`` has the gradient of that sum by ratios and alphas alike: in expectation the gradient
of E[accepted].

``chain``: the gradient of -sum_k prod_{i<=k} q_i(y_i). arXiv 2606.11552 has a chain loss on prefix
products and a loss on the first error of a block; only its abstract and summaries were at hand, so
that products of q(y), not of alpha (which would be ``expected``), a first error by arg max against
the data's token and the scale of both are our reading of it.

Symbols: K slots; p, q the target's and the draft's distribution of a slot; sg stops the gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "AcceptWeights",
    "accept_weights",
    "first_errors",
    "reach_times_continuation",
    "survival_weights",
]


class AcceptWeights(NamedTuple):
    """Of L_acc = sum_k alpha_k's weight · (1 - alpha_k) + ce_k's weight · ce_k; no graph."""

    alpha: Tensor  # [..., K] in 0..K
    ce: Tensor  # [..., K] in 0..K


@torch.no_grad()
def accept_weights(
    form: str,
    alpha: Tensor,  # [..., K] float in 0..1
    ce: Tensor,  # [..., K] -log q(label)
    target_ce: Tensor | None,  # [..., K] -log p(label); for ``path`` and ``path_exact``
    mask: Tensor,  # [..., K] bool, a contiguous supervised prefix
) -> AcceptWeights:
    """What each slot weighs in the `accept_length_form`; 0 on unsupervised slots."""
    if form == "expected":
        return AcceptWeights(reach_times_continuation(alpha, mask), torch.zeros_like(alpha))
    if form == "chain":
        return AcceptWeights(
            torch.zeros_like(alpha), survival_weights((-ce).exp(), mask, smoothing=0.0)
        )
    assert target_ce is not None
    gap = target_ce - ce  # log(q / p)
    ratio = gap.clamp_max(0).exp() * mask
    # the products before each slot
    reach = torch.cat([torch.ones_like(ratio[..., :1]), ratio.cumprod(-1)[..., :-1]], -1) * mask
    if form == "path":
        kept = (alpha * mask).unbind(-1)
        return AcceptWeights(reach * torch.stack(_continuations(kept), -1), torch.zeros_like(alpha))
    assert form == "path_exact", form
    # expected drafts behind each slot, once it was accepted
    behind = [torch.zeros_like(alpha[..., 0])]
    steps = zip((alpha * mask).unbind(-1)[:0:-1], ratio.unbind(-1)[:0:-1], strict=True)
    for value, chance in steps:
        behind.append(value + chance * behind[-1])
    behind.reverse()
    # a ratio of 1 has no slope; of the others d ratio / d ce = -ratio
    slope = torch.where(gap < 0, ratio, 0)
    return AcceptWeights(reach, reach * slope * torch.stack(behind, -1))


@torch.no_grad()
def first_errors(
    ce: Tensor,  # [..., K] -log q(label)
    peak: Tensor,  # [..., K] -log of the largest q
    mask: Tensor,  # [..., K] bool, a contiguous supervised prefix
) -> Tensor:  # [..., K] bool
    """The first supervised slot of each block whose most likely token is not the label, if any.

    A label that shares the largest probability is none.
    """
    error = (ce > peak) & mask
    return error & (error.cumsum(-1) == 1)


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
    return torch.stack(reach, -1) * torch.stack(_continuations(kept), -1) * mask


def _continuations(kept: tuple[Tensor, ...]) -> list[Tensor]:
    continuation = [torch.ones_like(kept[0])]
    for value in reversed(kept[1:]):
        continuation.append(1 + value * continuation[-1])
    continuation.reverse()
    return continuation


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
