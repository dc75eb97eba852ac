"""From committed token ids to text that is safe to send: whole code points, cut at a stop string.

A step commits up to block_size + 1 tokens at once, so neither a code point nor a stop string ends
where a commit ends. What reaches the client must not depend on where the commits were cut: the
text, and the number of tokens that count, are those of decoding one token at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Detokenizer",
    "Piece",
    "StopMatcher",
    "TextStream",
    "num_tokens_of",
    "possible_start",
    "special_ids",
]

REPLACEMENT = "\ufffd"
"""What a tokenizer decodes to where bytes are missing or wrong."""


class Detokenizer:
    """Incremental decoding: the pushes and the flush add up to the text of all ids.

    The ids of the last piece stay in the window as a prefix, because some decoders (SentencePiece)
    drop the space of the first piece they see. Text that ends in the replacement character may be
    the start of a code point whose bytes come with the next token, so it is held back; text before
    it is final. Byte-fallback decoders turn a whole run of bytes into replacement characters while
    the run is incomplete, which is why all trailing ones are held, not just the last.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special: bool = True, keep: frozenset[int] = frozenset()
    ) -> None:
        """``tokenizer``: of transformers; ``skip_special``: no special tokens in the text.

        ``keep``: special tokens that stand in the text nevertheless.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special and not keep
        self._dropped = special_ids(tokenizer) - keep if skip_special and keep else frozenset()
        self._prefix: list[int] = []
        self._prefix_text = ""
        self._pending: list[int] = []
        self._sent = 0  # characters of decode(prefix + pending) that were returned already

    def _decode(self, ids: list[int]) -> str:
        if self._dropped:
            ids = [one for one in ids if one not in self._dropped]
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became final with these ids, maybe empty."""
        self._pending.extend(token_ids)
        text = self._decode(self._prefix + self._pending)
        final = text.rstrip(REPLACEMENT)
        new = final[self._sent :]
        if final == text and len(text) > len(self._prefix_text):
            # A clean border. Ids without text (special tokens) make none: behind a prefix of
            # nothing the next piece would lose its space.
            self._prefix, self._pending = self._pending, []
            self._prefix_text = self._decode(self._prefix)
            self._sent = len(self._prefix_text)
        else:
            self._sent = max(self._sent, len(final))
        return new

    def flush(self) -> str:
        """What was held back: bytes that never became a code point, as replacement characters."""
        text = self._decode(self._prefix + self._pending)
        new, self._sent = text[self._sent :], len(text)
        return new

    def whole(self, token_ids: Sequence[int]) -> str:
        """What is final of the text of these ids alone."""
        return self._decode(list(token_ids)).rstrip(REPLACEMENT)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)


def num_tokens_of(detokenizer: Detokenizer, token_ids: Sequence[int], chars: int) -> int:
    """How many of the tokens it takes until the text has ``chars`` characters."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        if len(detokenizer.whole(token_ids[:middle])) >= chars:
            high = middle
        else:
            low = middle + 1
    return low


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    First means: the one that is complete earliest, and of those that end together the longest; so
    the result does not depend on the pieces. Text that may be the start of a stop string is held
    back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: non-empty strings."""
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to send; after a match (``matched``) nothing more comes."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = possible_start(text, self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back, when no more is to come."""
        text, self._held = self._held, ""
        return text


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Where a marker may have begun that is not complete yet; the text's length if none has."""
    longest = max((len(marker) for marker in markers), default=0)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[at:]
        if any(marker.startswith(tail) for marker in markers):
            return at
    return len(text)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a push yields."""

    text: str
    """Safe to send; may be empty."""
    num_tokens: int
    """How many of the pushed tokens count: all, or those through the one that completed a stop."""
    stop: str | None
    """The stop string that ended the text (it is not part of it)."""


class TextStream:
    """Detokeniser and stop matcher in a row."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        *,
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, keep=keep)
        self._matcher = StopMatcher(stops) if stops else None
        self.num_chars = 0
        """Of the text so far, what a stop string holds back included."""

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Take the tokens of one commit.

        With stop strings the ids go through one by one, as plain decoding would see them: the
        token that completes the string is the last that counts, wherever the block ends.
        """
        if self._matcher is None:
            text = self._detokenizer.push(token_ids)
            self.num_chars += len(text)
            return Piece(text, len(token_ids), None)
        text = ""
        for index, token_id in enumerate(token_ids):
            new = self._detokenizer.push([token_id])
            self.num_chars += len(new)
            text += self._matcher.push(new)
            if self._matcher.matched is not None:
                return Piece(text, index + 1, self._matcher.matched)
        return Piece(text, len(token_ids), None)

    def flush(self) -> Piece:
        """Everything that was held back, when no more tokens are to come."""
        text = self._detokenizer.flush()
        if self._matcher is None:
            return Piece(text, 0, None)
        text = self._matcher.push(text)
        if self._matcher.matched is None:
            text += self._matcher.flush()
        return Piece(text, 0, self._matcher.matched)
