"""Which cores the process of a rank keeps to: those beside its GPU, nobody else's, or any."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark.serving.ranks import cores
from dspark.serving.ranks.cores import keep_to_cores, share_of
from dspark.serving.ranks.seat import Seat

CUDA = torch.device("cuda:0")


@dataclass(frozen=True)
class Gpu:
    pci_bus_id: int
    pci_domain_id: int = 0
    pci_device_id: int = 0


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[set[int]]:
    """A machine of two nodes with eight cores of two threads each; GPUs 0 and 1 on the first."""
    for bus, listed in ((0x1A, "0-7,16-23"), (0x1B, "0-7,16-23"), (0xC0, "8-15,24-31\n")):
        place = tmp_path / f"0000:{bus:02x}:00.0"
        place.mkdir()
        (place / "local_cpulist").write_text(listed)
    for core in range(32):
        place = tmp_path / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{core % 16},{core % 16 + 16}\n")
    monkeypatch.setattr(cores, "_PCI", tmp_path)
    monkeypatch.setattr(cores, "_CPU", tmp_path)
    gpus = [Gpu(0x1A), Gpu(0x1B), Gpu(0xC0), Gpu(0xFF)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    set_to: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, given: set_to.append(given))
    return set_to


def test_ranks_on_a_node_share_its_cores_and_no_thread_of_one(kept: list[set[int]]) -> None:
    for rank in range(4):
        keep_to_cores(Seat(rank, 4, "", ""), CUDA)
    assert kept == [
        {0, 1, 2, 3, 16, 17, 18, 19},
        {4, 5, 6, 7, 20, 21, 22, 23},
        {*range(8, 16), *range(24, 32)},
        # of a GPU that the system knows nothing of
        set(range(32)),
    ]


def test_cores_that_the_user_took_away_are_not_taken(
    kept: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 18, 19, 20, 21, 9})
    for rank in range(3):
        keep_to_cores(Seat(rank, 4, "", ""), CUDA)
    assert kept == [{2, 3, 18, 19}, {4, 5, 20, 21}]


def test_few_cores_are_left_to_the_system() -> None:
    few = {0, 1, 2, 3, 4, 5, 6}
    assert share_of(0, [few]) == few
    assert share_of(0, [few, few]) == share_of(1, [few, few]) == set()


def test_ranks_of_a_test_run_anywhere(kept: list[set[int]]) -> None:
    keep_to_cores(Seat(0, 2, "", ""), torch.device("cpu"))
    keep_to_cores(Seat(0, 2, "", "", shared_gpu=True), CUDA)
    assert kept == []
