"""One decode at a time on a worker thread: queue, cancellation, deadlines, figures.

The engine takes token ids and hands out text: a model decodes, in this process or in one of its
own, `TextStream` turns its commits into text and finds stop strings, and whatever stands behind a
stop counts nowhere: not in the text, nor in the usage, nor in the accept length. Between two steps
the worker looks whether the client has gone or the request's time is up.
"""

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from dspark.acceptance import AcceptStats
from dspark.decoding import (
    Commit,
    DecodeParams,
    Draft,
    NextNDraft,
    PrefixCache,
    accept_schedule,
    proposal_limit,
    stream,
)
from dspark.errors import ConfigError, DSparkError, RunError
from dspark.serving.card import ModelCard, card_of
from dspark.serving.metrics import Metrics
from dspark.serving.request import (
    Event,
    Failed,
    Finished,
    GenerateParams,
    Job,
    Output,
)
from dspark.serving.settings import ServeSettings
from dspark.target import GoOn, Target

__all__ = [
    "NEXTN_HAS_NONE",
    "Decoder",
    "Draining",
    "Engine",
    "EngineLost",
    "LocalModel",
    "Model",
    "NameTaken",
    "QueueFull",
    "check_confidence",
    "end_ids",
    "prefix_cache",
    "proposals",
    "simulated",
]

log = logging.getLogger(__name__)

NEXTN_HAS_NONE = "a NEXTN block has no confidence head"


class QueueFull(RunError):
    """As many requests wait as may."""


class NameTaken(RunError):
    """Two requests may not go by one name at a time."""


class Draining(RunError):
    """The engine takes no new requests."""


class EngineLost(RunError):
    """What decodes has ended or hangs, and will not come back."""

    # a supervisor waits, and taking the libraries apart takes over a second
    at_once = True


@dataclass(frozen=True)
class Decoder:
    """What makes commits of a prompt.

    Attributes:
        name: reference or graph.
        stream: as `decoding.stream`; closing what it returns leaves the device quiet.
        context: positions of a prompt and its output together; None: as many as the target knows.
        most_stops: ids that may end an output, the model's own among them; None: any number.
        logprobs: whether commits can have them.
        prefixes: prompts that it has read and may use again; None: it keeps none.
    """

    name: str
    stream: Callable[[Sequence[int], DecodeParams, GoOn], Iterator[Commit]]
    context: int | None = None
    most_stops: int | None = None
    logprobs: bool = False
    prefixes: PrefixCache | None = None


class Model(Protocol):
    """A target and its draft, ready to decode one prompt at a time."""

    @property
    def card(self) -> ModelCard: ...

    def stream(
        self, prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn, /
    ) -> Iterator[Commit]:
        """As `decoding.stream`.

        Raises:
            EngineLost: it hangs or has ended.
        """

    def forget(self) -> None:
        """Drop what is kept of earlier prompts; called while nothing is decoded.

        Raises:
            EngineLost: as above.
        """

    def check(self) -> None:
        """Called now and then while nothing is decoded.

        Raises:
            EngineLost: as above.
        """


class LocalModel:
    """One of this process.

    ``decoder``: None is the reference.

    Raises:
        ConfigError: ``num_draft_tokens`` does not fit the draft, or the model's own defaults of
            sampling cannot be run.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        settings: ServeSettings | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        settings = settings or ServeSettings()
        prefixes = prefix_cache(settings, draft)
        schedule = simulated(draft, settings)

        def reference(
            prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn
        ) -> Iterator[Commit]:
            return stream(target, draft, prompt_ids, params, prefixes, go_on, schedule)

        decoder = decoder or Decoder(
            "reference", reference, settings.context, logprobs=True, prefixes=prefixes
        )
        self._prefixes = decoder.prefixes
        self.stream = decoder.stream
        self.card = card_of(
            target,
            engine=decoder.name,
            context=decoder.context,
            most_stops=decoder.most_stops,
            logprobs=decoder.logprobs,
            algorithm=algorithm(draft),
            num_draft_tokens=proposals(draft, settings),
            prefix_cache_bytes=self._prefixes.most_bytes if self._prefixes is not None else 0,
        )

    def forget(self) -> None:
        """Drop what is kept of earlier prompts."""
        if self._prefixes is not None:
            self._prefixes.clear()

    def check(self) -> None:
        """This process lives as long as it does."""


class Engine:
    """FIFO queue and worker over a model."""

    def __init__(self, model: Model, tokenizer: Any, settings: ServeSettings | None = None) -> None:
        self.card = model.card
        self.settings = settings or ServeSettings()
        self._model = model
        # a copy: fast tokenizers refuse to be used from two threads at the same time
        self._tokenizer = copy.deepcopy(tokenizer)
        self.num_draft_tokens = model.card.num_draft_tokens
        self.metrics = Metrics(self.num_draft_tokens)
        self._stop_ids = end_ids(tokenizer)
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._wake = threading.Condition()
        self._draining = False
        self._closed = False
        self._forget = False
        self.lost: str | None = None
        """What became of the model when it ended or hung; no request is served any more."""
        self.commits = 0
        """How often tokens became final."""
        self._beat, self._patience_s = time.monotonic(), self.settings.step_timeout_s
        self._thread = threading.Thread(target=self._work, name="dspark-worker", daemon=True)
        self._thread.start()

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: GenerateParams,
        emit: Callable[[Event], None],
        *,
        rid: str | None = None,
    ) -> Job:
        """Queue a request.

        ``rid``: the caller's own name for it, by which `abort` finds it as well.

        Raises:
            QueueFull: ``max_queue`` requests wait already.
            Draining: the engine is about to end.
            EngineLost: it has lost its model.
            NameTaken: another request goes by this ``rid``.
        """
        job = Job(request_id, prompt_ids, params, emit, rid)
        with self._wake:
            if self.lost is not None:
                raise EngineLost(self.lost)
            if self._draining:
                raise Draining("the server is shutting down and takes no new requests")
            if rid is not None and any(rid in one.names for one in self._jobs()):
                raise NameTaken(f"another request with the rid '{rid}' is running or waiting")
            waiting = sum(not one.cancelled for one in self._queue)
            if self._running is not None and waiting >= self.settings.max_queue:
                raise QueueFull(f"{waiting} requests are waiting, which is the limit; try later")
            self._queue.append(job)
            self._wake.notify_all()
        return job

    def generate(
        self, prompt_ids: list[int], params: GenerateParams, request_id: str = "in-process"
    ) -> Finished:
        """Run one request and wait for its end.

        Raises:
            RunError: it failed; the worker's log has the cause.
        """
        events: SimpleQueue[Event] = SimpleQueue()
        self.submit(request_id, list(prompt_ids), params, events.put)
        while True:
            event = events.get()
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise RunError(event.message)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def trouble(self) -> str | None:
        """Why no request would be answered now; None: the worker lives and makes progress."""
        if self.lost is not None:
            return self.lost
        if self._draining:
            return "the server is shutting down"
        fresh = time.monotonic() - self._beat < self._patience_s
        return None if self._thread.is_alive() and fresh else "the worker makes no progress"

    @property
    def healthy(self) -> bool:
        return self.trouble is None

    def abort(self, name: str | None) -> list[str]:
        """End the request of that id or ``rid`` as it stands (None: all).

        Returns what those that were found are called; see `Job.names`.
        One that runs ends before its next step.
        """
        with self._wake:
            found = [job for job in self._jobs() if name is None or name in job.names]
            for job in found:
                job.cancel()
            self._wake.notify_all()
        return [job.names[0] for job in found]

    def _jobs(self) -> list[Job]:
        """Those that are not over; the lock is held."""
        running = [self._running] if self._running is not None else []
        return [job for job in [*running, *self._queue] if not job.cancelled]

    def flush(self) -> None:
        """Start the accept and step figures anew; the next request finds no earlier prompt."""
        self.metrics.flush()
        with self._wake:
            self._forget = True
            self._wake.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for those there are; False if they take longer."""
        end = time.monotonic() + timeout_s
        with self._wake:
            self._draining = True
            while self._queue or self._running is not None:
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._wake.wait(min(left, 0.5))
        return True

    def close(self) -> None:
        """End the worker; a running request is ended as it stands."""
        with self._wake:
            self._draining = self._closed = True
            for job in self._jobs():
                job.cancel()
            self._wake.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._try(job)
        except EngineLost as error:
            with self._wake:
                self.lost = str(error)
                jobs = [job for job in (self._running, *self._queue) if job is not None]
            for job in jobs:
                self._end(job, Failed("lost", self.lost))
            with self._wake:
                self._running = None
                self._queue.clear()
                self._wake.notify_all()

    def _try(self, job: Job) -> None:
        try:
            self._run(job)
        except EngineLost:
            raise
        except DSparkError as error:
            log.exception("request %s failed", job.request_id)
            self._end(job, Failed("error", str(error)))
        # Whatever goes wrong in one request, the next ones are served.
        except Exception as error:
            log.exception("request %s failed", job.request_id)
            self._end(job, Failed("error", f"{type(error).__name__} while decoding"))
        with self._wake:
            self._running = None
            self._wake.notify_all()

    def _next(self) -> Job | None:
        with self._wake:
            while True:
                self._model.check()
                if self._forget:
                    self._model.forget()
                    self._forget = False
                self._beat = time.monotonic()
                self._expire()
                if self._queue:
                    self._running = self._queue.popleft()
                    return self._running
                if self._closed:
                    return None
                self._wake.wait(0.5)

    def _expire(self) -> None:
        """End queued requests whose client has gone, that were aborted, or whose time is up."""
        for job in list(self._queue):
            if job.cancelled:
                self._queue.remove(job)
                self._end(job, self._unbegun(job))
            elif self._late(job):
                self._queue.remove(job)
                self._end(job, Failed("deadline", "no turn within the server's time limit"))

    def _unbegun(self, job: Job) -> Finished:
        waited = time.monotonic() - job.arrived
        return Finished(
            text="",
            token_ids=[],
            finish_reason="abort",
            stop=None,
            num_prompt_tokens=len(job.prompt_ids),
            stats=AcceptStats(self.num_draft_tokens),
            queue_s=waited,
            ttft_s=0.0,
            total_s=waited,
            decode_s=0.0,
            likelihoods=None if job.params.top_logprobs is None else [],
        )

    def _run(self, job: Job) -> None:
        params = job.params
        decode = DecodeParams(
            max_new_tokens=params.max_new_tokens,
            sampling=params.sampling,
            stop_ids=params.stop_ids | (frozenset() if params.ignore_eos else self._stop_ids),
            ignore_eos=params.ignore_eos,
            num_draft_tokens=(self.num_draft_tokens or None) if params.draft else 0,
            confidence_threshold=self.settings.confidence_threshold,
            top_logprobs=params.top_logprobs,
        )
        started = time.monotonic()
        first_s = 0.0
        out = Output(
            self._tokenizer,
            params.stop,
            self.num_draft_tokens,
            skip_special=params.skip_special,
            keep=params.keep,
            interval=params.interval,
            with_logprobs=params.top_logprobs is not None,
            trace=params.trace,
        )
        step_s = self.settings.step_timeout_s
        self._patience_s = step_s * self.card.prefill_steps(len(job.prompt_ids))
        commits = self._model.stream(job.prompt_ids, decode, lambda: self._wanted(job))
        try:
            while out.finish_reason is None:
                # asked behind it as well: there is none where reading the prompt was given up
                commit = next(commits, None) if self._wanted(job) else None
                if commit is None and not self._wanted(job):
                    out.abort()
                    break
                assert commit is not None, "commits end with one that has a finish reason"
                self.commits += 1
                self._beat, self._patience_s = time.monotonic(), step_s
                num_tokens, num_accepted = out.take(commit)
                if commit.num_proposed is None:
                    first_s = self._beat - job.arrived
                    self.metrics.first_token(first_s)
                else:
                    self.metrics.step(commit.step_s, commit.num_proposed, num_accepted, num_tokens)
                if out.finish_reason is None:
                    self._send(job, out)
                with self._wake:
                    self._expire()
        finally:
            # steps may be queued behind the last commit, and must be over before the next request
            if (close := getattr(commits, "close", None)) is not None:
                close()
        self._send(job, out)
        end = Finished(
            text=out.text,
            token_ids=out.token_ids,
            finish_reason=out.finish_reason or "abort",
            stop=out.stop,
            num_prompt_tokens=len(job.prompt_ids),
            stats=out.stats,
            queue_s=started - job.arrived,
            ttft_s=first_s,
            total_s=time.monotonic() - job.arrived,
            decode_s=out.decode_s,
            likelihoods=out.likelihoods,
            num_cached_tokens=out.num_cached_tokens,
        )
        self._end(job, end)

    def _wanted(self, job: Job) -> bool:
        return not (job.cancelled or self._late(job))

    def _late(self, job: Job) -> bool:
        return time.monotonic() - job.arrived > self.settings.deadline_s

    def _send(self, job: Job, out: Output) -> None:
        for delta in out.unsent():
            job.emit(delta)

    def _end(self, job: Job, end: Finished | Failed) -> None:
        self.metrics.ended(
            prompt_tokens=len(job.prompt_ids),
            cached_tokens=end.num_cached_tokens if isinstance(end, Finished) else 0,
            output_tokens=len(end.token_ids) if isinstance(end, Finished) else 0,
            seconds=time.monotonic() - job.arrived,
            how=end.finish_reason if isinstance(end, Finished) else end.reason,
        )
        job.emit(end)


def prefix_cache(settings: ServeSettings, draft: Draft | None) -> PrefixCache | None:
    """As the settings have it; None: every prompt is read whole, as a NEXTN block wants it."""
    most = 0 if isinstance(draft, NextNDraft) else settings.prefix_cache_bytes
    return PrefixCache(most) if most else None


def end_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that end an output beside the target's own."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return frozenset(() if eos is None else (eos,))


def algorithm(draft: Draft | None) -> str | None:
    """As SGLang names it; None without a draft."""
    if draft is None:
        return None
    return "NEXTN" if isinstance(draft, NextNDraft) else "DSPARK"


def proposals(draft: Draft | None, settings: ServeSettings) -> int:
    """Proposals a round at most; 0 without a draft.

    Raises:
        ConfigError: ``num_draft_tokens`` or ``confidence_threshold`` does not fit the draft.
    """
    wanted, threshold = settings.num_draft_tokens, settings.confidence_threshold
    if draft is None:
        if wanted is not None:
            raise ConfigError(f"serve.num_draft_tokens is {wanted}, but there is no draft")
        check_confidence("there is no draft", threshold)
        return 0
    if isinstance(draft, NextNDraft):
        check_confidence(NEXTN_HAS_NONE, threshold)
    elif threshold and draft.confidence_head is None:
        check_confidence("the draft has no confidence head", threshold)
    return proposal_limit(draft, wanted, threshold)


def simulated(draft: Draft | None, settings: ServeSettings) -> list[int]:
    """Accepted proposals of the steps of a request, in turn; empty: they are judged.

    Raises:
        ConfigError: no step can accept so many.
    """
    wanted = settings.simulate_accept_length
    if wanted is None:
        return []
    if draft is None:
        raise ConfigError(f"serve.simulate_accept_length is {wanted:g}, but there is no draft")
    try:
        return accept_schedule(wanted, proposals(draft, settings))
    except ConfigError as error:
        raise ConfigError(f"serve.simulate_accept_length: {error}") from None


def check_confidence(reason: str, threshold: float) -> None:
    """Refuse a threshold that would cut nothing, for a ``reason``.

    Raises:
        ConfigError: there is one.
    """
    if threshold:
        raise ConfigError(f"serve.confidence_threshold is {threshold}, but {reason}; leave it out")
