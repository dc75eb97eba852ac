"""Appending to responses.jsonl: one run at a time, and never to a file that no sampler began."""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from dspark.corpus.responses import FORMAT, Response
from dspark.errors import ConfigError
from dspark.provenance import claim, making

__all__ = ["ResponseWriter"]

log = logging.getLogger(__name__)


class ResponseWriter:
    """Appends rows so that a kill at any moment loses at most the rows not yet flushed.

    Opening claims the file for this process and repairs the last line of a killed run: complete but
    for the line feed, it is closed; half written, it is removed. A file that no sampler began is
    refused and stays as it is. Use as a context manager.

    Raises:
        ConfigError: the name is that of a packed file, or the file holds something else.
        BlockingIOError: another run is writing there.
    """

    def __init__(self, path: Path) -> None:
        if path.name.endswith((".gz", ".parquet")):
            raise ConfigError(
                f"sample.out '{path}' would be a packed file, and rows are written as plain lines; "
                "give a name such as responses.jsonl"
            )
        self._path = path
        with making():
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ConfigError(
                    f"sample.out '{path}' is a device or pipe, in which no run could go on; give "
                    "a file such as responses.jsonl"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: what a full disk did not take must not be tried again on closing
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed in __exit__
        try:
            claim(self._file)
            self._repair()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, rows: Iterable[Response]) -> None:
        """Append ``rows`` and wait until they are on disk.

        Raises:
            OSError: names the file; what of the rows stands there is repaired by the next run.
        """
        self._append("".join(row.to_json() + "\n" for row in rows).encode())

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _repair(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        if not end:
            return
        keep = self._line_start(end)
        half = self._read(keep, end)
        whole = keep == end or _is_json(half)
        self._refuse_foreign(keep, half)
        if keep < end and whole:
            self._append(b"\n")
            keep = end + 1
        elif keep < end:
            log.warning("%s: dropping a half-written last line (%d bytes)", self._path, end - keep)
            self._file.truncate(keep)
        self._drop_unfinished(keep)

    def _refuse_foreign(self, keep: int, half: bytes) -> None:
        """``half``: what stands behind the last line feed, at ``keep``."""
        where = f"{self._path}:1"
        if not keep:
            ours = _is_ours(half) or (not _is_json(half) and _begins_as_ours(half))
        else:
            # both ends tell; `sampling.rows_present` reads what stands between
            ours = _is_ours(self._read(0, self._line_end(keep)))
            if ours:
                last = self._read(self._line_start(keep - 1), keep)
                ours, where = _is_ours(last) or not last.strip(), "its last line"
        if not ours:
            raise ConfigError(
                f"sample.out '{self._path}' holds rows that no sampler wrote ({where}); choose "
                "another file"
            )

    def _drop_unfinished(self, end: int) -> None:
        """Remove the sequences of a conversation whose last one did not get here."""
        if not end:
            return
        start = self._line_start(end - 1)
        try:
            row = json.loads(self._read(start, end))
            part, parts = int(row.get("part", 0)), int(row.get("parts", 1))
        except (ValueError, TypeError, AttributeError):
            return  # nothing that a sampler wrote
        if part >= parts - 1:
            return
        for _ in range(part):
            start = self._line_start(start - 1)
        log.warning("%s: dropping a half-written conversation at the end", self._path)
        self._file.truncate(start)

    def _read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def _line_end(self, size: int) -> int:
        """Offset behind the first line feed, which stands before ``size``."""
        for start in range(0, size, 1 << 16):
            found = self._read(start, start + (1 << 16)).find(b"\n")
            if found >= 0:
                return start + found + 1
        return size

    def _line_start(self, end: int) -> int:
        """Offset behind the last line feed before ``end``."""
        start, newline = max(end, 0), -1
        while start > 0 and newline < 0:
            stop, start = start, max(0, start - (1 << 16))
            newline = self._read(start, stop).rfind(b"\n")
        return start + newline + 1


_BEGIN = json.dumps({"format": FORMAT})[:-1].encode()
"""How every row that was written here begins."""


def _begins_as_ours(data: bytes) -> bool:
    return data.startswith(_BEGIN) or _BEGIN.startswith(data)


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _is_ours(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.get("format") == FORMAT
