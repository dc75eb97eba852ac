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

__all__ = ["route", "route_reference", "route_rows"]


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
def _order(score, e, E: tl.constexpr):
    """int64 that is ordered like the float32; of equal scores the lower id is the larger one."""
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (E - 1 - e).to(tl.int64)


@triton.jit
def _score(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(
    keys, E: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, X: tl.constexpr, XP: tl.constexpr
):  # fmt: skip
    """The X best experts of the best groups, best first; [XP]."""
    NONE: tl.constexpr = -(1 << 63)
    SIZE: tl.constexpr = E // G
    grouped = tl.reshape(keys, [G, SIZE])
    # a group counts as the sum of its two best
    first = tl.max(grouped, 1)
    best = _score(first)
    if SIZE > 1:
        best += _score(tl.max(tl.where(grouped == first[:, None], NONE, grouped), 1))
    g = tl.arange(0, G)
    mine, theirs = tl.reshape(best, [G, 1]), tl.reshape(best, [1, G])
    before = (theirs > mine) | ((theirs == mine) & (g[None, :] < g[:, None]))
    allowed = tl.sum(before.to(tl.int32), 1) < KEPT
    left = tl.reshape(tl.where(allowed[:, None], grouped, NONE), [E])
    x = tl.arange(0, XP)
    found = tl.zeros([XP], tl.int32)
    for slot in tl.static_range(X):
        top = tl.max(left, 0)
        found = tl.where(x == slot, E - 1 - (top & 0xFFFFFFFF).to(tl.int32), found)
        left = tl.where(left == top, NONE, left)
    return found


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
    rows = tl.load(live_rows)
    raw = tl.zeros([E], tl.float32)
    for part in tl.static_range(S):
        raw += tl.load(logits + (part * ROWS + row) * E + e)
    # one number for score and id: a maximum is then a single reduction
    keys = _order(tl.sigmoid(raw) + selection, e, E)
    x = tl.arange(0, XP)
    found = _best(keys, E, G, KEPT, X, XP)
    raw = tl.zeros([XP], tl.float32)
    for part in tl.static_range(S):
        raw += tl.load(logits + (part * ROWS + row) * E + found)
    weights = tl.where(x < X, tl.sigmoid(raw), 0.0)
    weights = weights / (tl.sum(weights) + 1e-20) * SCALE
    tl.store(factors + row * (X + 1) + x, tl.where(x == X, 1.0, weights), mask=x <= X)
    tl.store(ids + row * X + x, tl.where(row < rows, found, -1), mask=x < X)


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


@triton.jit
def _route_rows_kernel(
    logits, bias, ids, factors, SCALE,
    E: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, X: tl.constexpr, XP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e, x = tl.arange(0, E), tl.arange(0, XP)
    keys = _order(tl.sigmoid(tl.load(logits + row * E + e)) + tl.load(bias + e), e, E)
    found = _best(keys, E, G, KEPT, X, XP)
    weights = tl.where(x < X, tl.sigmoid(tl.load(logits + row * E + found)), 0.0)
    weights = weights / (tl.sum(weights) + 1e-20) * SCALE
    tl.store(factors + row * X + x, weights, mask=x < X)
    tl.store(ids + row * X + x, found.to(ids.dtype.element_ty), mask=x < X)


def route_rows(
    logits: Tensor,  # [R, E] float32, of any number of rows
    bias: Tensor,  # [E] float32
    *,
    groups: int,
    kept_groups: int,
    chosen: int,
    factor: float,
) -> tuple[Tensor, Tensor]:  # [R, X] int16, which sort fast; [R, X] float32
    """`target.moe.Router` behind its product, for a prompt.

    Raises:
        ValueError: a shape does not fit, or E or G is no power of two.
    """
    rows, experts = logits.shape
    if experts & (experts - 1) or groups & (groups - 1) or experts > 2**15:
        raise ValueError(
            f"route_rows wants powers of two, got {experts} experts in {groups} groups"
        )
    if bias.shape != (experts,) or not logits.is_contiguous() or logits.dtype != torch.float32:
        raise ValueError(
            f"route_rows wants contiguous float32 logits [R, E] and bias [E], got "
            f"{tuple(logits.shape)} of {logits.dtype} and {tuple(bias.shape)}"
        )
    ids = torch.empty(rows, chosen, dtype=torch.int16, device=logits.device)
    weights = torch.empty(rows, chosen, device=logits.device)
    _route_rows_kernel[(rows,)](
        logits, bias, ids, weights, factor, E=experts, G=groups, KEPT=kept_groups, X=chosen,
        XP=triton.next_power_of_2(chosen), num_warps=1,
    )  # fmt: skip
    return ids, weights
