"""Exchanges by a library's collectives, gloo here: to the bit those of the kernels."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dspark.kernels.exchange import CHOICE_WORDS, Stage, choose, exchange_norm, gather
from dspark.kernels.peers import room_bytes, simulated
from dspark.serving.graph.gathered import Gathered, Library

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on a CPU")

STAGES: tuple[Stage, ...] = ("tell", "hear")
RANKS, SIZE, SHARE, SLOTS, EPS = 4, 32, 24, 3, 1e-6


def given() -> dict[str, Tensor]:
    """By rank."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(RANKS, *shape, generator=generator)

    each = {"parts": drawn(1, 16, SIZE), "experts": drawn(16, 1, SIZE), "logits": drawn(16, SHARE)}
    each["factors"] = drawn(16, 1)
    each["shortlist"] = drawn(2 * SLOTS, 32).view(torch.int32)
    each["values"], each["ids"] = drawn(16, 8), torch.randperm(RANKS * 16 * 8).view(RANKS, 16, 8)
    # of equal scores the lowest id, and one that has none
    each["values"][1, 3, :2] = 7.0
    each["values"][2, 5] = float("-inf")
    each["ids"] = each["ids"].int()
    each["mailbox"] = torch.tensor([[17], [0], [99], [0]], dtype=torch.int32)
    return each


WEIGHT = torch.linspace(0.5, 2, SIZE)
RESIDUAL = torch.linspace(-1, 1, 16 * SIZE).view(16, SIZE)


def by_kernels(each: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every rank hears, [N, ...]."""
    rooms = (16, SIZE), (16, CHOICE_WORDS), (16, 32), (2 * SLOTS, 32)
    peers = simulated(RANKS, sum(room_bytes(RANKS, *room) for room in rooms), "cpu")
    sums, choices, logits, shortlist = (peers.room(*room) for room in rooms)
    heard = {name: torch.zeros(RANKS, 16, SIZE) for name in ("normed", "mixed", "alone", "tap")}
    heard["residual"], heard["mixed residual"] = (RESIDUAL.repeat(RANKS, 1, 1) for _ in "ab")
    heard["logits"] = torch.zeros(RANKS, 16, RANKS * SHARE)
    heard["shortlist"] = torch.zeros(RANKS, 2 * SLOTS, RANKS * 32, dtype=torch.int32)
    heard["best"], heard["mailbox"] = torch.zeros(RANKS, 16, RANKS), each["mailbox"].clone()
    heard["best ids"] = torch.zeros(RANKS, 16, RANKS, dtype=torch.int32)
    for stage in STAGES:
        exchange_norm(
            sums, each["parts"], WEIGHT, heard["normed"], eps=EPS, residual=heard["residual"],
            tap=heard["tap"], stage=stage,
        )  # fmt: skip
    for stage in STAGES:
        exchange_norm(
            sums, each["experts"], WEIGHT, heard["mixed"], eps=EPS, factors=each["factors"],
            residual=heard["mixed residual"], stage=stage,
        )  # fmt: skip
    for stage in STAGES:
        exchange_norm(sums, each["parts"], WEIGHT, heard["alone"], eps=EPS, stage=stage)
        gather(logits, each["logits"], heard["logits"], stage=stage)
        gather(shortlist, each["shortlist"], heard["shortlist"], stage=stage)
        choose(
            choices, each["values"], each["ids"], heard["mailbox"][:, 0], heard["best"],
            heard["best ids"], stage=stage,
        )  # fmt: skip
    return heard


def _one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS
    )
    mine = {name: one[rank] for name, one in given().items()}
    fault = torch.zeros(1, dtype=torch.int32)
    exchange = Gathered(Library(RANKS, rank, fault), SIZE, SHARE, SLOTS)
    heard = {name: torch.zeros(16, SIZE) for name in ("normed", "mixed", "alone", "tap")}
    heard["residual"], heard["mixed residual"] = RESIDUAL.clone(), RESIDUAL.clone()
    heard["logits"] = torch.zeros(16, RANKS * SHARE)
    heard["best"], heard["mailbox"] = torch.zeros(16, RANKS), mine["mailbox"]
    heard["best ids"] = torch.zeros(16, RANKS, dtype=torch.int32)
    exchange.norm(
        mine["parts"], WEIGHT, heard["normed"], eps=EPS, residual=heard["residual"],
        tap=heard["tap"],
    )  # fmt: skip
    exchange.norm(
        mine["experts"], WEIGHT, heard["mixed"], eps=EPS, factors=mine["factors"],
        residual=heard["mixed residual"],
    )  # fmt: skip
    exchange.norm(mine["parts"], WEIGHT, heard["alone"], eps=EPS)
    exchange.logits(mine["logits"], heard["logits"])
    whole = torch.zeros(2, SLOTS, RANKS * 32, dtype=torch.int32)
    exchange.shortlist(mine["shortlist"].view(2, SLOTS, 32), whole)
    heard["shortlist"] = whole.flatten(0, 1)
    exchange.choose(mine["values"], mine["ids"], heard["mailbox"], heard["best"], heard["best ids"])
    exchange.meet()
    torch.save(heard, folder / f"{rank}.pt")


def test_what_is_gathered_is_what_the_kernels_exchange(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_one_rank, args=(rank, tmp_path)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    expected = by_kernels(given())
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert torch.equal(one, expected[name][rank]), (rank, name)
    assert expected["mailbox"].flatten().tolist() == [17] * RANKS
