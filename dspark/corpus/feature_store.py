"""Reading feature shards: any row of a directory, through memory maps of its files."""

import bisect
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dspark.corpus.manifest import read_manifest
from dspark.corpus.shard_file import MappedFile, checksum
from dspark.corpus.storage import STORAGE
from dspark.corpus.store import TABLES, Header, Shard, describe, row_key
from dspark.errors import CheckpointError, DataError
from dspark.target.fingerprint import comparable, difference

__all__ = ["FeatureStore", "OpenShard", "read_manifest"]

log = logging.getLogger(__name__)

_OPEN_FILES = 64
_FEATURES = ("taps", "last_hidden", "tap_scales", "last_scales")


@dataclass(frozen=True)
class OpenShard:
    """A mapped file and its rows.

    Raises:
        CheckpointError: its parts do not fit together.
    """

    file: MappedFile
    ids: list[str]
    offsets: list[int]

    @classmethod
    def open(cls, path: Path, size: int | None = None) -> "OpenShard":
        file = MappedFile(path, size)
        try:
            ids, offsets = json.loads(file.metadata["ids"]), file.tensors["offsets"].tolist()
            tokens = {len(one) for name, one in file.tensors.items() if name != "offsets"}
            whole = offsets[0] == 0 and tokens == {offsets[-1]} and len(ids) == len(offsets) - 1
            if not whole or any(end < begin for begin, end in pairwise(offsets)):
                raise ValueError("its rows do not add up")
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise CheckpointError(f"feature shard '{path}' cannot be read: {error}") from error
        return cls(file, ids, offsets)

    def row(self, number: int) -> dict[str, Tensor]:
        """Views of the file's pages: to be copied before anything is done to them.

        Raises:
            CheckpointError: the file was cut since it was opened.
        """
        self.file.check()
        part = slice(self.offsets[number], self.offsets[number + 1])
        held = self.file.tensors
        names = ("input_ids", "loss_mask", *(name for name in _FEATURES if name in held))
        return {name: held[name][part] for name in names}

    def row_keys(self) -> list[str]:
        """`store.row_key` of every row; format 1 has its ids and masks read for it."""
        if "keys" in self.file.metadata:
            hashes = json.loads(self.file.metadata["keys"])
            return [f"{row} {one}" for row, one in zip(self.ids, hashes, strict=True)]
        found = []
        for number, row_id in enumerate(self.ids):
            row = self.row(number)
            found.append(row_key(row_id, row["input_ids"].long(), row["loss_mask"].bool()))
        return found


class FeatureStore:
    """Random access to the rows of a directory.

    Args:
        partial: take what there is of an unfinished directory, without shards that are damaged.

    Raises:
        CheckpointError: it is missing or of an unknown format; without ``partial`` also:
            incomplete or damaged.
    """

    def __init__(self, directory: Path, *, partial: bool = False) -> None:
        self._directory = directory
        self.partial = partial
        manifest = read_manifest(directory)
        self.header = Header(**manifest["header"])
        self.check_ids: dict[str, Any] | None = manifest.get("check")
        """What `head_check.expected` found; None where the directory does not tell."""
        self._tables: dict[str, Any] | None = manifest.get("tables")
        if partial:
            self._shards = list(_present(directory))
        else:
            if not manifest["complete"]:
                raise CheckpointError(
                    f"data.shards '{directory}' is incomplete: run the same capture again to "
                    "finish it, or set data.on_missing=generate"
                )
            self._shards = [Shard(**shard) for shard in manifest["shards"]]
            self._check_sizes()
        self._ends = list(accumulate(shard.rows for shard in self._shards))
        self.num_tokens = sum(shard.tokens for shard in self._shards)
        # maps and row names of the shards last read from
        self._open = lru_cache(maxsize=_OPEN_FILES)(self._open_shard)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def check(self, **expected: Any) -> None:
        """Refuse features of anything else; a value of None is not compared.

        Raises:
            DataError: a field of the header differs.
        """
        for name, value in expected.items():
            found = getattr(self.header, name)
            if value is not None and found != value:
                more = ""
                if name == "target_fingerprint" and comparable(found, value):
                    more = f" (another {difference(found, value)})"
                raise DataError(
                    f"data.shards '{self._directory}' was captured with {name} {found}, this run "
                    f"has {value}{more}; capture again"
                )

    def row(self, index: int) -> tuple[str, dict[str, Tensor]]:
        """Id and tensors, as they are stored, of row ``index`` of all shards together.

        They are views of the file's pages: to be copied before anything is done to them.

        Raises:
            IndexError: there is no such row.
            CheckpointError: its shard cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self._ends, index)
        inside = index - (self._ends[shard - 1] if shard else 0)
        opened = self._open(shard)
        return opened.ids[inside], opened.row(inside)

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        found: list[int] = []
        for shard in range(len(self._shards)):
            offsets = self._open(shard).offsets
            found.extend(end - begin for begin, end in pairwise(offsets))
        return found

    def row_keys(self) -> list[str]:
        """`store.row_key` of every row."""
        return [key for shard in range(len(self._shards)) for key in self._open(shard).row_keys()]

    def tables(self) -> dict[str, Tensor] | None:
        """The target's `head` and so on; None in a directory that was written without them.

        Raises:
            CheckpointError: the file is damaged, or missing although the manifest tells of it.
        """
        path = self._directory / TABLES
        told = self._tables
        if not path.exists():
            if told is None:
                return None
            raise CheckpointError(f"'{path}' is missing: run the same capture again")
        if told is not None and checksum(path) != told["crc32"]:
            raise CheckpointError(
                f"'{path}' is damaged or another target's: its checksum is not that of the "
                "manifest; run the same capture again"
            )
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"'{path}' cannot be read: {error}") from error

    def used_ids(self) -> set[int]:
        """Every token id that occurs in any row."""
        used: set[int] = set()
        for shard in range(len(self._shards)):
            file = self._open(shard).file
            file.check()
            used.update(torch.unique(file.tensors["input_ids"]).tolist())
        return used

    def _check_sizes(self) -> None:
        for shard in self._shards:
            path = self._directory / shard.file
            size = path.stat().st_size if path.exists() else None
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} bytes of {shard.bytes}"
                raise CheckpointError(f"feature shard '{path}' {state}: run the same capture again")

    def _check_shape(self, opened: OpenShard) -> None:
        storage, header = STORAGE[self.header.dtype], self.header
        width = header.hidden_size
        wanted = {
            "taps": (width * len(header.layer_ids), storage.taps),
            "last_hidden": (width, storage.last_hidden),
        }
        for name, (columns, dtype) in wanted.items():
            held = opened.file.tensors.get(name)
            # a shard whose rows were all left out has none
            if held is None and not opened.ids:
                continue
            if held is None or held.shape[1:] != (columns,) or held.dtype != dtype:
                found = "missing" if held is None else f"{list(held.shape)} {held.dtype}"
                raise CheckpointError(
                    f"feature shard '{opened.file.path}' does not fit the manifest: its {name} is "
                    f"{found}, the manifest says [tokens, {columns}] {dtype}; capture again"
                )

    def _open_shard(self, shard: int) -> OpenShard:
        told = self._shards[shard]
        try:
            opened = OpenShard.open(self._directory / told.file, told.bytes)
        except CheckpointError as error:
            if self.partial or "capture again" in str(error):
                raise
            raise CheckpointError(
                f"{error}; run the same capture again, which writes damaged shards anew"
            ) from error
        self._check_shape(opened)
        if len(opened.ids) != told.rows:
            raise CheckpointError(
                f"feature shard '{opened.file.path}' cannot be read: it holds {len(opened.ids)} "
                f"rows, the manifest says {told.rows}"
            )
        return opened


def _present(directory: Path) -> Iterator[Shard]:
    for path in sorted(directory.glob("shard-*.safetensors")):
        try:
            OpenShard.open(path)
            yield describe(path)
        except CheckpointError as error:
            log.warning("%s; its rows count as missing", error)
