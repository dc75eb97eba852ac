"""Keep evaluation text out of a training corpus.

A prompt overlaps when it shares a run of 13 words with an excluded text, when the whole texts are
equal, or when one of its sentences or lines is a sentence or line of an excluded text (eight words
or more, or five with a number among them: stock questions such as "How many are left?" are no
leak). Words are compared in lower case without punctuation. Thirteen words: GPT-3, arXiv:2005.14165
appendix C.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dspark.errors import DataError

__all__ = ["Overlap", "read_texts"]

_RUN = 13


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _units(text: str) -> Iterator[str]:
    """Sentences and lines that are long enough to be recognised."""
    for unit in re.split(r"(?<=[.?!:])\s+|\n+", text):
        words = _words(unit)
        if len(words) >= 8 or (len(words) >= 5 and any(w.isdigit() for w in words)):
            yield " ".join(words)


class Overlap:
    """Knows a set of excluded texts. ``kind_of(text)`` says how a text overlaps with them."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        self._runs: set[int] = set()
        self._units: set[str] = set()
        for text in excluded:
            words = _words(text)
            self._units.add(" ".join(words))
            self._units.update(_units(text))
            self._runs.update(self._hashes(words))

    @staticmethod
    def _hashes(words: list[str]) -> Iterator[int]:
        for i in range(len(words) - _RUN + 1):
            yield hash(tuple(words[i : i + _RUN]))

    def kind_of(self, text: str) -> str | None:
        """``13-gram`` or ``same text``; None when nothing is shared."""
        words = _words(text)
        if any(run in self._runs for run in self._hashes(words)):
            return "13-gram"
        if " ".join(words) in self._units or any(unit in self._units for unit in _units(text)):
            return "same text"
        return None


def read_texts(paths: Iterable[Path]) -> Iterator[str]:
    """Every string of every row of some JSON-lines files, whatever the rows' shape.

    Raises:
        DataError: a file cannot be read or a line is not JSON.
    """
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"excluded file {path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield from _strings(json.loads(line))
                except json.JSONDecodeError as error:
                    raise DataError(f"{path} line {number} is not JSON: {error.msg}") from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
