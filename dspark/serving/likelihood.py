"""Logprobs in words: the texts and bytes of tokens, which ids alone do not tell a client."""

import re
from dataclasses import dataclass
from typing import Any

from dspark.decoding import Logprob
from dspark.serving.stream import REPLACEMENT

__all__ = ["Likelihood", "TokenNames", "as_chat", "as_native", "as_text"]


@dataclass(frozen=True, slots=True)
class _Named:
    token: str
    raw: list[int] | None
    """None: the vocabulary does not tell the bytes."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one token of the output and of its alternatives."""

    name: _Named
    of: Logprob
    offset: int
    """Where its text begins, in characters."""
    top: tuple[_Named, ...]


class TokenNames:
    """Texts of single tokens, each looked up once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, _Named] = {}

    def likelihood(self, of: Logprob, offset: int) -> Likelihood:
        """The entry with its names."""
        top = tuple(self._name(token_id) for token_id, _ in of.top)
        return Likelihood(self._name(of.token_id), of, offset, top)

    def _name(self, token_id: int) -> _Named:
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> _Named:
        text = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        # None: a row of the model that the tokenizer has no token for
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        # decoders of this kind drop the space of the first piece they see
        if piece.startswith("▁") and not text.startswith(" "):
            text = " " + text
        if REPLACEMENT not in text:
            return _Named(text, list(text.encode()))
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return _Named(text, [int(byte[1], 16)])
        if all(letter in _BYTES for letter in piece):
            return _Named(text, [_BYTES[letter] for letter in piece])
        return _Named(text, None)


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _byte_letters()


def as_chat(entries: list[Likelihood]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def shown(name: _Named, logprob: float) -> dict[str, Any]:
        return {"token": name.token, "logprob": logprob, "bytes": name.raw}

    content = [
        {
            **shown(entry.name, entry.of.logprob),
            "top_logprobs": [
                shown(name, logprob)
                for name, (_, logprob) in zip(entry.top, entry.of.top, strict=True)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def as_text(entries: list[Likelihood]) -> dict[str, Any]:
    """`logprobs` of a completion's choice; of tokens of one text the likeliest is shown."""
    top: list[dict[str, float]] = []
    for entry in entries:
        shown: dict[str, float] = {}
        for name, (_, logprob) in zip(entry.top, entry.of.top, strict=True):
            shown.setdefault(name.token, logprob)
        # the chosen token is always there, as OpenAI has it
        shown.setdefault(entry.name.token, entry.of.logprob)
        top.append(shown)
    return {
        "tokens": [entry.name.token for entry in entries],
        "token_logprobs": [entry.of.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.offset for entry in entries],
    }


def as_native(entries: list[Likelihood], *, top: bool) -> dict[str, Any]:
    """Fields of `meta_info`, as SGLang has them; those of the prompt are not computed."""
    info: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [[entry.of.logprob, entry.of.token_id, None] for entry in entries],
    }
    if top:
        info["output_top_logprobs"] = [
            [[logprob, token_id, None] for token_id, logprob in entry.of.top] for entry in entries
        ]
    return info
