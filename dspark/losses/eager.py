"""The objective of the draft, written as it is defined. Everything else is held to this.

Source: DSpark, arXiv 2607.05147, equations 8-12 (CE, L1, confidence); the accept-length term and
the alternatives: `accept_length` and `slots`.

Symbols: N blocks, K slots, V vocabulary; Z and P the logits of draft and target.
"""

import torch
from torch import Tensor

from dspark.config import LossSettings
from dspark.losses.slots import SlotDistances, add_up, needs_labels
from dspark.losses.sums import Sums

__all__ = ["objective", "slot_distances"]


def objective(
    draft_logits: Tensor,  # [N, K, V] Z
    target_logits: Tensor,  # [N, K, V] P, no gradient flows here
    labels: Tensor,  # [N, K] int64
    mask: Tensor,  # [N, K] bool M, a contiguous supervised prefix of each block
    confidence_logits: Tensor | None,  # [N, K] s
    settings: LossSettings,
) -> Sums:
    """Numerators and statistics; `Sums.loss` makes the loss of them.

        q = softmax(Z)    p = softmax(P)    at temperature 1, without top-p or top-k
        alpha = clamp(1 - ||q - p||_1 / 2, 0, 1)
        w_k = exp(-k / decay) · M_k
        ce            = sum w · (-log q(label))
        l1            = sum w · ||q - p||_1                  the full L1, 0..2, twice the TV
        confidence    = sum w · BCEWithLogits(s, sg[alpha])
        accept_length = sum sg[reach · continuation] · (1 - alpha*)

    alpha* is alpha with softmax(P / accept_length_temperature) for p; `accept_length` has the other
    forms of this term. ``accept_length_focal`` adds to it, so weighted, -log q(label) of the first
    slot of each block whose label is not the most likely token. ``slot_weights: survival``
    replaces w in the first three by `survival_weights`; ``distance`` replaces ||q - p||_1 in
    ``l1`` by 2·(blend·KL(p||q) + (1 - blend)·TV), blend = exp(-3·sg[alpha]), or by
    -2·log(alpha). All softmaxes and sums are float32 at least.
    """
    distances = slot_distances(
        draft_logits,
        target_logits.detach(),
        labels,
        accept_temperature=settings.accept_length_temperature,
        with_kl=settings.distance == "lk_hybrid",
        with_labels=needs_labels(settings),
    )
    return add_up(distances, mask, confidence_logits, settings)


def slot_distances(
    draft_logits: Tensor,  # [N, K, V]
    target_logits: Tensor,  # [N, K, V]
    labels: Tensor,  # [N, K] int64
    *,
    accept_temperature: float,
    with_kl: bool,
    with_labels: bool = False,
) -> SlotDistances:
    """What differs between q and p in each slot, by autograd through the softmax."""
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    log_q = torch.log_softmax(draft_logits, -1, dtype=dtype)
    log_p = torch.log_softmax(target_logits, -1, dtype=dtype)
    q, p = log_q.exp(), log_p.exp()
    log_sharp = torch.log_softmax(target_logits.to(dtype) / accept_temperature, -1)
    place = labels[..., None]
    return SlotDistances(
        ce=-log_q.gather(-1, place)[..., 0],
        l1=(q - p).abs().sum(-1),
        accept_l1=(q - log_sharp.exp()).abs().sum(-1),
        kl=(p * (log_p - log_q)).sum(-1) if with_kl else None,
        target_ce=-log_sharp.gather(-1, place)[..., 0] if with_labels else None,
        peak=-log_q.detach().amax(-1) if with_labels else None,
    )
