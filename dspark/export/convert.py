"""An exported draft, ours or another trainer's, in the layout of other readers.

Weights are copied as they are stored, bit for bit and in their own dtype; only config.json is
written anew, and the target's two tables are added or left out where that was asked for.
"""

import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark import provenance
from dspark.draft import DSparkConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.export.card import CardFacts, SetResult, render
from dspark.export.check import PROBE_NAME, read_probe, save_probe
from dspark.export.config_json import LING, family_of, family_of_target, read_json, to_json
from dspark.export.layouts import LAYOUTS, Format, Origin, unreadable, write_config
from dspark.export.load import check_fit, fitting_model, read_config, read_weights
from dspark.export.place import PROVENANCE_NAME, check_place, filling
from dspark.export.speculators import is_speculators, verifier_of
from dspark.export.tensors import FROZEN, INDEX_NAME, WEIGHTS_NAME
from dspark.target import Target
from dspark.target.catalog import hub_id

__all__ = ["convert_draft"]

log = logging.getLogger(__name__)

_CARRIED = (".jinja", ".json", ".md", ".model", ".txt")
"""Tokenizer, licence: not what a trainer keeps to go on, nor code to be run."""
_CARD = "README.md"
_WRITTEN = ("config.json", INDEX_NAME, PROVENANCE_NAME, PROBE_NAME, _CARD)
_NOTE = "> Converted by dspark to the layout"
_NOTE_AT = re.compile(r"\A(?P<head>---\n.*?^---\n)?(?:\s*" + _NOTE + r"[^\n]*\n)?\n*", re.S | re.M)
_BEFORE = ", before a conversion"
_ANYWHERE = "ANY-DIRECTORY"


def convert_draft(
    source: Path | str,
    out: Path | str,
    format: Format,
    *,
    target: Target | None = None,
    load_target: Callable[[], Target] | None = None,
    slim: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the draft in ``source`` to the directory ``out`` and return its provenance.

    Args:
        target: to hold the draft against, and for its name; an outline will do.
        load_target: gives its weights, if ``format`` needs tables that ``source`` does not hold.
        slim: leave the target's embedding and head out.
        overwrite: replace a directory that holds files not written by an export.

    Raises:
        CheckpointError: the draft is not understood or does not fit, or ``out`` must not be
            replaced.
        ConfigError: ``format`` needs tables that nobody gave, or ``out`` cannot be written.
        RunError: the disk refused.
    """
    place, source = Path(out).expanduser().absolute(), Path(source).expanduser()
    check_place(place, source, overwrite=overwrite)
    config = read_config(source, target)
    if target is not None:
        check_fit(config, target, str(source))
    weights = read_weights(source)
    draft = fitting_model(config, weights, str(source))
    if reason := unreadable(config, format):
        log.warning("the layout is written, but %s", reason)
    tables = _holds_tables(weights)
    weights = _with_tables(weights, format, load_target, slim)
    record = _record(source, target)
    record.setdefault("num_parameters", sum(one.numel() for _, one in draft.trainable()))
    renewed = _is_rendered(source, record, config, tables)
    origin = _origin(read_json(source), record, target, weights)
    if format == "vllm" and origin.verifier is None:
        log.warning("the name of the target is not known (--target): whoever serves must tell it")
    with filling(place) as aside:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in _CARRIED and path.name not in _WRITTEN:
                shutil.copyfile(path, aside / path.name)
        provenance.save_tensors(weights, aside / WEIGHTS_NAME)
        provenance.write_json(aside / "config.json", write_config(config, format, origin))
        if record.get("check"):
            record.setdefault("checked_as", record["format"])
        record |= {"format": format, "converted_from": source.resolve().name}
        if renewed:
            card = _card(record, config, _holds_tables(weights), place.name)
            provenance.write_text(aside / _CARD, card)
        elif (source / _CARD).is_file():
            provenance.write_text(aside / _CARD, _noted(source / _CARD, format))
        _hand_on_probe(source, aside)
        record["files"] = sorted([*(path.name for path in aside.iterdir()), PROVENANCE_NAME])
        provenance.write_json(aside / PROVENANCE_NAME, record)
    return record


def _with_tables(
    weights: Mapping[str, Tensor],
    format: Format,
    load_target: Callable[[], Target] | None,
    slim: bool,
) -> dict[str, Tensor]:
    held = dict(weights)
    needed = LAYOUTS[format].needs_tables
    if slim:
        if needed:
            raise ConfigError(f"--slim: {LAYOUTS[format].reader} needs the tables in the file")
        return {name: tensor for name, tensor in held.items() if name not in FROZEN}
    missing = [name for name in FROZEN if name not in held]
    if not needed or not missing:
        return held
    if load_target is None:
        raise ConfigError(
            f"{LAYOUTS[format].reader} needs {' and '.join(missing)} in the file, which this draft "
            "lacks: give its target by --target"
        )
    target = load_target()
    like = held["fc.weight"]
    for name, table in zip(FROZEN, (target.embed_weight, target.head_weight), strict=True):
        # a clone: a tied target has one table under two names, which safetensors refuses
        held.setdefault(name, table.detach().to("cpu", like.dtype, copy=True).contiguous())
    return held


def _record(source: Path, target: Target | None) -> dict[str, Any]:
    """Provenance of an export of ours, to be handed on; of a foreign draft what is known."""
    path = source / PROVENANCE_NAME
    if path.exists():
        told = provenance.read_object(path, CheckpointError)
        if told.get("kind") == "dspark-export":
            named = told.get("target", {})
            if not (isinstance(named, Mapping) and isinstance(named.get("name", ""), str)):
                raise _garbled(path, f"target is {named!r}")
            return told
    record: dict[str, Any] = provenance.collect(kind="dspark-export")
    if target is not None:
        record["target"] = {"name": target.name, "architecture": target.architecture}
    return record


def _origin(
    raw: Mapping[str, Any],
    record: dict[str, Any],
    target: Target | None,
    weights: Mapping[str, Tensor],
) -> Origin:
    name, architectures = verifier_of(raw) if is_speculators(raw) else (None, [])
    told = record.get("target") or {}
    name = name or told.get("name")
    architectures = architectures or [one for one in [told.get("architecture")] if one]
    family = family_of(raw)
    if target is not None:
        name, architectures = target.name, [target.architecture]
        family = family_of_target(architectures)
    if not architectures and family == LING:
        architectures = ["BailingMoeV3ForCausalLM"]
    if name and "target" not in record:
        # the other layouts have no place for it, and the way back needs it
        record["target"] = {"name": name, "architecture": next(iter(architectures), "")}
    return Origin(
        family=family,
        verifier=hub_id(name) if name else None,
        verifier_architectures=[one for one in architectures if one],
        dtype=str(weights["fc.weight"].dtype).removeprefix("torch."),
    )


def _noted(card: Path, format: Format) -> str:
    """A card that nothing here can write anew, as that of another draft."""
    note = (
        f"{_NOTE} {format}. This is the card of the draft that it was made of, commands included."
    )
    text = card.read_text(encoding="utf-8", errors="replace")
    return _NOTE_AT.sub(lambda at: f"{at['head'] or ''}\n{note}\n\n", text, count=1).lstrip("\n")


def _hand_on_probe(source: Path, aside: Path) -> None:
    """What the same weights must meet again; another file of that name is no check."""
    if not (source / PROBE_NAME).exists():
        return
    try:
        probe = read_probe(source)
    except CheckpointError as error:
        log.warning("%s is left out: %s", PROBE_NAME, error)
        return
    origin = probe.expected_from.removesuffix(_BEFORE) + _BEFORE
    save_probe(aside, replace(probe, expected_from=origin))


def _card(record: Mapping[str, Any], config: DSparkConfig, tables: bool, path: str) -> str:
    """The card of an export of ours, whose commands depend on the layout."""
    told = dict(record["card"])
    facts = CardFacts(**{**told, "results": [SetResult(**one) for one in told["results"]]})
    shape = to_json(config, architecture="")
    return render(facts, config=shape, record=record, tables=tables, path=path)


def _is_rendered(
    source: Path, record: Mapping[str, Any], config: DSparkConfig, tables: bool
) -> bool:
    """May the card be written anew? Of one that somebody has edited that would lose the edits."""
    if not record.get("card"):
        return False
    try:
        ours = _card(record, config, tables, _ANYWHERE)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _garbled(source / PROVENANCE_NAME, str(error)) from error
    path = source / _CARD
    if not path.is_file():
        return True
    # the directory may have been moved since
    pattern = re.escape(ours).replace(re.escape(_ANYWHERE), r"[^\n]*")
    return bool(re.fullmatch(pattern, path.read_text(encoding="utf-8", errors="replace")))


def _holds_tables(weights: Mapping[str, Tensor]) -> bool:
    return all(name in weights for name in FROZEN)


def _garbled(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not as an export writes it ({reason}): take the whole directory anew, or "
        "remove this file"
    )
