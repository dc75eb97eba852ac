"""Are the tables beside the shards those of the checkpoint at `target.path`?

A run that needs no layer would not notice another model there. Some rows of each table are read
from the checkpoint's safetensors, nothing is loaded.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dspark.config import TargetSettings
from dspark.errors import DataError, TargetError
from dspark.provenance import read_object
from dspark.target import Target, fingerprint, resolve

__all__ = ["check_own"]

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_ROWS = 64


def check_own(
    settings: TargetSettings, outline: Target, tables: Mapping[str, Tensor], stored: str, where: str
) -> None:
    """Refuse shards that were captured from another model than the one at ``settings.path``.

    Args:
        outline: of that model.
        tables: `target.front.tables` as ``where``, a directory of shards, keeps them.
        stored: the shards' target fingerprint.

    Raises:
        DataError: the config or a table differs.
    """
    told = fingerprint.config_part(stored)
    ours = fingerprint.of_config(outline.config, outline.model)
    if told is not None and told != ours:
        raise DataError(
            f"data.shards '{where}' were captured from a target whose config (or "
            f"target.config_overrides) has the digits {told}; that of target.path "
            f"'{settings.path}' has {ours}: give the target they were captured from, or capture "
            "again"
        )
    directory = Path(resolve(settings))
    compared = False
    for name, weight in (("head", outline.head_weight), ("embed", outline.embed_weight)):
        if name in tables:
            rows = _rows(directory, _names(outline.model, weight), tables[name])
            if rows is None:
                continue
            compared = True
            if not bool((rows[0] == rows[1]).all()):
                raise DataError(
                    f"data.shards '{where}' keep the {name} table of another model than the one "
                    f"at target.path '{settings.path}': give the target they were captured from, "
                    "or capture again"
                )
    if not compared:
        log.info(
            "target.path '%s' holds no weights to compare: the target is taken as data.shards "
            "'%s' tell of it",
            settings.path,
            where,
        )


def _names(model: nn.Module, weight: Tensor) -> list[str]:
    """Under which a checkpoint may hold it; tied tables have two."""
    every = model.named_parameters(remove_duplicate=False)
    return [name for name, one in every if one is weight]


def _rows(directory: Path, names: list[str], table: Tensor) -> tuple[Tensor, Tensor] | None:
    """Some rows [_ROWS, D] as the checkpoint and as the shards hold them, None without them."""
    for file in _files(directory, names):
        try:
            with safe_open(file, framework="pt") as opened:
                held = set(opened.keys())
                for name in names:
                    if name in held:
                        return _read(opened.get_slice(name), table)
        except (OSError, SafetensorError) as error:
            log.warning("%s cannot be read (%s): its tables are not compared", file, error)
    return None


def _read(part: Any, table: Tensor) -> tuple[Tensor, Tensor] | None:
    if list(part.get_shape()) != list(table.shape):
        return None
    step = max(1, len(table) // _ROWS)
    ours = torch.cat([part[row : row + 1] for row in range(0, len(table), step)])
    if ours.dtype.itemsize == 1:
        return None  # quantised: its scales stand elsewhere
    # in the dtype in which the target was computed
    return ours.to(table.dtype), table[::step]


def _files(directory: Path, names: list[str]) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            held: Any = read_object(index, TargetError).get("weight_map")
            found = {held[name] for name in names if name in held}
            return [directory / str(name) for name in sorted(found)]
        except (TargetError, TypeError):
            return []
    return sorted(directory.glob("*.safetensors"))
