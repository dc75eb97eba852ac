"""`manifest.json` of a directory of feature shards: what is in it, and reading it with care."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from dspark.corpus.storage import STORAGE, row_bytes
from dspark.errors import CheckpointError
from dspark.provenance import read_object

__all__ = ["FORMAT", "FORMATS", "MANIFEST", "Header", "Shard", "read_manifest"]

FORMAT = "dspark.features/2"
FORMATS = ("dspark.features/1", FORMAT)
MANIFEST = "manifest.json"


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
    compute_dtype: str | None = None
    """Of the target when it computed them; None where an earlier version did not tell."""

    @property
    def token_bytes(self) -> int:
        return row_bytes(1, self.hidden_size, len(self.layer_ids), self.dtype)


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


_TEXT, _NUMBER = (str,), (int,)
_HEADER: dict[str, tuple[type, ...]] = {
    "target": _TEXT,
    "target_revision": (str, NoneType),
    "target_fingerprint": _TEXT,
    "hidden_size": _NUMBER,
    "dtype": _TEXT,
    "template_hash": _TEXT,
    "max_length": _NUMBER,
    "compute_dtype": (str, NoneType),
}
_SHARD: dict[str, tuple[type, ...]] = {
    "file": _TEXT,
    "rows": _NUMBER,
    "tokens": _NUMBER,
    "bytes": _NUMBER,
    "crc32": (str, NoneType),
}


def read_manifest(directory: Path, what: str = "data.shards") -> dict[str, Any]:
    """The manifest of a directory of shards, complete or not.

    Raises:
        CheckpointError: there is none, or it is damaged or of an unknown format; ``what`` names
            the setting.
    """
    path = directory / MANIFEST
    if not path.exists():
        raise CheckpointError(f"{what} '{directory}' holds no {MANIFEST}: run capture")
    manifest = read_object(path, CheckpointError)
    if manifest.get("format") not in FORMATS:
        raise CheckpointError(
            f"{what} '{directory}' has format {manifest.get('format')!r}; this version "
            f"reads {' and '.join(FORMATS)}"
        )
    try:
        header = Header(**manifest["header"])
        shards = [Shard(**shard) for shard in manifest["shards"]]
        _check(header, shards, manifest)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"'{path}' is damaged ({error}): delete it with its directory, and capture again"
        ) from None
    if header.dtype not in STORAGE:
        raise CheckpointError(
            f"{what} '{directory}' has dtype {header.dtype}; this version reads "
            f"{', '.join(STORAGE)}"
        )
    return manifest


def _check(header: Header, shards: list[Shard], manifest: dict[str, Any]) -> None:
    """Raises ValueError: something has the wrong type."""
    _types("header", header, _HEADER)
    _list("header.layer_ids", header.layer_ids, int)
    for number, shard in enumerate(shards):
        _types(f"shards[{number}]", shard, _SHARD)
        _list(f"shards[{number}].skipped", shard.skipped, str)
        if Path(shard.file).name != shard.file:
            raise ValueError(f"shards[{number}].file is {shard.file!r}, which is no file's name")
    if not isinstance(manifest["complete"], bool):
        raise ValueError(f"complete is {manifest['complete']!r}")
    check, tables = manifest.get("check"), manifest.get("tables")
    if check is not None:
        if not isinstance(check, dict) or not isinstance(check["row"], str):
            raise ValueError(f"check is {check!r}")
        _list("check.argmax", check["argmax"], int)
    if tables is not None and not (
        isinstance(tables, dict)
        and isinstance(tables["crc32"], str)
        and isinstance(tables["bytes"], int)
    ):
        raise ValueError(f"tables is {tables!r}")


def _types(where: str, one: object, wanted: dict[str, tuple[type, ...]]) -> None:
    for name, types in wanted.items():
        value = getattr(one, name)
        fits = isinstance(value, types) and not isinstance(value, bool)
        if not fits or (isinstance(value, int) and value < 0):
            raise ValueError(f"{where}.{name} is {value!r}")


def _list(where: str, value: object, kind: type) -> None:
    if not isinstance(value, list) or not all(type(one) is kind for one in value):
        raise ValueError(f"{where} is {value!r}")
