"""A directory that `dspark prepare` is told to make and that is there already.

It is left as it is if its `prepare.json` tells of the same settings and sources and its files are
still those described; anything else is refused, and nothing of it is touched.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError, DataError
from dspark.provenance import read_object

__all__ = ["FILES", "REPORT", "measured", "there"]

REPORT = "prepare.json"
FILES = ("train.jsonl", "heldout.jsonl")
_GIVEN = ("sources", "exclude")
"""Settings that are compared by the files and sets that they stand for."""


def there(out: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The report in ``out`` if it is what is ``wanted``; None if ``out`` is free.

    Raises:
        ConfigError: it holds something else.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a directory")
    inside = sorted(path.name for path in out.iterdir())
    if not inside:
        return None
    foreign = [name for name in inside if name not in (*FILES, REPORT)]
    if REPORT not in inside or foreign:
        named = f" ('{foreign[0]}')" if foreign else ""
        raise ConfigError(f"--out {out} holds other files{named}; give a new or empty directory")
    report = read_object(out / REPORT, ConfigError)
    if damaged := _damaged(report):
        raise ConfigError(
            f"{out / REPORT} is damaged ({damaged}); give another --out, or remove that directory"
        )
    if other := _difference(report, wanted):
        raise ConfigError(f"--out {out} holds a preparation of other {other}; give another one")
    for name in FILES:
        path = out / name
        # hashed only if the size fits
        said = report["files"][name]
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != said.get("bytes") or measured(path) != said:
            raise ConfigError(
                f"{path} is not the file that {out / REPORT} describes; give another --out, "
                "or remove that directory"
            )
    return report


def measured(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}
    except OSError as error:
        raise DataError(f"cannot read '{path}': {(error.strerror or '').lower()}") from error


def _difference(report: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What of the input differs, in words; the commits of hub sets are not looked at."""
    theirs, ours = report["settings"], wanted["settings"]
    for key in ours:
        if key not in _GIVEN and theirs.get(key) != ours[key]:
            return f"settings ({key}: {theirs.get(key)}, now {ours[key]})"
    for group in ("sources", "excluded"):
        before, now = _named(report[group]), _named(wanted[group])
        if [name for name, _ in before] != [name for name, _ in now]:
            return group
        if before != now:
            return f"content of {group}"
    return ""


def _named(sources: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(set or resolved path, SHA-256) of each source."""
    found = []
    for one in sources:
        path = one.get("path")
        name = str(Path(path).resolve()) if isinstance(path, str) else f"set {one.get('set')}"
        found.append((name, one.get("sha256")))
    return found


def _damaged(report: dict[str, Any]) -> str:
    """What of a report cannot be used, in words."""
    for key in ("settings", "counts", "reasons", "files"):
        if not isinstance(report.get(key), dict):
            return f"'{key}' is no object"
    for key in ("read", "train", "heldout", "rejected"):
        if not isinstance(report["counts"].get(key), int):
            return f"'counts' lacks the number '{key}'"
    for name in FILES:
        if not isinstance(report["files"].get(name), dict):
            return f"'files' does not describe {name}"
    for group in ("sources", "excluded"):
        listed = report.get(group)
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            return f"'{group}' is no list of objects"
    return ""
