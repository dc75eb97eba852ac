"""Sentence patterns with slots, and one random stream that fills them."""

import random
import re
from collections.abc import Mapping
from functools import cache

from dspark.corpus.task_patterns import PATTERNS
from dspark.corpus.task_words import WORDS

__all__ = ["Grammar", "grammar", "join"]

# <slot>, <2-30>, <name:2-30>, <name:20-200:5>. LaTeX and Python use braces, so slots do not.
_SLOT = re.compile(r"<(?:([A-Za-z]\w*):)?([A-Za-z]\w*|\d+-\d+(?::\d+)?)>")


class Grammar:
    """Sentence patterns with slots, filled from word lists by one random stream.

    ``<name>`` takes a value of the list (or pattern block) ``name`` and keeps it: the same slot
    later in the prompt is the same value. ``<name2>`` is another value of that list, ``<Name>`` the
    same value with a capital. ``<3-40>`` is a number, ``<a:3-40>`` one that ``<a>`` repeats,
    ``<a:20-200:5>`` one in steps of 5.
    """

    def __init__(self, words: Mapping[str, str], patterns: Mapping[str, str]) -> None:
        self._lists = {name: _weighted(text.split("|")) for name, text in words.items()}
        self._lists |= {n: _weighted(text.strip("\n").split("\n")) for n, text in patterns.items()}

    def pick(self, rng: random.Random, name: str) -> str:
        """A value of the list ``name``, its slots still open."""
        values, weights = self._lists[name]
        return rng.choices(values, weights)[0]

    def fill(self, rng: random.Random, pattern: str, known: dict[str, str] | None = None) -> str:
        """``pattern`` with every slot replaced; ``known`` holds (and collects) decided slots."""
        known = {} if known is None else known
        out: list[str] = []
        end = 0
        for match in _SLOT.finditer(pattern):
            label, kind = match[1] or match[2], match[2]
            key = label.lower()
            if key not in known or label[0].isdigit():
                known[key] = self._draw(rng, kind, known)
            text = known[key]
            if label[0].isupper():
                text = text[:1].upper() + text[1:]
            before = pattern[end : match.start()]
            if text[:1].lower() in "aeiou":
                before = re.sub(r"\b([Aa]) $", r"\1n ", before)
            out += [before, text]
            end = match.end()
        return "".join(out) + pattern[end:]

    def _draw(self, rng: random.Random, kind: str, known: dict[str, str]) -> str:
        if kind[0].isdigit():
            low, high, *step = map(int, re.split("[-:]", kind))
            return str(rng.randrange(low, high + 1, *step))
        name = kind.lower()
        if name in self._lists:
            return self.fill(rng, self.pick(rng, name), known)
        name = name.rstrip("0123456789")
        taken = {value for key, value in known.items() if key.rstrip("0123456789") == name}
        text = ""
        for _ in range(40):  # every list has more values than a pattern has slots for it
            text = self.fill(rng, self.pick(rng, name))
            if text not in taken:
                break
        return text


def _weighted(lines: list[str]) -> tuple[list[str], list[int]]:
    values, weights = [], []
    for line in lines:
        match = re.match(r"\*(\d+) ?", line)
        weights.append(int(match[1]) if match else 1)
        values.append(line[match.end() :] if match else line)
    return values, weights


@cache
def grammar() -> Grammar:
    """The grammar over this package's own words."""
    return Grammar(WORDS, PATTERNS)


def join(first: str, second: str, between: str) -> str:
    """Both texts with ``between`` in the middle, or the one that is not empty."""
    return f"{first}{between}{second}" if first and second else first or second
