"""Cores for the process of each rank: beside its GPU, and apart from those of the other ranks.

The steps of a rank are launched by one thread, and a rank that launches late is one that the others
wait for.
"""

import os
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from dspark.serving.ranks.seat import Seat

__all__ = ["keep_to_cores", "share_of"]

_LEAST = 4
"""Cores of a rank; with fewer, where a process runs is left to the system."""
_PCI = Path("/sys/bus/pci/devices")
_CPU = Path("/sys/devices/system/cpu")


def keep_to_cores(seat: Seat, device: torch.device) -> None:
    """Let the calling thread, and those it starts, run on this rank's cores alone.

    Nothing where the system cannot say which these are, or they are too few.
    """
    if device.type != "cuda" or seat.shared_gpu or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    near = [(_beside(index) & allowed) or allowed for index in range(seat.ranks)]
    if cores := share_of(seat.rank, near):
        os.sched_setaffinity(0, cores)


def share_of(rank: int, near: Sequence[Set[int]]) -> set[int]:
    """Of the cores ``near`` each rank's GPU, those of ``rank``; none, if they are too few."""
    mine = near[rank]
    alike = [other for other, cores in enumerate(near) if cores == mine]
    each, place = len(mine) // len(alike), alike.index(rank)
    # threads of one core stay together
    ordered = sorted(mine, key=lambda core: (_first_thread(core), core))
    return set(ordered[place * each : (place + 1) * each]) if each >= _LEAST else set()


def _beside(gpu: int) -> set[int]:
    """Cores of the NUMA node that a GPU hangs on; none, if nobody knows."""
    kind: Any = torch.cuda.get_device_properties(gpu)
    if not hasattr(kind, "pci_bus_id"):  # a release of torch that does not tell
        return set()
    address = f"{kind.pci_domain_id:04x}:{kind.pci_bus_id:02x}:{kind.pci_device_id:02x}.0"
    return _listed(_PCI / address / "local_cpulist")


def _first_thread(core: int) -> int:
    return min(_listed(_CPU / f"cpu{core}/topology/thread_siblings_list"), default=core)


def _listed(path: Path) -> set[int]:
    """As in "0-3,8": what is in the file; nothing without one."""
    try:
        ends = [one.split("-") for one in path.read_text().strip().split(",") if one]
    except OSError:
        return set()
    return {
        core for first, *last in ends for core in range(int(first), int((last or [first])[0]) + 1)
    }
