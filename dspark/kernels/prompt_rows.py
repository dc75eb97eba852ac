"""Element-wise work on the rows of a prompt in one pass each: norms, SwiGLU, rows for the experts.

Roundings are those of the modules; only sums of float32 run in another order. Rows may have a
stride, so that a part of a wider product needs no copy.

Symbols: R rows, D width, I inner width, X experts a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.reduce_norm import norm_row

__all__ = ["expert_rows", "limited_swiglu_rows", "norm_rows"]


@triton.jit
def _norm_kernel(
    x, part, weight, total, out, x_row, part_row,
    D: tl.constexpr, EPS: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    live = d < D
    new = tl.load(x + row * x_row + d, mask=live, other=0.0)
    if ADD:
        more = tl.load(part + row * part_row + d, mask=live, other=0.0).to(tl.float32)
        new = (new.to(tl.float32) + more).to(out.dtype.element_ty)
        tl.store(total + row * D + d, new, mask=live)
    scale = tl.load(weight + d, mask=live, other=0.0)
    norm_row(new, scale, out + row * D + d, live, D, EPS)


def norm_rows(
    x: Tensor,  # [..., D], any leading sizes that are one run of rows
    weight: Tensor,  # [D] of the same dtype
    eps: float,
    part: Tensor | None = None,  # like `x`
) -> tuple[Tensor, Tensor]:  # x + part (x itself without one), and its norm
    """`target.norm.RMSNorm` of x or of the sum; both are new, contiguous tensors.

    Raises:
        ValueError: dtypes or shapes differ, or a row is no run of numbers.
    """
    size = x.shape[-1]
    same = part is None or (part.shape == x.shape and part.dtype == x.dtype)
    if weight.shape != (size,) or weight.dtype != x.dtype or not same:
        raise ValueError(
            f"norm_rows wants weight [{size}] and a part like x, all of {x.dtype}, got "
            f"{tuple(weight.shape)} of {weight.dtype}"
        )
    flat = _rows(x, "norm_rows")
    more = flat if part is None else _rows(part, "norm_rows")
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    total = out if part is None else torch.empty_like(out)
    _norm_kernel[(len(flat),)](
        flat, more, weight, total, out, flat.stride(0), more.stride(0), D=size, EPS=eps,
        BD=triton.next_power_of_2(size), ADD=part is not None, num_warps=4 if size <= 1024 else 8,
    )  # fmt: skip
    return x if part is None else total.view(x.shape), out.view(x.shape)


@triton.jit
def _swiglu_kernel(
    gate, up, out, gate_row, up_row, R, WIDTH, LIMIT,
    LIMITED: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    i = (tl.program_id(1) * BI + tl.arange(0, BI))[None, :]
    live = (row < R) & (i < WIDTH)
    dtype: tl.constexpr = out.dtype.element_ty
    left = tl.load(gate + row * gate_row + i, mask=live, other=0.0).to(tl.float32)
    left = (left * tl.sigmoid(left)).to(dtype).to(tl.float32)
    right = tl.load(up + row * up_row + i, mask=live, other=0.0).to(tl.float32)
    if LIMITED:
        left = tl.minimum(left, LIMIT)
        right = tl.minimum(tl.maximum(right, -LIMIT), LIMIT)
    tl.store(out + row * WIDTH + i, (left * right).to(dtype), mask=live)


def limited_swiglu_rows(
    gate: Tensor,  # [..., I], as for `norm_rows`
    up: Tensor,  # [..., I]
    limit: float,
) -> Tensor:  # [..., I]
    """`target.moe.limited_swiglu`.

    Raises:
        ValueError: shapes differ, or a row is no run of numbers.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"limited_swiglu_rows wants gate and up alike, got {tuple(gate.shape)} of "
            f"{gate.dtype} and {tuple(up.shape)} of {up.dtype}"
        )
    left, right = _rows(gate, "limited_swiglu_rows"), _rows(up, "limited_swiglu_rows")
    rows, inner = left.shape
    out = torch.empty(rows, inner, dtype=gate.dtype, device=gate.device)
    block = min(256, triton.next_power_of_2(inner))
    tall = max(1, 2048 // block)
    _swiglu_kernel[(triton.cdiv(rows, tall), triton.cdiv(inner, block))](
        left, right, out, left.stride(0), right.stride(0), rows, inner, limit,
        LIMITED=limit > 0, BR=tall, BI=block, num_warps=4,
    )  # fmt: skip
    return out.view(gate.shape)


@triton.jit
def _gather_kernel(
    x, order, out, places, D,
    X: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + at)
    tl.store(places + slot, at)
    d = tl.arange(0, BD)
    row = tl.load(x + slot // X * D + d, mask=d < D, other=0.0)
    tl.store(out + at * D + d, row, mask=d < D)


def expert_rows(
    x: Tensor,  # [R, D]
    order: Tensor,  # [R X] int64, slots by expert; slot / X is the row
    chosen: int,  # X
) -> tuple[Tensor, Tensor]:  # [R X, D]; [R, X] int64, where each slot has gone
    """Rows in the order of ``order``, and the way back.

    Raises:
        ValueError: a shape does not fit.
    """
    if order.shape != (len(x) * chosen,) or order.dtype != torch.int64 or not x.is_contiguous():
        raise ValueError(
            f"expert_rows wants contiguous x [R, D] and order [R x {chosen}] int64, got "
            f"{tuple(x.shape)} and {tuple(order.shape)} of {order.dtype}"
        )
    size = x.shape[1]
    out = torch.empty(len(order), size, dtype=x.dtype, device=x.device)
    places = torch.empty(len(x), chosen, dtype=torch.int64, device=x.device)
    _gather_kernel[(len(order),)](
        x, order, out, places, size, X=chosen, BD=triton.next_power_of_2(size), num_warps=4
    )
    return out, places


def _rows(x: Tensor, kernel: str) -> Tensor:
    """[..., D] as rows with one stride.

    Raises:
        ValueError: they have none.
    """
    if x.stride(-1) == 1:
        try:
            return x.view(-1, x.shape[-1])
        except RuntimeError:
            pass
    raise ValueError(f"{kernel} wants rows of one stride, got strides {x.stride()}")
