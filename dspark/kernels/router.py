"""From router logits to the experts of each row, one program a row.

Sigmoid, selection bias, the best groups, the best experts in them, and their factors. The list of
experts that a step needs is nowhere written down: an expert kernel has a program for every pair of
row and slot, and the first pair that names an expert does its work for all rows.

Symbols: R = 16 rows, E experts, G groups, X experts a token, S partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, flags

__all__ = ["route", "route_reference"]


def route_reference(
    logits: Tensor,  # [R, E]
    bias: Tensor,  # [E] float32
    live_rows: int,
    *,
    groups: int,
    kept_groups: int,
    chosen: int,
    factor: float,
) -> tuple[Tensor, Tensor]:  # [R, X] int32, [R, X + 1] float32
    """`target.moe.Router` behind its product; ids of rows that are not live are -1.

    The last factor, of the shared expert, is 1.
    """
    scores = torch.sigmoid(logits.float())
    biased = scores + bias
    by_group = biased.view(len(logits), groups, -1)
    best = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool)
    allowed.scatter_(1, best.topk(kept_groups, -1).indices, True)
    allowed = allowed[:, :, None].expand_as(by_group).reshape(biased.shape)
    ids = biased.masked_fill(~allowed, float("-inf")).topk(chosen, -1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor
    ids = ids.int()
    ids[live_rows:] = -1
    return ids, torch.cat([weights, weights.new_ones(len(weights), 1)], 1)


@triton.jit
def _route_kernel(
    logits, bias, live_rows, ids, factors, SCALE,
    S: tl.constexpr, E: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, X: tl.constexpr,
    XP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    e = tl.arange(0, E)
    selection = tl.load(bias + e)
    begin(PDL)
    raw = tl.zeros([E], tl.float32)
    for part in tl.static_range(S):
        raw += tl.load(logits + (part * ROWS + row) * E + e)
    scores = tl.sigmoid(raw)
    SIZE: tl.constexpr = E // G
    grouped = tl.reshape(scores + selection, [G, SIZE])
    # a group counts as the sum of its two best
    first = tl.max(grouped, 1)
    inner = tl.arange(0, SIZE)[None, :]
    rest = tl.where(inner == tl.argmax(grouped, 1)[:, None], float("-inf"), grouped)
    best = first + tl.max(rest, 1) if SIZE > 1 else first
    g = tl.arange(0, G)
    mine, theirs = tl.reshape(best, [G, 1]), tl.reshape(best, [1, G])
    ahead = (theirs > mine) | ((theirs == mine) & (g[None, :] < g[:, None]))
    allowed = tl.sum(ahead.to(tl.int32), 1) < KEPT
    left = tl.reshape(tl.where(allowed[:, None], grouped, float("-inf")), [E])
    x = tl.arange(0, XP)
    found = tl.full([XP], -1, tl.int32)
    weights = tl.zeros([XP], tl.float32)
    for slot in tl.static_range(X):
        expert = tl.argmax(left, 0)
        hit = e == expert
        weights = tl.where(x == slot, tl.sum(tl.where(hit, scores, 0.0)), weights)
        found = tl.where(x == slot, expert, found)
        left = tl.where(hit, float("-inf"), left)
    weights = weights / (tl.sum(weights) + 1e-20) * SCALE
    tl.store(factors + row * (X + 1) + x, tl.where(x == X, 1.0, weights), mask=x <= X)
    found = tl.where(row < tl.load(live_rows), found, -1)
    tl.store(ids + row * X + x, found, mask=x < X)


def route(
    logits: Tensor,  # [S, R, E] float32, partial sums
    bias: Tensor,  # [E] float32, for selection only
    live_rows: Tensor,  # [1] int32; rows behind it need no expert
    ids: Tensor,  # [R, X] int32
    factors: Tensor,  # [R, X + 1] float32
    *,
    groups: int,
    kept_groups: int,
    factor: float,
    warps: int = 1,
    pdl: bool | None = None,
) -> None:
    """`route_reference` into ``ids`` and ``factors``. Of equal scores the lower id wins.

    Raises:
        ValueError: a shape does not fit, or E or G is no power of two.
    """
    splits, rows, experts = logits.shape
    chosen = ids.shape[1]
    fits = bias.shape == (experts,) and ids.shape == (ROWS, chosen)
    if rows != ROWS or not fits or factors.shape != (ROWS, chosen + 1):
        raise ValueError(
            f"route wants logits [S, {ROWS}, E], bias [E], ids [{ROWS}, X] and factors "
            f"[{ROWS}, X + 1], got {tuple(logits.shape)}, {tuple(bias.shape)}, "
            f"{tuple(ids.shape)} and {tuple(factors.shape)}"
        )
    if experts & (experts - 1) or groups & (groups - 1) or not logits.is_contiguous():
        raise ValueError(
            "route wants contiguous logits and powers of two, got "
            f"{experts} experts in {groups} groups"
        )
    _route_kernel[(ROWS,)](
        logits, bias, live_rows, ids, factors, factor,
        S=splits, E=experts, G=groups, KEPT=kept_groups, X=chosen,
        XP=triton.next_power_of_2(chosen + 1), ROWS=ROWS, num_warps=warps, **flags(logits, pdl),
    )  # fmt: skip
