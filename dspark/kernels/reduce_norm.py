"""Between two sublayers: add up partial sums, add the residual, norm, and keep a tap.

Where a residual begins, `embed_norm` looks it up, and `parts_norm` norms a sum that has none.

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

__all__ = [
    "combine_norm",
    "combine_norm_reference",
    "embed_norm",
    "finish_row",
    "norm_row",
    "parts_norm",
    "reduce_norm",
    "reduce_norm_reference",
]


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
def finish_row(
    total, old, scale, residual, out, tap, row, tap_row, d, live,
    D: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
):  # fmt: skip
    """Row of parts -> residual, norm and tap; the roundings are those of the reference."""
    dtype = residual.dtype.element_ty
    place = row * D + d
    new = (old.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)
    norm_row(new, scale, out + place, live, D, EPS)
    tl.store(residual + place, new, mask=live)
    if TAP:
        tl.store(tap + row * tap_row + d, new, mask=live)


@triton.jit
def norm_row(new, scale, out, live, D: tl.constexpr, EPS: tl.constexpr):
    """RMSNorm of one row, rounded before the weight as the modules do."""
    wide = new.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / D + EPS)).to(new.dtype)
    tl.store(out, (normed.to(tl.float32) * scale.to(tl.float32)).to(new.dtype), mask=live)


@triton.jit
def _reduce_norm_kernel(
    parts, residual, weight, out, tap, tap_row,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row = tl.program_id(0)
    place = row * D + d
    # older than the kernel before, which has waited for it
    old = tl.load(residual + place, mask=live, other=0.0)
    scale = tl.load(weight + d, mask=live, other=0.0)
    begin(PDL)
    total = tl.zeros([BD], tl.float32)
    for part in tl.static_range(S):
        total += tl.load(parts + part * ROWS * D + place, mask=live, other=0.0).to(tl.float32)
    finish_row(total, old, scale, residual, out, tap, row, tap_row, d, live, D, EPS, TAP)


@triton.jit
def _combine_norm_kernel(
    each, factors, residual, weight, out, tap, tap_row,
    X: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row = tl.program_id(0)
    # older than the kernel before, which has waited for it
    old = tl.load(residual + row * D + d, mask=live, other=0.0)
    scale = tl.load(weight + d, mask=live, other=0.0)
    begin(PDL)
    total = tl.zeros([BD], tl.float32)
    for slot in tl.static_range(X):
        factor = tl.load(factors + row * X + slot)
        part = tl.load(each + (row * X + slot) * D + d, mask=live, other=0.0).to(tl.float32)
        total += factor * part
    finish_row(total, old, scale, residual, out, tap, row, tap_row, d, live, D, EPS, TAP)


def reduce_norm(
    parts: Tensor,  # [S, R, D] float32 or the residual's dtype
    residual: Tensor,  # [R, D], updated in place; not written by the kernel right before this one
    weight: Tensor,  # [D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    tap: Tensor | None = None,  # [R, D], a copy of the new residual; rows may have a stride
    warps: int = 8,
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
        parts, residual, weight, out, *_tap(residual, tap),
        S=parts.shape[0], D=d, BD=triton.next_power_of_2(d), EPS=eps,
        TAP=tap is not None, ROWS=ROWS, num_warps=warps, **flags(residual, pdl),
    )  # fmt: skip


def combine_norm(
    each: Tensor,  # [R, X, D] float32 or the residual's dtype
    factors: Tensor,  # [R, X] float32
    residual: Tensor,  # [R, D], updated in place; not written by the kernel right before this one
    weight: Tensor,  # [D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    tap: Tensor | None = None,  # [R, D]
    warps: int = 8,
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
        each, factors, residual, weight, out, *_tap(residual, tap),
        X=factors.shape[1], D=d,
        BD=triton.next_power_of_2(d), EPS=eps, TAP=tap is not None, ROWS=ROWS, num_warps=warps,
        **flags(residual, pdl),
    )  # fmt: skip


@triton.jit
def _parts_norm_kernel(
    parts, weight, out, residual, part_stride, row_stride,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, KEEP: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row = tl.program_id(0)
    scale = tl.load(weight + d, mask=live, other=0.0)
    begin(PDL)
    total = tl.zeros([BD], tl.float32)
    for part in tl.static_range(S):
        place = parts + part * part_stride + row * row_stride + d
        total += tl.load(place, mask=live, other=0.0).to(tl.float32)
    new = total.to(out.dtype.element_ty)
    if KEEP:
        tl.store(residual + row * D + d, new, mask=live)
    norm_row(new, scale, out + row * D + d, live, D, EPS)


@triton.jit
def _embed_norm_kernel(
    first, others, count, table, weight, residual, out, live_rows, done,
    FILL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row = tl.program_id(0)
    scale = tl.load(weight + d, mask=live, other=0.0)
    begin(PDL)
    token = tl.load(first)
    if FILL >= 0:
        token = tl.where(row == 0, token, FILL)
    else:
        rows = tl.where(tl.load(done) != 0, 0, tl.load(count) + 1)
        if row == 0:
            tl.store(live_rows, rows)
        # rows that are not live are the anchor's: any finite values would do
        other = tl.load(others + tl.maximum(row - 1, 0))
        token = tl.where((row == 0) | (row >= rows), token, other)
    new = tl.load(table + token.to(tl.int64) * D + d, mask=live, other=0.0)
    tl.store(residual + row * D + d, new, mask=live)
    norm_row(new, scale, out + row * D + d, live, D, EPS)


def parts_norm(
    parts: Tensor,  # [S, R, D] float32 or the dtype of `out`; parts and rows may have strides
    weight: Tensor,  # [D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    residual: Tensor | None = None,  # [R, D], of the dtype of `out`
    pdl: bool | None = None,
) -> None:
    """RMSNorm of a sum that belongs to no residual, rounded to the dtype of ``out`` first.

    ``residual``: begins with that sum.

    Raises:
        ValueError: a shape does not fit.
    """
    d = out.shape[1]
    if parts.shape[1:] != out.shape or weight.shape != (d,) or parts.stride(2) != 1:
        raise ValueError(
            f"parts_norm wants parts [S, {ROWS}, D], weight [D] and out [{ROWS}, D], got "
            f"{tuple(parts.shape)}, {tuple(weight.shape)} and {tuple(out.shape)}"
        )
    if residual is not None and (residual.shape != out.shape or residual.dtype != out.dtype):
        raise ValueError(
            f"parts_norm wants a residual like out [{ROWS}, {d}] {out.dtype}, got "
            f"{tuple(residual.shape)} {residual.dtype}"
        )
    _parts_norm_kernel[(ROWS,)](
        parts, weight, out, out if residual is None else residual,
        parts.stride(0), parts.stride(1),
        S=parts.shape[0], D=d, BD=triton.next_power_of_2(d), EPS=eps, KEEP=residual is not None,
        num_warps=8, **flags(out, pdl),
    )  # fmt: skip


def embed_norm(
    first: Tensor,  # [1] int32, the token of row 0
    table: Tensor,  # [V, D]
    weight: Tensor,  # [D]
    residual: Tensor,  # [R, D]
    out: Tensor,  # [R, D]
    *,
    eps: float,
    fill: int | None = None,
    proposals: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    warps: int = 8,
    pdl: bool | None = None,
) -> None:
    """Rows of the embedding into ``residual``, and their RMSNorm.

    Behind the token of row 0 stand ``fill`` (a draft's block), or ``proposals``: tokens [R] int32,
    their count [1] int32, where to write the number of live rows [1] int32, and a flag [1] int32
    that makes it zero.

    Raises:
        ValueError: a shape does not fit, or not one of the two is given.
    """
    _check(residual, weight, out, None)
    if table.shape[1] != residual.shape[1] or (fill is None) == (proposals is None):
        raise ValueError(
            f"embed_norm wants a table [V, {residual.shape[1]}] and either fill or proposals, got "
            f"{tuple(table.shape)}, {fill} and {proposals}"
        )
    tokens, count, live_rows, done = proposals or (first, first, first, first)
    d = residual.shape[1]
    _embed_norm_kernel[(ROWS,)](
        first, tokens, count, table, weight, residual, out, live_rows, done,
        FILL=-1 if fill is None else fill, D=d, BD=triton.next_power_of_2(d), EPS=eps,
        ROWS=ROWS, num_warps=warps, **flags(residual, pdl),
    )  # fmt: skip


def _tap(residual: Tensor, tap: Tensor | None) -> tuple[Tensor, int]:
    return (residual, 0) if tap is None else (tap, tap.stride(0))


def _check(residual: Tensor, weight: Tensor, out: Tensor, tap: Tensor | None) -> None:
    rows, d = residual.shape
    one = out if tap is None else tap
    if rows != ROWS or weight.shape != (d,) or not out.shape == one.shape == residual.shape:
        raise ValueError(
            f"residual, out and tap must be [{ROWS}, D] and weight [D], got "
            f"{tuple(residual.shape)}, {tuple(out.shape)}, {tuple(one.shape)}, "
            f"{tuple(weight.shape)}"
        )
