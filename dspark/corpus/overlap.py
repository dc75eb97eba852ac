"""Keep evaluation text out of a training corpus.

A prompt overlaps when it shares a run of 13 words with an excluded text, when the whole texts are
equal, or when one of its sentences or lines is a sentence or line of an excluded text (eight words
or more, or five with a number among them: stock questions such as "How many are left?" are no
leak). Words are compared in lower case without punctuation. Thirteen words: GPT-3, arXiv:2005.14165
appendix C. Where scripts without spaces make up most of a run, it is 20 characters long, which is
about as much text; a sentence counts by the same rate (`words.CHARACTER`). A text without words
is equal to none. Of a string that is JSON, what is inside counts as well.

Only hashes are kept: 12 bytes for each word and sentence excluded, some 40 while they are sorted.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspark.corpus.words import CHARACTER, Hashes, hashes, length, runs, spaceless, tokens
from dspark.errors import DataError

__all__ = ["Overlap", "read_texts", "strings"]

_RUN = 13
_CHARACTER_RUN = round(_RUN / CHARACTER)
_LEVELS = 8
"""Of JSON inside a string inside JSON."""
_END = re.compile(r"[.?!:]\s+|[\u3002\uff1f\uff01\uff1a\uff1b]|\n+")


def _runs(words: list[str], numbers: Hashes) -> Hashes:
    """Hashes of the runs that tell a text; which runs do depends on their tokens alone."""
    single = spaceless(words)
    if not single.any():
        return runs(numbers, _RUN)
    before = np.concatenate([[0], np.cumsum(single)])
    found = []
    for size, of_characters in ((_RUN, False), (_CHARACTER_RUN, True)):
        if len(words) >= size:
            mostly = 2 * (before[size:] - before[:-size]) > size
            found.append(runs(numbers, size)[mostly == of_characters])
    return np.concatenate(found) if found else np.empty(0, dtype=np.uint64)


def _units(text: str, words: list[str], *, short: bool = True) -> Hashes:
    """Hashes of the text and of those sentences and lines that are long enough to be known by; of
    the text itself whether it is so or not, if ``short``.
    """
    found = [_hash(words)] if words and (short or _telling(words)) else []
    parts = _END.split(text)
    for part in parts if len(parts) > 1 else ():
        unit = tokens(part)
        if _telling(unit):
            found.append(_hash(unit))
    return np.array(found, dtype=np.uint64)


def _telling(words: list[str]) -> bool:
    size = length(words)
    return size >= 8 or (size >= 5 and any(word.isdigit() for word in words))


def _hash(words: list[str]) -> int:
    text = " ".join(words).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class _Table:
    """Hashes and the number of the set that each was first seen in."""

    def __init__(self) -> None:
        self._hashes = np.empty(0, dtype=np.uint64)
        self._sets = np.empty(0, dtype=np.uint32)
        self._new: list[tuple[Hashes, int]] = []
        self._waiting = 0

    def __bool__(self) -> bool:
        return bool(self._new) or len(self._hashes) > 0

    def add(self, numbers: Hashes, of_set: int) -> None:
        self._new.append((numbers, of_set))
        self._waiting += len(numbers) + 1
        if self._waiting > 100_000 + len(self._hashes):
            self._sort_in()

    def first(self, numbers: Hashes) -> int | None:
        """The set of the first of ``numbers`` that is known."""
        if self._new:
            self._sort_in()
        if not len(self._hashes) or not len(numbers):
            return None
        at = np.minimum(np.searchsorted(self._hashes, numbers), len(self._hashes) - 1)
        known = np.flatnonzero(self._hashes[at] == numbers)
        return int(self._sets[at[known[0]]]) if len(known) else None

    def _sort_in(self) -> None:
        every = np.concatenate([self._hashes, *(numbers for numbers, _ in self._new)])
        sets: list[npt.NDArray[np.uint32]] = [
            np.full(len(numbers), of_set, dtype=np.uint32) for numbers, of_set in self._new
        ]
        # of equal ones `unique` names the first
        self._hashes, places = np.unique(every, return_index=True)
        self._sets = np.concatenate([self._sets, *sets])[places]
        self._new.clear()
        self._waiting = 0


class Overlap:
    """Knows sets of excluded texts. ``kind_of(text)`` says how a text overlaps with them."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        self._names: list[str] = []
        self._runs = _Table()
        self._units = _Table()
        self.add("excluded", excluded)

    def add(self, name: str, texts: Iterable[str]) -> None:
        """Exclude ``texts`` too; `find` tells the ``name``."""
        number = len(self._names)
        self._names.append(name)
        for text in texts:
            words = tokens(text)
            self._runs.add(_runs(words, hashes(words)), number)
            self._units.add(_units(text, words), number)

    def find(self, text: str, *, short: bool = True) -> tuple[str, str] | None:
        """(kind, name of the set), with `13-gram` or `same text` as the kind; None if clean.

        Unless ``short``, a text that is too short for a sentence to be known by is equal to none.
        """
        if not self._runs and not self._units:
            return None
        words = tokens(text)
        number = self._runs.first(_runs(words, hashes(words)))
        if number is not None:
            return "13-gram", self._names[number]
        number = self._units.first(_units(text, words, short=short))
        return None if number is None else ("same text", self._names[number])

    def kind_of(self, text: str) -> str | None:
        """``13-gram`` or ``same text``; None when nothing is shared."""
        found = self.find(text)
        return found[0] if found else None


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Every string of every row of some JSON-lines files, whatever the rows' shape.

    Raises:
        DataError: a file cannot be read or a line is not JSON.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield from strings(_parsed(line, f"{path} line {number}"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"excluded file {path} cannot be read: {error}") from error


def _parsed(line: str, place: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON: {error.msg}") from error


def strings(value: object, *, keys: bool = False) -> Iterator[str]:
    """Every string inside a JSON value, in order; keys too, if ``keys``.

    A string that is itself a JSON object or array is followed by the strings inside.
    """
    # not by recursion: a row may be nested deeper than Python's stack
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting:
        one, level = waiting.pop()
        if isinstance(one, str):
            yield one
            inside = _decoded(one) if level < _LEVELS else None
            if inside is not None:
                waiting.append((inside, level + 1))
        elif isinstance(one, dict):
            for key, part in reversed(one.items()):
                waiting.append((part, level))
                if keys:
                    waiting.append((key, _LEVELS))
        elif isinstance(one, list):
            waiting += ((part, level) for part in reversed(one) if not isinstance(part, int))


def _decoded(text: str) -> object:
    """The object or array that ``text`` is the JSON of, else None."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
