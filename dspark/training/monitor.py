"""Figures of a run: summed on the device step by step, read only when a line is due.

`metrics.jsonl` holds one JSON object a line with `step` and these names:

- ``train/loss``: mean over the line's steps of the loss that was optimised, ramp included;
  ``train/ce_loss``, ``l1_loss``, ``confidence_loss``, ``accept_length_loss``: its terms without
  their weights.
- ``train/tau`` (bonus included), ``accepted_drafts``, ``accept_rate@k``, ``survival@k``: the
  teacher-forced expectations of `dspark.acceptance`, pooled over the line's steps.
- ``train/confidence_{abs_error,bias,cumprod_bias}``: confidence against alpha.
- ``train/lr`` of the line's last step, ``train/grad_norm`` before clipping, mean over the steps.
- ``train/epoch``: passes over the data; ``train/supervised_tokens``: slots with a label in the
  line's steps; ``train/empty_steps``: how many of these steps had none in any row;
  ``train/skipped_rows``: rows in these steps that were left out because the target's features of
  them hold NaN, Inf or only zeros.
- ``perf/step_s``, ``perf/tokens_per_s`` (tokens of the rows, without padding, all processes),
  ``perf/mem_gib`` (peak of this process's GPU); ``perf/features_wait_s``, with split features:
  seconds for which the main process waited for its target workers in the line's steps;
  ``perf/rows_{shards,window,generated}``, with `data.on_missing` generate: documents of the line's
  steps, in the main process, by where their features were from.
- ``val/tau``, ``accepted_drafts``, ``accept_rate@k``, ``survival@k``: the same, counted over a real
  decode of the validation prompts (`validation`); ``val/rounds``: its draft-and-verify rounds;
  ``val/ema_tau``: ``val/tau`` of the average of the weights (`ema`).

Every figure is a ratio of sums over all processes, so it does not depend on their number.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark.errors import DataError, RunError
from dspark.losses import Sums
from dspark.provenance import write_text

__all__ = ["MetricsFile", "Monitor"]

log = logging.getLogger(__name__)

_EXTRAS = ("loss", "grad_norm", "tokens", "empty_steps", "skipped_rows")


class Monitor:
    """The sums since the last line. Nothing here waits for the device before `line` or `state`."""

    def __init__(self, block_size: int, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._statistics = 3 * block_size + 10  # of `Sums.to_vector`
        size = self._statistics + len(_EXTRAS)
        self._sums = torch.zeros(size, dtype=torch.float64, device=accelerator.device)
        self._steps = 0
        self._since = time.perf_counter()
        self._timed_steps = 0

    def add(self, vector: Tensor, loss: Tensor, *, tokens: int, skipped: Tensor) -> None:
        """Count one forward pass of this process.

        Args:
            vector: `Sums.to_vector` of the pass.
            loss: its share of the step's loss.
            tokens: of its rows, without padding.
            skipped: how many of its rows were left out.
        """
        assert len(vector) == self._statistics
        self._sums[: self._statistics] += vector
        self._sums[self._statistics] += loss.detach()
        self._sums[self._statistics + 2] += tokens
        self._sums[self._statistics + 4] += skipped

    def end_step(self, grad_norm: Tensor, denominators: Tensor) -> None:
        """Count an optimizer step; both arguments are the same in every process."""
        if self._accelerator.is_main_process:
            self._sums[self._statistics + 1] += grad_norm.detach()
            self._sums[self._statistics + 3] += denominators[1] == 0
        self._steps += 1
        self._timed_steps += 1

    def line(self) -> dict[str, float]:
        """Figures since the last line, of all processes, and a fresh start. A collective.

        Raises:
            RunError: the loss or the gradient is not finite.
        """
        total = self._accelerator.reduce(self._sums, reduction="sum").cpu()
        elapsed = time.perf_counter() - self._since
        sums = Sums.from_vector(total[: self._statistics])
        loss, grad_norm, tokens, empty_steps, skipped_rows = total[self._statistics :].tolist()
        steps, timed = self._steps, self._timed_steps
        figures = {
            "train/loss": loss / steps,
            **{f"train/{name}": value for name, value in sums.metrics().items()},
            "train/grad_norm": grad_norm / steps,
            "train/supervised_tokens": float(sums.slots.sum()),
            "train/empty_steps": empty_steps,
            "train/skipped_rows": skipped_rows,
            "perf/step_s": elapsed / timed,
            # after a resume the first line also holds steps of the process before
            "perf/tokens_per_s": tokens * timed / steps / elapsed,
        }
        if self._sums.device.type == "cuda":
            figures["perf/mem_gib"] = torch.cuda.max_memory_allocated(self._sums.device) / 2**30
        _check_finite(loss, grad_norm)
        self._sums.zero_()
        self._steps = self._timed_steps = 0
        self._since = time.perf_counter()
        return figures

    def state(self) -> tuple[list[list[float]], int]:
        """Sums of each process and steps since the last line, for a checkpoint. A collective.

        Raises:
            RunError: the loss or the gradient is not finite; such a state is not worth saving.
        """
        window = self._accelerator.gather(self._sums[None]).tolist()
        first = self._statistics
        _check_finite(*(sum(sums[place] for sums in window) for place in (first, first + 1)))
        return window, self._steps

    def restore(self, window: Sequence[Sequence[float]], steps: int) -> None:
        """Go on from `state`, exactly so with the same number of processes."""
        sums = torch.tensor(window, dtype=torch.float64)
        if len(window) == self._accelerator.num_processes:
            self._sums.copy_(sums[self._accelerator.process_index])
        elif self._accelerator.is_main_process:
            self._sums.copy_(sums.sum(0))
        self._steps = steps

    def restart_clock(self) -> None:
        """Leave the time since the last call (loading, validation, saving) out of ``perf/``."""
        self._since = time.perf_counter()
        self._timed_steps = 0


def _check_finite(loss: float, grad_norm: float) -> None:
    # a gradient that is not finite has spoilt the weights, which the next loss would show
    for name, value in (("loss", loss), ("gradient's norm", grad_norm)):
        if math.isfinite(value):
            continue
        raise RunError(
            f"the {name} is {value}: the draft's weights or the target's features are no longer "
            "finite; lower train.lr or train.max_grad_norm and start from the last checkpoint"
        )


class MetricsFile:
    """`metrics.jsonl`, on rank 0; every line is flushed."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Open ``path`` to append behind ``last_step``; lines beyond it are dropped.

        Raises:
            DataError: a line in the middle is not one of ours.
        """
        self._path = path
        if path.exists():
            _truncate(path, last_step)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Append one line."""
        try:
            self._file.write(json.dumps({"step": step, **figures}) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self._path)  # a full disk does not say where
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _truncate(path: Path, last_step: int) -> None:
    """Keep the lines up to ``last_step``: what a killed run wrote behind its checkpoint goes."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            entry: dict[str, Any] = json.loads(line)
            step = int(entry["step"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break  # cut by the kill
            raise DataError(f"{path} line {number} is not a line of metrics: {error}") from None
        if step <= last_step and line.endswith("\n"):
            kept.append(line)
    if len(kept) < len(lines):
        log.info("%s: dropped %d lines behind step %d", path, len(lines) - len(kept), last_step)
        write_text(path, "".join(kept))
