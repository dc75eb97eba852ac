"""Routed experts and the shared one on at most 16 rows: each expert that is needed is read once.

`experts_up` multiplies all rows by an expert's gate and up projections (a tile has 16 rows whether
they are needed or not) and applies SwiGLU with its limits; `experts_down` multiplies by the down
projection and writes each row's result to the slot in which it chose the expert. Place 0 is the
shared expert; place 1 + i stands for pair i of row and slot, and works if no earlier pair names the
same expert. Nothing is sorted, and no sum runs over experts, of which other rows change the list.

Symbols: R = 16 rows, D hidden, I inner width (of this rank), E experts, X experts a token,
A = 1 + R X places.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, dot, flags

__all__ = ["experts_down", "experts_reference", "experts_up"]


def experts_reference(
    x: Tensor,  # [R, D]
    gate_up: Tensor,  # [E + 1, 2 I, D], gate first; the last one is the shared expert
    down: Tensor,  # [E + 1, D, I]
    ids: Tensor,  # [R, X] int32, -1 for none
    limit: float,
    shared_limit: float,
) -> Tensor:  # [R, X + 1, D], by slot; zeros where there is none
    """Every row through each of its experts, one by one, as `target.moe.Experts.one` does."""
    rows, chosen = ids.shape
    out = x.new_zeros(rows, chosen + 1, x.shape[1])
    for row in range(rows):
        for slot, expert in enumerate([*ids[row].tolist(), len(down) - 1]):
            if int(ids[row].max()) < 0:
                continue
            most = (limit if slot < chosen else shared_limit) or torch.inf
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            inner = torch.nn.functional.silu(gate).clamp(max=most) * up.clamp(-most, most)
            out[row, slot] = down[expert] @ inner
    return out


@triton.jit
def _pair(ids, place, E: tl.constexpr, X: tl.constexpr, XP: tl.constexpr, ROWS: tl.constexpr):
    """Expert of a place or -1, and in which slot each row wants it (-1: not at all)."""
    rows = tl.arange(0, ROWS)[:, None]
    x = tl.arange(0, XP)[None, :]
    every = tl.load(ids + rows * X + x, mask=x < X, other=-1)
    pair = tl.maximum(place - 1, 0)
    expert = tl.where(place == 0, E, tl.load(ids + pair))
    before = (every == expert) & (rows * X + x < pair)
    expert = tl.where(tl.sum(tl.sum(before.to(tl.int32), 1), 0) > 0, -1, expert)
    slots = tl.max(tl.where(every == expert, x, -1), 1)
    # a row that routes nowhere is not live, and needs no shared expert either
    return expert, tl.where(place == 0, tl.where(tl.max(every, 1) >= 0, X, -1), slots)


@triton.jit
def _up_kernel(
    x, weight, ids, out, LIMIT, SHARED_LIMIT,
    D: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, X: tl.constexpr, XP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (INNER + BN - 1) // BN
    place = tl.program_id(0) // TILES
    rows = tl.arange(0, ROWS)
    n = (tl.program_id(0) % TILES) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    begin(PDL)
    expert, _ = _pair(ids, place, E, X, XP, ROWS)
    if expert < 0:
        return
    live = n[None, :] < INNER
    a = x + rows[:, None] * D + k[None, :]
    w = weight + expert.to(tl.int64) * (2 * INNER * D) + n[None, :] * D + k[:, None]
    gate = tl.zeros([ROWS, BN], tl.float32)
    up = tl.zeros([ROWS, BN], tl.float32)
    for step in range(0, D, BK):
        left = tl.load(a + step)
        first = tl.load(w + step, mask=live, other=0.0, eviction_policy="evict_first")
        second = tl.load(w + INNER * D + step, mask=live, other=0.0, eviction_policy="evict_first")
        gate, up = dot(left, first, gate, WIDE), dot(left, second, up, WIDE)
    # as the products of a library would be: rounded before the activation
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    most = tl.where(place == 0, SHARED_LIMIT, LIMIT)
    gate = tl.minimum(gate * tl.sigmoid(gate), most)
    inner = gate * tl.minimum(tl.maximum(up, -most), most)
    tl.store(out + (place * ROWS + rows[:, None]) * INNER + n[None, :], inner.to(dtype), mask=live)


@triton.jit
def _down_kernel(
    inner, weight, ids, out,
    D: tl.constexpr, INNER: tl.constexpr, E: tl.constexpr, X: tl.constexpr, XP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (D + BN - 1) // BN
    place = tl.program_id(0) // TILES
    rows = tl.arange(0, ROWS)
    n = (tl.program_id(0) % TILES) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # the routes are older than the kernel before, which has waited for them
    expert, slots = _pair(ids, place, E, X, XP, ROWS)
    begin(PDL)
    if expert < 0:
        return
    live = n[None, :] < D
    a = inner + (place * ROWS + rows[:, None]) * INNER + k[None, :]
    w = weight + expert.to(tl.int64) * (D * INNER) + n[None, :] * INNER + k[:, None]
    total = tl.zeros([ROWS, BN], tl.float32)
    for step in range(0, INNER, BK):
        left = tl.load(a + step)
        right = tl.load(w + step, mask=live, other=0.0, eviction_policy="evict_first")
        total = dot(left, right, total, WIDE)
    place_of = out + (rows[:, None] * (X + 1) + slots[:, None]) * D + n[None, :]
    tl.store(place_of, total.to(out.dtype.element_ty), mask=live & (slots[:, None] >= 0))


def experts_up(
    x: Tensor,  # [R, D]
    weight: Tensor,  # [E + 1, 2 I, D], gate first; the last one is the shared expert
    ids: Tensor,  # [R, X] int32, from `route`
    out: Tensor,  # [A, R, I]
    *,
    limit: float,
    shared_limit: float,
    block_n: int = 32,
    block_k: int = 128,
    warps: int = 2,
    stages: int = 3,
    most_rows: int = ROWS,
    pdl: bool | None = None,
) -> None:
    """SwiGLU of every expert that is needed, for all rows; a limit of 0 is none.

    ``most_rows``: no step has more live rows, and there are programs for no more.

    Raises:
        ValueError: a shape does not fit, or ``block_k`` does not divide D.
    """
    d, width, chosen = x.shape[1], weight.shape[1] // 2, ids.shape[1]
    places = 1 + ROWS * chosen
    if len(x) != ROWS or weight.shape[2] != d or out.shape != (places, ROWS, width) or d % block_k:
        raise ValueError(
            f"experts_up wants x [{ROWS}, D] with D a multiple of {block_k}, weight "
            f"[E + 1, 2 I, D] and out [{places}, {ROWS}, I], got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {tuple(out.shape)}"
        )
    _up_kernel[((1 + most_rows * chosen) * triton.cdiv(width, block_n),)](
        x, weight, ids, out, limit or torch.inf, shared_limit or torch.inf,
        D=d, INNER=width, E=len(weight) - 1, X=chosen, XP=triton.next_power_of_2(chosen),
        BN=block_n, BK=block_k, ROWS=ROWS, num_warps=warps, num_stages=stages, **flags(x, pdl),
    )  # fmt: skip


def experts_down(
    inner: Tensor,  # [A, R, I], from `experts_up`
    weight: Tensor,  # [E + 1, D, I]
    ids: Tensor,  # [R, X] int32; not written by the kernel right before this one
    out: Tensor,  # [R, X + 1, D]
    *,
    block_n: int = 64,
    block_k: int = 64,
    warps: int = 4,
    stages: int = 3,
    most_rows: int = ROWS,
    pdl: bool | None = None,
) -> None:
    """Each row's expert outputs, by slot; slots of rows that are not live keep what they hold.

    Raises:
        ValueError: a shape does not fit, or ``block_k`` does not divide I.
    """
    places, rows, width = inner.shape
    d, chosen = weight.shape[1], ids.shape[1]
    fits = rows == ROWS and places == 1 + ROWS * chosen and out.shape == (ROWS, chosen + 1, d)
    if not fits or weight.shape[2] != width or width % block_k:
        raise ValueError(
            f"experts_down wants inner [1 + {ROWS} X, {ROWS}, I] with I a multiple of {block_k}, "
            f"weight [E + 1, D, I] and out [{ROWS}, X + 1, D], got {tuple(inner.shape)}, "
            f"{tuple(weight.shape)} and {tuple(out.shape)}"
        )
    _down_kernel[((1 + most_rows * chosen) * triton.cdiv(d, block_n),)](
        inner, weight, ids, out,
        D=d, INNER=width, E=len(weight) - 1, X=chosen, XP=triton.next_power_of_2(chosen),
        BN=block_n, BK=block_k, ROWS=ROWS, num_warps=warps, num_stages=stages, **flags(inner, pdl),
    )  # fmt: skip
