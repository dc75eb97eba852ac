"""Safetensors files of a sharded checkpoint: headers, the index, and writing a plan of shards.

Headers are read by hand, so that a truncated file is told by the tensor it lacks and nothing is
mapped before everything has been checked.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.errors import TargetError
from dspark.provenance import read_object, save_tensors, temporary_name, write_json
from dspark.target.layout import TensorSpec

__all__ = ["INDEX_NAME", "WEIGHTS_NAME", "Stored", "read_headers", "read_index", "write_shards"]

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
_MOST_HEADER = 100 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor as a file's header describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: BF16, F32, F8_E4M3, …"""


def read_headers(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory, from the headers of its files.

    Raises:
        TargetError: no weights, a file missing, truncated or unreadable, or an index that does not
            agree with the files.
    """
    index = directory / INDEX_NAME
    if not index.is_file():
        single = directory / WEIGHTS_NAME
        if not single.is_file():
            raise TargetError(f"{directory} holds neither {INDEX_NAME} nor {WEIGHTS_NAME}")
        return _header(single)
    places = read_index(index, TargetError)
    held: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        for tensor, stored in _header(directory / name).items():
            if tensor not in places:
                raise TargetError(
                    f"{name} holds {tensor}, which {index} does not list: the tensor is not "
                    "expected, or the index is of other files"
                )
            # a copy in another file than the listed one is nobody's business
            if places[tensor] == name:
                held[tensor] = stored
    for tensor, name in places.items():
        if tensor not in held:
            raise TargetError(f"{index} says that {name} holds {tensor}, and it does not")
    return held


def read_index(index: Path, kind: type[Exception]) -> dict[str, str]:
    """Tensor -> name of its file beside ``index``; all of these files are there.

    Raises:
        kind: it cannot be read, is no index, or names files that are missing.
    """
    places = read_object(index, kind).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
        raise kind(f"{index} must hold 'weight_map', an object of tensor names and file names")
    outside = sorted(name for name in set(places.values()) if Path(name).name != name)
    if outside:
        raise kind(f"{index} must name files beside it, not {outside[0]}")
    missing = sorted({name for name in places.values() if not (index.parent / name).is_file()})
    if missing:
        raise kind(f"{index.parent} lacks {', '.join(missing)}, which its index names")
    return places


def _header(path: Path) -> dict[str, Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MOST_HEADER):
                raise ValueError(f"its header claims {length} bytes of {size}")
            raw: dict[str, Any] = json.loads(file.read(length))
        raw.pop("__metadata__", None)
        held = {}
        for name, entry in raw.items():
            end = 8 + length + entry["data_offsets"][1]
            if end > size:
                raise TargetError(
                    f"{path} is truncated: {name} should end at byte {end}, the file has {size}"
                )
            held[name] = Stored(path, tuple(entry["shape"]), entry["dtype"])
        return held
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise TargetError(f"{path} is not a safetensors file: {error}") from None


def plan(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Specs in their order, cut into files of at most ``shard_bytes`` (a larger tensor alone)."""
    shards: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        if not shards or used + spec.nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def write_shards(
    directory: Path,
    specs: Iterable[TensorSpec],
    values: Callable[[TensorSpec], Tensor],
    shard_bytes: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> Mapping[str, str]:
    """Write ``values`` of every spec, one shard in memory at a time; name -> file.

    Values are asked for by several threads.

    One shard is `model.safetensors`, more have the index that readers expect. ``progress`` is told
    the bytes of each finished shard.
    """
    shards = plan(specs, shard_bytes)
    places: dict[str, str] = {}
    pool = ThreadPoolExecutor()
    try:
        for number, shard in enumerate(shards):
            name = (
                WEIGHTS_NAME
                if len(shards) == 1
                else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            )
            tensors = pool.map(lambda spec: values(spec).cpu().contiguous(), shard)
            with temporary_name(directory / name) as aside:
                save_tensors(
                    {spec.name: tensor for spec, tensor in zip(shard, tensors, strict=True)}, aside
                )
            places |= {spec.name: name for spec in shard}
            if progress is not None:
                progress(sum(spec.nbytes for spec in shard))
    finally:
        # who is interrupted does not wait for the rest of a shard
        pool.shutdown(wait=False, cancel_futures=True)
    if len(shards) > 1:
        total = sum(spec.nbytes for shard in shards for spec in shard)
        write_json(
            directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places}
        )
    return places
