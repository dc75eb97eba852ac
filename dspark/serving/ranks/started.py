"""The ranks of a service as its server sees them: it starts them, and tells which one is lost.

A process that has died, or whose memory shows no sign of life, names its rank. A rank that lives
and waits for another is not silent: signs of life come from a thread of their own.
"""

import logging
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from dspark import errors
from dspark.errors import DSparkError, RunError
from dspark.serving.ranks.board import Board, Topic
from dspark.serving.ranks.follow import BROKEN_OFF, LoadRank, main
from dspark.serving.ranks.seat import Seat

__all__ = ["Ranks"]

log = logging.getLogger(__name__)

_SILENT_S = 2.5
"""A rank that shows no sign of life for longer hangs."""
_LOOK_S = 0.6
"""Time between two looks counts up to this: the server may have been stopped itself."""
_CAUSE_S = 0.5
"""How long the first cause of a failure is looked for."""
_END_S = 5.0
"""For the end of all processes that were killed."""


class Ranks:
    """The followers' processes, and the memory that all ranks share."""

    def __init__(
        self,
        context: BaseContext,
        load: LoadRank,
        ranks: int,
        levels: Mapping[str, int],
        load_timeout_s: float,
        *,
        shared_gpu: bool = False,
    ) -> None:
        self._board = Board(ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-ranks-")
        meeting = str(Path(self._folder.name) / "meeting")
        self.seats = [
            Seat(rank, ranks, self._board.name, meeting, load_timeout_s, shared_gpu)
            for rank in range(ranks)
        ]
        self._processes: dict[int, BaseProcess] = {}
        self.engine: BaseProcess | None = None
        """Rank 0's, which another one starts."""
        self._pulse = [_Pulse() for _ in self.seats]
        for seat in self.seats[1:]:
            process = context.Process(  # type: ignore[attr-defined]
                target=main, args=(load, seat, os.getpid(), levels),
                name=f"dspark-rank-{seat.rank}",
            )  # fmt: skip
            process.start()
            self._processes[seat.rank] = process
            log.info("rank %d is process %d", seat.rank, process.pid)

    @property
    def pids(self) -> dict[int, int]:
        """Of the followers."""
        return {rank: process.pid or 0 for rank, process in self._processes.items()}

    def trouble(self, *, loading: bool = False) -> DSparkError | None:
        """What has become of a rank that is lost; None: all are there.

        While they load, none is silent too long: reading a file may be all that a process does.
        """
        return self._first(loading=loading) or self._left()

    def cause(self, otherwise: DSparkError, *, loading: bool = False) -> DSparkError:
        """Which rank made the others fail; ``otherwise`` where none is found."""
        end = time.monotonic() + _CAUSE_S
        while time.monotonic() < end:
            if (first := self._first(loading=loading)) is not None:
                return first
            time.sleep(0.02)
        return otherwise

    def _left(self) -> DSparkError | None:
        """A rank that has ended since another one left it: not the first to end."""
        for rank, process in self._processes.items():
            if process.exitcode == BROKEN_OFF:
                return RunError(f"rank {rank} was left by another rank")
        return None

    def _first(self, *, loading: bool) -> DSparkError | None:
        engine = {0: self.engine} if self.engine is not None else {}
        for rank, process in {**engine, **self._processes}.items():
            # an engine that ends by itself says why
            own = rank == 0 and (process.exitcode or 0) >= 0
            if not process.is_alive() and process.exitcode != BROKEN_OFF and not own:
                return self._end(rank, process)
        if loading:
            return None
        for rank, pulse in enumerate(self._pulse):
            if pulse.silent_s(self._board.beats(rank)) > _SILENT_S:
                return RunError(f"{_name(rank)} hangs: no sign of life for {_SILENT_S:g} s")
        return None

    def kill(self) -> None:
        """End all of them at once."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """The same, wait until they have ended, and give the memory back."""
        self.kill()
        end = time.monotonic() + _END_S
        for process in self._processes.values():
            process.join(max(0.0, end - time.monotonic()))
        self._board.close(last=True)
        self._folder.cleanup()

    def _end(self, rank: int, process: BaseProcess) -> DSparkError:
        if (said := self._board.said(rank, Topic.END)) is not None:
            name, message = pickle.loads(said)
            kind = getattr(errors, name, RunError)
            return kind(message) if name != "RunError" else RunError(f"rank {rank}: {message}")
        code = process.exitcode or 0
        if code >= 0:
            return RunError(f"rank {rank} ended with exit code {code}; its log says why")
        why = ", for lack of memory perhaps" if -code == signal.SIGKILL else ""
        return RunError(f"{_name(rank)} was ended by {signal.Signals(-code).name}{why}")


def _name(rank: int) -> str:
    return "rank 0, the engine process," if rank == 0 else f"rank {rank}"


class _Pulse:
    """Signs of life of one rank, as they were seen."""

    def __init__(self) -> None:
        self._beats, self._silent_s, self._seen = -1, 0.0, time.monotonic()

    def silent_s(self, beats: int) -> float:
        """Seconds without one, up to now."""
        now = time.monotonic()
        passed, self._seen = min(now - self._seen, _LOOK_S), now
        self._silent_s = 0.0 if beats != self._beats else self._silent_s + passed
        self._beats = beats
        return self._silent_s
