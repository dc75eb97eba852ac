"""Rows whose names a prompt's own id would take a second time.

A row is known by its prompt's id, `#n` behind it for further samples and `/n` for further sequences
of a conversation (`Response.key`). Ids that end so are common (`HumanEval/3`) and good, unless the
prompt `HumanEval` is answered into the same file: then the later of the two is rejected.
"""

import re
from collections.abc import Iterator

from dspark.config import SampleSettings
from dspark.corpus.prompts import Prompt
from dspark.corpus.seen import Seen

__all__ = ["RowNames"]

_SAMPLE = re.compile(r"(.+)#([1-9][0-9]{0,8})", re.DOTALL)
_PART = re.compile(r"(.+)/[1-9][0-9]{0,8}", re.DOTALL)


class RowNames:
    """The names of one file's rows. ``present``: (prompt id, sample) of those that stand there."""

    def __init__(self, settings: SampleSettings, present: set[tuple[str, int]]) -> None:
        self._samples = settings.samples_per_prompt
        self._parts = settings.regenerate == "all"
        self._present = present
        self._seen = Seen()

    def add(self, prompt: Prompt) -> None:
        """``prompt`` is about to be asked; call it before `clash`."""
        self._seen.add(prompt.id)

    def clash(self, prompt: Prompt, sample: int) -> str | None:
        """The prompt whose rows have a name that a row of this answer would get, or None."""
        for name, other in self._others(prompt, sample):
            asked = name in self._seen and other < self._samples
            if asked or (name, other) in self._present:
                return name
        return None

    def _others(self, prompt: Prompt, sample: int) -> Iterator[tuple[str, int]]:
        """(prompt id, sample) of every answer that could have a row of the same name."""
        for number in range(_sequences(prompt) if self._parts else 1):
            name = f"{prompt.id}/{number}" if number else prompt.id
            for like, which in _readings(name, sample):
                if (like, which) != (prompt.id, sample):
                    yield like, which
                if self._parts and (part := _PART.fullmatch(like)) and part[1] != prompt.id:
                    yield part[1], which


def _readings(name: str, sample: int) -> Iterator[tuple[str, int]]:
    """Every (row id, sample) that is written as this one."""
    yield name, sample
    if sample:
        yield f"{name}#{sample}", 0
    elif (found := _SAMPLE.fullmatch(name)) is not None:
        yield found[1], int(found[2])


def _sequences(prompt: Prompt) -> int:
    """Most sequences that the answers to a prompt can take."""
    given = [message for message in prompt.messages if message["role"] == "assistant"]
    return len(given) + len(prompt.followups) + 1
