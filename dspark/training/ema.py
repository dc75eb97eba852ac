"""The running average of the draft's weights (EMA), in float32, beside the masters.

After the t-th optimizer step since the average began,

    average = d_t · average + (1 - d_t) · weights,   d_t = min(train.ema_decay, (1 + t) / (10 + t)),

so that a young average is short and soon forgets where it started from, a random draft for example
(0.92 after 100 steps, 0.991 after 1000). It begins as a copy of the weights.

Every process averages the part of the masters that it holds itself (all of them, or its shard), so
an update talks to nobody and waits for nothing. To be read as a whole, the averages change places
with the masters for a while: `engine.weights` then gives them, whatever the engine.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.training.checkpoint import Saved
from dspark.training.engine import Engine

__all__ = ["Average", "begin", "decay_at"]

log = logging.getLogger(__name__)


def decay_at(updates: int, ceiling: float) -> float:
    """d_t of update number ``updates`` (from 1), at most ``ceiling``."""
    return min(ceiling, (1 + updates) / (10 + updates))


class Average:
    """The average of the weights that ``engine`` trains; a copy of them at first."""

    def __init__(self, engine: Engine, decay: float, *, since: int) -> None:
        """``since``: optimizer steps that were done when the average began."""
        self.since = since
        self._engine = engine
        self._decay = decay
        self._parts = [part.clone() for part in engine.masters()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` optimizer steps."""
        weight = 1.0 - decay_at(step - self.since, self._decay)
        torch._foreach_lerp_(self._parts, self._engine.masters(), weight)

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Go on from `weights`, exactly so."""
        with self.shown():  # the masters stand aside
            self._engine.put(weights)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the engine's masters are the averages. Not for a training step."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def weights(self, *, keep: bool) -> dict[str, Tensor]:
        """Whole averages on the CPU, where ``keep`` is true (else none). A collective."""
        with self.shown():
            whole = self._engine.weights()
            # copies: the engine's own tensors are about to be the masters again
            return {name: value.to("cpu", copy=True) for name, value in whole.items() if keep}

    @torch.no_grad()
    def _swap(self) -> None:
        for part, master in zip(self._parts, self._engine.masters(), strict=True):
            held = part.clone()
            part.copy_(master)
            master.copy_(held)


def begin(engine: Engine, decay: float | None, saved: Saved | None) -> Average | None:
    """The average to keep with ``decay``, from where ``saved`` left it; None if it is off.

    Raises:
        CheckpointError: the saved average is not one of these weights.
    """
    if decay is None:
        if saved is not None and saved.average is not None:
            log.warning(
                "train.ema_decay is null, so the average of the weights in %s ends there",
                saved.path,
            )
        return None
    if saved is None:
        return Average(engine, decay, since=0)
    if saved.average is None or saved.state.ema_since is None:
        log.warning(
            "%s holds no average of the weights (train.ema_decay was null): it begins with the "
            "weights of step %d",
            saved.path,
            saved.state.step,
        )
        return Average(engine, decay, since=saved.state.step)
    shapes = [
        {name: v.shape for name, v in held.items()} for held in (saved.average, saved.weights)
    ]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"the average in {saved.path} has other tensors than its weights: "
            "set train.ema_decay=null to go on without it"
        )
    average = Average(engine, decay, since=saved.state.ema_since)
    average.restore(saved.average)
    return average
