"""A KDA layer over a whole prompt, from its projections to the input of its output projection.

The same numbers as `target.kda` up to the order of float32 sums: convolutions, SiLU, norms and
gates of all rows at once, the chunks of `kernels.kda_chunks`, and the gated norm. Scratch is
bounded: a long prompt runs in segments.

Symbols: T rows, H heads (of this rank), K key size, V value size (equal to it), W kernel of the
short convolutions, B = 16 rows of a block, C = 64 of a chunk.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.kda_chunks import BLOCK, CHUNK, Segment, chain, solve
from dspark.kernels.launch import check_shapes

__all__ = ["kda_prefill", "supported"]

_LOWEST = -5.0
"""Decay of a row down to which half a block may be undone in float32."""


def supported(size: int, lower_bound: float) -> bool:
    """Whether the kernels take heads of this size with decays down to this bound."""
    return size >= 16 and size & (size - 1) == 0 and lower_bound >= _LOWEST


@triton.jit
def _convolved(
    x, tail, taps, row, column, rows, edge, x_row, tail_row,
    W: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """[B, K] float32: W taps, SiLU, rounded like the activations; zero behind the last row."""
    total = tl.zeros([B, K], tl.float32)
    for tap in tl.static_range(W):
        source = row + (tap - W + 1)
        here = (source >= 0) & (row < rows)
        place = source[:, None].to(tl.int64) * x_row * ALIGN + column[None, :]
        now = tl.load(x + place, mask=here[:, None], other=0.0).to(tl.float32)
        if edge:  # rows before the call
            held = (source < 0) & (row < rows)
            before = (source + W - 1)[:, None] * tail_row + column[None, :]
            now += tl.load(tail + before, mask=held[:, None], other=0.0).to(tl.float32)
        total += now * tl.load(taps + column * W + tap).to(tl.float32)[None, :]
    return (total * tl.sigmoid(total)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _inputs_kernel(
    q, k, v, f, b, tail, q_taps, k_taps, v_taps, a_log, dt_bias,
    query, key, value, decays, betas, inverse, mixed, first, rows, padded, x_row, b_row, LOWER,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, W: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = H * K
    r = tl.arange(0, B)
    row = first + block * B + r
    column = head * K + tl.arange(0, K)
    live = row < rows
    scratch = head * padded + block * B + r
    at = scratch[:, None] * K + tl.arange(0, K)[None, :]
    edge = first + block * B < W
    wanted = _convolved(
        q, tail, q_taps, row, column, rows, edge, x_row, 3 * WIDTH, W, B, K, ALIGN
    )  # fmt: skip
    keys = _convolved(
        k, tail + WIDTH, k_taps, row, column, rows, edge, x_row, 3 * WIDTH, W, B, K, ALIGN
    )  # fmt: skip
    values = _convolved(
        v, tail + 2 * WIDTH, v_taps, row, column, rows, edge, x_row, 3 * WIDTH, W, B, K, ALIGN
    )  # fmt: skip
    tl.store(value + at, values)
    wanted = wanted * tl.rsqrt(tl.sum(wanted * wanted, 1) + 1e-6)[:, None] * (1 / tl.sqrt(float(K)))
    keys = keys * tl.rsqrt(tl.sum(keys * keys, 1) + 1e-6)[:, None]
    tl.store(query + at, wanted)
    tl.store(key + at, keys)
    place = row[:, None].to(tl.int64) * x_row * ALIGN + column[None, :]
    raw = tl.load(f + place, mask=live[:, None], other=0.0)
    shifted = raw.to(tl.float32) + tl.load(dt_bias + column)[None, :]
    left = LOWER * tl.sigmoid(tl.exp(tl.load(a_log + head)) * shifted)
    # rows behind the last forget nothing and write nothing
    total = tl.cumsum(tl.where(live[:, None], left, 0.0), 0)
    tl.store(decays + at, total)
    beta = tl.load(b + row.to(tl.int64) * b_row + head, mask=live, other=0.0)
    beta = tl.where(live, tl.sigmoid(beta.to(tl.float32)), 0.0)
    tl.store(betas + scratch, beta)
    # products inside the block, decayed from and to its middle; read back in slices of K, which
    # costs fewer registers than products of whole rows
    tl.debug_barrier()
    i, j = r[:, None], r[None, :]
    system, inside = tl.zeros([B, B], tl.float32), tl.zeros([B, B], tl.float32)
    for step in range(0, K, BK):
        piece = scratch[:, None] * K + step + tl.arange(0, BK)[None, :]
        late = tl.load(decays + piece)
        late = late - tl.sum(tl.where(i == B // 2, late, 0.0), 0)[None, :]
        mine = tl.load(key + piece)
        early = tl.trans(mine * tl.exp(-late))
        late = tl.exp(late)
        system = tl.dot(mine * late, early, system, input_precision=PRECISION)
        inside = tl.dot(tl.load(query + piece) * late, early, inside, input_precision=PRECISION)
    system = tl.where(i > j, beta[:, None] * system, 0.0)
    corner = scratch[:, None] * C + block % (C // B) * B + r[None, :]
    tl.store(mixed + corner, tl.where(i >= j, inside, 0.0))
    # forward substitution: once row `known` of the inverse is final, all below lose their part
    solved = tl.where(i == j, 1.0, 0.0)
    for known in tl.static_range(B - 1):
        part = tl.sum(tl.where(j == known, system, 0.0), 1)
        final = tl.sum(tl.where(i == known, solved, 0.0), 0)
        solved -= part[:, None] * final[None, :]
    tl.store(inverse + corner, solved)


@triton.jit
def _outputs_kernel(
    query, mixed, updates, starts, g, norm, out, first, rows, padded, g_row, EPS,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    r, v = tl.arange(0, C), tl.arange(0, K)
    place = head * padded + chunk * C + r
    lower = (r // B)[None, :] <= (r // B)[:, None]
    pairs = tl.load(mixed + place[:, None] * C + r[None, :], mask=lower, other=0.0)
    update = tl.load(updates + place[:, None] * K + v[None, :])
    total = tl.dot(pairs, update, input_precision=PRECISION)
    start = starts + (head * (padded // C) + chunk).to(tl.int64) * (K * K)
    for step in range(0, K, BK):
        k = step + tl.arange(0, BK)
        left = tl.load(query + place[:, None] * K + k[None, :])
        right = tl.load(start + k[:, None] * K + v[None, :])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total = total * tl.rsqrt(tl.sum(total * total, 1) / K + EPS)[:, None]
    row = (first + chunk * C + r).to(tl.int64)
    live = (row < rows)[:, None]
    column = (head * K + v)[None, :]
    gate = tl.load(g + row[:, None] * g_row * ALIGN + column, mask=live, other=0.0)
    gate = gate.to(tl.float32)
    total = total * tl.load(norm + v).to(tl.float32)[None, :] * tl.sigmoid(gate)
    place = out + row[:, None] * (H * K) + column
    tl.store(place, total.to(out.dtype.element_ty), mask=live)


def kda_prefill(
    parts: Sequence[Tensor],  # projections q, k, v, f, g, each [T, H K], and b [T, H]
    tail: Tensor,  # [W - 1, 3 H K], inputs of the convolutions before the call
    taps: Sequence[Tensor],  # of q, k, v: [H K, W]
    a_log: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H K] float32
    norm: Tensor,  # [K], weight of the output's norm
    state: Tensor,  # [H, K, V] float32
    *,
    lower_bound: float,
    eps: float,
    segment: int = 4096,
    precision: str = "tf32x3",
) -> tuple[Tensor, Tensor]:  # [T, H K] in the dtype of q; [H, K, V], the state behind the last row
    """`target.kda.KDA` of one sequence between its projections; nothing waits for the host.

    Rows of q, k, v, f and g may have a stride, the same for all, and those of b another.
    ``precision``: of products of float32, "tf32x3" or "ieee"; the first is as good as float32 to
    about 2^-21 and runs on tensor cores.

    Raises:
        ValueError: a shape or stride does not fit, or heads or decays are none of `supported`.
    """
    q, k, v, f, g, b = parts
    heads, (rows, width) = len(a_log), q.shape
    size = width // heads
    wide = (k, v, f, g)
    if any(one.shape != q.shape or one.stride() != q.stride() for one in wide) or q.stride(1) != 1:
        raise ValueError(
            "kda_prefill wants q, k, v, f, g of one shape [T, H K] and one stride, got "
            f"{[(tuple(one.shape), one.stride()) for one in (q, *wide)]}"
        )
    if not supported(size, lower_bound) or width != heads * size or segment % CHUNK or not rows:
        raise ValueError(
            f"kda_prefill wants rows, heads of a power of two from 16 on, decays from {_LOWEST} on "
            f"and segments of whole chunks, got {tuple(q.shape)}, {heads}, {lower_bound}, {segment}"
        )
    check_shapes(
        "kda_prefill",
        tail=(tail, (len(tail), 3 * width)),
        **{f"taps {i}": (one, (width, len(tail) + 1)) for i, one in enumerate(taps)},
        dt_bias=(dt_bias, (width,)),
        norm=(norm, (size,)),
        state=(state, (heads, size, size)),
    )
    if b.shape != (rows, heads) or b.stride(1) != 1:
        raise ValueError(f"kda_prefill wants b [{rows}, {heads}], got {tuple(b.shape)}")
    # so that the compiler knows how many numbers it may load at once
    align = math.gcd(q.stride(0), 16)
    out = torch.empty(rows, width, dtype=q.dtype, device=q.device)
    last = torch.empty_like(state)
    for first in range(0, rows, segment):
        chunks = triton.cdiv(min(segment, rows - first), CHUNK)
        padded = chunks * CHUNK
        held = Segment.empty(heads, padded, size, q.device)
        _inputs_kernel[(padded // BLOCK, heads)](
            q, k, v, f, b, tail, *taps, a_log, dt_bias,
            held.query, held.key, held.value, held.decays, held.beta, held.inverse, held.mixed,
            first, rows, padded, q.stride(0) // align, b.stride(0), lower_bound,
            H=heads, K=size, BK=min(size, 32), W=len(tail) + 1, B=BLOCK, C=CHUNK, ALIGN=align,
            PRECISION=precision, num_warps=4, num_stages=1,
        )  # fmt: skip
        solve(held, precision)
        chain(held, last if first else state, last, precision)
        _outputs_kernel[(chunks, heads)](
            held.query, held.mixed, held.fresh, held.starts, g, norm, out,
            first, rows, padded, g.stride(0) // align, eps,
            H=heads, K=size, BK=min(size, 32), B=BLOCK, C=CHUNK, ALIGN=align,
            PRECISION=precision, num_warps=8,
        )  # fmt: skip
    return out, last
