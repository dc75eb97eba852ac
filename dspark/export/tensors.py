"""Weights of an exported draft on disk: one safetensors file, or several behind an index.

Names are those of `DSparkDraftModel`; files that put `model.` before them are read as well, and so
are SpecForge's first exports, whose Markov head was a logit head.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.target.shards import INDEX_NAME, WEIGHTS_NAME, read_index

__all__ = [
    "AVERAGE_NAME",
    "FROZEN",
    "INDEX_NAME",
    "WEIGHTS_NAME",
    "misfits",
    "read_tensors",
    "weights_sha256",
]

AVERAGE_NAME = "ema.safetensors"
"""In a training checkpoint: the average of the weights over the steps."""
_OLD_MARKOV, _MARKOV = "logit_head.", "markov_head."
FROZEN = ("embed_tokens.weight", "lm_head.weight")
"""Copies of the target's tables: in the file or not, as the writer liked."""


def read_tensors(directory: Path, file: str | None = None) -> dict[str, Tensor]:
    """All tensors of a draft by name, on the CPU, in the dtype they are stored in.

    ``file``: another one than the weights' own.

    Raises:
        CheckpointError: no weights, a shard missing or unreadable, a name that stands twice.
    """
    tensors: dict[str, Tensor] = {}
    for shard in [directory / file] if file else _shards(directory):
        try:
            with safe_open(str(shard), framework="pt") as opened:  # type: ignore[no-untyped-call]
                held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read the weights {shard}: {error}") from None
        for name, tensor in held.items():
            plain = name.removeprefix("model.")
            if plain.startswith(_OLD_MARKOV):
                plain = _MARKOV + plain.removeprefix(_OLD_MARKOV)
            if plain.startswith("rotary_emb."):
                continue  # a function of the config, not a weight
            if plain in tensors:
                raise CheckpointError(f"{directory} holds the tensor '{plain}' twice")
            tensors[plain] = tensor
    return tensors


def weights_sha256(directory: Path) -> str:
    """Of the trained tensors as stored, which no conversion changes; the target's tables are not.

    Raises:
        CheckpointError: as `read_tensors`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(directory).items()):
        if name not in FROZEN:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            # numpy has no bfloat16
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _shards(directory: Path) -> list[Path]:
    single, index = directory / WEIGHTS_NAME, directory / INDEX_NAME
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(f"{directory} has neither {WEIGHTS_NAME} nor {INDEX_NAME}")
    names = set(read_index(index, CheckpointError).values())
    return [directory / name for name in sorted(names)]


def misfits(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> str:
    """What is missing, surplus or misshaped, as one clause; empty when all fits."""
    known = {**expected, **optional}
    missing = [name for name in expected if name not in tensors]
    surplus = [name for name in tensors if name not in known]
    shapes = [
        f"{name} is {list(tensors[name].shape)} where the config wants {list(shape)}"
        for name, shape in known.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    parts = []
    if missing:
        parts.append(f"missing {', '.join(missing)}")
    if surplus:
        parts.append(f"not expected {', '.join(sorted(surplus))}")
    return "; ".join(parts + shapes)
