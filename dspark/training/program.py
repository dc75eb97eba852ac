"""The program: `accelerate launch train.py --config configs/….yaml key.sub=value`.

Exit codes: 0 done, 1 the run failed, 2 wrong use, 75 stopped by a signal after saving (start the
same command again to go on). `accelerate launch` and torchrun turn every code but 0 into 1.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator

from dspark import config_io, provenance
from dspark.config import Config
from dspark.errors import CheckpointError, ConfigError, DSparkError, unwritable
from dspark.progress import quiet_transformers
from dspark.target import peek
from dspark.training import checkpoint, launch, plan, plan_text, tracker
from dspark.training.signals import EXIT_INTERRUPTED
from dspark.training.split.devices import check_spread, devices_of
from dspark.training.split.pool import TargetPool
from dspark.training.trainer import Trainer, TrainReport

__all__ = ["find_resume", "main", "process", "run"]

log = logging.getLogger(__name__)

_EXAMPLE = "example: accelerate launch train.py --config configs/tiny.yaml train.steps=20"


def main(argv: Sequence[str] | None = None) -> None:
    """The program: settings and overrides from ``argv``, a run, an exit code."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        usage="%(prog)s [-h] [--config PATH] [--json] [--plan [--mfu SHARE] [--tokens N]] "
        "[section.key=value ...]",
        description="Distil a DSpark draft from a target. Settings given as section.key=value "
        "(also --section.key value) win over the file.",
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument("--config", "-c", metavar="PATH", help="YAML settings; see configs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--plan", action="store_true", help="print what the run would be and cost; load no weights"
    )
    parser.add_argument(
        "--mfu", metavar="SHARE", help="of the GPU's peak, assumed by --plan (default 0.4)"
    )
    parser.add_argument(
        "--tokens", metavar="N", help="of the data, assumed by --plan (such as 1.24e9)"
    )
    arguments, overrides = parser.parse_known_args(argv)
    try:
        launch.check_ranks(os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    quiet_transformers()
    try:
        for name in ("mfu", "tokens"):
            value = getattr(arguments, name)
            if value is not None and not arguments.plan:
                raise ConfigError(f"--{name} {value} is for --plan; give that too")
        config = config_io.load(arguments.config, overrides)
        if arguments.plan:
            _plan(config, arguments, shown=rank == 0)
            return
        report = run(config)
    except DSparkError as error:
        print(f"error: {error}" if rank == 0 else f"error (rank {rank}): {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        refused = unwritable(error)
        if refused is None:
            raise
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(refused.exit_code)
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


def process(argv: Sequence[str] | None = None) -> None:
    """`main`, by a process that is there for nothing else."""
    try:
        main(argv)
    except SystemExit as end:
        _leave(end.code)
        raise
    _leave(0)


def _leave(code: int | str | None) -> None:
    """End one process of several without taking Python apart.

    Threads of a process group can outlive it. One that then asks for Python aborts the process, and
    the launcher takes a training that is done for one that failed.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1" and isinstance(code, int | None):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def run(config: Config) -> TrainReport:
    """Train as ``config`` says, or go on where the newest checkpoint in `output_dir` stands.

    Raises:
        DSparkError: one sentence about what a user can change; see the subclasses.
    """
    begun = time.perf_counter()
    settings = config.train
    tracker.check_installed(settings.tracker)
    accelerator = launch.start(settings, device=config.target.device)
    launch.on_main(accelerator, lambda: tracker.check_server(settings.tracker))
    split = settings.features == "split"
    with ExitStack() as stack:

        def begin() -> Path | None:
            output_dir = Path(settings.output_dir)
            if not output_dir.exists() or output_dir.is_dir():
                try:
                    stack.enter_context(provenance.claimed(output_dir))
                except BlockingIOError:
                    raise ConfigError(
                        f"another run is writing to train.output_dir '{output_dir}': wait for its "
                        "end, or choose another directory"
                    ) from None
            return find_resume(config)

        resume = launch.on_main(accelerator, begin)
        pool = stack.enter_context(target_pool(config, accelerator)) if split else None
        trainer = Trainer(config, accelerator, resume, pool)
        status = trainer.train()
        return trainer.report(status, time.perf_counter() - begun)


def target_pool(config: Config, accelerator: Accelerator) -> TargetPool:
    """The target workers of this process, not started yet.

    Raises:
        ConfigError: `train.target_devices` cannot be used.
    """
    names = config.train.target_devices
    if any("+" in name for name in names):
        check_spread(names, config.target.path, ling=peek(config.target)[0] is not None)
    local_trainers = os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)
    devices = devices_of(
        names,
        local_index=accelerator.local_process_index,
        local_trainers=int(local_trainers),
        training=accelerator.device,
        num_gpus=torch.cuda.device_count(),
    )
    return TargetPool(
        config.target, devices, queue=config.train.split_queue, device=accelerator.device
    )


def _plan(config: Config, arguments: argparse.Namespace, *, shown: bool) -> None:
    mfu = 0.4 if arguments.mfu is None else plan.share(arguments.mfu)
    tokens = None if arguments.tokens is None else plan.count(arguments.tokens)
    resume = find_resume(config, clear=False)
    report = plan.plan_run(config, os.environ, resume=resume, mfu=mfu, tokens=tokens)
    if shown:
        print(json.dumps(report) if arguments.json else "\n".join(plan_text.lines(report)))


def find_resume(config: Config, *, clear: bool = True) -> Path | None:
    """The checkpoint to go on from; ``clear`` mends what a killed save left behind.

    Raises:
        ConfigError: `resume: none` with an output directory that is not empty.
        CheckpointError: the given checkpoint is none, or newer ones stand beside it; or with
            `resume: auto` the newest one is damaged, or none of those there is complete.
    """
    settings = config.train
    output_dir = Path(settings.output_dir)
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"train.output_dir '{output_dir}' is a file")
    if settings.resume == "none":
        held = {one.name for one in output_dir.iterdir()} if output_dir.exists() else set()
        if held - {provenance.LOCK}:
            raise ConfigError(
                f"train.output_dir '{output_dir}' is not empty and train.resume is none: "
                "use train.resume=auto to go on there, or another directory"
            )
        return None
    checkpoint.check_links(output_dir)
    if clear:
        checkpoint.clear_leftovers(output_dir)
    if settings.resume == "auto":
        newest = checkpoint.newest_complete(output_dir)
        if newest is not None and clear:
            checkpoint.mend_links(newest)
        return newest
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
