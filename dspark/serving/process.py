"""The engine in a process of its own, as the server sees it: every wait for it has an end.

A process that has died, or is silent for longer than its work may take, is lost: it is killed, and
whoever waits for it is told why.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context, resource_tracker
from types import TracebackType
from typing import Any, Final, Self, cast

from dspark import errors
from dspark.decoding import Commit, DecodeParams
from dspark.errors import DSparkError, RunError
from dspark.serving.card import ModelCard
from dspark.serving.child import STOPS, Load, main
from dspark.serving.engine import EngineLost
from dspark.serving.ranks.follow import LoadRank
from dspark.serving.ranks.lead import LoadLeader
from dspark.serving.ranks.started import Ranks
from dspark.serving.settings import ServeSettings
from dspark.serving.wire import (
    Broken,
    Committed,
    Decode,
    Ended,
    Forget,
    Gone,
    Ping,
    Pong,
    Ready,
    Stop,
    Taken,
    Wire,
)
from dspark.target import GoOn

__all__ = ["EngineProcess"]

log = logging.getLogger(__name__)

_METHOD: Final = "spawn"
_SLICE_S = 1.0
"""Waits are counted in pieces of this: time in which this process was stopped itself is none."""
_RANKS_SLICE_S = 0.1
"""The same where other ranks are looked at as well."""
_QUIET_S = 1.0
"""A process that was silent for longer is asked whether it is there."""
_PING_S = 0.5
_END_S = 5.0
"""For the end of a process that was told, or made, to end."""


class EngineProcess:
    """A `Model` that another process holds; leaving the context ends that process.

    ``load`` is called there, and must be a function that a new process finds by its name. With
    ``settings.tp`` ranks it is that of rank 0, and ``load_rank`` that of the others, each in a
    process of its own; both are given a `Seat`. ``shared_gpu``: all of them on one, for tests.

    Raises:
        DSparkError: what ``load`` raised.
        RunError: it ended with another error, or took longer than ``load_timeout_s``.
    """

    def __init__(
        self,
        load: Load | LoadLeader,
        settings: ServeSettings,
        load_rank: LoadRank | None = None,
        *,
        shared_gpu: bool = False,
    ) -> None:
        self._step_s = settings.step_timeout_s
        self._ranks: Ranks | None = None
        self._lost: EngineLost | None = None
        self._loading = True
        self._heard = self._asked = time.monotonic()
        self._pinged, self._silent_s = False, 0.0
        mine, theirs = socket.socketpair()
        self._wire = Wire(mine)
        levels = {name: logging.getLogger(name).level for name in ("", "dspark")}
        # started by the first process otherwise, and then it lets the signals through
        resource_tracker.ensure_running()
        # until the process has said what it wants, Ctrl-C would show a traceback from its imports
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            if load_rank is not None:
                self._ranks = Ranks(
                    get_context(_METHOD), load_rank, settings.tp, levels, settings.load_timeout_s,
                    shared_gpu=shared_gpu,
                )  # fmt: skip
                load = partial(cast("LoadLeader", load), self._ranks.seats[0])
            self._process = get_context(_METHOD).Process(
                target=main, args=(load, theirs, os.getpid(), levels), name="dspark-engine"
            )
            self._process.start()
            if self._ranks is not None:
                self._ranks.engine = self._process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        try:
            self.card = self._ready(settings.load_timeout_s)
        except BaseException:
            self.kill()
            self.close()
            raise
        self._loading = False

    @property
    def rank_pids(self) -> dict[int, int]:
        """Of all ranks; of an engine of one alone."""
        return {0: self.pid, **(self._ranks.pids if self._ranks is not None else {})}

    @property
    def pid(self) -> int:
        pid: int = self._process.pid or 0
        return pid

    def stream(
        self, prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn | None = None
    ) -> Iterator[Commit]:
        """As `decoding.stream`; closing it ends the decode at its next step.

        Raises:
            EngineLost: the process has died or hangs.
            RunError: this decode failed; the process's log has the cause.
        """
        self._tell(Decode(list(prompt_ids), params))
        # until the first commit; then steps
        limit_s = self._step_s * self.card.prefill_steps(len(prompt_ids))
        doing = f"reading a prompt of {len(prompt_ids)} tokens"
        ended = told = False
        try:
            while True:
                message = self._hear(limit_s, doing, go_on)
                go_on = None  # from here on the prompt has been read
                if isinstance(message, Committed):
                    told = message.commit.finish_reason is not None
                    yield message.commit
                    self._tell(Taken())
                elif isinstance(message, Broken):
                    told = True
                    raise RunError(message.message)
                elif isinstance(message, Ended):
                    ended = True
                    return
                limit_s, doing = self._step_s, "in a step"
        finally:
            if not ended and self._lost is None:
                if not told:
                    self._tell(Stop())
                while not isinstance(self._hear(self._step_s, "ending a request"), Ended):
                    pass

    def forget(self) -> None:
        """Drop what is kept of earlier prompts, before the next decode.

        Raises:
            EngineLost: the process has died or hangs.
        """
        self._tell(Forget())

    def check(self) -> None:
        """Is it there? Asks, and takes the answer at a later call."""
        if not self._process.is_alive():
            raise self._lose(self._end())
        if self._ranks is not None and (trouble := self._ranks.trouble()) is not None:
            raise self._lose(str(trouble))
        now = time.monotonic()
        waited, self._asked = min(now - self._asked, _PING_S), now
        if not self._pinged:
            if now - self._heard > _QUIET_S:
                self._tell(Ping())
                self._pinged, self._silent_s = True, 0.0
            return
        try:
            self._take(self._wire.receive(0))
        except TimeoutError:
            self._silent_s += waited
            if self._silent_s > self._step_s:
                raise self._lose(_hangs(self._step_s, "waiting for a request")) from None
        except EOFError:
            raise self._lose(self._end()) from None

    def kill(self) -> None:
        """End it at once, whatever it does; `close` waits until it has ended.

        One that holds much of a GPU's memory takes its time, and whoever waits for it is told now.
        """
        self._process.kill()
        if self._ranks is not None:
            self._ranks.kill()

    def close(self) -> None:
        """End it, when nothing is decoded any more."""
        self._wire.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            log.warning("the engine process does not end and is killed")
            self.kill()
            self._process.join(_END_S)
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ready(self, timeout_s: float) -> ModelCard:
        try:
            message = self._wait(timeout_s)
        except TimeoutError:
            raise RunError(
                f"the model was not loaded within {timeout_s:g} s (--load-timeout-s)"
            ) from None
        except EOFError:
            raise self._cause(RunError(f"loading the model: {self._end()}")) from None
        if isinstance(message, Gone):
            # of several ranks that refuse the same thing one speaks first
            raise _error(message)
        assert isinstance(message, Ready)
        return message.card

    def _tell(self, message: object) -> None:
        try:
            self._wire.send(message, self._step_s)
        except TimeoutError:
            raise self._lose(_hangs(self._step_s, "it should read a message")) from None
        except EOFError:
            raise self._lose(self._end()) from None

    def _hear(self, timeout_s: float, doing: str, go_on: GoOn | None = None) -> Any:
        while True:
            try:
                message = self._take(self._wait(timeout_s, go_on))
            except TimeoutError:
                raise self._lose(_hangs(timeout_s, doing)) from None
            except EOFError:
                raise self._lose(self._end()) from None
            if not isinstance(message, Pong):
                return message

    def _wait(self, timeout_s: float, go_on: GoOn | None = None) -> Any:
        whole_s = _SLICE_S if self._ranks is None else _RANKS_SLICE_S
        while True:
            if go_on is not None and not go_on():
                self._tell(Stop())
                go_on = None
            slice_s = min(timeout_s, whole_s)
            try:
                return self._wire.receive(slice_s)
            except TimeoutError:
                timeout_s -= slice_s
                if timeout_s <= 0:
                    raise
            if not self._process.is_alive():
                return self._last()
            if self._ranks is None:
                continue
            if (trouble := self._ranks.trouble(loading=self._loading)) is not None:
                raise self._cause(trouble) if self._loading else self._lose(str(trouble))

    def _cause(self, otherwise: DSparkError) -> DSparkError:
        """``otherwise``, unless a rank that has ended made the others fail."""
        if self._ranks is None:
            return otherwise
        return self._ranks.cause(otherwise, loading=self._loading)

    def _last(self) -> Any:
        """What a process said before it died, while others of its own hold the wire open."""
        try:
            return self._wire.receive(0)
        except TimeoutError:
            raise EOFError from None

    def _take(self, message: Any) -> Any:
        """What every message that comes says of the process."""
        self._heard, self._pinged = time.monotonic(), False
        if isinstance(message, Gone):
            raise self._lose(message.message)
        return message

    def _lose(self, reason: str) -> EngineLost:
        self._lost = EngineLost(str(self._cause(RunError(reason))))
        self.kill()
        return self._lost

    def _end(self) -> str:
        """How it ended."""
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "the engine process has closed its wire"
        if code >= 0:
            return f"the engine process ended with exit code {code}; its log says why"
        name = signal.Signals(-code).name
        why = ", for lack of memory perhaps" if -code == signal.SIGKILL else ""
        return f"the engine process was ended by {name}{why}"


def _hangs(timeout_s: float, doing: str) -> str:
    return f"the engine hangs: no sign of life for {timeout_s:g} s (--step-timeout-s) {doing}"


def _error(said: Gone) -> DSparkError:
    kind = getattr(errors, said.kind, RunError)
    known = isinstance(kind, type) and issubclass(kind, DSparkError)
    raised: DSparkError = (kind if known else RunError)(said.message)
    return raised
