"""Sum of each row's experts where a whole prompt is read: gathered, weighed and added in one pass.

Symbols: R rows, X experts a token, D hidden.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["expert_sum", "expert_sum_reference"]


def expert_sum_reference(
    parts: Tensor,  # [R X, D]
    places: Tensor,  # [R, X] int64, where in `parts` each slot's output lies
    weights: Tensor,  # [R, X] float32
    shared: Tensor | None = None,  # [R, D]
) -> Tensor:  # [R, D] float32, or in the dtype of `shared`
    """Slots added in the router's order; then, behind a rounding, the shared expert."""
    each = parts[places].float()
    total = (each * weights[..., None]).sum(1)
    return total if shared is None else total.to(shared.dtype) + shared


@triton.jit
def _sum_kernel(
    parts, places, weights, shared, out, D,
    X: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(X):
        place = tl.load(places + row * X + slot)
        part = tl.load(parts + place * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.load(weights + row * X + slot) * part
    dtype: tl.constexpr = out.dtype.element_ty
    if SHARED:
        more = tl.load(shared + row * D + d, mask=d < D, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + more
    tl.store(out + row * D + d, total.to(dtype), mask=d < D)


def expert_sum(
    parts: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None = None
) -> Tensor:
    """`expert_sum_reference`, without the copies in between.

    Raises:
        ValueError: ``shared`` does not fit.
    """
    rows, chosen = places.shape
    size = parts.shape[1]
    if shared is not None and (shared.shape != (rows, size) or not shared.is_contiguous()):
        raise ValueError(
            f"expert_sum wants contiguous shared {(rows, size)}, got {tuple(shared.shape)}"
        )
    dtype = torch.float32 if shared is None else shared.dtype
    out = torch.empty(rows, size, dtype=dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(size))
    _sum_kernel[(rows, triton.cdiv(size, block))](
        parts, places, weights, out if shared is None else shared, out, size,
        X=chosen, BLOCK=block, SHARED=shared is not None, num_warps=4,
    )  # fmt: skip
    return out
