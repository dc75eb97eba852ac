"""Between two sublayers: add up partial sums, add the residual, norm, and keep a tap.

One program a row, so that a row is added in one order whatever happens to the others. The sums of
a sublayer come as S partial products (splits of K, or ranks), or as the outputs of a row's routed
experts with their weights.

Symbols: R = 16 rows, D hidden, S partial sums, X experts a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, flags

__all__ = ["combine_norm", "combine_norm_reference", "reduce_norm", "reduce_norm_reference"]


def reduce_norm_reference(
    parts: Tensor,  # [S, R, D]
    residual: Tensor,  # [R, D]
    weight: Tensor,  # [D]
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [R, D] in the residual's dtype
    """New residual, and its RMSNorm: `target.model.Layer` between mixer and FFN."""
    dtype = residual.dtype
    total = residual + parts.float().sum(0).to(dtype)
    wide = total.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return total, wide.to(dtype) * weight


def combine_norm_reference(
    each: Tensor,  # [R, X, D]
    factors: Tensor,  # [R, X] float32
    residual: Tensor,  # [R, D]
    weight: Tensor,  # [D]
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [R, D]
    """`reduce_norm_reference` of a row's experts: X of them in the router's order, shared last."""
    total = (each.float() * factors[..., None]).sum(1)
    return reduce_norm_reference(total[None], residual, weight, eps)


@triton.jit
def _finish(
    total, residual, weight, out, tap, place, d, live,
    D: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """Row of parts -> residual, norm and tap; the roundings are those of the reference."""
    dtype = residual.dtype.element_ty
    old = tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    new = (old + total.to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual + place, new, mask=live)
    if TAP:
        tl.store(tap + place, new, mask=live)
    wide = new.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / D + EPS)).to(dtype)
    scale = tl.load(weight + d, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, (normed.to(tl.float32) * scale).to(dtype), mask=live)


@triton.jit
def _reduce_norm_kernel(
    parts, residual, weight, out, tap,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    place = tl.program_id(0) * D + d
    begin(PDL)
    total = tl.zeros([BD], tl.float32)
    for part in tl.static_range(S):
        total += tl.load(parts + part * ROWS * D + place, mask=live, other=0.0).to(tl.float32)
    _finish(total, residual, weight, out, tap, place, d, live, D, EPS, TAP)


@triton.jit
def _combine_norm_kernel(
    each, factors, residual, weight, out, tap,
    X: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row = tl.program_id(0)
    begin(PDL)
    total = tl.zeros([BD], tl.float32)
    for slot in tl.static_range(X):
        factor = tl.load(factors + row * X + slot)
        part = tl.load(each + (row * X + slot) * D + d, mask=live, other=0.0).to(tl.float32)
        total += factor * part
    _finish(total, residual, weight, out, tap, row * D + d, d, live, D, EPS, TAP)


def reduce_norm(
    parts: Tensor,  # [S, R, D] float32 or the residual's dtype
    residual: Tensor,  # [R, D], updated in place
    weight: Tensor,  # [D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    tap: Tensor | None = None,  # [R, D], a copy of the new residual
    pdl: bool | None = None,
) -> None:
    """`reduce_norm_reference`, in place; nothing is allocated.

    Raises:
        ValueError: a shape does not fit.
    """
    _check(residual, weight, out, tap)
    if parts.shape[1:] != residual.shape or not parts.is_contiguous():
        raise ValueError(
            f"reduce_norm wants contiguous parts [S, {ROWS}, D], got {tuple(parts.shape)}"
        )
    d = residual.shape[1]
    _reduce_norm_kernel[(ROWS,)](
        parts, residual, weight, out, residual if tap is None else tap,
        S=parts.shape[0], D=d, BD=triton.next_power_of_2(d), EPS=eps, TAP=tap is not None,
        ROWS=ROWS, num_warps=8, **flags(residual, pdl),
    )  # fmt: skip


def combine_norm(
    each: Tensor,  # [R, X, D] float32 or the residual's dtype
    factors: Tensor,  # [R, X] float32
    residual: Tensor,  # [R, D], updated in place
    weight: Tensor,  # [D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    tap: Tensor | None = None,  # [R, D]
    pdl: bool | None = None,
) -> None:
    """`combine_norm_reference`, in place; nothing is allocated.

    Raises:
        ValueError: a shape does not fit.
    """
    _check(residual, weight, out, tap)
    d = residual.shape[1]
    if each.shape != (*factors.shape, d) or len(each) != ROWS or not each.is_contiguous():
        raise ValueError(
            f"combine_norm wants contiguous each [{ROWS}, X, D] and factors [{ROWS}, X], got "
            f"{tuple(each.shape)} and {tuple(factors.shape)}"
        )
    _combine_norm_kernel[(ROWS,)](
        each, factors, residual, weight, out, residual if tap is None else tap,
        X=factors.shape[1], D=d, BD=triton.next_power_of_2(d), EPS=eps, TAP=tap is not None,
        num_warps=8, **flags(residual, pdl),
    )  # fmt: skip


def _check(residual: Tensor, weight: Tensor, out: Tensor, tap: Tensor | None) -> None:
    rows, d = residual.shape
    one = out if tap is None else tap
    if rows != ROWS or weight.shape != (d,) or not out.shape == one.shape == residual.shape:
        raise ValueError(
            f"residual, out and tap must be [{ROWS}, D] and weight [D], got "
            f"{tuple(residual.shape)}, {tuple(out.shape)}, {tuple(one.shape)}, "
            f"{tuple(weight.shape)}"
        )
