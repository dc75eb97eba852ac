"""What may change between a checkpoint and the run that goes on from it.

`checkpoint.check_structure` has what must not; here are the number of steps, and all else.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.config import Config
from dspark.errors import CheckpointError
from dspark.training.checkpoint import Saved, TrainState
from dspark.training.optim import Schedule, ramp_at

__all__ = ["check_length", "resolved", "structure", "warn"]

log = logging.getLogger(__name__)

# Settings whose change alters no number of the training and none that `best` goes by.
_PLAIN_KEYS = frozenset(
    {
        "output_dir", "features", "steps", "epochs", "batch_size", "grad_accumulation",
        "gradient_checkpointing", "attention", "compile", "num_processes", "resume", "save_every",
        "keep", "log_every", "validate_every", "tracker", "chunk_blocks", "seed", "num_anchors",
        "target_devices", "split_queue",
    }
)  # fmt: skip


def structure(
    config: Config, *, rows: Mapping[str, Any], shape: Mapping[str, Any], global_batch: int
) -> dict[str, Any]:
    """What makes a run this one, beside its target: what `checkpoint.check_structure` compares.

    Args:
        rows: `rows.identity`.
        shape: `build.shape` of the draft.
    """
    return {
        **rows,
        "data.max_length": config.data.max_length,
        "data.pack_length": config.data.pack_length,
        "train.seed": config.train.seed,
        "train.num_anchors": config.train.num_anchors,
        "global batch (batch_size x grad_accumulation x processes)": global_batch,
        **shape,
    }


def check_length(state: TrainState, path: Path, config: Config, schedule: Schedule) -> None:
    """Another number of steps is another schedule, unless every rate stays what it was.

    Raises:
        CheckpointError: the learning rate or the ramp of a step would differ.
    """
    then, now = state.total_steps, schedule.total_steps
    if then == now:
        return
    before = replace(schedule, total_steps=then)
    fade = {"start": config.loss.accept_length_start, "ratio": config.loss.accept_length_ramp}
    warm = max(schedule.warmup_steps, before.warmup_steps)
    ramp = max(ramp_at(state.step, total_steps=n, **fade) < 1 for n in (then, now))
    if schedule.kind != "constant" or state.step < warm or ramp:
        raise CheckpointError(
            f"the run is {now} steps long but {path} was trained for {then}, which the "
            f"{schedule.kind} schedule and the ramps depend on: set train.steps={then}, "
            "or start in another train.output_dir"
        )


def resolved(config: Config, *, precision: str, dtype: str) -> Config:
    """For the record: with what launch and machine made of the settings that leave it to them."""
    return config.model_copy(
        update={
            "target": config.target.model_copy(update={"dtype": dtype}),
            "train": config.train.model_copy(update={"mixed_precision": precision}),
        }
    )


def warn(saved: Saved, config: Config) -> None:
    """Name every setting of the optimisation that differs from the checkpoint's.

    Args:
        saved: earlier versions recorded its settings as they were given.
        config: `resolved`.
    """
    for section in ("target", "loss", "train"):
        then = getattr(saved.config, section).model_dump()
        now = getattr(config, section).model_dump()
        for key, value in now.items():
            untold = key in ("mixed_precision", "dtype") and then[key] in (None, "auto")
            counts = key == "dtype" if section == "target" else key not in _PLAIN_KEYS
            if then[key] != value and counts and not untold:
                log.warning(
                    "%s.%s changes from %s to %s at step %d",
                    section,
                    key,
                    then[key],
                    value,
                    saved.state.step,
                )
