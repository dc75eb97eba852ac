"""Which text of an output accepted draft tokens made, however it is cut into deltas."""

from dataclasses import dataclass

__all__ = ["Origins", "Trace"]


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of a delta's text."""

    num_tokens: int
    """New tokens since the delta before."""
    num_accepted: int
    """Accepted draft tokens among them."""
    pieces: tuple[tuple[str, bool], ...]
    """(text, whether accepted draft tokens made it); together the delta's text. Text that several
    tokens share, such as a code point of many bytes, belongs to the one that completes it."""


class Origins:
    """Grows with the tokens of one output."""

    def __init__(self) -> None:
        self._accepted: list[bool] = []
        self._ends: list[int] = []
        self._chars = self._tokens = 0
        self._next = 0  # the first token whose text is not handed out whole

    def add(self, num_chars: int, accepted: bool) -> None:
        """One more token, behind which the text has ``num_chars`` characters."""
        self._accepted.append(accepted)
        self._ends.append(num_chars)

    def upto(self, text: str, num_tokens: int) -> Trace:
        """Of the delta ``text`` that ends with the first ``num_tokens`` tokens."""
        since, self._tokens = self._tokens, num_tokens
        begin, end = self._chars, self._chars + len(text)
        pieces: list[tuple[str, bool]] = []
        at = begin
        while at < end:
            known = self._next < len(self._ends)
            # what a flush adds behind the last token was made by none
            stop = min(self._ends[self._next], end) if known else end
            accepted = known and self._accepted[self._next]
            if stop > at:
                new = text[at - begin : stop - begin]
                if pieces and pieces[-1][1] == accepted:
                    new = pieces.pop()[0] + new
                pieces.append((new, accepted))
                at = stop
            if known and self._ends[self._next] <= at:
                self._next += 1
        self._chars = end
        new_tokens = self._accepted[since:num_tokens]
        return Trace(num_tokens - since, sum(new_tokens), tuple(pieces))
