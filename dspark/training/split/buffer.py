"""Memory that a trainer and a target worker both see: tensors by name, without pickling them.

It is an anonymous file of the kernel's. No name of it exists anywhere, so nothing is left behind
however the two processes end; it grows in place, and whoever reads maps it again.
"""

import logging
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

__all__ = ["Buffer", "Layout", "Placed"]

log = logging.getLogger(__name__)

_ALIGNED = 256


@dataclass(frozen=True)
class Placed:
    """Where one tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def end(self) -> int:
        """Offset behind it, in bytes."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


Layout = dict[str, Placed]
"""What `Buffer.read` needs to find what `Buffer.write` wrote; small, and travels as a message."""


class Buffer:
    """One writer and one reader at a time, who tell each other by messages whose turn it is.

    Pickled while a process is started, it is the same memory there.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = os.memfd_create("dspark-split") if file is None else file
        self._bytes: Tensor | None = None  # [size] uint8, all of the memory
        self._pinned = False
        self.page_locked = False
        """Whether this process maps it for a GPU's copy engine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (reduction.DupFd(self._file),)

    @property
    def size(self) -> int:
        """Bytes that there are, in either process."""
        return os.fstat(self._file).st_size

    def write(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Copy ``tensors`` (any device) over what was here; grows if they need more."""
        layout: Layout = {}
        end = 0
        for name, tensor in tensors.items():
            start = -(-end // _ALIGNED) * _ALIGNED
            layout[name] = Placed(tensor.dtype, tuple(tensor.shape), start)
            end = layout[name].end
        if end > self.size:
            os.ftruncate(self._file, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE)
        for name, view in self.read(layout).items():
            view.copy_(tensors[name])
        return layout

    def read(self, layout: Layout) -> dict[str, Tensor]:
        """The tensors as they lie here: views, which the next `write` overwrites."""
        needed = max((placed.end for placed in layout.values()), default=0)
        if needed and (self._bytes is None or len(self._bytes) < needed):
            self._map()
        return {name: self._view(placed) for name, placed in layout.items()}

    def drop(self) -> None:
        """Forget this process's mapping; the memory stays."""
        if self._bytes is not None and self._pinned:
            _cuda().cudaHostUnregister(self._bytes.data_ptr())
        self._bytes, self._pinned = None, False

    def empty(self) -> None:
        """Give the memory back; the other process must read nothing before the next `write`."""
        self.drop()
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """End of use in this process."""
        self.drop()
        os.close(self._file)

    def _map(self) -> None:
        self.drop()
        # unmapped by itself, when the last view of it is gone
        self._bytes = torch.frombuffer(mmap.mmap(self._file, self.size), dtype=torch.uint8)
        if self.page_locked:
            code = _cuda().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0)
            self._pinned = int(code) == 0
            if not self._pinned:
                log.warning("the features' memory cannot be page-locked: copies take longer")

    def _view(self, placed: Placed) -> Tensor:
        if 0 in placed.shape:
            return torch.empty(placed.shape, dtype=placed.dtype)
        assert self._bytes is not None
        return self._bytes[placed.offset : placed.end].view(placed.dtype).view(placed.shape)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _reopened(file: Any) -> Buffer:
    return Buffer(file.detach())
