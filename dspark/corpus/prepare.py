"""From public sets and local files to a clean prompt set: `dspark prepare`.

A row is kept unless it is unusable, repeats an id or a text, shares text with an excluded set, or
is near to a prompt kept before; the first reason in this order counts. The first of several alike
wins, so the same input in the same order gives the same files. What of a row is compared is
`identity`: all that is written of it with excluded texts, all that the target sees with prompts.

Which prompts are held out is a hash of the seed and the prompt's id. A share therefore moves no
prompt when rows are added or taken away; a count holds out the N smallest hashes, so added rows
may push a prompt from held-out to training, never the other way. Near duplicates are gone by then,
so none stands on both sides.

Memory: about 80 bytes a row for the texts seen and as much for ids that rows bring (160 MB each at
two million rows), and what `near` keeps.
"""

import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dspark.corpus.files import read_rows
from dspark.corpus.identity import every_text, near_runs, normalised, number
from dspark.corpus.near import NearDuplicates
from dspark.corpus.overlap import Overlap, strings
from dspark.corpus.presets import HubSource
from dspark.corpus.prompts import Prompt, given_id, parse_prompt
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.words import tokens
from dspark.errors import ConfigError, DataError
from dspark.progress import track

__all__ = [
    "Heldout",
    "PrepareSettings",
    "Selection",
    "exclude",
    "heldout_of",
    "limit_of",
    "near_of",
    "row_of",
    "split",
]

_SCORES = 2**64
_LABELS = ("id", "category", "source")
"""Of a row: texts, but not what it says."""
_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)


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
    share = _decimal(text)
    if math.isfinite(share) and text.strip().isdecimal():
        return Heldout(count=int(text))
    if not 0 <= share < 1:
        raise ConfigError(
            f"--heldout must be a count such as 500 or a share below 1 such as 0.02, got '{text}'"
        )
    return Heldout(share=share)


def limit_of(text: str) -> int:
    """A count of one or more.

    Raises:
        ConfigError: it is none.
    """
    count = _decimal(text)
    if not count >= 1 or not text.strip().isdecimal():
        raise ConfigError(f"--limit must be a whole number from 1 on such as 500, got '{text}'")
    return int(text)


def near_of(text: str) -> float | None:
    """The Jaccard index from which on two prompts are one; None for `off`.

    Raises:
        ConfigError: it is neither `off` nor in 0.5..1.
    """
    if text.strip().lower() == "off":
        return None
    threshold = _decimal(text)
    if not 0.5 <= threshold <= 1:
        raise ConfigError(f"--near must be a similarity from 0.5 to 1, or off, got '{text}'")
    return threshold


def _decimal(text: str) -> float:
    """The number that ``text`` writes in plain digits without a sign, else NaN."""
    return float(text) if _NUMBER.fullmatch(text.strip()) else math.nan


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
                    self.scores.append(number(f"{self.seed}:{prompt.id}", 8))
                    yield prompt
                    if limit is not None and len(self.scores) >= limit:
                        break
            finally:
                self.read[source] = self.rejects.read - before
            if not usable:
                why = self.rejects.explained() if self.read[source] else "it is empty"
                raise DataError(f"'{source}' holds no usable prompt: {why}")

    def _check(self, prompt: Prompt, own_id: str | None) -> None:
        if own_id is not None and not _new(number(own_id), self._ids):
            raise RowError(Reason.DUPLICATE_ID, own_id[:40])
        if not _new(number(normalised(prompt)), self._texts):
            raise RowError(Reason.EXACT_DUPLICATE)
        for text, said in every_text(prompt):
            if found := self.overlap.find(text, short=said):
                kind, name = found
                self.overlaps[name] = self.overlaps.get(name, 0) + 1
                raise RowError(Reason.OVERLAP, f"{kind} of {name}")
        if self.near is not None and not self.near.add(near_runs(prompt)):
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
        texts = _Texts(source, rejects)
        overlap.add(source, texts)
        rows[source] = rejects.read
        if rejects.rejected or not texts.words:
            why = rejects.explained() or (
                "its rows hold no text" if rejects.read else "it is empty"
            )
            raise DataError(f"'{source}' cannot be excluded whole: {why}")
    return overlap, rows


@dataclass
class _Texts:
    """The texts of an excluded source, and whether there was a word among them."""

    source: str
    rejects: Rejects
    words: bool = False

    def __iter__(self) -> Iterator[str]:
        for row in read_rows(self.source, self.rejects):
            texts = list(strings({k: v for k, v in row.value.items() if k not in _LABELS}))
            if any(map(tokens, texts)):
                self.words = True
            elif row.value.get("input_ids"):
                self.rejects.add(RowError(Reason.TOKENS_ONLY, "no text to compare"), row.place)
            yield from texts
            yield from strings([row.value.get(key) for key in _LABELS])


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


def _new(number: int, seen: set[int]) -> bool:
    if number in seen:
        return False
    seen.add(number)
    return True
