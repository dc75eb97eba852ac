"""Start-up of the processes: as many as were asked for, joined in one training, or a refusal.

Some launches silently start one process instead of several, or several that never hear of each
other and train the same draft apart. What is checked here, before anything is loaded:

- `accelerate launch --num_processes 2` without GPUs starts one process. It leaves a rendezvous
  address (MASTER_ADDR) and no WORLD_SIZE.
- A world of several processes must be one for accelerate too.
- DeepSpeed and FSDP are refused.
- `train.num_processes`, when given, must be what was started.
"""

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import nn

from dspark.config import TrainSettings
from dspark.errors import ConfigError, DSparkError

__all__ = ["check_environment", "check_started", "on_main", "prepare", "start"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Validation and checkpoint writing keep other ranks waiting; a first target load can take long.
_TIMEOUT = timedelta(minutes=60)


def check_environment(
    environ: Mapping[str, str], settings: TrainSettings, *, has_gpu: bool
) -> None:
    """Refuse a launch that would not train as it was asked to, from what it left in ``environ``.

    Raises:
        ConfigError: the launcher asked for DeepSpeed, FSDP, fp16, an accumulation of its own, or
            for more processes than it started.
    """
    for variable, name in (
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ):
        if environ.get(variable, "false").lower() in ("1", "true"):
            raise ConfigError(
                f"the launcher asked for {name}, which this trainer does not do yet (it comes with "
                "the trainer for full-size targets): launch with distributed_type NO or MULTI_GPU, "
                "as configs/accelerate/*.yaml do"
            )
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if settings.mixed_precision is None and precision not in ("no", "bf16"):
        raise ConfigError(
            f"the launcher asked for mixed_precision {precision}: use bf16 or no "
            "(or set train.mixed_precision)"
        )
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation not in ("1", "auto", str(settings.grad_accumulation)):
        raise ConfigError(
            f"the launcher asked for gradient_accumulation_steps {accumulation} and "
            f"train.grad_accumulation is {settings.grad_accumulation}: "
            "leave it out of the launcher's settings"
        )
    launched = "ACCELERATE_MIXED_PRECISION" in environ  # set by every `accelerate launch`
    alone = "WORLD_SIZE" not in environ and "LOCAL_RANK" not in environ
    if launched and alone and "MASTER_ADDR" in environ and settings.num_processes != 1:
        wanted = settings.num_processes or 2
        raise ConfigError(
            "`accelerate launch` was asked for several processes and started one: "
            + _remedy(wanted, has_gpu)
            + "; set train.num_processes=1 if one process is what you want"
        )


def check_started(
    *,
    num_processes: int,
    distributed_type: str,
    environ: Mapping[str, str],
    settings: TrainSettings,
) -> None:
    """Refuse when the processes that run are not the one training that was asked for.

    Raises:
        ConfigError: WORLD_SIZE or `train.num_processes` differs from ``num_processes``, or
            accelerate found a way to distribute that is not data parallelism.
    """
    has_gpu = torch.cuda.is_available()
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size != num_processes:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but accelerate sees {num_processes} process(es), so each "
            "would train its own draft: " + _remedy(world_size, has_gpu)
        )
    if settings.num_processes not in (None, num_processes):
        raise ConfigError(
            f"train.num_processes is {settings.num_processes} but {num_processes} process(es) "
            "started: " + _remedy(settings.num_processes or 1, has_gpu)
        )
    parallel = distributed_type in ("MULTI_GPU", "MULTI_CPU")
    if not parallel and (distributed_type != "NO" or num_processes > 1):
        raise ConfigError(
            f"accelerate runs {num_processes} process(es) as {distributed_type}; "
            "this trainer knows NO, MULTI_GPU and MULTI_CPU"
        )


def start(settings: TrainSettings, *, device: str) -> Accelerator:
    """The accelerator of this process, checked. ``device`` is the target's setting.

    Raises:
        ConfigError: see `check_environment` and `check_started`, or a device that names one GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"target.device is {device!r}, but each training process takes its own GPU: use auto "
            "or cpu, and CUDA_VISIBLE_DEVICES to choose among GPUs"
        )
    has_gpu = torch.cuda.is_available()
    check_environment(os.environ, settings, has_gpu=has_gpu)
    # A second run in this process (a demo, a test) may want another precision than the first.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        # Without it, several torchrun processes on a machine without GPUs never find each other.
        cpu=device == "cpu" or not has_gpu,
        mixed_precision=settings.mixed_precision,
        # The trainer weighs the loss of each window itself: backward must not divide it again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_TIMEOUT),
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ],
    )
    check_started(
        num_processes=accelerator.num_processes,
        distributed_type=accelerator.distributed_type.name,
        environ=os.environ,
        settings=settings,
    )
    if accelerator.device.type == "cpu":
        _use_cores(os.environ)
    return accelerator


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Model and optimizer as accelerate wants them used."""
    with warnings.catch_warnings():
        # torch renames broadcast_buffers in a release that not everybody has
        warnings.simplefilter("ignore", FutureWarning)
        prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer)
    return prepared


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0; every rank gets its result, or its user error."""
    outcome: list[T | DSparkError | None] = [None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except DSparkError as error:
            outcome[0] = error
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome, from_process=0)
    if isinstance(outcome[0], DSparkError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]


def _use_cores(environ: Mapping[str, str]) -> None:
    """Undo the single thread that `accelerate launch` and torchrun set when not told otherwise."""
    launched = "ACCELERATE_MIXED_PRECISION" in environ or "TORCHELASTIC_RUN_ID" in environ
    if launched and environ.get("OMP_NUM_THREADS") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // int(environ.get("LOCAL_WORLD_SIZE", "1")))
        if threads > 1:
            torch.set_num_threads(threads)
            log.info("the launcher left one CPU thread; using %d", threads)


def _remedy(num_processes: int, has_gpu: bool) -> str:
    if has_gpu:
        return f"use `accelerate launch --num_processes {num_processes} train.py …`"
    return (
        f"on CPUs use `ACCELERATE_USE_CPU=true torchrun --nproc_per_node {num_processes} "
        "train.py …`"
    )
