"""What is exported: a training checkpoint's weights and what its files say about the run.

The trainer's layout: `checkpoint-<step>/` with model.safetensors (float32, the draft's own
weights), config.json, trainer_state.json, config.yaml, provenance.json and, written last,
COMPLETE; beside the checkpoints the links `best` and `latest`. With `train.ema_decay` also
ema.safetensors, the average of the weights over the steps, and check_ema.json, what it accepted.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dspark import config_io
from dspark.config import Config
from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError
from dspark.export.check import AVERAGE_PROBE_NAME, PROBE_NAME, Probe, read_probe
from dspark.export.config_json import ARCHITECTURES, from_json, read_json
from dspark.export.load import build_draft, check_fit, load_draft
from dspark.export.template import warn_of_another_target
from dspark.export.tensors import AVERAGE_NAME, read_tensors
from dspark.provenance import read_object
from dspark.target import Target

__all__ = ["Source", "Weights", "find_checkpoint", "read_source", "target_dtype"]

Weights = Literal["best", "raw", "ema"]
"""Of a checkpoint: those that accepted more if it is the run's best, else raw; those of its step;
their average over the steps."""

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A draft as it was trained, before it is rounded for export."""

    draft: DSparkDraftModel
    path: Path | None = None
    step: int | None = None
    weights: Literal["raw", "ema"] | None = None
    """Which of the checkpoint's; None for a draft that is none."""
    accept_length: float | None = None
    """The trainer's figure over its validation prompts, if these are its best weights."""
    probe: Probe | None = None
    config: Config | None = None
    """Resolved settings of the run."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's own."""


def find_checkpoint(path: Path) -> Path:
    """The complete checkpoint at ``path``; of a run directory its `best`, else its newest.

    Raises:
        CheckpointError: there is none, or it was half written.
    """
    if not path.is_dir():
        raise CheckpointError(f"'{path}' is not a directory; give a checkpoint or a run directory")
    if (path / "trainer_state.json").exists():
        if not (path / "COMPLETE").exists():
            raise CheckpointError(
                f"{path} has no COMPLETE file: it was half written; export another checkpoint"
            )
        return path
    steps = {
        int(match[1]): child
        for child in path.iterdir()
        if (match := _NAME.fullmatch(child.name)) and (child / "COMPLETE").exists()
    }
    best = path / "best"
    if (best / "COMPLETE").exists():
        return best.resolve()
    if not steps:
        raise CheckpointError(f"{path} holds no complete checkpoint-<step> directory")
    return steps[max(steps)]


def read_source(
    source: Path | str | DSparkDraftModel, target: Target, weights: Weights = "best"
) -> Source:
    """A checkpoint, a run directory, an exported draft or a model, in float32 (a model: as it is).

    ``weights`` chooses among a checkpoint's; others have one kind, which counts as raw.

    Raises:
        CheckpointError: it is missing, incomplete, does not fit ``target``, or holds no such
            weights.
    """
    if weights == "ema" and (isinstance(source, DSparkDraftModel) or _is_export(source)):
        raise CheckpointError(
            "weights ema: an average of the weights is in training checkpoints only, and this is "
            "a draft: leave it out"
        )
    if isinstance(source, DSparkDraftModel):
        check_fit(source.config, target, "the draft")
        return Source(draft=source)
    path = Path(source).expanduser()
    if _is_export(path):
        draft = load_draft(path, target=target, dtype=torch.float32)
        return Source(draft=draft, path=path.resolve())
    return _read_checkpoint(find_checkpoint(path), target, weights)


def target_dtype(source: Path) -> str:
    """The target's `dtype` setting in the run that left ``source``; auto for an exported draft.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if _is_export(source):
        return "auto"
    settings = find_checkpoint(source.expanduser()) / "config.yaml"
    return config_io.load(settings).target.dtype if settings.exists() else "auto"


def _is_export(source: Path | str) -> bool:
    path = Path(source).expanduser()
    return (path / "config.json").exists() and not (path / "trainer_state.json").exists()


def _read_checkpoint(path: Path, target: Target, asked: Weights) -> Source:
    # the trainer does not name the architecture that an export will claim
    raw = {**read_json(path), "architectures": [ARCHITECTURES[0]]}
    shape = from_json(raw, str(path / "config.json"))
    check_fit(shape, target, str(path))
    state = _json(path / "trainer_state.json")
    best = state.get("best") or {}
    if best.get("step") != state.get("step"):
        best = {}
    weights = best.get("weights", "raw") if asked == "best" else asked
    if weights == "ema" and not (path / AVERAGE_NAME).exists():
        raise CheckpointError(
            f"{path} holds no average of the weights ({AVERAGE_NAME}): train.ema_decay was null; "
            "export its weights raw"
        )
    tensors = read_tensors(path, AVERAGE_NAME if weights == "ema" else None)
    draft = build_draft(shape, tensors, where=str(path), target=target, dtype=torch.float32)
    probe_name = AVERAGE_PROBE_NAME if weights == "ema" else PROBE_NAME
    trained_for = (state.get("structure") or {}).get("target")
    warn_of_another_target(path, trained_for, target)
    settings = path / "config.yaml"
    return Source(
        draft=draft,
        path=path.resolve(),
        step=state.get("step"),
        weights=weights,
        accept_length=(
            best.get("accept_length") if best.get("weights", "raw") == weights else None
        ),
        probe=read_probe(path, probe_name) if (path / probe_name).exists() else None,
        config=config_io.load(settings) if settings.exists() else None,
        provenance=_json(path / "provenance.json"),
    )


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty if the file is missing."""
    return read_object(path, CheckpointError) if path.exists() else {}
