"""Layers of one model on several devices, one run of them behind the other.

For a target that no single GPU holds: one device computes at a time, which is slow and needs
nothing else. Serving over ranks is another thing (`LingModel.ranks`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from dspark.errors import TargetError

__all__ = ["on_device", "parse_devices", "spread"]


def parse_devices(name: str, setting: str = "target.device") -> tuple[torch.device, ...]:
    """`cuda:0`, `cpu`, or several joined by +, as `cuda:2+cuda:3`.

    Raises:
        TargetError: one is no device, or not here, or stands there twice.
    """
    found = []
    for part in name.split("+"):
        try:
            device = torch.device(part)
        except RuntimeError:
            raise TargetError(
                f"{setting} '{part}' is not a torch device: write cpu, cuda:0, or several as "
                "cuda:0+cuda:1"
            ) from None
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise TargetError(f"{setting} '{part}' needs a GPU, and torch finds none")
            if device.index is not None and device.index >= torch.cuda.device_count():
                raise TargetError(
                    f"{setting} '{part}' is not here: torch finds {torch.cuda.device_count()} "
                    "GPU(s), counted from cuda:0"
                )
        elif not _is_here(device):
            raise TargetError(
                f"{setting} '{part}' is a device that this torch does not have; write cpu, or "
                "cuda:0 where there is a GPU"
            )
        if device.type == "cuda" and device in found:
            raise TargetError(f"{setting} '{name}' names {part} twice")
        found.append(device)
    return tuple(found)


def _is_here(device: torch.device) -> bool:
    try:
        # meta is everywhere, and holds nothing
        return torch.empty(0, device=device).device.type != "meta"
    except (RuntimeError, AssertionError, ImportError):
        return False


def spread(
    layers: Sequence[nn.Module],
    devices: Sequence[torch.device],
    *,
    before: Sequence[nn.Module] = (),
) -> tuple[torch.device, ...]:
    """A device for every layer: in runs, of about equal bytes together with ``before``, which the
    first device holds too. Each device gets a layer while there are any."""
    sizes = [_bytes(layer) for layer in layers]
    held = sum(_bytes(module) for module in before)
    share = (held + sum(sizes)) / len(devices)
    placed: list[torch.device] = []
    number = 0
    for index, size in enumerate(sizes):
        left = len(devices) - 1 - number
        # on to the next one where this layer would lie beyond the edge for more than half
        full = held + size / 2 > share * (number + 1) or len(sizes) - index <= left
        if left and full and (placed and placed[-1] == devices[number]):
            number += 1
        placed.append(devices[number])
        held += size
    return tuple(placed)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels that are launched inside go to ``device``."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _bytes(module: nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
