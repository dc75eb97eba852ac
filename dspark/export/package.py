"""What would be uploaded of an exported draft to the Hugging Face hub; nothing here asks the hub.

Weights and tokenizer go up as they are. The card and the records beside it go up without absolute
paths of this machine; nothing in the directory is changed.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.utils import validate_repo_id

from dspark import provenance
from dspark.draft import DSparkConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.export.card import CardFacts, SetResult, render
from dspark.export.check import PROBE_NAME
from dspark.export.config_json import read_json, to_json
from dspark.export.load import fitting_model, read_config, read_weights
from dspark.export.paths import (
    absolute_paths,
    local_text,
    public,
    public_text,
)
from dspark.export.place import PROVENANCE_NAME
from dspark.export.results import read_results
from dspark.export.speculators import is_speculators, verifier_of
from dspark.export.tensors import FROZEN, weights_sha256
from dspark.target.catalog import NAMES, hub_id

__all__ = ["WEIGHTS", "Card", "Item", "Package", "package"]

CARD_NAME = "README.md"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class Item:
    """A file of the upload."""

    path: str
    """In the repository."""
    content: Path | bytes
    num_bytes: int
    sha256: str

    def summary(self) -> dict[str, Any]:
        return {"path": self.path, "bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Package:
    """All that is uploaded, in one commit."""

    items: tuple[Item, ...]
    card: str
    left_out: tuple[str, ...]
    """Names in the directory that no export has written."""

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True, kw_only=True)
class Card:
    """What to write a new card with, beside what the directory tells."""

    evaluations: Sequence[Path] = ()
    """Outputs of `dspark eval --json`; none: the results of the old card."""
    licence: str | None = None
    target: str | None = None
    """The target's name on the hub, where the export knows it by another."""


def package(directory: Path | str, repo_id: str, card: Card | None = None) -> Package:
    """Check the draft in ``directory`` as a loader would, and say what would be uploaded.

    Args:
        card: for a new card; None takes the directory's.

    Raises:
        CheckpointError: it is no complete exported draft, or its card lacks a field.
        ConfigError: a name is no name of the hub, or a fact for the card is missing.
        DataError: an evaluation is not understood, or is of another draft.
    """
    if not _is_repo(repo_id):
        raise ConfigError(f"REPO_ID must be owner/name, as the hub allows them, got '{repo_id}'")
    place = Path(directory).expanduser()
    config = read_config(place)
    record = _record(place)
    weights = read_weights(place)
    draft = fitting_model(config, weights, str(place))
    raw = read_json(place)
    told: dict[str, Any] = public(record)
    known = absolute_paths([record, raw, str(place.resolve()), str(Path.home())])
    if card is None:
        text = _own_card(place, known)
        base = _base_of(text, place)
        told["target"] = {**(told.get("target") or {}), "name": _called(record, base)}
    else:
        base = _base(card.target or (record.get("target") or {}).get("name"), card)
        told["target"] = {**(told.get("target") or {}), "name": _called(record, base)}
        told.setdefault("num_parameters", sum(one.numel() for _, one in draft.trainable()))
        facts = _facts(told, card, config, weights_sha256(place))
        told["card"] = asdict(facts)
        text = public_text(
            render(
                facts,
                config=to_json(config, architecture=""),
                record=told,
                tables=all(name in weights for name in FROZEN),
                path=repo_id.partition("/")[2],
                repo_id=repo_id,
            ),
            known,
        )
    contents: dict[str, Path | bytes] = {name: place / name for name in record["files"]}
    told["files"] = sorted({*record["files"], CARD_NAME})
    contents[CARD_NAME] = text.encode()
    contents[PROVENANCE_NAME] = _json(told)
    contents["config.json"] = _public_json(place / "config.json", _named(raw, base, place))
    if PROBE_NAME in contents:
        probe = provenance.read_object(place / PROBE_NAME, CheckpointError)
        contents[PROBE_NAME] = _public_json(place / PROBE_NAME, public(probe))
    items = tuple(_item(path, content, known) for path, content in sorted(contents.items()))
    rest = sorted(path.name for path in place.iterdir() if path.name not in contents)
    return Package(items=items, card=text, left_out=tuple(rest))


def _record(place: Path) -> dict[str, Any]:
    """provenance.json, whose list of files is there in full."""
    path = place / PROVENANCE_NAME
    if not path.exists():
        raise CheckpointError(
            f"{place} has no {PROVENANCE_NAME}: no export has written it; `dspark convert` takes "
            "drafts of other trainers"
        )
    record = provenance.read_object(path, CheckpointError)
    names = record.get("files")
    if (
        record.get("kind") != "dspark-export"
        or not isinstance(names, list)
        or not all(isinstance(name, str) and Path(name).name == name for name in names)
    ):
        raise CheckpointError(f"{path} is not that of an export: it lists no files of one")
    lost = [name for name in names if name != CARD_NAME and not (place / name).is_file()]
    if lost:
        raise CheckpointError(
            f"{place} lacks {', '.join(lost)}, which an export has written there: it is half "
            "copied or half removed; take the whole directory, or export again"
        )
    return record


# --- the card ----------------------------------------------------------------------------------


def _own_card(place: Path, known: set[str]) -> str:
    path = place / CARD_NAME
    if not path.is_file():
        raise CheckpointError(f"{place} has no card ({CARD_NAME}): --card writes one")
    return public_text(path.read_text(encoding="utf-8", errors="replace"), known)


def _base_of(text: str, place: Path) -> str:
    """The target that a card names; its fields are there."""
    found = re.match(r"---\n(.*?)^---\s*$", text, re.DOTALL | re.MULTILINE)
    try:
        fields = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        fields = None
    path = place / CARD_NAME
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path} has no fields (YAML between two lines ---): --card writes a card that has"
        )
    for field, option in (("base_model", "--card"), ("license", "--card --licence ID")):
        if not fields.get(field):
            raise CheckpointError(
                f"{path} does not state {field} in its fields: add it, or write a new card with "
                f"{option}"
            )
    base = fields["base_model"]
    base = base[0] if isinstance(base, list) else base
    if not _is_on_hub(base):
        raise CheckpointError(
            f"{path}: base_model is {base!r}, which is no owner/name of the hub: correct it, or "
            "write a new card with --card"
        )
    return str(base)


def _is_on_hub(name: Any) -> bool:
    return isinstance(name, str) and _is_repo(name) and not Path(name).exists()


def _is_repo(name: str) -> bool:
    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return bool(_REPO.fullmatch(name))


def _base(name: Any, card: Card) -> str:
    base = hub_id(name) if isinstance(name, str) else None
    if base is None or not (_is_repo(base) if card.target else _is_on_hub(base)):
        given = "not known" if base is None else f"'{base}'"
        raise ConfigError(
            f"the target's name is {given}, which is no owner/name of the hub: give it by --target"
        )
    return base


def _called(record: Mapping[str, Any], base: str) -> str:
    """A nickname stays: what it loads are the very weights that the draft was trained for."""
    name = (record.get("target") or {}).get("name")
    return name if name in NAMES and hub_id(name) == base else base


def _facts(record: Mapping[str, Any], card: Card, config: DSparkConfig, sha256: str) -> CardFacts:
    """Of the old card, with what was asked for in its place."""
    facts = _old_facts(record)
    if card.evaluations:
        results, measured = read_results(
            card.evaluations, block_size=int(config.block_size or 0), weights_sha256=sha256
        )
        facts = replace(
            facts,
            results=[replace(one, name=public(one.name)) for one in results],
            measured=public(measured),
        )
    licence = (card.licence or facts.licence or "").lower()
    if not _LICENCE.fullmatch(licence):
        given = f"'{licence}' is no id of a licence" if licence else "the card states no licence"
        raise ConfigError(f"{given}: give one such as apache-2.0 by --licence")
    return replace(facts, licence=licence)


def _old_facts(record: Mapping[str, Any]) -> CardFacts:
    told = record.get("card")
    if told is None:
        # a card that was written by hand: what the run has left
        sample = (record.get("config") or {}).get("sample") or {}
        step = record.get("step")
        return CardFacts(
            sampling=sample.get("settings") or (),
            training={"optimizer steps": step} if step else {},
        )
    try:
        return CardFacts(**{**told, "results": [SetResult(**one) for one in told["results"]]})
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{PROVENANCE_NAME} holds a card that is not understood: {error}"
        ) from None


# --- the files ---------------------------------------------------------------------------------


def _named(raw: Mapping[str, Any], base: str, place: Path) -> dict[str, Any]:
    """config.json, whose verifier (in the layout of speculators) is one that others can find."""
    config: dict[str, Any] = public(raw)
    if not is_speculators(raw):
        return config
    name = verifier_of(raw)[0]
    if name and name != base and name not in NAMES and _is_on_hub(name):
        raise CheckpointError(
            f"{place}: config.json names the verifier {name}, and the card the target {base}: "
            "correct one of them"
        )
    told = config.setdefault("speculators_config", {})
    told["verifier"] = {**(told.get("verifier") or {}), "name_or_path": base}
    return config


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _public_json(path: Path, value: Any) -> Path | bytes:
    """The file itself where nothing in it was changed."""
    return path if provenance.read_object(path, CheckpointError) == value else _json(value)


def _item(path: str, content: Path | bytes, known: set[str]) -> Item:
    if not path.endswith(WEIGHTS):
        data = content if isinstance(content, bytes) else content.read_bytes()
        text = data.decode("utf-8", errors="replace")
        if _SECRET.search(text):
            raise ConfigError(f"{path} holds what looks like a token of the hub: remove it")
        if (held := local_text(text, known)) is not None:
            raise ConfigError(f"{path} holds the path {held} of this machine: remove it")
    if isinstance(content, bytes):
        return Item(path, content, len(content), hashlib.sha256(content).hexdigest())
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Item(path, content, content.stat().st_size, digest)
