"""Distil a draft: `accelerate launch train.py --config configs/….yaml key.sub=value`.

One optimizer step is a window of forward passes. Its rows, anchors and denominators are known
before the first of them, and the denominators are those of the whole step over all processes: so
one process with four forward passes, two with two and four with one have the same loss and the
same gradient. Every random number is a function of (seed, position of the row), every rate of the
step; that is what makes a resumed run continue to the bit.

Exit codes: 0 done, 1 the run failed, 2 wrong use, 75 stopped by a signal after saving (start the
same command again to go on). `accelerate launch` and torchrun turn every code but 0 into 1.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dspark import config_io, provenance
from dspark.config import Config
from dspark.draft.model import DSparkDraftModel
from dspark.errors import CheckpointError, ConfigError, DSparkError
from dspark.export.config_json import from_json, read_json, to_json
from dspark.progress import Bar
from dspark.target import Target, load, load_tokenizer
from dspark.training import build, checkpoint, launch, tracker, validation
from dspark.training.checkpoint import Best, Saved, TrainState
from dspark.training.features import batch_features, gather_rows
from dspark.training.monitor import MetricsFile, Monitor
from dspark.training.objective import Objective
from dspark.training.optim import (
    Plan,
    Schedule,
    build_optimizer,
    plan_steps,
    ramp_at,
    set_learning_rate,
)
from dspark.training.signals import EXIT_INTERRUPTED, StopRequest
from dspark.training.window import Window, Windows

__all__ = ["TrainReport", "main", "run"]

log = logging.getLogger(__name__)

_EXAMPLE = "example: accelerate launch train.py --config configs/tiny.yaml train.steps=20"


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What a run did."""

    status: str
    """finished; interrupted (saved on a signal); already finished (nothing was left to do)."""
    step: int
    total_steps: int
    output_dir: str
    last: str | None
    """Newest checkpoint."""
    best: str | None
    """Checkpoint with the longest accept length in validation; None without validation."""
    best_accept_length: float | None
    loss: float | None
    """Of the last line of metrics that this process wrote, like `tau`."""
    tau: float | None
    seconds: float


def main(argv: Sequence[str] | None = None) -> None:
    """The program: settings and overrides from ``argv``, a run, an exit code."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Distil a DSpark draft from a target.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="PATH", help="YAML settings; see configs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that win over the file"
    )
    arguments, others = parser.parse_known_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        report = run(config_io.load(arguments.config, [*arguments.overrides, *others]))
    except DSparkError as error:
        print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if rank == 0:
        log.info(
            "%s at step %d of %d: %s", report.status, report.step, report.total_steps, report.last
        )
        if arguments.json:
            print(json.dumps(asdict(report)))
    if report.status == "interrupted":
        sys.exit(EXIT_INTERRUPTED)


def run(config: Config) -> TrainReport:
    """Train as ``config`` says, or go on where the newest checkpoint in `output_dir` stands.

    Raises:
        DSparkError: one sentence about what a user can change; see the subclasses.
    """
    begun = time.perf_counter()
    settings = config.train
    tracker.check_installed(settings.tracker)
    accelerator = launch.start(settings, device=config.target.device)
    resume = launch.on_main(accelerator, lambda: find_resume(config))
    trainer = Trainer(config, accelerator, resume)
    status = trainer.train()
    return trainer.report(status, time.perf_counter() - begun)


def find_resume(config: Config) -> Path | None:
    """The checkpoint to go on from; clears what a killed save left behind.

    Raises:
        ConfigError: `resume: none` with an output directory that is not empty.
        CheckpointError: the given checkpoint is none, or newer ones stand beside it.
    """
    settings = config.train
    output_dir = Path(settings.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"train.output_dir '{output_dir}' is a file")
    if settings.resume == "none":
        if output_dir.exists() and any(output_dir.iterdir()):
            raise ConfigError(
                f"train.output_dir '{output_dir}' is not empty and train.resume is none: "
                "use train.resume=auto to go on there, or another directory"
            )
        return None
    checkpoint.clear_leftovers(output_dir)
    if settings.resume == "auto":
        return checkpoint.newest_complete(output_dir)
    path = Path(settings.resume).resolve()
    if not path.is_dir():
        raise CheckpointError(
            f"train.resume '{settings.resume}' is neither auto, nor none, nor a directory"
        )
    checkpoint.verify_complete(path)
    found = [one.resolve() for one in checkpoint.find_complete(output_dir)]
    newer = found[found.index(path) + 1 :] if path in found else found
    if newer:
        raise CheckpointError(
            f"train.output_dir holds {newer[-1].name}, which going on from {path} would overtake: "
            "move it away or choose another train.output_dir"
        )
    return path


class Trainer:
    """One run: what is loaded once, and the loop over steps."""

    def __init__(self, config: Config, accelerator: Accelerator, resume: Path | None) -> None:
        self.config = config
        self.accelerator = accelerator
        self.output_dir = Path(config.train.output_dir)
        device = accelerator.device
        settings = config.train

        # once, on rank 0: a named target may have to be unpacked first
        launch.on_main(accelerator, lambda: resolve(config.target))
        tokenizer = load_tokenizer(config.target)
        if settings.validation_prompts:
            check_template(tokenizer)
        rows = open_rows(config, tokenizer)
        self.plan = plan_steps(
            settings, num_rows=len(rows), num_processes=accelerator.num_processes
        )
        self.schedule = Schedule(
            peak=settings.lr,
            total_steps=self.plan.total_steps,
            warmup_ratio=settings.warmup_ratio,
            kind=settings.schedule,
        )
        self.target = load(config.target, device=device.type if device.type == "cpu" else str(device))
