"""What of a prompt is compared: with equal ones, with excluded texts and with near ones."""

import hashlib
import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

from dspark.corpus.near import shingles
from dspark.corpus.overlap import strings
from dspark.corpus.prompts import Prompt
from dspark.corpus.signs import signed_tokens
from dspark.corpus.words import Hashes, hashes

__all__ = ["every_text", "near_runs", "normalised", "number"]

_SPOKEN = ("content", "reasoning_content")


def normalised(prompt: Prompt) -> str:
    """The whole prompt with white space folded and accents in one form.

    NFC and not NFKC, which would make 2² and 22 the same exercise; what differs in such forms
    only is left to the search for near duplicates.
    """
    return _canonical([prompt.messages, list(prompt.followups), prompt.tools])


def every_text(prompt: Prompt) -> Iterator[tuple[str, bool]]:
    """Every text of the row that is written of a prompt, and whether the whole of it is one that
    somebody said.

    What else a row holds (tools, arguments, labels, JSON inside a text) has short texts such as
    "string" that many sets share. Where the row came from, a path, is no text.
    """
    spoken = [message[key] for message in prompt.messages for key in _SPOKEN if key in message]
    for whole in (*spoken, *prompt.followups):
        for place, text in enumerate(strings(whole)):
            yield text, place == 0
    rest = [
        {key: value for key, value in message.items() if key not in (*_SPOKEN, "role")}
        for message in prompt.messages
    ]
    for text in strings([rest, prompt.tools, prompt.id, prompt.category], keys=True):
        yield text, False


def near_runs(prompt: Prompt) -> Hashes:
    """[runs] of the user's texts, such that prompts that differ in any other message share none.

    Were the runs of a long system prompt counted among them, all questions behind it would be near
    to one another.
    """
    asked = [message["content"] for message in prompt.messages if message["role"] == "user"]
    asked += prompt.followups
    numbers = np.concatenate([hashes(signed_tokens(text)) for text in asked])
    if not len(numbers):
        # where there is no word, all of the text is one
        numbers = hashes(["".join("".join(asked).split())])
    around = [message for message in prompt.messages if message["role"] != "user"]
    if not around and not prompt.tools:
        return shingles(numbers)
    words = " ".join(signed_tokens(_canonical([around, prompt.tools])))
    return shingles(numbers) ^ np.uint64(number(words, 8))


def number(text: str, size: int = 16) -> int:
    """A hash of ``size`` bytes, the same in every process."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size)
    return int.from_bytes(digest.digest(), "big")


def _canonical(value: Any) -> str:
    return json.dumps(_folded(value), ensure_ascii=False, sort_keys=True)


def _folded(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, list):
        return [_folded(part) for part in value]
    if isinstance(value, dict):
        return {key: _folded(part) for key, part in value.items()}
    return value
