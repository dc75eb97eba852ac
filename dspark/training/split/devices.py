"""Which of `train.target_devices` run the target for one trainer, or why they cannot."""

import os
from collections.abc import Sequence

import torch

from dspark.errors import ConfigError

__all__ = ["check_spread", "devices_of"]


def check_spread(names: Sequence[str], target: str, *, ling: bool) -> None:
    """Only a Ling-3.0 target can lie on several devices.

    Raises:
        ConfigError: one of ``names`` is several devices, and ``target`` is another.
    """
    several = next((name for name in names if "+" in name), None)
    if several is not None and not ling:
        raise ConfigError(
            f"train.target_devices holds '{several}', several devices for one target, which is for "
            f"Ling-3.0 targets and '{target}' is none: name single devices"
        )


def devices_of(
    names: Sequence[str],
    *,
    local_index: int,
    local_trainers: int,
    training: torch.device,
    num_gpus: int,
) -> tuple[str, ...]:
    """Every ``local_trainers``-th of ``names``, from ``local_index`` on.

    Args:
        names: `train.target_devices`, of one machine; several joined by + hold one target.
        local_index, local_trainers: this trainer among those of this machine.
        training: its own device; trainers on GPUs take the first ones.
        num_gpus: GPUs that this process sees.

    Raises:
        ConfigError: a name is no device that can be used, or there are fewer than trainers.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("train.features split needs Linux: set train.features=online")
    for name in (part for group in names for part in group.split("+")):
        _check(name, num_gpus)
        index = torch.device(name).index
        if training.type == "cuda" and index is not None and index < local_trainers:
            free = f"from cuda:{local_trainers} on" if num_gpus > local_trainers else "on no GPU"
            raise ConfigError(
                f"train.target_devices holds {name}, on which a trainer runs: {local_trainers} "
                f"trainer(s) take the first GPUs, so the target can run {free}; start fewer "
                "trainers with --num_processes, or set train.features=online"
            )
    if len(names) < local_trainers:
        raise ConfigError(
            f"train.target_devices holds {len(names)} device(s) for {local_trainers} trainers on "
            "this machine: each needs one or more (a device may stand there twice)"
        )
    return tuple(names[local_index::local_trainers])


def _check(name: str, num_gpus: int) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"train.target_devices holds '{name}', which cannot run a target: name devices such "
            "as cuda:4, or cpu"
        )
    if device.type == "cuda" and device.index is None:
        raise ConfigError(f"train.target_devices holds '{name}' without a number: write cuda:4")
    if device.type == "cuda" and device.index >= num_gpus:
        raise ConfigError(
            f"train.target_devices holds {name}, but this machine shows {num_gpus} GPU(s), counted "
            "from cuda:0"
        )
