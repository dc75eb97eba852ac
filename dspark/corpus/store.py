"""Feature shards: what the target computed for each row, on disk.

A directory holds `shard-00000.safetensors`, … and `manifest.json`. A shard packs whole rows one
behind the other: `input_ids` [N] int32, `loss_mask` [N] uint8, `taps` [N, F*D], `last_hidden`
[N, D], `offsets` [R + 1] int64; its header names the rows. Each file appears under its name only
when it is complete; the manifest's `complete` becomes true when all of them are there.
`target.safetensors` holds the target's output head and embedding: training needs nothing else.

Bytes per token: D·(F + 1)·itemsize + 5.
"""

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError, DataError
from dspark.provenance import read_object, save_tensors, temporary_name, write_json

__all__ = [
    "FORMAT",
    "FeatureStore",
    "Header",
    "Shard",
    "ShardRow",
    "finish",
    "present_shard",
    "row_bytes",
    "start",
    "write_shard",
]

FORMAT = "dspark.features/1"
_MANIFEST = "manifest.json"
_TABLES = "target.safetensors"
_ID_BYTES = 4 + 1  # input_ids, loss_mask


@dataclass(frozen=True, kw_only=True)
class Header:
    """What features depend on; a reader refuses any other."""

    target: str
    target_revision: str | None
    target_fingerprint: str
    layer_ids: list[int]
    hidden_size: int
    dtype: str
    template_hash: str
    max_length: int

    @property
    def token_bytes(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else 4
        return row_bytes(1, self.hidden_size, len(self.layer_ids), itemsize)


@dataclass(frozen=True)
class ShardRow:
    """One row on its way to disk."""

    id: str
    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool
    taps: Tensor  # [S, F*D]
    last_hidden: Tensor  # [S, D]


@dataclass(frozen=True)
class Shard:
    """A complete shard, as the manifest lists it."""

    file: str
    rows: int
    tokens: int
    bytes: int
    skipped: list[str]
    """Ids of rows whose features were unusable."""


def row_bytes(num_tokens: int, hidden_size: int, num_taps: int, itemsize: int) -> int:
    """Size on disk of the features of ``num_tokens`` tokens, headers left out."""
    return num_tokens * (hidden_size * (num_taps + 1) * itemsize + _ID_BYTES)


def start(directory: Path, header: Header) -> None:
    """Claim ``directory`` for ``header``, new or to go on with.

    Raises:
        ConfigError: it holds features of something else, or other files.
    """
    manifest = directory / _MANIFEST
    if manifest.exists():
        found = read_object(manifest, CheckpointError).get("header", {})
        for name, ours in asdict(header).items():
            if found.get(name) != ours:
                raise ConfigError(
                    f"capture.out '{directory}' holds features with {name} {found.get(name)}, this "
                    f"run has {ours}; choose another directory"
                )
    elif directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"capture.out '{directory}' is not empty and holds no features")
    _write_manifest(directory, header, [], complete=False)


def write_shard(
    directory: Path, index: int, rows: Sequence[ShardRow], plan: Sequence[str], skipped: list[str]
) -> Shard:
    """Write one shard of rows, for a ``plan`` of row ids of which ``skipped`` are left out."""
    tensors = {
        "input_ids": _joined([row.input_ids.int() for row in rows], torch.int32),
        "loss_mask": _joined([row.loss_mask.to(torch.uint8) for row in rows], torch.uint8),
        "offsets": torch.tensor([0, *accumulate(len(row.input_ids) for row in rows)]),
    }
    if rows:
        tensors["taps"] = torch.cat([row.taps for row in rows])
        tensors["last_hidden"] = torch.cat([row.last_hidden for row in rows])
    path = directory / _name(index)
    names = {
        "format": FORMAT,
        "ids": json.dumps([row.id for row in rows]),
        "plan": _plan_hash(plan),
        "skipped": json.dumps(skipped),
    }
    with temporary_name(path) as aside:
        save_tensors(tensors, aside, names)
    return _describe(path)


def present_shard(directory: Path, index: int, plan: Sequence[str]) -> Shard | None:
    """The shard of an earlier run if it was written for the same plan, else None."""
    path = directory / _name(index)
    try:
        with safe_open(path, "pt") as file:
            if file.metadata().get("plan") != _plan_hash(plan):
                return None
    except (OSError, SafetensorError):
        return None
    return _describe(path)


def finish(
    directory: Path,
    header: Header,
    shards: Sequence[Shard],
    tables: Mapping[str, Tensor] | None = None,
) -> None:
    """Mark the directory complete, with the target's ``tables`` (`target.front.tables`) in it.

    What earlier runs left behind is removed.
    """
    if tables is not None:
        with temporary_name(directory / _TABLES) as aside:
            save_tensors({name: one.cpu().contiguous() for name, one in tables.items()}, aside)
    listed = {shard.file for shard in shards}
    for path in [*directory.glob("shard-*.safetensors"), *directory.glob(".shard-*.tmp")]:
        if path.name not in listed:
            path.unlink()
    _write_manifest(directory, header, shards, complete=True)


class FeatureStore:
    """Random access to the rows of a complete directory.

    Raises:
        CheckpointError: it is missing, incomplete, damaged, or of an unknown format.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not (directory / _MANIFEST).exists():
            raise CheckpointError(f"data.shards '{directory}' holds no {_MANIFEST}: run capture")
        manifest = read_object(directory / _MANIFEST, CheckpointError)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"data.shards '{directory}' has format {manifest.get('format')!r}; this version "
                f"reads {FORMAT}"
            )
        if not manifest["complete"]:
            raise CheckpointError(
                f"data.shards '{directory}' is incomplete: run the same capture again to finish it"
            )
        self.header = Header(**manifest["header"])
        self._shards = [Shard(**shard) for shard in manifest["shards"]]
        for shard in self._shards:
            path = directory / shard.file
            size = path.stat().st_size if path.exists() else None
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} bytes of {shard.bytes}"
                raise CheckpointError(f"feature shard '{path}' {state}: run capture again")
        self._ends = list(accumulate(shard.rows for shard in self._shards))
        self.num_tokens = sum(shard.tokens for shard in self._shards)
        # file handles and row names of the shards last read from
        self._open = lru_cache(maxsize=64)(self._open_shard)

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
                raise DataError(
                    f"data.shards '{self._directory}' was captured with {name} {found}, this run "
                    f"has {value}; capture again"
                )

    def row(self, index: int) -> tuple[str, dict[str, Tensor]]:
        """Id and tensors of row ``index`` of all shards together.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect.bisect_right(self._ends, index)
        inside = index - (self._ends[shard - 1] if shard else 0)
        file, names, offsets = self._open(shard)
        part = slice(offsets[inside], offsets[inside + 1])
        keys = ("input_ids", "loss_mask", "taps", "last_hidden")
        return names[inside], {key: file.get_slice(key)[part] for key in keys}

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        found: list[int] = []
        for shard in range(len(self._shards)):
            offsets = self._open(shard)[2]
            found.extend(end - begin for begin, end in pairwise(offsets))
        return found

    def tables(self) -> dict[str, Tensor] | None:
        """The target's `head` and so on; None in a directory that was written without them.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = self._directory / _TABLES
        if not path.exists():
            return None
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"'{path}' cannot be read: {error}") from error

    def used_ids(self) -> set[int]:
        """Every token id that occurs in any row."""
        used: set[int] = set()
        for shard in range(len(self._shards)):
            used.update(self._open(shard)[0].get_tensor("input_ids").unique().tolist())
        return used

    def _open_shard(self, shard: int) -> tuple[Any, list[str], list[int]]:
        path = self._directory / self._shards[shard].file
        try:
            file: Any = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"feature shard '{path}' cannot be read: {error}") from error
        return file, json.loads(file.metadata()["ids"]), file.get_tensor("offsets").tolist()


def _name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def _describe(path: Path) -> Shard:
    with safe_open(path, "pt") as file:
        names = file.metadata()
        offsets = file.get_tensor("offsets")
    return Shard(
        path.name,
        len(offsets) - 1,
        int(offsets[-1]),
        path.stat().st_size,
        json.loads(names["skipped"]),
    )


def _plan_hash(plan: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(plan).encode()).hexdigest()


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=dtype)


def _write_manifest(
    directory: Path, header: Header, shards: Sequence[Shard], *, complete: bool
) -> None:
    manifest = {
        "format": FORMAT,
        "complete": complete,
        "header": asdict(header),
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(directory / _MANIFEST, manifest)
