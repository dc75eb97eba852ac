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
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dspark
from dspark import provenance
from dspark.corpus.manifest import FORMAT, FORMATS, MANIFEST, Header, Shard, read_manifest
from dspark.corpus.shard_file import MappedFile, checksum, write_file
from dspark.corpus.storage import row_bytes
from dspark.corpus.unusable import BadRow
from dspark.errors import CheckpointError, ConfigError
from dspark.provenance import LOCK, temporary_name, write_json
from dspark.target.fingerprint import comparable, difference

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
    "check_header",
    "clear",
    "describe",
    "finish",
    "is_planned",
    "present_shard",
    "row_bytes",
    "row_key",
    "save_row",
    "shard_name",
    "start",
    "write_quarantine",
    "write_shard",
]

log = logging.getLogger(__name__)

TABLES = "target.safetensors"
QUARANTINE = "quarantine.jsonl"


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


def row_key(row_id: str, input_ids: Tensor, loss_mask: Tensor) -> str:
    """What makes a row this one: its id, and a hash of its ids [S] int64 and mask [S] bool."""
    digest = hashlib.sha256(input_ids.numpy().tobytes() + loss_mask.numpy().tobytes())
    return f"{row_id} {digest.hexdigest()[:16]}"


def check_header(
    directory: Path, header: Header, like: Callable[[str], str] | None = None
) -> Header:
    """May features with ``header`` go to ``directory``, which is new or to be gone on with?

    Args:
        like: `Target.fingerprint_like`, for directories that an earlier version began.

    Returns:
        The header to go on with: what an earlier version knew of it stays as it was.

    Raises:
        ConfigError: it holds features of something else, or other files.
        CheckpointError: its manifest is damaged or of an unknown format.
    """
    if not (directory / MANIFEST).exists():
        if directory.exists() and not all(_own(path) for path in directory.iterdir()):
            raise ConfigError(f"capture.out '{directory}' is not empty and holds no features")
        return header
    found = Header(**read_manifest(directory, "capture.out")["header"])
    if like is not None and not comparable(found.target_fingerprint, header.target_fingerprint):
        header = replace(header, target_fingerprint=like(found.target_fingerprint))
    if found.compute_dtype is None:
        header = replace(header, compute_dtype=None)
    for name, ours in asdict(header).items():
        theirs = getattr(found, name)
        if theirs != ours:
            more = ""
            if name == "target_fingerprint":
                more = f" (another {difference(theirs, ours)})"
            raise ConfigError(
                f"capture.out '{directory}' holds features with {name} {theirs}, this run has "
                f"{ours}{more}; choose another directory"
            )
    return header


def start(directory: Path, header: Header) -> None:
    """Claim ``directory`` for ``header``, new or to go on with.

    Raises:
        ConfigError, CheckpointError: as `check_header`.
    """
    _write_manifest(directory, check_header(directory, header), [], complete=False)


def clear(directory: Path) -> None:
    """Remove what killed runs were writing; only for who has claimed the directory."""
    for path in directory.glob(".*.tmp"):
        if _own(path):
            path.unlink(missing_ok=True)


def _own(path: Path) -> bool:
    """Is this a lock, or a file that a killed capture was writing?"""
    names = rf"{re.escape(MANIFEST)}|shard-\d+\.safetensors|{re.escape(TABLES)}"
    names = rf"{names}|{re.escape(QUARANTINE)}|provenance\.json"
    return path.name == LOCK or bool(re.fullmatch(rf"\.({names})\.\d+\.tmp", path.name))


def write_shard(
    directory: Path,
    index: int,
    rows: Sequence[ShardRow],
    plan: Sequence[str],
    bad: Sequence[BadRow],
) -> Shard:
    """Write one shard of rows, for a ``plan`` of row keys of which ``bad`` are left out."""
    path = directory / shard_name(index)
    _save(path, rows, plan=_plan_hash(plan), skipped=json.dumps([asdict(one) for one in bad]))
    return describe(path)


def save_row(path: Path, row: ShardRow, **metadata: str) -> None:
    """Write a shard of one row that belongs to no directory of shards."""
    _save(path, [row], **metadata)


def present_shard(directory: Path, index: int, plan: Sequence[str]) -> Shard | None:
    """The shard of an earlier run if it was written for the same plan, else None.

    It is read whole, and its checksum compared: a damaged one counts as missing.
    """
    path = directory / shard_name(index)
    try:
        if MappedFile(path).metadata.get("plan") != _plan_hash(plan):
            return None
        shard = describe(path)
        if shard.crc32 is not None and checksum(path) != shard.crc32:
            log.warning("feature shard '%s' is damaged: it is written again", path)
            return None
        return shard
    except CheckpointError:
        return None


def is_planned(path: Path, plan: Sequence[str]) -> bool:
    """Was this file, whole or damaged, written for these row keys?"""
    try:
        return MappedFile(path).metadata.get("plan") == _plan_hash(plan)
    except CheckpointError:
        return False


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

    ``check`` is what `head_check.expected` found. Shards that are not listed are removed.
    """
    told = None
    if tables is not None:
        path = directory / TABLES
        with temporary_name(path) as aside:
            crc = write_file(aside, {k: [one.cpu()] for k, one in tables.items()}, {"format": "pt"})
        told = {"bytes": path.stat().st_size, "crc32": crc}
    listed = {shard.file for shard in shards}
    for path in directory.glob("shard-*.safetensors"):
        if path.name not in listed:
            path.unlink()
    _write_manifest(directory, header, shards, complete=True, check=check, tables=told)


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


def shard_name(index: int) -> str:
    """File of the shard of this number."""
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
    tables: Mapping[str, Any] | None = None,
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
        "tables": tables,
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(directory / MANIFEST, manifest)
