"""Linear layers of a decode step on a CPU, with weights laid out for 8 or 16 rows.

A verify step multiplies a handful of rows by every weight of the model, so it runs at the speed at
which weights are read. The general matrix product of the CPU build reads them at less than half of
it for so few rows; oneDNN with weights repacked once for the row count gets there. Only the step
uses the repacked copy: whole sequences take the usual path.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["pack_linears"]

_ROWS = (8, 16)
_MOST_BYTES = 4 << 30
"""The packed copy doubles the weights in memory; larger models keep the usual product."""


class PackedLinear(nn.Linear):
    """`nn.Linear` that takes the packed weights for calls of 8 or 16 rows."""

    _packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() // self.in_features not in _ROWS or torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self._packed, self.bias, "none", [], ""
        )
        return out


def _available() -> bool:
    ops: Any = torch.ops.mkldnn
    return bool(torch._C._has_mkldnn) and hasattr(ops, "_linear_pointwise")


def _dtypes() -> tuple[torch.dtype, ...]:
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def pack_linears(model: nn.Module) -> int:
    """Repack the linear layers of a CPU model in place; bytes of the packed copies.

    Does nothing on another device, without oneDNN, and for models over 4 GiB.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    size = sum(module.weight.nbytes for module in linears)
    fits = all(
        module.weight.device.type == "cpu" and module.weight.dtype in _dtypes()
        for module in linears
    )
    if not (fits and _available() and size <= _MOST_BYTES):
        return 0
    with torch.no_grad():
        for module in linears:
            module.__class__ = PackedLinear
            packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), _ROWS[0])
            object.__setattr__(module, "_packed", packed)
    return size
