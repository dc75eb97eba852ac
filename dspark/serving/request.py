"""One request in the engine: its parameters, its events, and its output as it grows."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dspark.acceptance import AcceptStats
from dspark.decoding import Commit, SamplingParams
from dspark.serving.likelihood import Likelihood, TokenNames
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
    keep: frozenset[int] = frozenset()
    """Special tokens that stand in it nevertheless: marks that its reader needs."""
    interval: int | None = None
    """Tokens of one `Delta`; None: as many as became final together."""
    top_logprobs: int | None = None
    """As `DecodeParams` has it."""
    draft: bool = True
    """False: decode as if there were no draft."""
    trace: bool = False
    """Say of each piece of text whether its token came from the draft."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a running request; with an interval it may be empty."""

    text: str
    num_tokens: int
    """Tokens of the output so far, those whose text is still held back included."""
    likelihoods: list[Likelihood] | None = None
    """Of the tokens since the last one, where they were asked for."""
    trace: Trace | None = None
    """Where the new text came from, if that was asked for."""
    num_cached_tokens: int = 0
    """Of the prompt, those that were not read again."""


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
    likelihoods: list[Likelihood] | None = None
    """Of all tokens, where they were asked for."""
    num_cached_tokens: int = 0
    """Of the prompt, those that were not read again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be carried out; the engine goes on, unless it is lost."""

    reason: Literal["error", "deadline", "lost"]
    message: str


Event = Delta | Finished | Failed


@dataclass(eq=False, slots=True)
class Job:
    """A request in the engine. ``emit`` is called on the worker's thread, last with the end."""

    request_id: str
    prompt_ids: list[int]
    params: GenerateParams
    emit: Callable[[Event], None]
    rid: str | None = None
    """The caller's own name for it."""
    arrived: float = field(default_factory=time.monotonic)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Give up: no further step is run for it, and no further event is of interest."""
        self._cancelled.set()

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called by; first the one that its answer carries."""
        return (self.request_id,) if self.rid is None else (self.rid, self.request_id)

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
        keep: frozenset[int] = frozenset(),
        interval: int | None = None,
        with_logprobs: bool = False,
        trace: bool = False,
    ) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.stats = AcceptStats(block_size)
        self.stop: str | None = None
        self.finish_reason: FinishReason | None = None
        self.decode_s = 0.0
        self.num_cached_tokens = 0
        self._stream = TextStream(tokenizer, stops, skip_special=skip_special, keep=keep)
        self._interval = interval
        self._origins = Origins() if trace else None
        self.likelihoods: list[Likelihood] | None = [] if with_logprobs else None
        self._names = TokenNames(tokenizer)
        self._sent = self._sent_tokens = 0
        self._due: list[tuple[int, int]] = []  # length of the text, and tokens, of whole intervals

    def take(self, commit: Commit) -> tuple[int, int]:
        """Add a commit; (tokens that count, accepted proposals among them)."""
        ids = commit.token_ids
        self.num_cached_tokens += commit.num_reused
        # a stop id ends the text, it is none
        readable = ids[:-1] if commit.finish_reason == "stop" else ids
        num_accepted = 0 if commit.num_proposed is None else commit.num_accepted
        begins: list[int] = []
        num_tokens = self._push(readable, num_accepted, begins)
        begins.append(self._stream.num_chars)
        if self.stop is not None:
            ids = ids[:num_tokens]
        elif commit.finish_reason is not None:
            self.finish_reason = "stop" if commit.finish_reason == "stop" else "length"
            self._add(self._stream.flush())
        self.token_ids += ids
        if self.likelihoods is not None:
            # the token that ends the output has no text and begins behind it
            self.likelihoods += map(
                self._names.likelihood, (commit.logprobs or [])[: len(ids)], begins
            )
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

    def unsent(self) -> list[Delta]:
        """What was not asked for yet."""
        due, self._due = self._due, []
        deltas = [self._delta(chars, num_tokens) for chars, num_tokens in due]
        # with an interval this is what its last one left, or held back
        rest = self._interval is None or self.finish_reason is not None
        if rest and len(self.text) > self._sent:
            deltas.append(self._delta(len(self.text), len(self.token_ids)))
        return deltas

    def _delta(self, chars: int, num_tokens: int) -> Delta:
        text, self._sent = self.text[self._sent : chars], chars
        since, self._sent_tokens = self._sent_tokens, num_tokens
        return Delta(
            text,
            num_tokens,
            None if self.likelihoods is None else self.likelihoods[since:num_tokens],
            None if self._origins is None else self._origins.upto(text, num_tokens),
            self.num_cached_tokens,
        )

    def _push(self, ids: list[int], num_accepted: int, begins: list[int]) -> int:
        """Add the text of these tokens; how many of them count.

        Where it is asked for by token, ``begins`` gets where the text of each begins.
        """
        if self._interval is None and self.likelihoods is None and self._origins is None:
            piece = self._stream.push(ids)
            self._add(piece)
            return piece.num_tokens
        # the text does not depend on where the pushes are cut
        for index, token_id in enumerate(ids):
            begins.append(self._stream.num_chars)
            self._add(self._stream.push([token_id]))
            if self._origins is not None:
                self._origins.add(self._stream.num_chars, index < num_accepted)
            num_tokens = len(self.token_ids) + index + 1
            if self._interval is not None and num_tokens % self._interval == 0:
                self._due.append((len(self.text), num_tokens))
            if self.stop is not None:
                return index + 1
        return len(ids)

    def _add(self, piece: Piece) -> None:
        self.text += piece.text
        if piece.stop is not None:
            self.stop, self.finish_reason = piece.stop, "stop"
