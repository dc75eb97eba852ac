"""A rolling window on disk: rows that were computed wait there for the next epoch.

One file a row, a shard of its own, named by what it depends on. Every process writes into the one
directory, and each removes the oldest of its own files when they take more than its share. Nothing
relies on a file: one that has vanished, is cut or damaged is a row to be computed again. So a kill
at any moment is harmless, and so are two runs at the same time.
"""

import hashlib
import json
import logging
import zlib
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Self

from torch import Tensor

from dspark.corpus.feature_store import OpenShard
from dspark.corpus.shard_file import checksum
from dspark.corpus.store import Header, ShardRow, save_row
from dspark.errors import CheckpointError

__all__ = ["RollingWindow"]

log = logging.getLogger(__name__)

_SUFFIX = ".row"
_WAITING = 4  # rows on their way to disk; one more is waited for


class RollingWindow:
    """Rows of one header, kept on disk; a context manager, at whose end all are written.

    Args:
        directory: made when the first row is written.
        header: of the shards; rows of any other are not found.
        share: bytes that this process's files may take.
        index, count: of this process among those that share the directory.
    """

    def __init__(
        self, directory: Path, header: Header, share: int, *, index: int = 0, count: int = 1
    ) -> None:
        self._directory = directory
        self._prefix = hashlib.sha256(json.dumps(asdict(header)).encode()).hexdigest()[:16]
        self._share = share
        self._index = index
        self._files: OrderedDict[str, int] = OrderedDict()  # mine, the oldest first, and their size
        self._writer = ThreadPoolExecutor(1, f"window-{index}")
        self._waiting: list[Future[None]] = []
        self._adopt(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._writer.shutdown(cancel_futures=kind is not None)

    @property
    def active(self) -> bool:
        """Does it take rows?"""
        return self._share > 0

    def find(self, key: str) -> dict[str, Tensor] | None:
        """The stored tensors of the row with this `store.row_key`, None where it is not there."""
        path = self._directory / self._name(key)
        if not path.exists():
            return None
        try:
            shard = OpenShard.open(path)
            if shard.row_keys() != [key] or checksum(path) != shard.file.metadata["crc32"]:
                raise CheckpointError(f"feature shard '{path}' cannot be read: it is damaged")
            # copied at once: another process may take the file away, and a cut one would kill
            return {name: one.clone() for name, one in shard.row(0).items()}
        except (CheckpointError, KeyError) as error:
            if path.exists():
                log.warning("%s; the row is computed again", error)
            return None

    def keep(self, row: ShardRow) -> None:
        """Write a row in the background; the oldest ones make room for it."""
        if not self._share:
            return
        while len(self._waiting) >= _WAITING:
            self._waiting.pop(0).result()
        self._waiting = [one for one in self._waiting if not one.done()]
        self._waiting.append(self._writer.submit(self._write, row))

    def flush(self) -> None:
        """Wait until every row is written."""
        while self._waiting:
            self._waiting.pop(0).result()

    def _write(self, row: ShardRow) -> None:
        size = sum(one.nbytes for one in vars(row).values() if isinstance(one, Tensor))
        if not self._share or size > self._share:
            return
        name = self._name(row.key)
        self._files.pop(name, None)
        try:
            self._make_room(self._share - size)
            save_row(self._directory / name, row)
            self._files[name] = (self._directory / name).stat().st_size
            self._make_room(self._share)
        except OSError as error:
            log.warning(
                "data.window_bytes: %s cannot be written (%s); rows are computed anew from here on",
                self._directory / name,
                error.strerror or error,
            )
            self._share = 0

    def _make_room(self, most: int) -> None:
        while self._files and sum(self._files.values()) > most:
            name, _ = self._files.popitem(last=False)
            (self._directory / name).unlink(missing_ok=True)

    def _adopt(self, count: int) -> None:
        """Of the files that earlier runs left, a part becomes this process's own."""
        found: list[tuple[float, str, int]] = []
        for path in [*self._directory.glob(f"*{_SUFFIX}"), *self._directory.glob(".*.tmp")]:
            if zlib.crc32(path.name.encode()) % count != self._index:
                continue
            try:
                if path.suffix == _SUFFIX:
                    held = path.stat()
                    found.append((held.st_mtime, path.name, held.st_size))
                else:
                    path.unlink()  # a killed process was writing it
            except OSError:
                continue
        self._files.update({name: size for _, name, size in sorted(found)})
        self._make_room(self._share)

    def _name(self, key: str) -> str:
        return hashlib.sha256(f"{self._prefix} {key}".encode()).hexdigest()[:32] + _SUFFIX
