"""The directory of a prepared prompt set: `train.jsonl`, `heldout.jsonl` and `prepare.json`.

It is built in a hidden neighbour and renamed when it is whole, so a directory of that name is
finished or not there. `prepare.json` tells what went in (sizes and hashes of files, commits of hub
sets), what came out and where each row that was read has gone; `prepared_before` reads it again.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dspark.corpus.files import expand
from dspark.corpus.near import NearDuplicates
from dspark.corpus.prepare import (
    PrepareSettings,
    Selection,
    exclude,
    heldout_of,
    near_of,
    row_of,
    split,
)
from dspark.corpus.prepared_before import FILES, REPORT, measured, there
from dspark.corpus.presets import HubSource, licence_of, pinned, refuse_evaluation
from dspark.errors import ConfigError, DataError
from dspark.provenance import claimed, collect, making, write_json

__all__ = ["FORMAT", "prepare"]

log = logging.getLogger(__name__)

FORMAT = "dspark.prepare/1"
_LONGEST = 100
"""Bytes of the directory's name in that of its hidden neighbour."""


def prepare(settings: PrepareSettings, out: Path) -> tuple[dict[str, Any], bool]:
    """Write a prompt set to ``out``: what its `prepare.json` says, and whether it was made now.

    A set made before by the same settings from the same files is left as it is.

    Raises:
        ConfigError: a setting is wrong, or ``out`` holds something else.
        DataError: a source or an excluded set cannot be read, or no prompt is left.
        MissingPackageError: a source needs `dspark[data]`.
    """
    heldout = heldout_of(settings.heldout)
    threshold = near_of(settings.near)
    out = _place(out)
    with _workshop(out) as work:
        sources, excluded = expand(settings.sources), _excluded(settings)
        refuse_evaluation(sources, "sources")
        _keep_apart(out, sources, excluded)
        states = {source: _state(source) for source in (*sources, *excluded)}
        wanted: dict[str, Any] = {
            "format": FORMAT,
            "settings": json.loads(json.dumps(asdict(settings))),
            "sources": [_described(source) for source in sources],
            "excluded": [_described(source) for source in excluded],
        }
        if (before := there(out, wanted)) is not None:
            return before, False

        read_from = _pin(sources, wanted["sources"])
        kept_out = _pin(excluded, wanted["excluded"])
        overlap, excluded_rows = exclude(kept_out)
        near = None if threshold is None else NearDuplicates(threshold)
        selection = Selection(overlap, near, settings.seed)
        work.mkdir()
        every = work / "kept"
        with every.open("w", encoding="utf-8", newline="\n") as file:
            for prompt in selection.take(read_from, settings.limit):
                file.write(json.dumps(row_of(prompt), ensure_ascii=False) + "\n")
        for source, state in states.items():
            if _state(source) != state:
                raise DataError(f"'{source}' changed while it was read; give the command once more")
        counts = _deal(every, work, list(split(selection.scores, heldout)))
        if not counts["train"]:
            why = selection.rejects.explained() or "all are held out"
            raise DataError(f"no prompt is left to train on: {why}")
        for one, source in zip(wanted["sources"], read_from, strict=True):
            one["rows"] = selection.read.get(source, 0)
            one["kept"] = selection.kept.get(source, 0)
        for one, source in zip(wanted["excluded"], kept_out, strict=True):
            one["rows"] = excluded_rows[source]
            one["overlaps"] = selection.overlaps.get(source, 0)
        rejects = selection.rejects.to_dict()
        report = {
            **wanted,
            "counts": {"read": rejects["read"], **counts, "rejected": rejects["rejected"]},
            "reasons": rejects["reasons"],
            "places": rejects["places"],
            "files": {name: measured(work / name) for name in FILES},
            "made_by": collect(),
        }
        write_json(work / REPORT, report)
        with making():
            # an empty directory of that name gives way
            os.replace(work, out)
    return report, True


def _place(out: Path) -> Path:
    """Where ``out`` is, links followed.

    Raises:
        ConfigError: no directory can be made there.
    """
    try:
        place = out.resolve()
        place.lstat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        shown = f"{str(out)[:100]}…" if len(str(out)) > 200 else out
        raise ConfigError(f"--out {shown} cannot be made: {reason}; give another one") from None
    if not place.name:
        raise ConfigError(f"--out {out} is the root of all files; give a new or empty directory")
    return place


@contextmanager
def _workshop(out: Path) -> Iterator[Path]:
    """A place beside ``out`` for this process alone; what is left there in the end goes away."""
    name = out.name
    if len(os.fsencode(name)) > _LONGEST:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        name = f"{os.fsencode(name)[:_LONGEST].decode(errors='ignore')}.{digest}"
    aside = out.with_name(f".{name}.preparing")
    try:
        with claimed(aside):
            work = aside / "whole"
            shutil.rmtree(work, ignore_errors=True)
            try:
                yield work
            except OSError as error:
                # a full disk does not tell of which file it took no more
                error.filename = error.filename or str(out)
                raise
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with suppress(OSError):
            # that of a killed run, which `claimed` found here
            aside.rmdir()


def _excluded(settings: PrepareSettings) -> list[str]:
    return expand(settings.exclude, heldout=True) if settings.exclude else []


def _keep_apart(out: Path, sources: Sequence[str], excluded: Sequence[str]) -> None:
    inside = [s for s in (*sources, *excluded) if out in Path(s).resolve().parents]
    if inside:
        raise ConfigError(f"--out {out} holds '{inside[0]}', which is to be read; give another one")
    apart = {_real(source) for source in excluded}
    if both := [source for source in sources if _real(source) in apart]:
        raise ConfigError(f"'{both[0]}' is a source and in --exclude; take it out of one of them")


def _real(source: str) -> str:
    return source if source.startswith("hub://") else str(Path(source).resolve())


def _state(source: str) -> tuple[int, ...]:
    """What changes when a file is written to; nothing for a set of the hub."""
    if source.startswith("hub://"):
        return ()
    try:
        state = Path(source).stat()
    except OSError as error:
        raise DataError(f"cannot read '{source}': {(error.strerror or '').lower()}") from error
    return state.st_ino, state.st_size, state.st_mtime_ns


def _described(source: str) -> dict[str, Any]:
    hub = HubSource.parse(source) if source.startswith("hub://") else None
    if hub is None:
        return {"path": source, **measured(Path(source))}
    return {
        "set": hub.written(),
        "hub_id": hub.name,
        "config": hub.config,
        "split": hub.split,
        "file": hub.file,
        "revision": hub.revision,
        "licence": licence_of(hub),
    }


def _pin(sources: Sequence[str], described: list[dict[str, Any]]) -> list[str]:
    """``sources`` with hub sets at the commit they have now, which ``described`` then names."""
    found: dict[tuple[str, str | None], str | None] = {}
    result = []
    for source, one in zip(sources, described, strict=True):
        hub = HubSource.parse(source) if source.startswith("hub://") else None
        if hub is not None:
            key = (hub.name, hub.revision)
            if key not in found:
                found[key] = pinned(hub).revision
                if found[key] is None:
                    log.warning("the commit of %s is not known; prepare.json says null", hub.name)
            one["revision"] = found[key]
            source = str(replace(hub, revision=found[key]))
        result.append(source)
    return result


def _deal(every: Path, work: Path, held: Sequence[bool]) -> dict[str, int]:
    """Deal the rows of ``every``, which is removed, to the two files; returns their numbers."""
    with ExitStack() as stack:
        train, heldout = (stack.enter_context((work / name).open("wb")) for name in FILES)
        with every.open("rb") as rows:
            for line, out_of_training in zip(rows, held, strict=True):
                (heldout if out_of_training else train).write(line)
        for file in (train, heldout):
            file.flush()
            os.fsync(file.fileno())
    every.unlink()
    return {"train": len(held) - sum(held), "heldout": sum(held)}
