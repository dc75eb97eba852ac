"""The target: a frozen post-trained model that is sampled, tapped and verified against."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from dspark.config import TargetSettings
from dspark.errors import TargetError
from dspark.target import catalog
from dspark.target.hf import Features, Rows, Target
from dspark.target.rows import ATTENTION_NAME, RowCache

__all__ = ["Features", "RowCache", "Rows", "Target", "load", "load_tokenizer", "resolve"]

log = logging.getLogger(__name__)


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
        raise TargetError(
            f"target.path '{path}' is neither a model directory, nor a hub id like owner/name, "
            f"nor a known name ({known})"
        )
    return path


def load(
    settings: TargetSettings | str, *, device: str | None = None, dtype: str | None = None
) -> Target:
    """Load the target's weights, frozen and in evaluation mode.

    ``device`` and ``dtype`` win over the settings.

    Raises:
        TargetError: it cannot be found or read, or its architecture is not supported.
    """
    settings = TargetSettings(path=settings) if isinstance(settings, str) else settings
    from transformers import AutoModelForCausalLM

    where = _device(device or settings.device)
    place = resolve(settings)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            place,
            revision=settings.revision,
            dtype=_dtype(dtype or settings.dtype, where),
            attn_implementation=ATTENTION_NAME,
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise TargetError(_first_line(settings.path, error)) from error
    return Target(model.to(where), settings.path, settings.revision)


def load_tokenizer(settings: TargetSettings | str) -> Any:
    """The target's tokenizer (a transformers PreTrainedTokenizerBase); loads no weights.

    Raises:
        TargetError: there is none, or it cannot be read.
    """
    settings = TargetSettings(path=settings) if isinstance(settings, str) else settings
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(settings), revision=settings.revision)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise TargetError(_first_line(f"{settings.path} (tokenizer)", error)) from error


def _first_line(path: str, error: Exception) -> str:
    text = str(error).strip().splitlines()
    offline = os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(path).exists()
    hint = "; HF_HUB_OFFLINE=1 forbids the download" if offline else ""
    return f"cannot load target '{path}': {text[0] if text else type(error).__name__}{hint}"


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TargetError(f"target.device '{name}' is not a torch device") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TargetError(f"target.device '{name}' needs a GPU, and torch finds none")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # without bf16 arithmetic a CPU emulates it, several times slower than float32
        fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
