"""Start-up of the processes: as many as were asked for, joined in one training, or a refusal.

Some launches silently start one process instead of several, or several that never hear of each
other and train the same draft apart. What is checked here, before anything is loaded:

- `accelerate launch --num_processes 2` without GPUs starts one process. It leaves a rendezvous
  address (MASTER_ADDR) and no WORLD_SIZE.
- A world of several processes must be one for accelerate too.
- DeepSpeed's settings must not contradict the trainer's (`zero.check_settings`), FSDP must be its
  second version, and neither may offload.
- `train.num_processes`, when given, must be what was started.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import nn

from dspark.config import TrainSettings
from dspark.errors import ConfigError, DSparkError, MissingPackageError

__all__ = [
    "Strategy",
    "check_device",
    "check_environment",
    "check_ranks",
    "check_started",
    "on_main",
    "prepare",
    "start",
    "strategy_of",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

Strategy = Literal["replicated", "zero", "fsdp"]

# Validation and checkpoint writing keep other ranks waiting; a first target load can take long.
_TIMEOUT = timedelta(minutes=60)


def check_environment(
    environ: Mapping[str, str], settings: TrainSettings, *, has_gpu: bool
) -> None:
    """Refuse a launch that would not train as it was asked to, from what it left in ``environ``.

    Raises:
        ConfigError: the launcher asked for Megatron-LM, fp16, a compiler or an accumulation of its
            own, a kind of FSDP that is not done here, or for more processes than it started.
        MissingPackageError: it asked for DeepSpeed, which is not installed.
    """
    if _flag(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError(
            "the launcher asked for Megatron-LM, which this trainer does not do: launch as one of "
            "configs/accelerate/*.yaml does"
        )
    strategy = strategy_of(environ)
    if strategy == "zero" and importlib.util.find_spec("deepspeed") is None:
        raise MissingPackageError(
            "the launcher asked for DeepSpeed, which is not installed: pip install 'dspark[train]'"
        )
    if strategy == "fsdp":
        _check_fsdp(environ)
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if settings.mixed_precision is None and precision not in ("no", "bf16"):
        raise ConfigError(
            f"the launcher asked for mixed_precision {precision}: use bf16 or no "
            "(or set train.mixed_precision)"
        )
    dynamo = environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo.lower() != "no":
        raise ConfigError(
            f"the launcher asked for dynamo_backend {dynamo}: leave it out of the launcher's "
            "settings and use train.compile=true"
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


def check_ranks(environ: Mapping[str, str]) -> None:
    """Refuse what no launcher sets.

    Raises:
        ConfigError: a rank or a number of processes is none.
    """
    for name, least in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1)):
        value = environ.get(name)
        if value is not None and not (value.isdecimal() and int(value) >= least):
            raise ConfigError(
                f"the environment says {name}={value}, which must be a whole number >= {least}: "
                "leave it to the launcher, or unset it"
            )


def check_started(
    *,
    num_processes: int,
    distributed_type: str,
    environ: Mapping[str, str],
    settings: TrainSettings,
    strategy: Strategy = "replicated",
) -> None:
    """Refuse when the processes that run are not the one training that was asked for.

    Raises:
        ConfigError: WORLD_SIZE or `train.num_processes` differs from ``num_processes``, or
            accelerate found another way to distribute than ``strategy`` needs.
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
    if strategy == "fsdp" and num_processes == 1:
        raise ConfigError(
            "FSDP of one process shards nothing: start several, or launch with "
            "configs/accelerate/single.yaml"
        )
    fitting = {
        "replicated": ("MULTI_GPU", "MULTI_CPU"),
        "zero": ("DEEPSPEED",),
        "fsdp": ("FSDP", "MULTI_CPU"),
    }[strategy]
    alone = strategy == "replicated" and num_processes == 1 and distributed_type == "NO"
    if distributed_type not in fitting and not alone:
        raise ConfigError(
            f"accelerate runs {num_processes} process(es) as {distributed_type}; this trainer "
            "knows NO for one, MULTI_GPU, MULTI_CPU, DEEPSPEED and FSDP"
        )


def start(settings: TrainSettings, *, device: str) -> Accelerator:
    """The accelerator of this process, checked. ``device`` is the target's setting.

    Raises:
        ConfigError: see `check_environment` and `check_started`, or a device that names one GPU.
    """
    check_device(device)
    has_gpu = torch.cuda.is_available()
    check_environment(os.environ, settings, has_gpu=has_gpu)
    strategy = strategy_of(os.environ)
    on_cpu = device == "cpu" or not has_gpu
    if strategy == "zero" and on_cpu and has_gpu:
        raise ConfigError(
            "target.device is cpu, but DeepSpeed takes the GPUs it sees: set target.device=auto, "
            "or hide them with CUDA_VISIBLE_DEVICES="
        )
    # A second run in this process (a demo, a test) may want another precision than the first.
    AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(
            # Without it, several torchrun processes on a machine without GPUs never meet.
            # But accelerate takes the word for a wish to do without DeepSpeed.
            cpu=on_cpu and strategy != "zero",
            mixed_precision=settings.mixed_precision,
            # The trainer weighs the loss of each window itself: backward must not divide it again.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=1, sync_with_dataloader=False
            ),
            deepspeed_plugin=_deepspeed(os.environ, settings) if strategy == "zero" else None,
            kwargs_handlers=[
                # On a CPU, accelerate counts one process under any other backend of DeepSpeed's.
                InitProcessGroupKwargs(
                    backend="gloo" if strategy == "zero" and on_cpu else None, timeout=_TIMEOUT
                ),
                DistributedDataParallelKwargs(
                    broadcast_buffers=False, gradient_as_bucket_view=True
                ),
            ],
        )
    except (ValueError, torch.distributed.DistError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"accelerate refuses what the launcher set: {reason}") from error
    check_started(
        num_processes=accelerator.num_processes,
        distributed_type=accelerator.distributed_type.name,
        environ=os.environ,
        settings=settings,
        strategy=strategy,
    )
    if strategy == "zero":
        _let_targets_load()
        # DeepSpeed calls collectives by names that torch has renamed, some thousand times a run
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    if accelerator.device.type == "cpu":
        _use_cores(os.environ)
    return accelerator


def check_device(device: str) -> None:
    """``device``: the target's setting.

    Raises:
        ConfigError: it names one GPU, or several.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"target.device is {device!r}, but each training process takes its own GPU: use auto "
            "or cpu, and CUDA_VISIBLE_DEVICES to choose among GPUs"
        )


def strategy_of(environ: Mapping[str, str]) -> Strategy:
    """How the launcher wants the draft held: whole in each process, or in shards."""
    if _flag(environ, "ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    return "fsdp" if _flag(environ, "ACCELERATE_USE_FSDP") else "replicated"


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


def _check_fsdp(environ: Mapping[str, str]) -> None:
    if environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "the launcher asked for the first version of FSDP: set fsdp_version: 2, as "
            "configs/accelerate/fsdp2.yaml does"
        )
    for variable, name, remedy in (
        ("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params", "this trainer does not offload"),
        (
            "FSDP_ACTIVATION_CHECKPOINTING",
            "fsdp_activation_checkpointing",
            "use train.gradient_checkpointing=true",
        ),
        (
            "FSDP_CPU_RAM_EFFICIENT_LOADING",
            "fsdp_cpu_ram_efficient_loading",
            "every process needs the target's weights",
        ),
    ):
        if _flag(environ, variable):
            raise ConfigError(f"the launcher's {name} is true: set it to false ({remedy})")


def _deepspeed(environ: Mapping[str, str], settings: TrainSettings) -> DeepSpeedPlugin:
    from dspark.training import zero

    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path != "none" and not Path(path).is_file():
        raise ConfigError(f"deepspeed_config_file '{path}' is not a file (from {Path.cwd()})")
    try:
        plugin = DeepSpeedPlugin()
    except ValueError as error:
        raise ConfigError(f"accelerate refuses the DeepSpeed settings: {error}") from error
    given: dict[str, Any] = plugin.deepspeed_config
    precision = settings.mixed_precision or environ.get("ACCELERATE_MIXED_PRECISION", "no")
    num_processes = int(environ.get("WORLD_SIZE", "1"))
    zero.check_settings(given, settings, precision=precision, num_processes=num_processes)
    zero.fill_settings(given, settings, num_processes=num_processes)
    if not torch.cuda.is_available():
        zero.skip_cpu_kernels()
    return plugin


def _let_targets_load() -> None:
    """Keep stage 3 away from models that transformers loads from here on.

    Under it transformers would shard every model as it loads, but the target is used whole.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in ("1", "true")


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
