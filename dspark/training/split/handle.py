"""One target worker as its trainer sees it: its process, its slots, its answers, its end."""

import signal
from collections import deque
from collections.abc import Mapping
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from dspark.config import TargetSettings
from dspark.errors import RunError
from dspark.training.split.buffer import Buffer, Layout
from dspark.training.split.worker import Compute, Computed, Failed, Start, serve

__all__ = ["Handle"]

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PATIENCE = 5.0  # seconds for a worker to end by itself
_LAST_WORD = 1.0  # seconds; a dead process's ends of pipes do not close all at once


class Handle:
    """A worker on ``device`` with ``queue`` slots, for a trainer on ``trainer``.

    Raises (in everything that waits for it):
        RunError: it failed or died; while the target is loaded, the error of the loading instead.
    """

    def __init__(
        self, settings: TargetSettings, device: str, queue: int, trainer: torch.device
    ) -> None:
        self.device = device
        self.slots = tuple(Buffer() for _ in range(queue))
        self.parcel = Buffer()
        self.free = deque(range(queue))
        self._found: deque[Computed] = deque()
        self._loaded = False
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        threads = torch.get_num_threads()
        start = Start(theirs, settings, device, self.slots, self.parcel, threads)
        self.process = context.Process(target=serve, args=(start,), name=f"target on {device}")
        # Stop signals often go to all processes of a terminal or a job. A mask is inherited from
        # the first instruction on; the tracker, if this process has none yet, would undo it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        for slot in self.slots:
            slot.page_locked = trainer.type == "cuda"

    def wait_until_loaded(self) -> None:
        """Until its target is there."""
        self._receive()
        self._loaded = True

    def compute(
        self,
        inputs: Mapping[str, Tensor],
        spans: tuple[tuple[int, int, int], ...],
        layer_ids: tuple[int, ...],
    ) -> None:
        """Have the features of ``inputs`` computed in a free slot."""
        slot = self.free.popleft()
        self._send(Compute(slot, self.slots[slot].write(inputs), spans, layer_ids))

    def next_features(self) -> tuple[int, Layout]:
        """Slot and layout of the oldest features that were asked for."""
        found = self._found.popleft() if self._found else self._receive()
        assert isinstance(found, Computed)
        return found.slot, found.features

    def ask(self, request: Any) -> Any:
        """Any other request's answer; features that come before it are kept."""
        self._send(request)
        while isinstance(answer := self._receive(), Computed):
            self._found.append(answer)
        return answer

    def end(self) -> None:
        """Wait for its end, for a short time; the connection is closed already."""
        # what still loads its target looks at its connection too late
        self.process.join(_PATIENCE if self._loaded else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        for buffer in (*self.slots, self.parcel):
            buffer.close()

    def _send(self, request: Any) -> None:
        try:
            self.connection.send(request)
        except OSError:
            while True:  # until its last word, or its end, is raised
                self._receive()

    def _receive(self) -> Any:
        try:
            wait([self.connection, self.process.sentinel])
            if not self.connection.poll(_LAST_WORD):
                raise EOFError
            answer = self.connection.recv()
        except (EOFError, OSError):
            pass
        else:
            if isinstance(answer, Failed):
                if not self._loaded:
                    raise answer.error
                raise RunError(f"the target worker on {self.device} failed: {answer.error}")
            return answer
        self.process.join(_PATIENCE)
        raise RunError(
            f"the target worker on {self.device} {_ending(self.process.exitcode)}; what was saved "
            "is intact: start the same command again to go on from there"
        )


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (is the machine's memory full?)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
