"""Attention over the tiles that hold anything, by torch's flex attention.

On a GPU it is compiled, once for a shape and once more for all others; elsewhere it runs as plain
torch over all tiles, which is its definition and slow.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["sparse_attention"]


def sparse_attention(
    q: Tensor,  # [B, H, Q, N]
    k: Tensor,  # [B, G, C, N], G divides H
    v: Tensor,  # [B, G, C, N]
    tiles: BlockMask,
) -> Tensor:  # [B, H, Q, N] in autocast's dtype, else that of v
    """Softmax attention in float32 over products of the inputs' dtype, grouped queries included."""
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype
    q, k, v = (one.to(dtype) for one in (q, k, v))
    function: Any = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        function = _compiled()
    out: Tensor = function(q, k, v, block_mask=tiles, enable_gqa=q.shape[1] != k.shape[1])
    return out


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
