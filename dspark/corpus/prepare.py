"""From public sets and local files to a clean prompt set: `dspark prepare`.

A row is kept unless it is unusable, repeats an id or a text, shares text with an excluded set, or
is near to a prompt kept before; the first reason in this order counts. The first of several alike
wins, so the same input in the same order gives the same files.

Which prompts are held out is a hash of the seed and the prompt's id. A share therefore moves no
prompt when rows are added or taken away; a count holds out the N smallest hashes, so added rows
may push a prompt from held-out to training, never the other way. Near duplicates are gone by then,
so none stands on both sides.

Memory: about 80 bytes a row for the texts seen and as much for ids that rows bring (160 MB each at
two million rows), and what `near` keeps.
"""

import hashlib
import json
import math
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.corpus.files import read_rows
from dspark.corpus.near import NearDuplicates, shingles
from dspark.corpus.overlap import Overlap, strings
from dspark.corpus.presets import HubSource
from dspark.corpus.prompts import Prompt, given_id, parse_prompt
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.words import hashes, tokens
from dspark.errors import ConfigError, DataError
from dspark.progress import track

__all__ = [
    "Heldout",
    "PrepareSettings",
    "Selection",
    "exclude",
    "heldout_of",
    "near_of",
    "row_of",
    "split",
]

_SCORES = 2**64


@dataclass(frozen=True)
class Heldout:
    """How many prompts are held out: a count, or a share in [0, 1)."""

    count: int | None = None
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """What a preparation depends on beside its input."""

    sources: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    heldout: str = "0.02"
    """`heldout_of`."""
    limit: int | None = None
    """At most this many prompts are kept, held-out ones included; reading then stops."""
    seed: int = 0
    near: str = "0.8"
    """`near_of`."""


def heldout_of(text: str) -> Heldout:
    """A count (`500`) or a share (`0.02`).

    Raises:
        ConfigError: it is neither.
    """
    try:
        if text.strip().isdecimal():
            return Heldout(count=int(text))
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ConfigError(
            f"--heldout must be a count such as 500 or a share below 1 such as 0.02, got '{text}'"
        )
    return Heldout(share=share)


def near_of(text: str) -> float | None:
    """The Jaccard index from which on two prompts are one; None for `off`.

    Raises:
        ConfigError: it is neither `off` nor in 0.5..1.
    """
    if text.strip().lower() == "off":
        return None
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not 0.5 <= threshold <= 1:
        raise ConfigError(f"--near must be a similarity from 0.5 to 1, or off, got '{text}'")
    return threshold


@dataclass
class Selection:
    """The prompts kept so far, as numbers, and why others were not."""

    overlap: Overlap
    near: NearDuplicates | None
    seed: int = 0
    rejects: Rejects = field(default_factory=Rejects)
    kept: dict[str, int] = field(default_factory=dict)
    """By source."""
    read: dict[str, int] = field(default_factory=dict)
    """By source, unusable rows included."""
    overlaps: dict[str, int] = field(default_factory=dict)
    """Rows rejected by excluded source."""
    scores: "array[int]" = field(default_factory=lambda: array("Q"))
    """[kept] the hashes that decide what is held out."""
    _ids: set[int] = field(default_factory=set)
    _texts: set[int] = field(default_factory=set)

    def take(self, sources: Iterable[str], limit: int | None = None) -> Iterator[Prompt]:
        """The prompts of ``sources`` (items of `expand`) to keep, at most ``limit`` of them.

        Raises:
            DataError: a source cannot be read, or holds no usable row.
        """
        for source in sources:
            if limit is not None and len(self.scores) >= limit:
                return
            usable = 0
            before = self.rejects.read
            self.kept[source] = 0
            try:
                for row in track(read_rows(source, self.rejects), Path(source).name):
                    try:
                        prompt = parse_prompt(row)
                        usable += 1
                        self._check(prompt, given_id(row.value))
                    except RowError as error:
                        self.rejects.add(error, row.place)
                        continue
                    self.kept[source] += 1
                    self.scores.append(_number(f"{self.seed}:{prompt.id}", 8))
                    yield prompt
                    if limit is not None and len(self.scores) >= limit:
                        break
            finally:
                self.read[source] = self.rejects.read - before
            if not usable:
                why = self.rejects.explained() if self.read[source] else "it is empty"
                raise DataError(f"'{source}' holds no usable prompt: {why}")

    def _check(self, prompt: Prompt, own_id: str | None) -> None:
        if own_id is not None and not _new(_number(own_id), self._ids):
            raise RowError(Reason.DUPLICATE_ID, own_id[:40])
        if not _new(_number(_normalised(prompt)), self._texts):
            raise RowError(Reason.EXACT_DUPLICATE)
        asked, written = [], ""
        for text, by_user in _every_text(prompt):
            words = tokens(text)
            numbers = hashes(words)
            if by_user:
                asked.append(numbers)
                written += "".join(text.split())
            if found := self.overlap.find(text, words, numbers):
                kind, name = found
                self.overlaps[name] = self.overlaps.get(name, 0) + 1
                raise RowError(Reason.OVERLAP, f"{kind} of {name}")
        if self.near is not None:
            numbers = np.concatenate(asked)
            # where there is no word, all of the text is one
            if not self.near.add(shingles(numbers if len(numbers) else hashes([written]))):
                raise RowError(Reason.NEAR_DUPLICATE)


def exclude(sources: Iterable[str]) -> tuple[Overlap, dict[str, int]]:
    """Everything that ``sources`` (items of `expand`) say, and how many rows each has.

    Raises:
        DataError: a source or one of its rows cannot be read; what it says could be missed.
    """
    overlap = Overlap()
    rows: dict[str, int] = {}
    for source in sources:
        rejects = Rejects()
        overlap.add(
            source,
            (text for row in read_rows(source, rejects) for text in strings(row.value)),
        )
        rows[source] = rejects.read
        if rejects.rejected or not rejects.read:
            why = rejects.explained() or "it is empty"
            raise DataError(f"'{source}' cannot be excluded whole: {why}")
    return overlap, rows


def split(scores: "array[int]", heldout: Heldout) -> Iterator[bool]:
    """For each prompt, whether it is held out.

    Raises:
        DataError: none would be left to train on.
    """
    if heldout.count is None:
        edge = int(heldout.share * _SCORES)
        return (score < edge for score in scores)
    if heldout.count and heldout.count >= len(scores):
        raise DataError(
            f"--heldout {heldout.count} leaves none of {len(scores)} prompts to train on; "
            "give a smaller count or a share such as 0.02"
        )
    order = np.argsort(np.array(scores, dtype=np.uint64), kind="stable")
    chosen = set(order[: heldout.count].tolist())
    return (place in chosen for place in range(len(scores)))


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A row that `dspark sample` reads as the same prompt, with the id that it has here."""
    row: dict[str, Any] = {"id": prompt.id}
    if prompt.followups:
        row["turns"] = [prompt.messages[0]["content"], *prompt.followups]
    else:
        row["messages"] = prompt.messages
    if prompt.tools:
        row["tools"] = prompt.tools
    if prompt.category is not None:
        row["category"] = prompt.category
    hub = HubSource.parse(prompt.source) if prompt.source.startswith("hub://") else None
    return {**row, "source": replace(hub, revision=None).written() if hub else prompt.source}


def _normalised(prompt: Prompt) -> str:
    """The whole prompt with white space folded and accents in one form.

    NFC and not NFKC, which would make 2² and 22 the same exercise; what differs in such forms
    only is left to the search for near duplicates.
    """
    value = _folded([prompt.messages, list(prompt.followups), prompt.tools])
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _folded(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, list):
        return [_folded(part) for part in value]
    if isinstance(value, dict):
        return {key: _folded(part) for key, part in value.items()}
    return value


def _every_text(prompt: Prompt) -> Iterator[tuple[str, bool]]:
    """The texts of a prompt, and whether the user wrote them."""
    for message in prompt.messages:
        yield str(message["content"]), message["role"] == "user"
    for text in prompt.followups:
        yield text, True


def _number(text: str, size: int = 16) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size)
    return int.from_bytes(digest.digest(), "big")


def _new(number: int, seen: set[int]) -> bool:
    if number in seen:
        return False
    seen.add(number)
    return True
