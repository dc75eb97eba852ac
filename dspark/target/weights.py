"""Weights of a Ling-3.0 checkpoint into a `LingModel`, whole or one rank's slice, and back.

Files are read one after the other and tensor by tensor, straight into the place where they stay:
beside the result there is never more than one shard in memory. Everything that the headers can
tell is checked before the first weight is read.

Symbols: E experts, I inner width of a rank, D hidden.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import TargetError
from dspark.progress import track
from dspark.provenance import write_json
from dspark.target.config import LingConfig
from dspark.target.drawn import Drawn, fill_drawn
from dspark.target.layout import TensorSpec, is_quantised, tensors
from dspark.target.model import LingModel, Reduce
from dspark.target.shards import Stored, read_headers, write_shards

__all__ = ["SHARD_BYTES", "fill", "load_model", "read_tensor", "save_model"]

SHARD_BYTES = 5 << 30
_SCALE = "_scale_inv"
_FP8_BLOCK = 128
_SHOWN = 6
"""Problems told one by one; of the others the number."""


def load_model(
    directory: Path,
    config: LingConfig,
    *,
    device: torch.device | str | Sequence[torch.device] = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    ranks: int = 1,
    rank: int = 0,
    reduce: Reduce | None = None,
    whole_embedding: bool = False,
    nextn: bool = False,
    swiglu_limits: bool = True,
) -> LingModel:
    """Build the model of ``config`` (rank ``rank`` of ``ranks``) and read its weights.

    Several devices share the layers. fp8 blocks are multiplied out. ``nextn`` also reads the NEXTN
    block; without it its tensors are passed over. Where ``config`` says so, weights are drawn.

    Raises:
        TargetError: a file or tensor is missing, surplus, truncated, misshaped, of another dtype,
            or holds NaN or infinity; the message names tensors and what was expected.
    """
    with torch.device("meta"):
        model = LingModel(
            config,
            ranks=ranks,
            rank=rank,
            reduce=reduce,
            whole_embedding=whole_embedding,
            nextn=nextn,
            swiglu_limits=swiglu_limits,
        )
    drawn = Drawn.of(config, f"{directory}/config.json")
    if drawn is not None:
        return fill_drawn(model.to(dtype), _one_device(device), drawn)
    wanted = {spec.name: spec for spec in tensors(config) if nextn or not _nextn(config, spec.name)}
    held = read_headers(directory)
    _check(config, directory, wanted, held)
    model = model.to(dtype)
    model.to_devices([torch.device(device)] if isinstance(device, str | torch.device) else device)
    by_file: dict[Path, list[TensorSpec]] = defaultdict(list)
    for name, spec in wanted.items():
        by_file[held[name].file].append(spec)
    places = _Places(model)
    for file in track(sorted(by_file), f"loading {directory.name}", len(by_file)):
        _read_file(file, by_file[file], held, places, ranks, rank)
    return model


def _one_device(device: torch.device | str | Sequence[torch.device]) -> torch.device | str:
    if isinstance(device, str | torch.device):
        return device
    if len(device) > 1:
        raise TargetError(f"drawn weights are for one device, not for {len(device)}")
    return device[0]


def read_tensor(directory: Path, name: str) -> Tensor:
    """One whole tensor, as it is stored.

    Raises:
        TargetError: there is none of this name.
    """
    stored = read_headers(directory).get(name)
    if stored is None:
        raise TargetError(f"{directory} holds no tensor {name}")
    with safe_open(str(stored.file), framework="pt") as opened:  # type: ignore[no-untyped-call]
        found: Tensor = opened.get_tensor(name)
    return found


def save_model(model: LingModel, directory: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a whole model in the official layout, with its config.json.

    A model without the NEXTN block gets a config without it.

    Raises:
        ValueError: ``model`` is one rank of several.
    """
    if model.ranks != 1:
        raise ValueError(f"one rank of {model.ranks} is no whole checkpoint")
    config = model.config
    directory.mkdir(parents=True, exist_ok=True)
    places = _Places(model)

    def value(spec: TensorSpec) -> Tensor:
        dtype = torch.float32 if spec.float32 else torch.bfloat16
        return places.of(spec).detach().to(dtype).view(spec.shape)

    specs = [spec for spec in tensors(config) if model.has_nextn or not _nextn(config, spec.name)]
    write_shards(directory, specs, value, shard_bytes)
    raw = dict(config.raw)
    if not model.has_nextn:
        raw["num_nextn_predict_layers"] = 0
    write_json(directory / "config.json", raw)


def fill(model: LingModel, values: Callable[[TensorSpec], Tensor]) -> None:
    """Set every tensor of ``model`` from whole ``values`` (a rank takes its slice)."""
    places = _Places(model)
    with torch.no_grad():
        for spec in tensors(model.config):
            if _nextn(model.config, spec.name) and not model.has_nextn:
                continue
            place = places.of(spec)
            place.copy_(
                values(spec)[_slice(spec, model.ranks, model.rank, place)].view(place.shape)
            )


def _nextn(config: LingConfig, name: str) -> bool:
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= config.num_hidden_layers


class _Places:
    """Where a tensor of the checkpoint lies in a model."""

    def __init__(self, model: LingModel) -> None:
        self._held: dict[str, Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }

    def of(self, spec: TensorSpec) -> Tensor:
        """A view; experts are a part of a stack."""
        before, middle, after = spec.name.partition(".mlp.experts.")
        if not middle:
            return self._held[spec.name]
        number, projection, _ = after.split(".")
        if projection == "down_proj":
            return self._held[f"{before}{middle}down"][int(number)]
        gate, up = self._held[f"{before}{middle}gate_up"][int(number)].chunk(2)
        return gate if projection == "gate_proj" else up


def _read_file(
    file: Path,
    specs: list[TensorSpec],
    held: Mapping[str, Stored],
    places: _Places,
    ranks: int,
    rank: int,
) -> None:
    try:
        with safe_open(str(file), framework="pt") as opened:  # type: ignore[no-untyped-call]
            for spec in specs:
                place = places.of(spec)
                mine = _slice(spec, ranks, rank, place)
                if held[spec.name].dtype == "F8_E4M3":
                    value = _dequantised(opened.get_tensor(spec.name), spec.name, file, held)[mine]
                else:
                    value = opened.get_slice(spec.name)[mine]
                if not bool(value.isfinite().all()):
                    raise TargetError(f"{file}: {spec.name} holds NaN or infinity")
                with torch.no_grad():
                    place.copy_(value.view(place.shape))
    except (OSError, SafetensorError) as error:
        raise TargetError(f"cannot read {file}: {error}") from None


def _slice(spec: TensorSpec, ranks: int, rank: int, place: Tensor) -> tuple[slice, ...]:
    """What goes to ``place``, which may be a rank's own although it holds the whole."""
    parts = [slice(None)] * len(spec.shape)
    if spec.split is not None and place.numel() < prod(spec.shape):
        width = spec.shape[spec.split] // ranks
        parts[spec.split] = slice(rank * width, (rank + 1) * width)
    return tuple(parts)


def _dequantised(weight: Tensor, name: str, file: Path, held: Mapping[str, Stored]) -> Tensor:
    """fp8 blocks of 128 x 128 times their scales, in bf16; whole: ranks cut through blocks."""
    place = held[name + _SCALE].file
    with safe_open(str(place), framework="pt") as opened:  # type: ignore[no-untyped-call]
        scale: Tensor = opened.get_tensor(name + _SCALE).float()
    rows, columns = weight.shape
    scale = scale.repeat_interleave(_FP8_BLOCK, 0)[:rows]
    scale = scale.repeat_interleave(_FP8_BLOCK, 1)[:, :columns]
    return (weight.float() * scale).to(torch.bfloat16)


def _check(
    config: LingConfig,
    directory: Path,
    wanted: Mapping[str, TensorSpec],
    held: Mapping[str, Stored],
) -> None:
    problems = list(_problems(config, wanted, held))
    if problems:
        more = len(problems) - _SHOWN
        shown = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise TargetError(f"{directory} does not fit its config.json: {shown}")


def _problems(
    config: LingConfig, wanted: Mapping[str, TensorSpec], held: Mapping[str, Stored]
) -> Iterator[str]:
    for name, spec in wanted.items():
        stored = held.get(name)
        if stored is None:
            yield f"{name} {list(spec.shape)} is missing"
            continue
        flat = (spec.shape[0], spec.shape[-1])
        # a depthwise convolution without its middle dimension is the same numbers
        same = stored.shape == spec.shape or (".conv1d" in name and stored.shape == flat)
        if not same:
            yield f"{name} is {list(stored.shape)}, expected {list(spec.shape)}"
        yield from _dtype_problem(config, spec, stored, held)
    for name in held:
        plain = name.removesuffix(_SCALE)
        if plain not in wanted and not (name.startswith("model.layers.") and _nextn(config, name)):
            yield f"{name} is not expected"


def _dtype_problem(
    config: LingConfig, spec: TensorSpec, stored: Stored, held: Mapping[str, Stored]
) -> Iterator[str]:
    allowed = ("F32",) if spec.float32 else ("BF16", "F32")
    if stored.dtype in allowed:
        return
    if stored.dtype == "F8_E4M3" and is_quantised(config, spec.name):
        blocks = tuple(-(-size // _FP8_BLOCK) for size in spec.shape)
        scale = held.get(spec.name + _SCALE)
        if scale is None:
            yield f"{spec.name} is fp8 and {spec.name}{_SCALE} is missing"
        elif scale.shape != blocks:
            yield f"{spec.name}{_SCALE} is {list(scale.shape)}, expected {list(blocks)}"
        return
    yield f"{spec.name} is stored as {stored.dtype}, expected {' or '.join(allowed)}"
