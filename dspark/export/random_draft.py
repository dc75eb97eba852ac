"""A draft directory with random weights, for times alone: nobody would accept what it proposes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError
from dspark.export.config_json import from_json
from dspark.export.tensors import WEIGHTS_NAME
from dspark.provenance import making, save_tensors, write_json

__all__ = ["fill_draft", "write_random_draft"]


@torch.no_grad()
def fill_draft(draft: DSparkDraftModel, seed: int) -> None:
    """Norms of one, all else drawn, where the weights are."""
    device = next(draft.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, values in draft.named_parameters():
        if "norm" in name:
            values.fill_(1.0)
        else:
            values.normal_(0, 0.02, generator=generator)


@torch.no_grad()
def write_random_draft(raw: Mapping[str, Any], out: Path, *, seed: int = 0) -> int:
    """Write config.json ``raw`` and bfloat16 weights of its shape to ``out``; bytes of weights.

    Raises:
        CheckpointError: ``out`` holds files, or ``raw`` is not understood.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists; give a new directory")
    config = from_json(dict(raw), "draft")
    with torch.device("meta"):
        draft: DSparkDraftModel = DSparkDraftModel(config)
    draft.to(torch.bfloat16).to_empty(device="cpu")
    fill_draft(draft, seed)
    tensors = dict(draft.trainable())
    with making():
        out.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, out / WEIGHTS_NAME)
    # it comes last: it is what marks the directory as usable
    write_json(out / "config.json", dict(raw))
    return sum(one.nbytes for one in tensors.values())
