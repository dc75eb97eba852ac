"""Block verification: sampled proposals judged together, which keeps more than one by one.

With p_0 = 1 and p_i = min(p_{i-1} p(x_i) / q(x_i), 1), prefix i passes with probability

    h_i = R_i / (R_i + 1 - p_i), R_i = sum_v max(p_i p(v) - q(v), 0), and h_n = p_n for the last.

The longest prefix that passes is kept; behind it stands a draw from the normalised
max(p_i p - q, 0), or from p behind the last. The output has the target's distribution, and no such
rule keeps more on average. Where a block ends may depend on its tokens, since every h_i is of one
prefix. Source: Sun et al. 2024, arXiv 2403.10444, algorithm 2.

Later proposals decide what is kept of earlier ones. So no noise of this round may come back in the
next: `of_round` gives every round a seed of its own.

Symbols: n proposals, V vocabulary; ... are sequences that are judged together.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dspark.decoding.rejection import replacements
from dspark.decoding.sampling import SamplingParams

__all__ = ["judge_block", "of_round", "params_of_round", "pass_chances"]


def of_round(seed: int | Tensor, position: int | Tensor) -> Tensor:  # int64
    """Seed of the round whose anchor stands at ``position``."""
    return torch.as_tensor(seed) + ((torch.as_tensor(position) + 1) << 32)


def params_of_round(params: SamplingParams, position: int) -> SamplingParams:
    """``params`` with the seed of the round whose anchor stands at ``position``."""
    return replace(params, seed=int(of_round(params.seed, position)))


def pass_chances(
    target_p: Tensor,  # [..., n + 1, V] float, behind the anchor and each proposal
    draft_p: Tensor,  # [..., n, V] float, which the proposals were drawn from
    proposals: Tensor,  # [..., n] int64
) -> tuple[Tensor, Tensor]:  # [..., n] and [..., n, V]
    """h_1..h_n, and max(p_i p - q, 0) for i = 0..n-1, the weights of what stands behind i."""
    at = proposals[..., None]
    p, q = target_p[..., :-1, :], draft_p
    ratios = p.gather(-1, at)[..., 0] / q.gather(-1, at)[..., 0]
    carried = [torch.ones_like(ratios[..., :1])]
    for k in range(proposals.shape[-1]):
        carried.append((carried[-1] * ratios[..., k : k + 1]).clamp_max(1))
    reach = torch.cat(carried, -1)  # p_0..p_n
    rest = (reach[..., :-1, None] * p - q).clamp_min(0)
    mass = rest[..., 1:, :].sum(-1)
    # 0 / 0: the draft is the target there, and some longer prefix passes for certain
    inner = (mass / (mass + 1 - reach[..., 1:-1])).nan_to_num(1.0)
    return torch.cat([inner, reach[..., -1:]], -1)[..., : proposals.shape[-1]], rest


def judge_block(
    target_p: Tensor,  # as `pass_chances`
    draft_p: Tensor,
    proposals: Tensor,
    uniform: Tensor,  # [..., n + 1] float32 in (0, 1); the last is not read
    noise: Tensor,  # [..., n + 1, V] float32, standard Gumbel
) -> Tensor:  # [..., n + 1] int64
    """As `rejection.judge`."""
    chances, rest = pass_chances(target_p, draft_p, proposals)
    passes = uniform[..., :-1] < chances
    # a prefix is kept if it passes, or a longer one does
    kept = passes.flip(-1).cummax(-1).values.flip(-1) if passes.shape[-1] else passes
    return replacements(rest, target_p, proposals, kept, noise)
