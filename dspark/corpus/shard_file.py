"""One safetensors file of features: written piece by piece, read through a memory map.

Tensors come out as views of the file's pages: nothing is read before it is looked at, and nothing
is copied. The map is private to the process, so that no write could reach the file.
The header's `crc32` is that of the whole file with zeros in its place.
"""

import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import CheckpointError

__all__ = ["MappedFile", "checksum", "write_file"]

_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MOST_HEADER = 100 << 20
_OPEN_CRC = b'"crc32":"00000000"'
_PIECE = 1 << 22


def write_file(
    path: Path, tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]
) -> str:
    """Write tensors, each given as pieces [n, ...] one behind the other; the file's `crc32`.

    Pieces of a tensor have one dtype and one shape but for their length; there is one at least.
    """
    header: dict[str, Any] = {"__metadata__": {**metadata, "crc32": "0" * 8}}
    # the widest first: so each begins at a multiple of its own width
    names = sorted(tensors, key=lambda name: (-tensors[name][0].dtype.itemsize, name))
    end = 0
    for name in names:
        pieces = tensors[name]
        begin, end = end, end + sum(piece.numel() * piece.dtype.itemsize for piece in pieces)
        shape = [sum(len(piece) for piece in pieces), *pieces[0].shape[1:]]
        dtype = _NAMES[pieces[0].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(head)
    with path.open("wb") as file:
        file.write(head)
        for name in names:
            for piece in tensors[name]:
                if piece.numel():
                    data: Any = piece.contiguous().view(torch.uint8).flatten().numpy()
                    crc = zlib.crc32(data, crc)
                    file.write(data)
        found = f"{crc:08x}"
        file.seek(head.index(_OPEN_CRC) + len(_OPEN_CRC) - 9)
        file.write(found.encode())
    return found


def checksum(path: Path) -> str:
    """The `crc32` of the file as it is now, to be compared with that of when it was written.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = int.from_bytes(head, "little")
            head += file.read(min(size, _MOST_HEADER))
            place = head.find(b'"crc32":"')
            if place >= 0:
                place += len(_OPEN_CRC) - 9
                head = head[:place] + b"0" * 8 + head[place + 8 :]
            crc = zlib.crc32(head)
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    return f"{crc:08x}"


class MappedFile:
    """A file whose tensors are views of its pages; look at them, never write to them.

    Args:
        size: bytes that it should have; None takes any.

    Raises:
        CheckpointError: it cannot be read, is damaged or has another size.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if size is not None and self.size != size:
                    raise CheckpointError(_cut(path, self.size, size))
                if self.size < 8:
                    raise _unreadable(path, f"it has {self.size} bytes")
                # torch wants to be able to write; what is written stays in this process
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from error
        try:
            header, begin = self._header()
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", {}))
            self.tensors = {name: self._view(one, begin) for name, one in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, f"its header is damaged ({error})") from error

    def check(self) -> None:
        """Look at the file's size, since reading behind its end would kill the process.

        Raises:
            CheckpointError: it was cut since it was opened.
        """
        held = self._map.size()
        if held < self.size:
            raise CheckpointError(_cut(self.path, held, self.size))

    def _header(self) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(self.size - 8, _MOST_HEADER):
            raise ValueError(f"it would have {length} bytes")
        header = json.loads(self._map[8 : 8 + length])
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        return header, 8 + length

    def _view(self, one: Mapping[str, Any], begin: int) -> Tensor:
        dtype, shape = _DTYPES[one["dtype"]], [int(number) for number in one["shape"]]
        first, last = one["data_offsets"]
        count = math.prod(shape)
        if not 0 <= first <= last <= self.size - begin or min(shape, default=1) < 0:
            raise ValueError("a tensor lies outside the file")
        if last - first != count * dtype.itemsize:
            raise ValueError("a tensor's size is not that of its shape")
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin + first)
        return flat.view(shape)


def _cut(path: Path, held: int, wanted: int) -> str:
    return f"feature shard '{path}' has {held} bytes of {wanted}: run the same capture again"


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"feature shard '{path}' cannot be read: {reason}")
