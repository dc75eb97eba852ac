"""Feature shards: what the target computed for each row, on disk.

A directory holds `shard-00000.safetensors`, … and `manifest.json`. A shard packs whole rows one
behind the other: `input_ids` [N] int32, `loss_mask` [N] uint8, `taps` [N, F*D], `last_hidden`
[N, D], `offsets` [R + 1] int64, and for 8-bit features their scales (`corpus.storage`); its header
names the rows. Each file appears under its name only when it is complete; the manifest's `complete`
becomes true when all of them are there. `target.safetensors` holds the target's output head and
embedding: training needs nothing else. `quarantine.jsonl` tells why rows were left out.

Format 2 has the checksums, row fingerprints and 8-bit features that format 1 has not; both are
read. Reading: `corpus.feature_store`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dspark
from dspark import provenance
from dspark.corpus.shard_file import MappedFile, write_file
from dspark.corpus.storage import row_bytes
from dspark.corpus.unusable import BadRow
from dspark.errors import CheckpointError, ConfigError
from dspark.provenance import read_object, save_tensors, temporary_name, write_json

__all__ = [
    "FORMAT",
    "FORMATS",
    "MANIFEST",
    "QUARANTINE",
    "TABLES",
    "Header",
    "Shard",
    "ShardRow",
    "bad_rows",
    "describe",
    "finish",
    "present_shard",
    "row_bytes",
    "row_key",
    "save_row",
    "start",
    "write_quarantine",
    "write_shard",
]

FORMAT = "dspark.features/2"
FORMATS = ("dspark.features/1", FORMAT)
MANIFEST = "manifest.json"
TABLES = "target.safetensors"
QUARANTINE = "quarantine.jsonl"


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
        return row_bytes(1, self.hidden_size, len(self.layer_ids), self.dtype)


@dataclass(frozen=True)
class ShardRow:
    """One row on its way to disk, its features as they are stored."""

    id: str
    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool
    taps: Tensor  # [S, F*D]
    last_hidden: Tensor  # [S, D]
    tap_scales: Tensor | None = None  # [S, F]
    last_scales: Tensor | None = None  # [S, 1]

    @property
    def key(self) -> str:
        return row_key(self.id, self.input_ids, self.loss_mask)


@dataclass(frozen=True)
class Shard:
    """A complete shard, as the manifest lists it."""

    file: str
    rows: int
    tokens: int
    bytes: int
    skipped: list[str]
    """Ids of rows whose features were unusable."""
    crc32: str | None = None
    """Of the file (`shard_file.checksum`); None in format 1."""


def row_key(row_id: str, input_ids: Tensor, loss_mask: Tensor) -> str:
    """What makes a row this one: its id, and a hash of its ids [S] int64 and mask [S] bool."""
    digest = hashlib.sha256(input_ids.numpy().tobytes() + loss_mask.numpy().tobytes())
    return f"{row_id} {digest.hexdigest()[:16]}"


def start(directory: Path, header: Header) -> None:
    """Claim ``directory`` for ``header``, new or to go on with.

    Raises:
        ConfigError: it holds features of something else, or other files.
    """
    manifest = directory / MANIFEST
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
    directory: Path,
    index: int,
    rows: Sequence[ShardRow],
    plan: Sequence[str],
    bad: Sequence[BadRow],
) -> Shard:
    """Write one shard of rows, for a ``plan`` of row keys of which ``bad`` are left out."""
    path = directory / _name(index)
    _save(path, rows, plan=_plan_hash(plan), skipped=json.dumps([asdict(one) for one in bad]))
    return describe(path)


def save_row(path: Path, row: ShardRow, **metadata: str) -> None:
    """Write a shard of one row that belongs to no directory of shards."""
    _save(path, [row], **metadata)


def present_shard(directory: Path, index: int, plan: Sequence[str]) -> Shard | None:
    """The shard of an earlier run if it was written for the same plan, else None."""
    path = directory / _name(index)
    try:
        if MappedFile(path).metadata.get("plan") != _plan_hash(plan):
            return None
        return describe(path)
    except CheckpointError:
        return None


def describe(path: Path) -> Shard:
    """A shard by its own header.

    Raises:
        CheckpointError: it is damaged.
    """
    file = MappedFile(path)
    try:
        offsets = file.tensors["offsets"]
        skipped = [one.id for one in _skipped(file)]
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"feature shard '{path}' cannot be read: {error!r}") from error
    crc = file.metadata.get("crc32")
    return Shard(path.name, len(offsets) - 1, int(offsets[-1]), file.size, skipped, crc)


def bad_rows(directory: Path, shard: Shard) -> list[BadRow]:
    """The rows that were left out of a shard, and why."""
    return _skipped(MappedFile(directory / shard.file)) if shard.skipped else []


def write_quarantine(directory: Path, rows: Sequence[BadRow]) -> None:
    """`quarantine.jsonl`, made anew from what the shards say; none without such rows."""
    path = directory / QUARANTINE
    if rows:
        lines = (json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
        provenance.write_text(path, "".join(lines))
    else:
        path.unlink(missing_ok=True)


def finish(
    directory: Path,
    header: Header,
    shards: Sequence[Shard],
    tables: Mapping[str, Tensor] | None = None,
    *,
    check: Mapping[str, Any] | None = None,
) -> None:
    """Mark the directory complete, with the target's ``tables`` (`target.front.tables`) in it.

    ``check`` is what `head_check.expected` found. What earlier runs left behind is removed.
    """
    if tables is not None:
        with temporary_name(directory / TABLES) as aside:
            save_tensors({name: one.cpu().contiguous() for name, one in tables.items()}, aside)
    listed = {shard.file for shard in shards}
    for path in [*directory.glob("shard-*.safetensors"), *directory.glob(".shard-*.tmp")]:
        if path.name not in listed:
            path.unlink()
    _write_manifest(directory, header, shards, complete=True, check=check)


def _save(path: Path, rows: Sequence[ShardRow], **metadata: str) -> None:
    pieces: dict[str, list[Tensor]] = {
        "input_ids": [torch.empty(0, dtype=torch.int32)],
        "loss_mask": [torch.empty(0, dtype=torch.uint8)],
        "offsets": [torch.tensor([0, *accumulate(len(row.input_ids) for row in rows)])],
    }
    pieces["input_ids"] += [row.input_ids.int() for row in rows]
    pieces["loss_mask"] += [row.loss_mask.to(torch.uint8) for row in rows]
    for name in ("taps", "last_hidden", "tap_scales", "last_scales"):
        held = [value for row in rows if (value := getattr(row, name)) is not None]
        if held:
            pieces[name] = held
    names = {
        "format": FORMAT,
        "ids": json.dumps([row.id for row in rows]),
        "keys": json.dumps([row.key.rpartition(" ")[2] for row in rows]),
        **metadata,
    }
    with temporary_name(path) as aside:
        write_file(aside, pieces, names)


def _skipped(file: MappedFile) -> list[BadRow]:
    found = json.loads(file.metadata["skipped"])
    return [BadRow(one, "") if isinstance(one, str) else BadRow(**one) for one in found]


def _name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def _plan_hash(plan: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(plan).encode()).hexdigest()


def _write_manifest(
    directory: Path,
    header: Header,
    shards: Sequence[Shard],
    *,
    complete: bool,
    check: Mapping[str, Any] | None = None,
) -> None:
    manifest = {
        "format": FORMAT,
        "complete": complete,
        "header": asdict(header),
        "versions": {"dspark": dspark.__version__, **provenance.versions()},
        "rows": sum(shard.rows for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "bytes": sum(shard.bytes for shard in shards),
        "check": check,
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(directory / MANIFEST, manifest)
