"""`train.py --plan`: what a run would be, computed from its settings; no weights are loaded.

Refusals are those of the run, since the same functions make them. What it cannot know without
weights (whether the shards are this target's) is left to the run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dspark.config import Config, TrainSettings
from dspark.corpus.chat import check_template
from dspark.draft.config import DSparkConfig
from dspark.errors import ConfigError, TargetError
from dspark.target import Target, load_tokenizer, outline
from dspark.target.config import LingConfig
from dspark.training import build, changes, checkpoint, launch, tracker, validation, zero
from dspark.training.memory import Holding
from dspark.training.plan_data import DataSize, enlarged, measure_rows, open_if_there, unread
from dspark.training.plan_features import alternatives
from dspark.training.plan_model import draft_shape, parameters
from dspark.training.plan_sizes import Sizes
from dspark.training.plan_text import warnings
from dspark.training.rows import TrainingRows, check_fit, identity
from dspark.training.split.devices import check_spread, devices_of

__all__ = ["count", "holding_of", "plan_run", "share"]

_HOLDINGS: tuple[Holding, ...] = ("replicated", "zero2", "zero3", "fsdp2")


def plan_run(
    config: Config,
    environ: Mapping[str, str],
    *,
    resume: Path | None,
    mfu: float = 0.4,
    tokens: int | None = None,
) -> dict[str, Any]:
    """The plan as plain values, sizes in bytes; `plan_text` shows it.

    Args:
        config: the settings of the run.
        environ: what the launcher left; without one, the plan is of one process.
        resume: the checkpoint that the run would go on from.
        mfu: share of `PEAK_TFLOPS` that is assumed to be reached.
        tokens: of the data, assumed whatever is there of it; rows are like those that are.

    Raises:
        DSparkError: as the run would, for everything that shows without weights.
    """
    settings = config.train
    tracker.check_installed(settings.tracker)
    launch.check_device(config.target.device)
    processes, holding, precision = _topology(settings, environ)
    target = outline(config.target)
    _check_workers(config, target, processes, environ)
    tokenizer = _tokenizer(config)
    rows: TrainingRows | None = None
    if tokenizer is None:
        note = f"target '{config.target.path}' has no tokenizer yet"
    else:
        if settings.validation_prompts:
            check_template(tokenizer)
        found = open_if_there(config, tokenizer)
        rows, note = (None, found) if isinstance(found, str) else (found, "")
    if rows is not None:
        check_fit(rows, target)
    if tokenizer is not None:
        validation.prompt_ids(
            settings,
            tokenizer,
            max_positions=target.max_position_embeddings,
            vocab_size=target.vocab_size,
        )
    draft = draft_shape(config, target, tokenizer, rows, resume)
    data = unread(config, note) if rows is None else measure_rows(rows, settings.num_anchors)
    if tokens is not None:
        data = enlarged(data, tokens)
    if data.storage is not None:
        # what is there is not what a capture would write now
        stored = config.capture.model_copy(update={"dtype": data.storage})
        config = config.model_copy(update={"capture": stored})
    parts = parameters(draft)

    def sizes_of(other: Config) -> Sizes:
        return Sizes(other, draft, target, data, parts["trainable"], precision == "bf16", mfu)

    one = sizes_of(config)

    if resume is not None:
        _check_resume(config, resume, rows, draft, one, processes)

    report: dict[str, Any] = {
        "launch": {"processes": processes, "strategy": holding, "precision": precision},
        "batch": one.batch(processes),
        "data": _data(data),
        "steps": one.steps(processes),
        "draft": {
            **build.shape(draft),
            "draft.mask_token_id": draft.mask_token_id
            if _mask_is_known(config, tokenizer)
            else None,
        },
        "parameters": {**parts, "target": one.target_parameters, "target_active": one.active},
        "memory": one.memory(holding, processes),
        "target_workers": one.workers(processes),
        "disk": one.disk(),
        "cost": one.cost(processes),
        "resume": str(resume) if resume else None,
    }
    wanted = settings.num_processes
    report["features"] = alternatives(
        config,
        holding,
        wanted or processes,
        sizes_of,
        there=data.storage is not None,
        spreads=isinstance(target.config, LingConfig),
    )
    if wanted not in (None, processes):
        report["at_num_processes"] = {
            "processes": wanted,
            "batch": one.batch(wanted),
            "steps": one.steps(wanted),
            "memory_peak": {name: one.memory(name, wanted)["peak"] for name in _HOLDINGS},
            "target_workers": one.workers(wanted),
            "cost": one.cost(wanted),
        }
    report["warnings"] = warnings(report, config)
    return report


def _check_workers(
    config: Config, target: Target, processes: int, environ: Mapping[str, str]
) -> None:
    names = config.train.target_devices
    check_spread(names, config.target.path, ling=isinstance(target.config, LingConfig))
    if not names:
        return
    gpus = [int(part[5:]) for name in names for part in name.split("+") if part[5:].isdigit()]
    trainers = max(processes, config.train.num_processes or 1)
    devices_of(
        names,
        local_index=0,
        local_trainers=int(environ.get("LOCAL_WORLD_SIZE", trainers)),
        training=torch.device("cuda"),
        # without a GPU here, the machine that is planned for has those that are named
        num_gpus=torch.cuda.device_count() or max(gpus, default=0) + 1,
    )


def _check_resume(
    config: Config,
    resume: Path,
    rows: TrainingRows | None,
    draft: DSparkConfig,
    sizes: Sizes,
    processes: int,
) -> None:
    state = checkpoint.read_state(resume)
    now = changes.structure(
        config,
        rows={} if rows is None else identity(rows),
        shape=build.shape(draft),
        global_batch=sizes.batch(processes)["global_batch"],
    )
    # the fingerprint needs weights, and what cannot be known here is left to the run
    checkpoint.check_structure({key: state.structure.get(key) for key in now}, now, resume)
    schedule = sizes.schedule(processes)
    if schedule is not None:
        changes.check_length(state, resume, config, schedule)


def share(text: str) -> float:
    """``--mfu``: a share above 0 and at most 1.

    Raises:
        ConfigError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"--mfu must be a share above 0 and at most 1, such as 0.4; got '{text}'")
    return value


def count(text: str) -> int:
    """``--tokens``: a number such as 1240000000 or 1.24e9.

    Raises:
        ConfigError: it is none, or below 1.
    """
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e15:
        raise ConfigError(f"--tokens must be a number of tokens such as 1.24e9; got '{text}'")
    return round(value)


def holding_of(environ: Mapping[str, str], settings: TrainSettings) -> Holding:
    """Who will hold the draft, by what the launcher left.

    Raises:
        ConfigError: DeepSpeed's settings are not the trainer's (`zero.check_settings`).
    """
    strategy = launch.strategy_of(environ)
    if strategy != "zero":
        return "fsdp2" if strategy == "fsdp" else "replicated"
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    stage: Any = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    given: dict[str, Any] = {"zero_optimization": {"stage": int(stage) if stage.isdigit() else 0}}
    if path != "none":
        if not Path(path).is_file():
            raise ConfigError(f"deepspeed_config_file '{path}' is not a file (from {Path.cwd()})")
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"accelerate refuses the DeepSpeed settings: {error}") from None
    precision = settings.mixed_precision or environ.get("ACCELERATE_MIXED_PRECISION", "no")
    world = int(environ.get("WORLD_SIZE", "1"))
    zero.check_settings(given, settings, precision=precision, num_processes=world)
    return "zero3" if given["zero_optimization"]["stage"] == 3 else "zero2"


def _topology(settings: TrainSettings, environ: Mapping[str, str]) -> tuple[int, Holding, str]:
    """Processes, who holds the draft, and the precision; refused as at a real start."""
    launch.check_environment(environ, settings, has_gpu=torch.cuda.is_available())
    strategy = launch.strategy_of(environ)
    processes = int(environ.get("WORLD_SIZE", "1"))
    kind = {"zero": "DEEPSPEED", "fsdp": "FSDP"}.get(
        strategy, "MULTI_GPU" if processes > 1 else "NO"
    )
    alone = "WORLD_SIZE" not in environ and strategy == "replicated"
    launch.check_started(
        num_processes=processes,
        distributed_type=kind,
        environ=environ,
        # a plan for several processes needs none of them
        settings=settings.model_copy(update={"num_processes": None}) if alone else settings,
        strategy=strategy,
    )
    precision = settings.mixed_precision or environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return processes, holding_of(environ, settings), precision


def _tokenizer(config: Config) -> Any:
    """None for a directory that holds no more than the target's config."""
    try:
        return load_tokenizer(config.target)
    except TargetError as error:
        if "has no tokenizer" in str(error):
            return None
        raise


def _mask_is_known(config: Config, tokenizer: Any) -> bool:
    settings = config.draft
    given = settings.mask_token_id is not None or settings.init_from is not None
    return given or tokenizer is not None


def _data(data: DataSize) -> dict[str, Any]:
    return {
        "known": data.known,
        "assumed": data.assumed,
        "note": data.note or None,
        "documents": data.documents,
        "rows": data.rows,
        "tokens": data.tokens,
        "fill": data.fill,
        "longest_row": data.longest_row,
        "tokens_per_row": data.row_tokens,
        "anchors_per_row": data.row_anchors,
    }
