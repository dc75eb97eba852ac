"""Linear layers of a decode step on a CPU, with weights laid out for 8 or 16 rows.

A verify step multiplies a handful of rows by every weight of the model, so it runs at the speed at
which weights are read. The general matrix product of the CPU build reads them at less than half of
it for so few rows; oneDNN with weights repacked once for the row count gets there. Only the step
uses the repacked copy: whole sequences take the usual path.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["pack_linears"]

_PACKED_FOR = 8
_MOST_ROWS = 16
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' models, and the draft, hold projections of one input."""
_MOST_BYTES = 4 << 30
"""The packed copy doubles the weights in memory; larger models keep the usual product."""


class _Packed:
    """Weights of layers that read the same input, one behind the other, and their last product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
        self._bias = torch.cat(biases) if biases else None
        self._sizes = [linear.out_features for linear in linears]
        self._seen: tuple[Tensor, int] | None = None
        self._parts: list[Tensor | None] = []

    def take(self, input: Tensor, index: int) -> Tensor:
        """The product of layer ``index``; those of its sisters are kept until they ask."""
        seen, version = self._seen or (None, 0)
        part = self._parts[index] if seen is input and version == input._version else None
        if part is None:
            out = torch.ops.mkldnn._linear_pointwise(
                input, self._weight, self._bias, "none", [], ""
            )
            self._parts = list(out.split(self._sizes, dim=-1))
            self._seen = (input, input._version)
            part = self._parts[index]
        self._parts[index] = None
        if not any(one is not None for one in self._parts):
            self._seen = None
        assert part is not None
        return part


class PackedLinear(nn.Linear):
    """`nn.Linear` that takes the packed weights for calls of at most 16 rows."""

    _packed: tuple[_Packed, int]

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() > _MOST_ROWS * self.in_features or torch.is_grad_enabled():
            return nn.functional.linear(input, self.weight, self.bias)
        packed, index = self._packed
        return packed.take(input, index)


def _available() -> bool:
    ops: Any = torch.ops.mkldnn
    return bool(torch._C._has_mkldnn) and hasattr(ops, "_linear_pointwise")


def _dtypes() -> tuple[torch.dtype, ...]:
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)


def _sisters(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Linear layers in groups of one input: known names beside each other, else one alone."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in _SAME_INPUT:
            group = [getattr(module, name, None) for name in names]
            alike = {(type(one), getattr(one, "bias", None) is None) for one in group}
            if alike in ({(nn.Linear, True)}, {(nn.Linear, False)}):
                grouped.update(group)  # type: ignore[arg-type]
                yield group  # type: ignore[misc]
    for module in model.modules():
        if type(module) is nn.Linear and module not in grouped:
            yield [module]


def pack_linears(model: nn.Module) -> int:
    """Repack the linear layers of a CPU model in place; bytes of the packed copies.

    Layers that project one input to queries, keys and values, or to gate and up, become one
    product: a call costs as much as reading a megabyte. Does nothing on another device, without
    oneDNN, and for models over 4 GiB.
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
        for group in list(_sisters(model)):
            packed = _Packed(group)
            for index, module in enumerate(group):
                module.__class__ = PackedLinear
                object.__setattr__(module, "_packed", (packed, index))
    return size
