"""An exported draft directory, ours or another trainer's, as a draft that fits its target.

Everything that would only show as an accept length near 1 is refused here, in one sentence with
both numbers: missing or surplus tensors, another vocabulary, layers the target does not have.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import CheckpointError
from dspark.export.config_json import LING, family_of, from_json, read_json
from dspark.export.place import PROVENANCE_NAME
from dspark.export.template import warn_of_another_target
from dspark.export.tensors import FROZEN, misfits, read_tensors
from dspark.target import Target
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape

__all__ = [
    "TargetShape",
    "build_draft",
    "check_fit",
    "fitting_model",
    "load_draft",
    "read_config",
    "read_weights",
]

_TRAINING_FILES = ("trainer_state.json", "optimizer.pt", "latest")


def read_config(
    path: str | Path,
    target: Target | None = None,
    *,
    target_layers: int | Callable[[], int] | None = None,
) -> DSparkConfig:
    """Shape of the draft in ``path``, for ``target`` if it is given; weights are not read.

    ``target_layers``: of a target that is not loaded yet.

    Raises:
        CheckpointError: no exported draft, or one that is not understood.
    """
    directory = _directory(path)
    raw, where = read_json(directory), str(directory / "config.json")
    config = from_json(
        raw,
        where,
        target_layers=target.num_layers if target is not None else target_layers,
    )
    mask, pad = config.mask_token_id, config.pad_token_id
    if mask == pad and family_of(raw) != LING:
        raise CheckpointError(
            f"{where}: mask_token_id is {mask} and pad_token_id is {pad}: padding would read as "
            f"open slots; only the official Ling draft ({LING}) is known to be trained so"
        )
    return config


def load_draft(
    path: str | Path,
    *,
    target: Target | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DSparkDraftModel:
    """Load an exported draft (config.json and safetensors, single or indexed) in evaluation mode.

    Args:
        target: its embedding and head are attached, and device and dtype default to its own.
            Without it, copies of the two tables are attached if the directory holds them.
        device: where the weights go; without a target the default is the CPU.
        dtype: of the weights; without a target the default is the one they are stored in.

    Raises:
        CheckpointError: it is a training checkpoint, is incomplete, or does not fit the target.
    """
    config = read_config(path, target)
    directory = _directory(path)
    if target is not None:
        check_fit(config, target, str(directory))
        warn_of_another_target(directory, _trained_for(directory), target)
    return build_draft(
        config,
        read_weights(directory),
        where=str(directory),
        target=target,
        device=device,
        dtype=dtype,
    )


def read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors of an exported draft, as stored.

    Raises:
        CheckpointError: they cannot be read, or are not finite.
    """
    tensors = read_tensors(directory)
    for name, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):
            raise CheckpointError(f"draft {directory} holds NaN or Inf in {name}: use another one")
    return tensors


def _trained_for(directory: Path) -> Any:
    """Fingerprint of the target that an export of ours was made for; drafts of others tell none."""
    try:
        text = (directory / PROVENANCE_NAME).read_text(encoding="utf-8")
        return json.loads(text)["target"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _directory(path: str | Path) -> Path:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"draft '{path}' is not a directory")
    if any((directory / name).exists() for name in _TRAINING_FILES):
        raise CheckpointError(
            f"{directory}: this is a training checkpoint; run `dspark export` first"
        )
    return directory


@dataclass(frozen=True)
class TargetShape:
    """What `check_fit` asks of a target, before one is loaded."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    @classmethod
    def of(cls, config: LingConfig | DenseShape, name: str) -> "TargetShape":
        """Of a model whose config is known."""
        return cls(
            name,
            config.num_hidden_layers,
            config.hidden_size,
            config.vocab_size,
            config.max_position_embeddings,
        )


def check_fit(config: DSparkConfig, target: Target | TargetShape, where: str) -> None:
    """Does a draft of this shape belong to ``target``?

    Raises:
        CheckpointError: names the key, the draft's number and the target's.
    """
    ids = list(config.target_layer_ids or ())
    if ids and ids[-1] >= target.num_layers:
        raise CheckpointError(
            f"{where}: target_layer_ids {ids} does not fit target '{target.name}', whose layers "
            f"are 0..{target.num_layers - 1}"
        )
    for key, mine, theirs in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if mine != theirs:
            raise CheckpointError(
                f"{where}: {key} is {mine} but target '{target.name}' has {theirs}; "
                "this draft was made for another target"
            )
    if config.max_position_embeddings < target.max_position_embeddings:
        raise CheckpointError(
            f"{where}: max_position_embeddings is {config.max_position_embeddings} but target "
            f"'{target.name}' has {target.max_position_embeddings}; drafting would fail on "
            "longer prompts"
        )


def fitting_model(
    config: DSparkConfig, tensors: Mapping[str, Tensor], where: str
) -> DSparkDraftModel:
    """A draft on the meta device, after a look at whether ``tensors`` are its weights.

    Raises:
        CheckpointError: every missing, surplus and misshaped tensor, in one message.
    """
    with torch.device("meta"):
        draft: DSparkDraftModel = DSparkDraftModel(config)
    expected = {name: tuple(parameter.shape) for name, parameter in draft.trainable()}
    table = (config.vocab_size, config.hidden_size)
    fault = misfits(tensors, expected, dict.fromkeys(FROZEN, table))
    if fault:
        raise CheckpointError(f"{where} does not fit its config: {fault}")
    return draft


def build_draft(
    config: DSparkConfig,
    tensors: dict[str, Tensor],
    *,
    where: str,
    target: Target | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DSparkDraftModel:
    """A draft from its shape and its tensors by name; ``where`` names them in errors.

    Raises:
        CheckpointError: every missing, surplus and misshaped tensor, in one message.
    """
    draft = fitting_model(config, tensors, where)
    if target is not None:
        device = target.device if device is None else device
        dtype = target.dtype if dtype is None else dtype
    placed = {
        name: tensors[name].to(device=device, dtype=dtype, copy=True).contiguous()
        for name, _ in draft.trainable()
    }
    draft.load_state_dict(placed, assign=True)
    # its tables are float32 functions of the config: rebuilt off the meta device, never cast
    draft.rotary_emb = Qwen3RotaryEmbedding(config).to(device)
    if target is not None:
        draft.attach(target.embed_weight, target.head_weight)
    elif all(name in tensors for name in FROZEN):
        draft.attach(*(tensors[name].to(device=device, dtype=dtype) for name in FROZEN))
    draft.train(False)
    return draft
