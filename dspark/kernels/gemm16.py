"""Products of a few rows with a large weight matrix, at the speed at which the weights are read.

A verify step multiplies at most 16 rows by every weight of the model. Bytes decide: each weight is
read once, by enough programs that the memory is busy, and while the kernel before still runs.

Symbols: R = 16 rows, N outputs, K inputs, S splits of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, dot, flags

__all__ = ["gemm16", "gemm16_reference"]


def gemm16_reference(
    x: Tensor,  # [R, K]
    weight: Tensor,  # [N, K]
    splits: int = 1,
) -> Tensor:  # [S, R, N] float32
    """Partial products over ``splits`` equal parts of K; their sum is ``x @ weight.T``."""
    parts = zip(x.float().chunk(splits, 1), weight.float().chunk(splits, 1), strict=True)
    return torch.stack([left @ right.T for left, right in parts])


@triton.jit
def _gemm16_kernel(
    x, weight, out, N, x_row,
    K: tl.constexpr, K_SPLIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PIECES: tl.constexpr, PREFETCH: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.program_id(1) * K_SPLIT + tl.arange(0, BK)
    w = weight + n[None, :].to(tl.int64) * K + k[:, None]
    live = n[None, :] < N
    if PIECES > 0:
        # weights are constants: on their way to the L2 cache before the rows are there
        piece = tl.arange(0, BN * PIECES)
        row = tl.minimum(tl.program_id(0) * BN + piece // PIECES, N - 1).to(tl.int64)
        at = row * K + tl.program_id(1) * K_SPLIT + piece % PIECES * (K_SPLIT // PIECES)
        tl.inline_asm_elementwise(
            PREFETCH, "=r,l", [weight + at], dtype=tl.int32, is_pure=False, pack=1
        )
    EVEN: tl.constexpr = K_SPLIT % BK == 0
    # zeros behind the end of a split change no sum
    inside = tl.arange(0, BK) < K_SPLIT
    within = live if EVEN else live & inside[:, None]
    first = tl.load(w, mask=within, other=0.0, eviction_policy="evict_first")
    begin(PDL)
    a = x + rows[:, None] * x_row + k[None, :]
    left = tl.load(a) if EVEN else tl.load(a, mask=inside[None, :], other=0.0)
    total = dot(left, first, tl.zeros([ROWS, BN], tl.float32), WIDE)
    for step in range(BK, K_SPLIT, BK):
        if EVEN:
            left = tl.load(a + step)
        else:
            inside = step + tl.arange(0, BK) < K_SPLIT
            within = live & inside[:, None]
            left = tl.load(a + step, mask=inside[None, :], other=0.0)
        right = tl.load(w + step, mask=within, other=0.0, eviction_policy="evict_first")
        total = dot(left, right, total, WIDE)
    place = out + (tl.program_id(1) * ROWS + rows[:, None]) * N + n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=live)


def gemm16(
    x: Tensor,  # [R, K] bfloat16 or float32, rows may have a stride
    weight: Tensor,  # [N, K] of the same dtype
    out: Tensor,  # [S, R, N] float32, or of any dtype with S = 1
    *,
    block_n: int = 32,
    block_k: int = 128,
    warps: int = 4,
    stages: int = 4,
    prefetch: int = 0,
    pdl: bool | None = None,
) -> None:
    """Write `gemm16_reference` into ``out``: one partial product for each of its S parts of K.

    ``prefetch`` > 0 asks for each weight row's part, in so many pieces, while the kernel before
    still runs; that pays for small matrices, and has no meaning on a CPU. A row's numbers do not
    depend on the other rows, nor on how many of them mean something.
    Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape or stride does not fit, or S does not divide K.
    """
    (rows, k), n, splits = x.shape, weight.shape[0], out.shape[0]
    if rows != ROWS or weight.shape[1] != k or out.shape[1:] != (ROWS, n) or x.stride(1) != 1:
        raise ValueError(
            f"gemm16 wants x [{ROWS}, K], weight [N, K] and out [S, {ROWS}, N], got "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(out.shape)}"
        )
    overlap = flags(x, pdl)
    pieces = 0 if overlap["WIDE"] else prefetch
    part = k // splits * x.element_size() // max(pieces, 1)
    if k % splits or part % 16 or not weight.is_contiguous() or not out.is_contiguous():
        raise ValueError(
            f"gemm16 wants contiguous weight and out, and K a multiple of {splits} splits in "
            f"pieces of 16 bytes, got K = {k}"
        )
    _gemm16_kernel[(triton.cdiv(n, block_n), splits)](
        x, weight, out, n, x.stride(0),
        K=k, K_SPLIT=k // splits, BN=block_n, BK=block_k, PIECES=pieces,
        PREFETCH=f"cp.async.bulk.prefetch.L2.global [$1], {part}; mov.u32 $0, 0;",
        ROWS=ROWS, num_warps=warps, num_stages=stages, **overlap,
    )  # fmt: skip
