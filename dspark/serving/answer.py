"""What an answer's text is made of: reasoning, and what is said.

The text arrives in pieces that end anywhere, so a marker may come in parts; what it becomes must
not depend on where it was cut. Line breaks at a marker are layout: they belong to neither side.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dspark.serving.stream import possible_start

__all__ = ["CLOSE", "OPEN", "Answer", "AnswerParser", "Part", "gather"]

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the answer, never empty."""

    kind: Literal["reasoning", "content"]
    text: str


class _Mode(Enum):
    BEGIN = "nothing but white space so far: reasoning may open here and nowhere else"
    REASONING = "between the markers"
    CONTENT = "what is said"


class AnswerParser:
    """Takes an output's text as it grows."""

    def __init__(self, *, separate: bool = True, opened: bool = False) -> None:
        """``separate``: False leaves reasoning and its markers in the content.

        ``opened``: the prompt ends inside the reasoning, as some chat templates have it.
        """
        self._opened = opened
        self._mode = _Mode.BEGIN if separate else _Mode.CONTENT
        self._text = ""
        self._fresh = False  # behind a marker: line breaks are layout
        self._breaks = ""  # line breaks that may stand before a marker
        self._parts: list[Part] = []
        self._taken = 0
        self.reasoning_chars = 0
        """Of the raw text, how much is reasoning, markers included."""

    def push(self, text: str) -> list[Part]:
        """What became certain with this text."""
        self._text += text
        while self._step():
            pass
        return self._parted()

    def flush(self) -> list[Part]:
        """What was held back, when no more text is to come."""
        if self._mode is _Mode.BEGIN and self._opened:
            self._enter(_Mode.REASONING, 0)
        self._say(self._text)
        self._take(len(self._text))
        if self._mode is _Mode.REASONING:
            self.reasoning_chars = self._taken
        elif self._breaks:
            self._parts.append(Part("content", self._breaks))
        self._breaks = ""
        return self._parted()

    def _step(self) -> bool:
        """Whether the mode changed, so that the rest must be looked at again."""
        if self._mode is _Mode.BEGIN:
            return self._begin()
        markers = (CLOSE,) if self._mode is _Mode.REASONING else ()
        at, marker = min(
            ((at, one) for one in markers if (at := self._text.find(one)) >= 0), default=(-1, "")
        )
        sure = at if marker else possible_start(self._text, markers)
        self._say(self._text[:sure])
        self._take(sure)
        if marker:
            self._enter(_Mode.CONTENT, len(marker))
            self.reasoning_chars = self._taken
        return bool(marker)

    def _begin(self) -> bool:
        said = self._text.lstrip()
        if said.startswith(OPEN):
            self._enter(_Mode.REASONING, len(self._text) - len(said) + len(OPEN))
        elif OPEN.startswith(said):
            return False
        elif self._opened:
            self._enter(_Mode.REASONING, 0)
        else:
            self._mode = _Mode.CONTENT
        return True

    def _enter(self, mode: _Mode, marker: int) -> None:
        self._mode, self._fresh, self._breaks = mode, True, ""
        self._take(marker)

    def _take(self, count: int) -> None:
        self._text = self._text[count:]
        self._taken += count

    def _say(self, text: str) -> None:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if not text:
            return
        text, self._breaks = self._breaks + text, ""
        if self._mode is _Mode.REASONING:
            kept = text.rstrip("\n")
            self._breaks = text[len(kept) :]
            text = kept
        if text:
            kind: Literal["reasoning", "content"] = (
                "reasoning" if self._mode is _Mode.REASONING else "content"
            )
            self._parts.append(Part(kind, text))

    def _parted(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    content: str
    reasoning: str


def gather(parts: Iterable[Part]) -> Answer:
    """All parts of one answer together."""
    texts = {"content": "", "reasoning": ""}
    for part in parts:
        texts[part.kind] += part.text
    return Answer(**texts)
