"""Rejection sampling: the other accept rule under which a draft changes no distribution.

A proposal x, drawn from the draft's q, is kept with probability min(1, p(x) / q(x)); the first that
is not is replaced by a draw from the normalised max(p - q, 0), and behind the last stands a draw
from p. It keeps more than coupled noise does, 1 - TV instead of about (1 - TV) / (1 + TV), but the
tokens depend on the draft: with the same seed another draft gives another sample. Source: Leviathan
et al. 2023, arXiv 2211.17192, algorithm 1.

Symbols: n proposals, V vocabulary, T positions; ... are sequences that are judged together.
"""

import torch
from torch import Tensor

from dspark.decoding.sampling import gumbel

__all__ = ["draw", "judge", "replacements"]

_NOTHING = 1e-8
"""Mass of max(p - q, 0) that is rounding: p and q are equal."""


def draw(
    seed: int | Tensor,  # one seed, or one a position: [T] int64
    positions: Tensor,  # [T] int64
    vocabulary: int,
) -> tuple[Tensor, Tensor]:  # [T] uniform in (0, 1), [T, V] Gumbel
    """What `judge` reads for these positions, independent of the noise of proposals.

    It is the same function of (seed, position, id), of ids that lie behind the vocabulary.
    """
    ids = torch.arange(vocabulary, 2 * vocabulary + 1, device=positions.device)
    noise = gumbel(seed, positions, ids)
    return torch.exp(-torch.exp(-noise[:, 0])), noise[:, 1:]


def judge(
    target_p: Tensor,  # [..., n + 1, V] float32, behind the anchor and each proposal
    draft_p: Tensor,  # [..., n, V] float32, which the proposals were drawn from
    proposals: Tensor,  # [..., n] int64
    uniform: Tensor,  # [..., n + 1] float32 in (0, 1); the last is not read
    noise: Tensor,  # [..., n + 1, V] float32, standard Gumbel
) -> Tensor:  # [..., n + 1] int64
    """A choice behind the anchor and each proposal, which equals the proposal if that is kept.

    Those behind the first that differs mean nothing.
    """
    at = proposals[..., None]
    p, q = target_p[..., :-1, :], draft_p
    kept = uniform[..., :-1] * q.gather(-1, at)[..., 0] < p.gather(-1, at)[..., 0]
    return replacements((p - q).clamp_min(0), target_p, proposals, kept, noise)


def replacements(
    rest: Tensor,  # [..., n, V] weights of what replaces a proposal
    target_p: Tensor,  # [..., n + 1, V]
    proposals: Tensor,  # [..., n] int64
    kept: Tensor,  # [..., n] bool
    noise: Tensor,  # [..., n + 1, V]
) -> Tensor:  # [..., n + 1] int64
    """What was kept, a draw from ``rest`` where it was not, and one from the target at the end."""
    # the first rejected proposal has no mass in its rest; where all the rest is rounding, it must
    # not come back by another way either
    other = target_p[..., :-1, :].scatter(-1, proposals[..., None], 0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > _NOTHING, rest, other)
    scores = torch.cat([rest, target_p[..., -1:, :]], -2).log()
    choices = (scores + noise).argmax(-1)
    choices[..., :-1] = torch.where(kept, proposals, choices[..., :-1])
    return choices
