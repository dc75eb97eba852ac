"""Large tensors in memory that is used again: the pages of a fresh one cost more than its copy.

A buffer is free again when no tensor looks at it any more, however many views there were.
"""

import sys
from math import prod
from threading import Lock

import torch
from torch import Tensor

__all__ = ["Buffers"]

_LARGE = 1 << 20
"""Bytes from which on it is worth it; smaller ones the allocator keeps by itself."""
_FREE_REFERENCES = 3  # of the list, of the loop over it, and of the call that counts


class Buffers:
    """At most so many buffers that are kept while nothing looks at them."""

    def __init__(self, keep: int = 4) -> None:
        self._keep = keep
        self._held: list[bytearray] = []
        self._lock = Lock()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Like torch.empty, on the CPU."""
        size = prod(shape) * dtype.itemsize
        if size < _LARGE:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            free = [one for one in self._held if sys.getrefcount(one) <= _FREE_REFERENCES]
            fits = min((one for one in free if len(one) >= size), key=len, default=None)
            if fits is None or len(fits) > 4 * size:
                fits = bytearray(size + size // 4)
                # what was too small goes first
                for one in sorted(free, key=len)[: max(0, len(free) - self._keep + 1)]:
                    self._held = [other for other in self._held if other is not one]
                self._held.append(fits)
            return torch.frombuffer(fits, dtype=dtype, count=prod(shape)).view(shape)
