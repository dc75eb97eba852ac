"""One request in the engine: its parameters, its events, and its output as it grows."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.acceptance import AcceptStats
from dspark.decoding import Commit, SamplingParams
from dspark.serving.origin import Origins, Trace
from dspark.serving.stream import Piece, TextStream

__all__ = [
    "Delta",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "GenerateParams",
    "Job",
    "Output",
]

FinishReason = Literal["stop", "length", "abort"]
"""abort: the client left, the deadline passed, or the server stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateParams:
    """What one request asks for; every value is the effective one."""

    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    """Beside the model's own ends, and even with ``ignore_eos``."""
    ignore_eos: bool = False
    skip_special: bool = True
    """Leave special tokens out of the text."""
    draft: bool = True
    """False: decode as if there were no draft."""
    trace: bool = False
    """Say of each piece of text whether its token came from the draft."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a running request."""

    text: str
    num_tokens: int
    """Tokens of the output so far, those whose text is still held back included."""
    trace: Trace | None = None
    """Where the new text came from, if that was asked for."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, and all that is known about it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop: str | None
    """The stop string that ended it, if one did."""
    num_prompt_tokens: int
    stats: AcceptStats
    queue_s: float
    ttft_s: float
    """From arrival to the first token, queue and prefill included; 0 when there was none."""
    total_s: float
    decode_s: float
    """Time of its steps, the prefill's not included."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be carried out; the engine goes on."""

    reason: Literal["error", "deadline", "abort"]
    message: str


Event = Delta | Finished | Failed


@dataclass(eq=False, slots=True)
class Job:
    """A request in the engine. ``emit`` is called on the worker's thread, last with the end."""

    request_id: str
    prompt_ids: list[int]
    params: GenerateParams
    emit: Callable[[Event], None]
    arrived: float = field(default_factory=time.monotonic)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Give up: no further step is run for it, and no further event is of interest."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()


class Output:
    """The output of one request as it grows, cut at the first stop."""

    def __init__(
        self,
        tokenizer: Any,
        stops: tuple[str, ...],
        block_size: int,
        *,
        skip_special: bool = True,
        trace: bool = False,
    ) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.stats = AcceptStats(block_size)
        self.stop: str | None = None
        self.finish_reason: FinishReason | None = None
        self.decode_s = 0.0
        self._stream = TextStream(tokenizer, stops, skip_special=skip_special)
        self._sent = 0
        self._origins = Origins() if trace else None

    def take(self, commit: Commit) -> tuple[int, int]:
        """Add a commit; (tokens that count, accepted proposals among them)."""
        ids = commit.token_ids
        # a stop id ends the text, it is none
        readable = ids[:-1] if commit.finish_reason == "stop" else ids
        num_tokens = self._push(readable, 0 if commit.num_proposed is None else commit.num_accepted)
        if self.stop is not None:
            ids = ids[:num_tokens]
        elif commit.finish_reason is not None:
            self.finish_reason = "stop" if commit.finish_reason == "stop" else "length"
            self._add(self._stream.flush())
        self.token_ids += ids
        if commit.num_proposed is None:
            return len(ids), 0
        self.decode_s += commit.step_s
        accepted = min(commit.num_accepted, len(ids))
        self.stats.add(
            num_proposed=commit.num_proposed, num_accepted=accepted, num_emitted=len(ids)
        )
        return len(ids), accepted

    def abort(self) -> None:
        """End where it stands."""
        self.finish_reason = "abort"
        self._add(self._stream.flush())

    def unsent(self) -> Delta | None:
        """Text that was not asked for yet; None when there is none."""
        new, self._sent = self.text[self._sent :], len(self.text)
        if not new:
            return None
        num_tokens = len(self.token_ids)
        trace = None if self._origins is None else self._origins.upto(new, num_tokens)
        return Delta(new, num_tokens, trace)

    def _push(self, ids: list[int], num_accepted: int) -> int:
        """Add the text of these tokens; how many of them count."""
        if self._origins is None:
            piece = self._stream.push(ids)
            self._add(piece)
            return piece.num_tokens
        # the text does not depend on where the pushes are cut
        for index, token_id in enumerate(ids):
            self._add(self._stream.push([token_id]))
            self._origins.add(len(self.text), index < num_accepted)
            if self.stop is not None:
                return index + 1
        return len(ids)

    def _add(self, piece: Piece) -> None:
        self.text += piece.text
        if piece.stop is not None:
            self.stop, self.finish_reason = piece.stop, "stop"
