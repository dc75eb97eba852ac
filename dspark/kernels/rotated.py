"""A head's queries or keys: partial sums added up, normed where a model does, and rotated.

With the roundings of a layer that norms, multiplies and rotates one after another. The halves of a
head are the two parts of its pairs, as in Llama, Qwen3 and the drafts.

Symbols: S partial sums, N head size.
"""

import triton
import triton.language as tl

from dspark.kernels.angles import cos_sin
from dspark.kernels.launch import added

__all__ = ["head_scales", "turned_head"]


@triton.jit
def head_scales(weight, inverse, n, N: tl.constexpr, NORM: tl.constexpr):
    """Norm weights and frequencies of elements ``n``, and what their partners in RoPE need."""
    other = (n + N // 2) % N
    live = n < N
    rate = tl.load(inverse + n % (N // 2), mask=live, other=0.0).to(tl.float32)
    if NORM:
        own = tl.load(weight + n, mask=live, other=0.0).to(tl.float32)
        partner = tl.load(weight + other, mask=live, other=0.0).to(tl.float32)
    else:
        own, partner = rate, rate  # not read
    return own, partner, rate, other


@triton.jit
def turned_head(
    parts, row, own, partner, rate, other, positions, n, EPS, AMPLITUDE,
    S: tl.constexpr, PART: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """One head of the rows that begin at ``row``: [rows, N] in ``dtype``."""
    live = n[None, :] < N
    x = added(parts, row[:, None] + n[None, :], PART, live, S, dtype)
    y = added(parts, row[:, None] + other[None, :], PART, live, S, dtype)
    if NORM:
        size = tl.rsqrt(tl.sum(x * x, 1) / N + EPS)[:, None]
        x = ((x * size).to(dtype).to(tl.float32) * own[None, :]).to(dtype).to(tl.float32)
        y = ((y * size).to(dtype).to(tl.float32) * partner[None, :]).to(dtype).to(tl.float32)
    angle = positions.to(tl.float32)[:, None] * rate[None, :]
    cos, sin = cos_sin(angle)
    cos = (cos * AMPLITUDE).to(dtype).to(tl.float32)
    sin = (sin * AMPLITUDE).to(dtype).to(tl.float32)
    y = tl.where(n[None, :] < N // 2, -y, y)
    x, y = (x * cos).to(dtype).to(tl.float32), (y * sin).to(dtype).to(tl.float32)
    return (x + y).to(dtype)
