"""Where an export may be put: a fresh directory, or one that only an earlier export has filled."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark import provenance
from dspark.errors import CheckpointError, ConfigError, RunError, unwritable

__all__ = ["PROVENANCE_NAME", "check_place", "filling"]

PROVENANCE_NAME = "provenance.json"


def check_place(place: Path, source: Path | None, *, overwrite: bool) -> None:
    """May ``place`` be replaced by an export of ``source``?

    Raises:
        CheckpointError: it is a file, holds the source or the working directory, or (unless
            ``overwrite``) holds anything that no export has written.
    """
    if place.exists() and not place.is_dir():
        raise CheckpointError(f"{place} is a file; give a directory to export to")
    here = Path(os.path.realpath(place))
    held = [Path.cwd()] + ([source.resolve()] if source is not None else [])
    for path in held:
        # replacing it would remove what is read, or what the user stands in
        if path == here or here in path.parents:
            raise CheckpointError(f"cannot export to {place}: it holds {path}; give another one")
    foreign = _foreign_files(place)
    if not foreign or overwrite:
        return
    shown = ", ".join(foreign[:5]) + (", …" if len(foreign) > 5 else "")
    raise CheckpointError(
        f"{place} holds files that no export has written ({shown}); give another directory, or "
        "--overwrite to replace it"
    )


def _foreign_files(place: Path) -> list[str]:
    if not place.is_dir():
        return []
    names = sorted(child.name for child in place.iterdir())
    try:
        record = json.loads((place / PROVENANCE_NAME).read_text(encoding="utf-8"))
        ours = record["files"] if record["kind"] == "dspark-export" else ()
    except (OSError, ValueError, KeyError, TypeError):
        ours = ()
    return [name for name in names if name not in ours]


@contextmanager
def filling(place: Path) -> Iterator[Path]:
    """Yield a directory beside ``place``, which takes its name when the block has succeeded.

    Raises:
        ConfigError: it is no place that can be written.
        RunError: the disk refused.
    """
    # the directory behind a symbolic link is replaced, and the link stays
    place = Path(os.path.realpath(place))
    aside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with provenance.making():
            aside.mkdir(parents=True)
        yield aside
        _put(aside, place)
    except OSError as error:
        if isinstance(refused := unwritable(error), ConfigError):
            raise refused from error
        raise RunError(f"cannot write the export {place}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _put(aside: Path, place: Path) -> None:
    """Rename ``aside`` to ``place``; what stood there is removed only afterwards."""
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        os.replace(place, old)
    os.replace(aside, place)
    shutil.rmtree(old, ignore_errors=True)
