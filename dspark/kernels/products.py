"""Products of few rows with a layer's arithmetic around them: a gated norm, and SwiGLU.

Symbols: R = 16 rows, N outputs, K inputs, S partial sums, H heads, X head size, B parts of a head,
D hidden, I inner width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, dot, flags

__all__ = ["gate_up16", "gated_gemm16", "gated_reference", "swiglu16"]


def gated_reference(
    core: Tensor,  # [R, H X] float32
    gate: Tensor,  # [R, H X]
    norm_weight: Tensor,  # [X]
    eps: float,
) -> Tensor:  # [R, H X] in the dtype of `gate`
    """RMSNorm of every head, times the sigmoid of the gate: what `target.kda` feeds to o_proj."""
    heads = core.view(len(core), -1, norm_weight.shape[0])
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    return (normed.flatten(1) * torch.sigmoid(gate.float())).to(gate.dtype)


@triton.jit
def _gated_kernel(
    core, squares, weight, out, N, EPS,
    K: tl.constexpr, X: tl.constexpr, TILES: tl.constexpr, HEADS: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x, tile = tl.arange(0, X), tl.arange(0, TILES)[None, :]
    live = n[None, :] < N
    head = tl.program_id(1) * HEADS
    w = weight + n[None, :].to(tl.int64) * K + head * X + x[:, None]
    dtype = weight.dtype.element_ty
    first = tl.load(w, mask=live, other=0.0, eviction_policy="evict_first")
    begin(PDL)
    total = tl.zeros([ROWS, BN], tl.float32)
    for step in tl.static_range(HEADS):
        if step == 0:
            right = first
        else:
            right = tl.load(w + step * X, mask=live, other=0.0, eviction_policy="evict_first")
        raw = tl.load(core + rows * K + (head + step) * X + x[None, :])
        square = tl.load(squares + (rows * (K // X) + head + step) * TILES + tile)
        size = tl.rsqrt(tl.sum(square, 1) / X + EPS)[:, None]
        total = dot((raw * size).to(dtype), right, total, WIDE)
    place = out + (tl.program_id(1) * ROWS + rows) * N + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _swiglu_kernel(
    parts, out, WIDTH, S: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < WIDTH
    begin(PDL)
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(S):
        place = parts + (part * ROWS + row) * 2 * WIDTH + at
        gate += tl.load(place, mask=live, other=0.0).to(tl.float32)
        up += tl.load(place + WIDTH, mask=live, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    inner = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out + row * WIDTH + at, inner.to(dtype), mask=live)


@triton.jit
def _gate_up_kernel(
    x, weight, out,
    D: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    live = n[None, :] < INNER
    w = weight + n[None, :].to(tl.int64) * D + k[:, None]
    w_up = w + INNER * D
    within = live & (k < D)[:, None]
    # weights are constants: on their way before the rows are there
    first = tl.load(w, mask=within, other=0.0, eviction_policy="evict_first")
    second = tl.load(w_up, mask=within, other=0.0, eviction_policy="evict_first")
    begin(PDL)
    a = x + rows * D + k[None, :]
    left = tl.load(a, mask=(k < D)[None, :], other=0.0)
    gate = dot(left, first, tl.zeros([ROWS, BN], tl.float32), WIDE)
    up = dot(left, second, tl.zeros([ROWS, BN], tl.float32), WIDE)
    for step in range(BK, D, BK):
        # the last step may be short: zeros change no sum
        within = live & (step + k < D)[:, None]
        left = tl.load(a + step, mask=(step + k < D)[None, :], other=0.0)
        right = tl.load(w + step, mask=within, other=0.0, eviction_policy="evict_first")
        gate = dot(left, right, gate, WIDE)
        right = tl.load(w_up + step, mask=within, other=0.0, eviction_policy="evict_first")
        up = dot(left, right, up, WIDE)
    # as the products of a library would be: rounded before the activation
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    inner = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up
    tl.store(out + rows * INNER + n[None, :], inner.to(dtype), mask=live)


def gate_up16(
    x: Tensor,  # [R, D]
    weight: Tensor,  # [2 I, D], gate first
    out: Tensor,  # [R, I]
    *,
    block_n: int = 32,
    block_k: int = 128,
    warps: int = 4,
    stages: int = 4,
    pdl: bool | None = None,
) -> None:
    """silu(x gate) x (x up): both products of an output in one program, so no sum is written.

    Rounded as `swiglu16` does. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape or a dtype does not fit.
    """
    (rows, d), inner = x.shape, out.shape[1]
    if rows != ROWS or weight.shape != (2 * inner, d) or len(out) != ROWS:
        raise ValueError(
            f"gate_up16 wants x [{ROWS}, D], weight [2 I, D] and out [{ROWS}, I], got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(out.shape)}"
        )
    if not all(one.is_contiguous() and one.dtype == x.dtype for one in (x, weight, out)):
        raise ValueError("gate_up16 wants contiguous tensors of one dtype")
    _gate_up_kernel[(triton.cdiv(inner, block_n),)](
        x, weight, out, D=d, INNER=inner, BN=block_n, BK=block_k, ROWS=ROWS, num_warps=warps,
        num_stages=stages, **flags(x, pdl),
    )  # fmt: skip


def gated_gemm16(
    core: Tensor,  # [R, K] float32, K = H X, gated and weighed but not yet normed
    squares: Tensor,  # [R, H, B] float32, parts of each head's sum of squares before the gate
    weight: Tensor,  # [N, K]
    out: Tensor,  # [P, R, N] float32, a partial product for each of P parts of the heads
    *,
    eps: float,
    block_n: int = 64,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """What `kda_verify` left, normed, times ``weight``; a head is one step over K.

    Raises:
        ValueError: a shape does not fit, or the parts do not divide the heads.
    """
    (n, k), (_, heads, tiles), parts = weight.shape, squares.shape, out.shape[0]
    fits = core.shape == (ROWS, k) and len(squares) == ROWS and out.shape[1:] == (ROWS, n)
    size = k // heads
    if not fits or k % heads or heads % parts or tiles & (tiles - 1) or size & (size - 1):
        raise ValueError(
            f"gated_gemm16 wants core [{ROWS}, K], squares [{ROWS}, H, B], weight [N, K], out "
            f"[P, {ROWS}, N], P parts of whole heads, and B and the head size powers of two, got "
            f"{tuple(core.shape)}, {tuple(squares.shape)}, {tuple(weight.shape)} and "
            f"{tuple(out.shape)}"
        )
    _gated_kernel[(triton.cdiv(n, block_n), parts)](
        core, squares, weight, out, n, eps,
        K=k, X=size, TILES=tiles, HEADS=heads // parts, BN=block_n, ROWS=ROWS,
        num_warps=warps, **flags(core, pdl),
    )  # fmt: skip


def swiglu16(
    parts: Tensor,  # [S, R, 2 I], gate first
    out: Tensor,  # [R, I]
    *,
    block: int = 256,
    pdl: bool | None = None,
) -> None:
    """silu(gate) x up of the summed parts, each rounded to the dtype of ``out``.

    Raises:
        ValueError: a shape does not fit.
    """
    width = out.shape[1]
    if parts.shape[1:] != (ROWS, 2 * width) or not parts.is_contiguous() or len(out) != ROWS:
        raise ValueError(
            f"swiglu16 wants contiguous parts [S, {ROWS}, 2 I] and out [{ROWS}, I], got "
            f"{tuple(parts.shape)} and {tuple(out.shape)}"
        )
    _swiglu_kernel[(triton.cdiv(width, block), ROWS)](
        parts, out, width, S=parts.shape[0], BLOCK=block, ROWS=ROWS, num_warps=4,
        **flags(out, pdl),
    )  # fmt: skip
