"""What an answer's text is made of: reasoning, what is said, and calls of tools.

The text arrives in pieces that end anywhere, so a marker may come in parts; what it becomes must
not depend on where it was cut. Line breaks at a marker are layout: they belong to neither side.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dspark.serving.calls import OPEN_CALL, Call, CallReader
from dspark.serving.stream import possible_start

__all__ = ["CLOSE", "OPEN", "Answer", "AnswerParser", "Part", "gather"]

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the answer, never empty, or a whole call."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: Call | None = None


class _Mode(Enum):
    BEGIN = "nothing but white space so far: reasoning may open here and nowhere else"
    REASONING = "between the markers"
    CONTENT = "what is said"


class AnswerParser:
    """Takes an output's text as it grows.

    A call is given out when it is whole; what turns out to be none is text of where it stands.
    Calls are found inside reasoning as well, since models forget to close it.
    """

    def __init__(
        self,
        *,
        separate: bool = True,
        opened: bool = False,
        calls: Callable[[], CallReader] | None = None,
    ) -> None:
        """``separate``: False leaves reasoning and its markers in the content.

        ``opened``: the prompt ends inside the reasoning, as some chat templates have it.
        ``calls``: makes a reader of one call; None leaves calls in the text.
        """
        self._opened = opened
        self._calls = calls
        self._reader: CallReader | None = None
        self._call_at: int | None = None
        self._mode = _Mode.BEGIN if separate else _Mode.CONTENT
        self._text = ""
        self._fresh = False  # behind a marker: line breaks are layout
        self._breaks = ""  # line breaks that may stand before a marker
        self._parts: list[Part] = []
        self._taken = 0
        self.reasoning_chars = 0
        """Of the raw text, how much is reasoning, markers included and calls at its end not."""

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
        if self._reader is not None:
            self._called(self._reader.finish(), len(self._text))
        self._say(self._text)
        self._take(len(self._text))
        if self._mode is _Mode.REASONING:
            self.reasoning_chars = self._taken if self._call_at is None else self._call_at
        elif self._breaks:
            self._parts.append(Part("content", self._breaks))
        self._breaks = ""
        return self._parted()

    def _step(self) -> bool:
        """Whether the mode changed, so that the rest must be looked at again."""
        if self._mode is _Mode.BEGIN:
            return self._begin()
        if self._reader is not None:
            if (verdict := self._reader.scan(self._text)) is not None:
                self._called(verdict.call, verdict.end)
            return verdict is not None
        markers: tuple[str, ...] = (CLOSE,) if self._mode is _Mode.REASONING else ()
        markers += (OPEN_CALL,) if self._calls is not None else ()
        at, marker = min(
            ((at, one) for one in markers if (at := self._text.find(one)) >= 0), default=(-1, "")
        )
        sure = at if marker else possible_start(self._text, markers)
        self._say(self._text[:sure])
        self._take(sure)
        if marker == CLOSE:
            self._enter(_Mode.CONTENT, len(marker))
            self.reasoning_chars = self._taken
        elif self._calls is not None and marker:
            self._reader = self._calls()
            self._take(len(marker))
        return bool(marker)

    def _called(self, call: Call | None, end: int) -> None:
        """The call that was being read ends there, or is none."""
        self._reader = None
        if call is None:
            self._say(OPEN_CALL)
            return
        if self._call_at is None:
            self._call_at = self._taken - len(OPEN_CALL)
        self._parts.append(Part("call", call=call))
        self._enter(self._mode, end)

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
        if self._mode is _Mode.REASONING or self._calls is not None:
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
    calls: tuple[Call, ...] = ()


def gather(parts: Iterable[Part]) -> Answer:
    """All parts of one answer together."""
    parts = list(parts)
    content, reasoning = (
        "".join(part.text for part in parts if part.kind == kind)
        for kind in ("content", "reasoning")
    )
    return Answer(content, reasoning, tuple(part.call for part in parts if part.call is not None))
