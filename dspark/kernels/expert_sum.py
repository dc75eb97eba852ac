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
) -> Tensor:  # [R, D] float32
    """Slots added in the router's order."""
    each = parts[places].float()
    return (each * weights[..., None]).sum(1)


@triton.jit
def _sum_kernel(
    parts, places, weights, out, D,
    X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(X):
        place = tl.load(places + row * X + slot)
        part = tl.load(parts + place * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.load(weights + row * X + slot) * part
    tl.store(out + row * D + d, total, mask=d < D)


def expert_sum(parts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """`expert_sum_reference`, without the copies in between."""
    rows, chosen = places.shape
    size = parts.shape[1]
    out = torch.empty(rows, size, dtype=torch.float32, device=parts.device)
    block = min(1024, triton.next_power_of_2(size))
    _sum_kernel[(rows, triton.cdiv(size, block))](
        parts, places, weights, out, size, X=chosen, BLOCK=block, num_warps=4
    )
    return out
