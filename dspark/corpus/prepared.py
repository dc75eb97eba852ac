"""The directory of a prepared prompt set: `train.jsonl`, `heldout.jsonl` and `prepare.json`.

It is built in a hidden neighbour and renamed when it is whole, so a directory of that name is
finished or not there. `prepare.json` tells what went in (sizes and hashes of files, commits of hub
sets), what came out and where each row that was read has gone.
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
from dspark.corpus.presets import HubSource, licence_of, pinned, refuse_evaluation
from dspark.errors import ConfigError, DataError
from dspark.provenance import claimed, collect, making, read_object, write_json

__all__ = ["FORMAT", "prepare"]

log = logging.getLogger(__name__)

FORMAT = "dspark.prepare/1"
REPORT = "prepare.json"
_FILES = ("train.jsonl", "heldout.jsonl")


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
    with _workshop(out) as work:
        sources, excluded = expand(settings.sources), _excluded(settings)
        refuse_evaluation(sources, "sources")
        _keep_apart(out, sources, excluded)
        wanted: dict[str, Any] = {
            "format": FORMAT,
            "settings": json.loads(json.dumps(asdict(settings))),
            "sources": [_described(source) for source in sources],
            "excluded": [_described(source) for source in excluded],
        }
        if (there := _there(out, wanted)) is not None:
            return there, False

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
            "files": {name: _measured(work / name) for name in _FILES},
            "made_by": collect(),
        }
        write_json(work / REPORT, report)
        with making():
            # an empty directory of that name gives way
            os.replace(work, out)
    return report, True


@contextmanager
def _workshop(out: Path) -> Iterator[Path]:
    """A place beside ``out`` for this process alone; what is left there in the end goes away."""
    place = out.absolute()
    aside = place.with_name(f".{place.name}.preparing")
    try:
        with claimed(aside):
            work = aside / "whole"
            shutil.rmtree(work, ignore_errors=True)
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
    finally:
        with suppress(OSError):
            # that of a killed run, which `claimed` found here
            aside.rmdir()


def _excluded(settings: PrepareSettings) -> list[str]:
    return expand(settings.exclude) if settings.exclude else []


def _keep_apart(out: Path, sources: Sequence[str], excluded: Sequence[str]) -> None:
    inside = [s for s in (*sources, *excluded) if out.resolve() in Path(s).resolve().parents]
    if inside:
        raise ConfigError(f"--out {out} holds '{inside[0]}', which is to be read; give another one")
    if both := [source for source in sources if source in excluded]:
        raise ConfigError(f"'{both[0]}' is a source and in --exclude; take it out of one of them")


def _there(out: Path, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The report in ``out`` if it is what is ``wanted``; None if ``out`` is free.

    Raises:
        ConfigError: it holds something else.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a directory")
    if not (out / REPORT).exists():
        if any(out.iterdir()):
            raise ConfigError(f"--out {out} holds other files; give a new or empty directory")
        return None
    report = read_object(out / REPORT, ConfigError)
    other = _difference(report, wanted)
    if other:
        raise ConfigError(f"--out {out} holds a preparation of other {other}; give another one")
    for name in _FILES:
        path = out / name
        said = report.get("files", {}).get(name, {})
        if not path.is_file() or path.stat().st_size != said.get("bytes"):
            raise ConfigError(
                f"{path} is not the file that {out / REPORT} describes; give another --out, "
                "or remove that directory"
            )
    return report


def _difference(report: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What of the input differs, in words; the commits of hub sets are not looked at."""
    theirs, ours = report.get("settings"), wanted["settings"]
    if not isinstance(theirs, dict):
        return "settings"
    for key in ours:
        if theirs.get(key) != ours[key]:
            return f"settings ({key}: {theirs.get(key)}, now {ours[key]})"
    for group in ("sources", "excluded"):
        before = [
            {k: one.get(k) for k in ("set", "path", "sha256")} for one in report.get(group, [])
        ]
        now = [{k: one.get(k) for k in ("set", "path", "sha256")} for one in wanted[group]]
        if before != now:
            return f"content of {group}"
    return ""


def _described(source: str) -> dict[str, Any]:
    hub = HubSource.parse(source) if source.startswith("hub://") else None
    if hub is None:
        return {"path": source, **_measured(Path(source))}
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


def _measured(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}
    except OSError as error:
        raise DataError(f"cannot read '{path}': {(error.strerror or '').lower()}") from error


def _deal(every: Path, work: Path, held: Sequence[bool]) -> dict[str, int]:
    """Deal the rows of ``every``, which is removed, to the two files; returns their numbers."""
    with ExitStack() as stack:
        train, heldout = (stack.enter_context((work / name).open("wb")) for name in _FILES)
        with every.open("rb") as rows:
            for line, out_of_training in zip(rows, held, strict=True):
                (heldout if out_of_training else train).write(line)
        for file in (train, heldout):
            file.flush()
            os.fsync(file.fileno())
    every.unlink()
    return {"train": len(held) - sum(held), "heldout": sum(held)}
