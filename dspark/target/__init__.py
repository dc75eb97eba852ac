"""The target: a frozen post-trained model that is sampled, tapped and verified against."""

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dspark.config import TargetSettings
from dspark.errors import TargetError
from dspark.provenance import read_object
from dspark.target import catalog
from dspark.target.base import Features, GoOn, ReadingStopped, Rows, Target
from dspark.target.config import LingConfig, is_ling
from dspark.target.hf import HFTarget
from dspark.target.ling import LingTarget
from dspark.target.model import LingModel, Reduce
from dspark.target.placement import parse_devices
from dspark.target.rows import RowCache
from dspark.target.weights import load_model

__all__ = [
    "Features",
    "GoOn",
    "HFTarget",
    "LingTarget",
    "ReadingStopped",
    "RowCache",
    "Rows",
    "Target",
    "library_config",
    "ling_directory",
    "load",
    "load_ling",
    "load_tokenizer",
    "outline",
    "peek",
    "resolve",
]

log = logging.getLogger(__name__)

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files, any of which a tokenizer can be made of."""


def resolve(settings: TargetSettings) -> str:
    """Directory or hub id behind ``settings.path``.

    Raises:
        TargetError: a path that does not exist and cannot be a hub id.
        MissingPackageError: a named target whose package is missing.
    """
    path = settings.path
    if path in catalog.NAMES:
        return str(catalog.materialise(path))
    if Path(path).expanduser().is_dir():
        return str(Path(path).expanduser())
    parts = path.split("/")
    if Path(path).expanduser().exists() or path.startswith((".", "/", "~")) or len(parts) != 2:
        known = ", ".join(catalog.NAMES)
        meant = Path("checkpoints") / path
        hint = f"; did you mean '{meant}'?" if (meant / "config.json").is_file() else ""
        raise TargetError(
            f"target.path '{path}' is neither a model directory, nor a hub id like owner/name, "
            f"nor a known name ({known}){hint}"
        )
    return path


def load(
    settings: TargetSettings | str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    nextn: bool = False,
) -> Target:
    """Load the target's weights, frozen and in evaluation mode.

    ``device`` and ``dtype`` win over the settings. ``nextn``: with the NEXTN block.

    Raises:
        TargetError: it cannot be found or read, its architecture is not supported, or it has no
            NEXTN block.
    """
    settings = TargetSettings(path=settings) if isinstance(settings, str) else settings
    devices = _devices(device or settings.device)
    where = devices[0]
    place = resolve(settings)
    raw = _raw_config(place, settings)
    if is_ling(raw) or raw.get("model_type") == "bailing_hybrid":
        return load_ling(
            settings, device=devices, dtype=_dtype(dtype or settings.dtype, where), nextn=nextn
        )
    _refuse_ling_settings(settings, raw)
    if nextn:
        raise TargetError(
            f"a NEXTN draft is for Ling-3.0 targets; '{settings.path}' is "
            f"{raw.get('architectures')}"
        )
    if len(devices) > 1:
        raise TargetError(
            f"target.device '{device or settings.device}' is several devices, which is for "
            f"Ling-3.0 targets; '{settings.path}' is {raw.get('architectures')}"
        )
    from transformers import AutoModelForCausalLM

    from dspark.target.attention import ATTENTION_NAME

    try:
        model = AutoModelForCausalLM.from_pretrained(
            place,
            revision=settings.revision,
            dtype=_dtype(dtype or settings.dtype, where),
            attn_implementation=ATTENTION_NAME,
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise TargetError(_first_line(settings.path, error)) from error
    return HFTarget(model.to(where), settings.path, settings.revision)


def outline(settings: TargetSettings) -> Target:
    """The target by its config alone, its weights without values (on torch's meta device).

    The dtype `auto` is bfloat16, as on a GPU.

    Raises:
        TargetError: as `load` does, but for what is wrong with weights.
    """
    place = resolve(settings)
    raw = _raw_config(place, settings)
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    if is_ling(raw) or raw.get("model_type") == "bailing_hybrid":
        changed = {**raw, **(settings.config_overrides or {})}
        config = LingConfig.from_dict(changed, f"{place}/config.json")
        with torch.device("meta"):
            ling = LingModel(config, swiglu_limits=settings.apply_swiglu_limits).to(dtype)
        generation = _ling_generation(Path(place), config, settings)
        return LingTarget(ling, settings.path, settings.revision, generation)
    _refuse_ling_settings(settings, raw)
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from dspark.target.attention import ATTENTION_NAME

    try:
        found = AutoConfig.from_pretrained(place, revision=settings.revision)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                found, dtype=dtype, attn_implementation=ATTENTION_NAME
            )
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise TargetError(_first_line(settings.path, error)) from error
    with suppress(OSError):  # without the file the config tells the end ids
        model.generation_config = GenerationConfig.from_pretrained(
            place, revision=settings.revision
        )
    return HFTarget(model, settings.path, settings.revision)


def peek(settings: TargetSettings) -> tuple[LingConfig | None, torch.device, torch.dtype]:
    """What `load` will load, and where to: the config of a Ling-3.0 target, None of another.

    Raises:
        TargetError: it cannot be found or understood, or there is no such device.
    """
    device = _devices(settings.device)[0]
    dtype = _dtype(settings.dtype, device)
    place = resolve(settings)
    raw = _raw_config(place, settings)
    if not is_ling(raw):
        return None, device, dtype
    changed = {**raw, **(settings.config_overrides or {})}
    return LingConfig.from_dict(changed, f"{place}/config.json"), device, dtype


def library_config(settings: TargetSettings) -> Any:
    """transformers' config of the text decoder that `load` will load; None if it knows none."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(resolve(settings), revision=settings.revision)
    except (OSError, ValueError, ImportError, KeyError, TypeError):
        return None
    return found.get_text_config(decoder=True)


def load_ling(
    settings: TargetSettings,
    *,
    device: torch.device | Sequence[torch.device],
    dtype: torch.dtype,
    ranks: int = 1,
    rank: int = 0,
    reduce: Reduce | None = None,
    whole_embedding: bool = False,
    nextn: bool = False,
) -> LingTarget:
    """Load a Ling-3.0 checkpoint, whole or as one of ``ranks`` (``reduce`` sums over them).

    ``whole_embedding``: a rank holds all rows of that table.

    Raises:
        TargetError: it cannot be found, does not fit its config, is not a Ling-3.0 model, or has no
            NEXTN block where one is wanted.
    """
    directory = ling_directory(settings)
    config = LingConfig.from_file(directory / "config.json", settings.config_overrides)
    if nextn and not config.num_nextn_predict_layers:
        raise TargetError(
            f"target '{settings.path}' has no NEXTN block to draft with: its "
            "num_nextn_predict_layers is 0"
        )
    model = load_model(
        directory,
        config,
        device=device,
        dtype=dtype,
        ranks=ranks,
        rank=rank,
        reduce=reduce,
        whole_embedding=whole_embedding,
        nextn=nextn,
        swiglu_limits=settings.apply_swiglu_limits,
    )
    generation = _ling_generation(directory, config, settings)
    return LingTarget(model, settings.path, settings.revision, generation)


def _ling_generation(directory: Path, config: LingConfig, settings: TargetSettings) -> Any:
    """transformers' GenerationConfig of the checkpoint, None without the file."""
    from transformers import GenerationConfig

    path = directory / "generation_config.json"
    if not path.is_file():
        return None
    try:
        generation = GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError) as error:
        raise TargetError(_first_line(settings.path, error, " (generation_config)")) from error
    config.check_ids(str(path), "eos_token_id", generation.eos_token_id)
    return generation


def _refuse_ling_settings(settings: TargetSettings, raw: dict[str, Any]) -> None:
    """Settings that another target would not heed."""
    if not settings.apply_swiglu_limits:
        raise TargetError(
            "target.apply_swiglu_limits false is for Ling-3.0 targets; "
            f"'{settings.path}' is {raw.get('architectures')}"
        )
    if settings.config_overrides:
        raise TargetError(
            f"target.config_overrides {dict(settings.config_overrides)} is for Ling-3.0 targets; "
            f"'{settings.path}' is {raw.get('architectures')}"
        )


def _raw_config(place: str, settings: TargetSettings) -> dict[str, Any]:
    """config.json of a directory or hub id; empty where there is none, which others report."""
    from transformers.utils import cached_file

    try:
        file = cached_file(place, "config.json", revision=settings.revision)
        raw = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return {}
    return raw if isinstance(raw, dict) else {}


def ling_directory(settings: TargetSettings) -> Path:
    """Where the files of a checkpoint lie, downloaded if they have to be.

    Raises:
        TargetError: it cannot be found.
    """
    place = resolve(settings)
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(snapshot_download(place, revision=settings.revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise TargetError(_first_line(settings.path, error)) from error


def load_tokenizer(settings: TargetSettings | str) -> Any:
    """The target's tokenizer (a transformers PreTrainedTokenizerBase); loads no weights.

    Raises:
        TargetError: there is none, or it cannot be read.
    """
    settings = TargetSettings(path=settings) if isinstance(settings, str) else settings
    from transformers import AutoTokenizer

    place = resolve(settings)
    try:
        return AutoTokenizer.from_pretrained(place, revision=settings.revision)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        if Path(place).is_dir() and not any((Path(place) / name).is_file() for name in _TOKENIZERS):
            raise TargetError(
                f"target '{settings.path}' has no tokenizer: the directory holds none of "
                f"{', '.join(_TOKENIZERS)}"
            ) from error
        if Path(place).is_dir():
            # what is wrong may be the config, which the tokenizer's class is read from
            read_object(Path(place) / "config.json", TargetError)
        raise TargetError(_first_line(settings.path, error, " (tokenizer)")) from error


def _first_line(path: str, error: Exception, part: str = "") -> str:
    text = str(error).strip().splitlines()
    offline = os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(path).exists()
    hint = "; HF_HUB_OFFLINE=1 forbids the download" if offline else ""
    return f"cannot load target '{path}'{part}: {text[0] if text else type(error).__name__}{hint}"


def _devices(name: str) -> tuple[torch.device, ...]:
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    return parse_devices(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # without bf16 arithmetic a CPU emulates it, several times slower than float32
        fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
