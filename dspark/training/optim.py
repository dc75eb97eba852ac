"""Step arithmetic, learning rate and optimizer.

A step is an optimizer step everywhere: warm-up, schedule and ramps are functions of the step
number alone, so no number of processes or of accumulated batches can make them run faster.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dspark.config import TrainSettings
from dspark.errors import DataError

__all__ = ["Plan", "Schedule", "build_optimizer", "plan_steps", "ramp_at", "set_learning_rate"]

_DECAY_SHARE = 0.2  # of the steps, at the end of a wsd schedule
_ADAM_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many optimizer steps a run takes, and over how many rows each.

    Passes over the data are those of `corpus.dataset.rows_at`: whole steps only.
    """

    global_batch: int
    """Rows of one step: batch_size x grad_accumulation x processes."""
    total_steps: int
    num_rows: int

    @property
    def left_out(self) -> int:
        """Rows that each pass leaves out because they fill no whole step; others every time."""
        return self.num_rows % self.global_batch if self.num_rows >= self.global_batch else 0

    def epoch(self, step: int) -> float:
        """Passes over the data after ``step`` steps."""
        return step * self.global_batch / (self.num_rows - self.left_out)


def plan_steps(settings: TrainSettings, *, num_rows: int, num_processes: int) -> Plan:
    """Steps of the run: `steps`, or those of `epochs` passes.

    With fewer rows than a global batch, passes follow each other within a step.

    Raises:
        DataError: there is no row at all.
    """
    if num_rows < 1:
        raise DataError("the data holds no row that can be trained on")
    global_batch = settings.batch_size * settings.grad_accumulation * num_processes
    if num_rows >= global_batch:
        steps = settings.epochs * (num_rows // global_batch)
    else:
        steps = max(1, settings.epochs * num_rows // global_batch)
    return Plan(global_batch=global_batch, total_steps=settings.steps or steps, num_rows=num_rows)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate of every step."""

    peak: float
    total_steps: int
    warmup_ratio: float
    kind: Literal["cosine", "constant", "wsd"]

    @property
    def warmup_steps(self) -> int:
        """Steps below the peak at the start."""
        return math.ceil(self.warmup_ratio * self.total_steps)

    def lr(self, step: int) -> float:
        """Learning rate of step number ``step`` (from 0): the first one is not 0, nor the last.

        Linear up over the warm-up, reaching the peak on the step after it; then down to where
        step ``total_steps`` would have 0.
        """
        warmup, total = self.warmup_steps, self.total_steps
        rise = (step + 1) / (warmup + 1) if step < warmup else 1.0
        if self.kind == "cosine":
            progress = max(0, step - warmup) / max(1, total - warmup)
            fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        elif self.kind == "wsd":
            fall = min(1.0, (total - step) / (math.ceil(_DECAY_SHARE * total) + 1))
        else:
            fall = 1.0
        return self.peak * min(rise, fall)


def ramp_at(step: int, *, total_steps: int, start: float, ratio: float) -> float:
    """Factor 0..1 of a term that is 0 before ``start`` of the steps and then fades in linearly.

    Args:
        ratio: share of the steps over which it does; 0: at once.
    """
    step -= math.ceil(start * total_steps)
    length = math.ceil(ratio * total_steps)
    if step < 0:
        return 0.0
    return 1.0 if step >= length else (step + 1) / (length + 1)


def build_optimizer(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], settings: TrainSettings
) -> torch.optim.AdamW:
    """AdamW over fp32 parameters; weight decay on matrices only (not on norms and biases)."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in parameters:
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}, not a fp32 master"
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=_ADAM_EPS,
        fused=True,  # one kernel instead of a dozen passes over the weights, on CPU as on GPU
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every group the learning rate ``value``."""
    for group in optimizer.param_groups:
        group["lr"] = value
