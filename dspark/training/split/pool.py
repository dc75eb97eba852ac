"""The trainer's side: its target workers, who is given which pass, and what comes back.

Passes are numbered as they are drawn; worker w of W gets w, w + W, …, each when one of its slots is
free. What is taken frees its slot, and the next pass goes out at once: a worker computes while the
trainer trains, and waits while all its slots are full.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from dspark.acceptance import AcceptStats
from dspark.config import TargetSettings
from dspark.decoding import draft_limit
from dspark.draft.config import DSparkConfig
from dspark.target import Features
from dspark.target.front import Front
from dspark.training.split.handle import Handle
from dspark.training.split.worker import Count, Describe, Described
from dspark.training.window import Pass, Window

__all__ = ["TargetPool"]

log = logging.getLogger(__name__)


class TargetPool:
    """Context manager around the workers of one trainer; nothing runs before `start`.

    Args:
        settings: the target, loaded once on each of ``devices``.
        devices: one worker each.
        queue: slots of a worker.
        device: the trainer's, where features and tables go.
    """

    def __init__(
        self,
        settings: TargetSettings,
        devices: Sequence[str],
        *,
        queue: int,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._queue = queue
        self._device = device
        self._workers: list[Handle] = []
        self._layer_ids: tuple[int, ...] = ()
        self._drawn: deque[Pass] = deque()  # not given to a worker yet
        self._given: deque[Pass] = deque()  # not taken yet
        self._num_given = self._num_taken = 0
        self._waited = 0.0  # seconds
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()

    def start(self) -> Front:
        """Start the workers, wait until each has loaded the target, and bring its front here.

        Raises:
            TargetError: it cannot be found or loaded.
            RunError: a worker died.
        """
        for device in self._devices:
            self._workers.append(Handle(self._settings, device, self._queue, self._device))
        for number, worker in enumerate(self._workers, 1):
            worker.wait_until_loaded()
            log.info(
                "target worker %d of %d on %s: process %d",
                number, len(self._workers), worker.device, worker.process.pid,
            )  # fmt: skip
        first = self._workers[0]
        described: Described = first.ask(Describe())
        tables = self._moved(first.parcel.read(described.tables))
        first.parcel.empty()
        return Front(described.facts, tables)

    def feed(self, windows: Iterable[Window], layer_ids: Sequence[int]) -> Iterator[Window]:
        """The same windows, later: their passes go to the workers as they are drawn."""
        self._layer_ids = tuple(layer_ids)
        ahead: deque[Window] = deque()
        for window in windows:
            ahead.append(window)
            self._drawn.extend(window.passes)
            self._give()
            # enough for every slot, when the passes of the first window will have been taken
            if len(self._drawn) + len(self._given) >= len(ahead[0].passes) + self._slots:
                yield ahead.popleft()
        yield from ahead

    def take(self, one: Pass) -> Features:
        """Features of ``one``, the next pass of the windows; on the trainer's device.

        Raises:
            RunError: the worker that computes them failed or died.
        """
        wanted = self._given.popleft()
        assert wanted.row_ids == one.row_ids, "passes are taken in the order of the windows"
        worker = self._workers[self._num_taken % len(self._workers)]
        self._num_taken += 1
        begun = time.perf_counter()
        slot, layout = worker.next_features()
        self._waited += time.perf_counter() - begun
        found = self._moved(worker.slots[slot].read(layout))
        worker.free.append(slot)
        self._give()
        return Features(**found)

    def counts(
        self,
        config: DSparkConfig,
        weights: Mapping[str, Tensor],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> AcceptStats:
        """`validation.counts`, by the first worker, behind the passes that it has already.

        Raises:
            RunError: it failed or died.
        """
        if not prompts:
            assert config.block_size is not None
            return AcceptStats(draft_limit(config.block_size, None))
        worker = self._workers[0]
        layout = worker.parcel.write(weights)
        worker.parcel.drop()
        stats: AcceptStats = worker.ask(Count(layout, config, prompts, max_new_tokens))
        worker.parcel.empty()
        return stats

    def waited(self) -> float:
        """Seconds for which `take` waited for workers since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    @property
    def _slots(self) -> int:
        return len(self._workers) * self._queue

    def _give(self) -> None:
        """Give passes away, in order, as long as the worker whose turn it is has a free slot."""
        while self._drawn:
            worker = self._workers[self._num_given % len(self._workers)]
            if not worker.free:
                return
            one = self._drawn.popleft()
            worker.compute({"input_ids": one.input_ids}, one.spans, self._layer_ids)
            self._given.append(one)
            self._num_given += 1

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the trainer's device, complete: their memory may be written again."""
        if self._copies is None:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        # beside the training's own stream, or the copy would wait for all that is queued there
        with torch.cuda.stream(self._copies):
            moved = {
                name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()
            }
        self._copies.synchronize()
        for tensor in moved.values():
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return moved
