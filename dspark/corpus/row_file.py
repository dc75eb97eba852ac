"""Ids and masks of training rows on disk, so that their number costs no memory.

A row takes 4 bytes a token for the id, 1 for the mask, and its name, in a temporary file that has
no directory entry: it goes with the process, whatever ends it. In memory stay 12 bytes a row and
the last rows not yet written. Reading takes no lock and moves no position, so that threads and
forked processes may share it.
"""

import errno
import os
import tempfile
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspark.errors import RunError

__all__ = ["RowFile"]

_BUFFER = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RowFile:
    """Rows by number; they can only be appended.

    Raises:
        RunError: the directory for temporary files (TMPDIR) is missing or takes no files.
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        """Every id that occurs."""
        self.num_tokens = 0
        self._lengths = array("I")
        self._ends = array("Q")  # offset behind each row
        self._buffer = bytearray()
        self._written = 0
        named = os.environ.get("TMPDIR")
        if named and not os.path.isdir(named):
            # Python would take another place without a word
            raise RunError(f"TMPDIR is '{named}', which is no directory: make it, or unset TMPDIR")
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - goes with the object
        except OSError as error:
            raise RunError(
                f"no temporary file can be made for the training rows: {error.strerror or error}; "
                "set TMPDIR to a directory that can be written"
            ) from None

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of every row. Do not write to it."""
        return self._lengths

    def append(self, name: str, ids: Sequence[int], mask: Iterable[int]) -> None:
        """Add a row; ids are in 0..2**31-1, and the mask has as many entries of 0 and 1.

        Raises:
            RunError: the disk is full.
        """
        self.used.update(ids)
        self.num_tokens += len(ids)
        self._buffer += array("i", ids).tobytes()
        self._buffer += bytes(mask)
        self._buffer += name.encode("utf-8", "surrogatepass")
        self._lengths.append(len(ids))
        self._ends.append(self._written + len(self._buffer))
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def read(self, index: int) -> tuple[str, Tensor, Tensor]:
        """Name, ids [S] int64 and mask [S] bool of a row.

        Raises:
            IndexError: there is no such row.
        """
        length, end = self._lengths[index], self._ends[index]
        start = self._ends[index - 1] if index % len(self) else 0
        data = bytearray(self._bytes(start, end))
        ids = torch.frombuffer(data, dtype=torch.int32, count=length)
        mask = torch.frombuffer(data, dtype=torch.bool, count=length, offset=4 * length)
        return data[5 * length :].decode("utf-8", "surrogatepass"), ids.long(), mask

    def _bytes(self, start: int, end: int) -> bytes:
        if start >= self._written:
            return bytes(self._buffer[start - self._written : end - self._written])
        parts = []
        while start < end and (part := os.pread(self._file.fileno(), end - start, start)):
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def _flush(self) -> None:
        rest = memoryview(self._buffer)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            held = (self._written + len(self._buffer) - len(rest)) / 2**20
            raise RunError(
                f"the training rows do not fit into {tempfile.gettempdir()} "
                f"({(error.strerror or str(error)).lower()} after {held:,.0f} MiB): set TMPDIR to "
                "a directory with more room, about as much as half the responses' files"
            ) from None
        finally:
            rest.release()
        self._written += len(self._buffer)
        self._buffer = bytearray()
