"""What the kernels of a decode step share: the row tile and launches that overlap.

A step has at most 16 rows, so every product has one tile of `ROWS` rows, whatever the number of
live ones: a row's arithmetic never depends on its neighbours. Programmatic dependent launch (PDL)
lets a kernel start while the one before it ends. Each kernel then waits before it reads anything
that the kernel before has written, and lets the next one start right behind its own wait. So what
is two or more launches old is complete, and may be read before the wait.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["ROWS", "added", "begin", "check_shapes", "dot", "flags", "without_pdl"]

ROWS = 16
"""Rows of a tile: one tensor-core tile, and the most rows of a step."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before, and let the one behind start; no-op without PDL."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def dot(left, right, total, WIDE: tl.constexpr):
    """``total`` + ``left`` @ ``right``; in float32 throughout if ``WIDE``."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def added(parts, place, stride, mask, S: tl.constexpr, dtype: tl.constexpr):
    """Partial sums in order, rounded as the product of a library would be; float32."""
    total = tl.load(parts + place, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, S):
        total += tl.load(parts + part * stride + place, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


_switched_off = False


@contextlib.contextmanager
def without_pdl() -> Iterator[None]:
    """Launches inside do not overlap, to see what overlapping gives."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def flags(like: torch.Tensor, pdl: bool | None = None) -> dict[str, Any]:
    """Launch options for a kernel on the device of ``like``.

    ``pdl`` None: where the GPU has it. ``WIDE`` asks for float32 products: Triton's interpreter,
    which runs the kernels on a CPU, gets those of bfloat16 wrong.
    """
    on_gpu = like.device.type == "cuda"
    overlap = on_gpu and not _switched_off and _has_pdl(like.device) if pdl is None else pdl
    more: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    return {"PDL": overlap, "WIDE": not on_gpu, **more}


def check_shapes(kernel: str, **wanted: tuple[torch.Tensor, tuple[int, ...] | torch.Size]) -> None:
    """Refuse tensors of another shape, or ones that are not contiguous.

    Raises:
        ValueError: naming the first.
    """
    for name, (one, shape) in wanted.items():
        if one.shape != shape or not one.is_contiguous():
            raise ValueError(
                f"{kernel} wants contiguous {name} {tuple(shape)}, got {tuple(one.shape)}"
            )
