"""Checkpoints with random weights in the official Ling-3.0 layout, of any size.

They stand in for the 250 GB download wherever only shapes matter: loader, server, step times. What
such a model says means nothing.
"""

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.progress import Bar
from dspark.provenance import free_bytes, making, write_json
from dspark.target.config import LingConfig
from dspark.target.drawn import KEY, Drawn, draw, fill_drawn
from dspark.target.layout import TensorSpec, tensors
from dspark.target.ling_chat import synthetic_tokenizer
from dspark.target.model import LingModel
from dspark.target.shards import write_shards
from dspark.target.weights import SHARD_BYTES

__all__ = ["make_checkpoint", "random_model", "synthetic"]

_OURS = re.compile(
    r"\.?(model.*\.safetensors|tokenizer.*\.json|chat_template\.jinja|generation_config\.json).*"
    r"|\.config\.json\..*"
)
"""What a call that did not come to its config.json leaves, complete or half written."""


def synthetic(spec: TensorSpec, config: LingConfig, seed: int) -> Tensor:
    """Values of one tensor, a function of (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    dtype = torch.float32 if spec.float32 else torch.bfloat16
    return draw(torch.empty(spec.shape, dtype=dtype), spec.name, config, generator)


@torch.no_grad()
def random_model(
    config: LingConfig,
    device: torch.device | str,
    *,
    ranks: int = 1,
    seed: int = 0,
    nextn: bool = False,
) -> LingModel:
    """A bf16 model, or one rank of several, filled where it stays; no file, no second copy.

    Sums over ranks are left out: with several, this is for times and memory alone.
    """
    with torch.device("meta"):
        model = LingModel(config, ranks=ranks, reduce=lambda part: part, nextn=nextn)
    return fill_drawn(model.to(torch.bfloat16), device, Drawn(seed))


def make_checkpoint(
    config: LingConfig,
    directory: Path,
    *,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    drawn: Drawn | None = None,
) -> int:
    """Write weights, config and a byte tokenizer with Ling's chat format; bytes of weights.

    Needs the memory of one shard. What an interrupted call left is removed. ``drawn``: no weights,
    but how whoever loads the directory draws them.

    Raises:
        TargetError: ``directory`` holds something else, or its disk is too small.
    """
    raw = {name: value for name, value in config.raw.items() if name != KEY}
    if drawn is not None:
        raw[KEY] = drawn.to_json()
        Drawn.of(LingConfig.from_dict(raw))
    left = _entries(directory)
    foreign = [one.name for one in left if not _OURS.fullmatch(one.name)]
    if foreign:
        raise TargetError(f"{directory} already holds {foreign[0]}; give a new directory")
    for one in left:
        # its shards may have been cut otherwise
        one.unlink()
    specs = list(tensors(config)) if drawn is None else []
    total = sum(spec.nbytes for spec in specs)
    if total > (free := free_bytes(directory)):
        raise TargetError(f"{directory} needs {total:,} bytes and its disk has {free:,} free")
    with making():
        directory.mkdir(parents=True, exist_ok=True)
    if specs:
        with Bar("synthetic weights", total) as bar:
            write_shards(
                directory,
                specs,
                lambda spec: synthetic(spec, config, seed),
                shard_bytes,
                progress=bar.advance,
            )
    synthetic_tokenizer(config).save_pretrained(directory)
    write_json(directory / "generation_config.json", {"eos_token_id": config.eos_token_id})
    # config.json comes last: it is what marks the directory as usable
    write_json(directory / "config.json", raw)
    return total


def _entries(directory: Path) -> list[Path]:
    if directory.exists() and not directory.is_dir():
        raise TargetError(f"{directory} is a file; give a new directory")
    return sorted(directory.iterdir()) if directory.exists() else []
