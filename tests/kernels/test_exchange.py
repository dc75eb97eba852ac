"""What ranks tell each other: the same bits on every rank, and an end to every wait.

All ranks are in this process. The interpreter runs one program after the other, so there an
exchange is two launches; on a GPU it is one, in which programs wait for each other.
"""

import multiprocessing
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.bench import exchange_rounds
from dspark.bench.exchange_rounds import wrong_elements
from dspark.kernels.exchange import (
    CHOICE_WORDS,
    Stage,
    add_ranks,
    choose,
    exchange_norm,
    exchange_norm_reference,
    gather,
    own_sums,
)
from dspark.kernels.peers import Peers, Room, room_bytes, simulated
from dspark.kernels.reduce_norm import reduce_norm

EPS = 1e-6
RANKS = [2, 4]


def stages(device: torch.device) -> tuple[Stage, ...]:
    return ("both",) if device.type == "cuda" else ("tell", "hear")


def drawn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize(
    ("ranks", "dtype", "experts"),
    [
        (2, torch.float32, True),
        (2, torch.bfloat16, False),
        (4, torch.float32, False),
        (4, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_rank_has_the_same_bits(
    ranks: int, dtype: torch.dtype, experts: bool, seed: int, device: torch.device
) -> None:
    size, held = 96, 3
    peers = simulated(ranks, room_bytes(ranks, 16, size), device)
    room = peers.room(16, size)
    # the exchange's count may wrap
    room.turns.fill_((1 << 31) - 3)
    for flag in flags_of(peers, room.flags, 16):
        flag.fill_((1 << 31) - 3)
    weight = drawn(size, seed=seed, device=device, dtype=dtype)
    one = drawn(16, size, seed=seed + 10, device=device, dtype=dtype)
    residual = one.repeat(ranks, 1, 1)
    taps = torch.full((ranks, 16, 3 * size), torch.nan, dtype=dtype, device=device)
    for turn in range(5):
        shape = (ranks, 16, held, size) if experts else (ranks, held, 16, size)
        parts = drawn(*shape, seed=seed + 20 + turn, device=device, dtype=torch.float32)
        factors, skew = None, turn % 2
        if experts:
            factors = drawn(ranks, 16, held, seed=turn, device=device, dtype=torch.float32)
        sums = torch.stack(
            [own_sums(parts[r], None if factors is None else factors[r]) for r in range(ranks)]
        )
        expected = exchange_norm_reference(sums, one, weight, EPS)
        out = torch.full_like(residual, torch.nan)
        tap = taps[:, :, size : 2 * size] if turn == 3 else None
        for stage in stages(device):
            exchange_norm(
                room, parts, weight, out, eps=EPS, residual=residual, factors=factors, tap=tap,
                stage=stage, skew=3 * skew,
            )  # fmt: skip
        for rank in range(ranks):
            assert torch.equal(residual[rank], residual[0])
            assert torch.equal(out[rank], out[0])
        # a place of a bfloat16 between 4 and 8, to which the residual grows
        tolerance = 1e-5 if dtype == torch.float32 else 2**-5
        torch.testing.assert_close(residual[0], expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out[0], expected[1], rtol=tolerance, atol=tolerance)
        if tap is not None:
            assert torch.equal(tap, residual)
        one = residual[0].clone()
    assert taps[:, :, :size].isnan().all()
    assert not peers.fault.any()


def flags_of(peers: Peers, first: int, programs: int) -> list[Tensor]:
    return [
        heap[first : first + 4 * peers.ranks * programs].view(torch.int32) for heap in peers.heaps
    ]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_the_sum_of_one_process(ranks: int, seed: int, device: torch.device) -> None:
    size = 64
    peers = simulated(ranks, room_bytes(ranks, 16, size), device)
    room = peers.room(16, size)
    parts = drawn(ranks, 1, 16, size, seed=seed, device=device, dtype=torch.float32)
    weight = drawn(size, seed=seed + 1, device=device, dtype=torch.bfloat16)
    residual = drawn(16, size, seed=seed + 2, device=device, dtype=torch.bfloat16)
    shared, out = residual.repeat(ranks, 1, 1), torch.empty_like(residual.repeat(ranks, 1, 1))
    for stage in stages(device):
        exchange_norm(room, parts, weight, out, eps=EPS, residual=shared, stage=stage)
    alone = torch.empty_like(residual)
    reduce_norm(parts[:, 0].contiguous(), residual, weight, alone, eps=EPS)
    for rank in range(ranks):
        assert torch.equal(shared[rank], residual)
        assert torch.equal(out[rank], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_without_residual_is_normed(dtype: torch.dtype, device: torch.device) -> None:
    peers = simulated(2, room_bytes(2, 16, 96), device)
    room = peers.room(16, 96)
    wide = drawn(2, 2, 16, 120, seed=0, device=device, dtype=torch.float32)
    parts, weight = wide[..., 8:104], drawn(96, seed=1, device=device, dtype=dtype)
    out = torch.full((2, 16, 96), torch.nan, dtype=dtype, device=device)
    for stage in stages(device):
        exchange_norm(room, parts, weight, out, eps=EPS, stage=stage)
    sums = torch.stack([own_sums(one, None) for one in parts])
    _, expected = exchange_norm_reference(sums, None, weight, EPS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one in out:
        torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize(("width", "block"), [(32, 32), (40, 16), (7, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_words_are_gathered_in_the_order_of_the_ranks(
    width: int, block: int, dtype: torch.dtype, device: torch.device
) -> None:
    programs = 3 * -(-width // block)
    peers = simulated(4, 2 * room_bytes(4, programs, block), device)
    room = peers.room(programs, block)
    out = torch.zeros(4, 3, 4 * width, dtype=dtype, device=device)
    for turn in range(3):
        x = (100 * drawn(4, 3, width, seed=turn, device=device, dtype=torch.float32)).to(dtype)
        for stage in stages(device):
            gather(room, x, out, stage=stage)
        for rank in range(4):
            assert torch.equal(out[rank], torch.cat(list(x), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompts_sums_are_those_of_one_order(dtype: torch.dtype, device: torch.device) -> None:
    peers = simulated(4, room_bytes(4, 8, 64), device)
    room = peers.room(8, 64)
    for turn, length in enumerate((3, 9)):
        x = drawn(4, length, 50, seed=turn, device=device, dtype=dtype)
        out = torch.full_like(x, torch.nan)
        for stage in stages(device):
            add_ranks(room, x, out, stage=stage)
        total = torch.zeros(length, 50, device=device)
        for one in x:
            total += one.float()
        for one in out:
            assert torch.equal(one, out[0])
            # the interpreter rounds to bfloat16 in its own way
            near = 0.0 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(one, total.to(dtype), rtol=near, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_sum_may_take_several_launches() -> None:
    device = torch.device("cuda")
    heaps = torch.zeros(1, room_bytes(1, 8, 64), dtype=torch.uint8, device=device)
    peers = Peers(list(heaps))
    x = torch.randn(1000, 50, device=device)
    out = torch.full_like(x, torch.nan)
    add_ranks(peers.room(8, 64), x, out)
    assert torch.equal(out, x)


def test_all_choose_among_the_best_of_each_rank(device: torch.device) -> None:
    peers = simulated(4, room_bytes(4, 16, CHOICE_WORDS), device)
    room = peers.room(16, CHOICE_WORDS)
    values = drawn(4, 16, 8, seed=0, device=device, dtype=torch.float32)
    ids = torch.arange(4 * 16 * 8, dtype=torch.int32, device=device).view(4, 16, 8)
    # of equal scores the lowest id, though it comes later
    values[1, 3], ids[1, 3, 5] = 7.0, 2
    values[2, 5] = float("-inf")
    mailbox = torch.tensor([17, 0, 99, 0], dtype=torch.int32, device=device)
    found = torch.full((4, 16, 4), torch.nan, device=device)
    found_ids = torch.full((4, 16, 4), -1, dtype=torch.int32, device=device)
    for stage in stages(device):
        choose(room, values, ids, mailbox, found, found_ids, stage=stage)
    for rank in range(4):
        assert torch.equal(found[rank], values.amax(-1).T)
        best = ids.masked_fill(values < values.amax(-1, keepdim=True), 1 << 30).amin(-1)
        assert torch.equal(found_ids[rank], best.T)
    assert found_ids[0, 3, 1] == 2
    assert mailbox.tolist() == [17] * 4


def test_a_fast_rank_does_not_overwrite_what_a_slow_one_still_reads(device: torch.device) -> None:
    heaps = list(torch.zeros(2, room_bytes(2, 3, 8), dtype=torch.uint8, device=device))
    peers = [Peers(heaps, rank) for rank in range(2)]
    rooms = [one.room(3, 8) for one in peers]
    for one in peers:
        one.looks.fill_(1)
    said = [[torch.full((3, 8), 10 * turn + rank, dtype=torch.int32, device=device)
             for rank in range(2)] for turn in range(3)]  # fmt: skip
    heard = [torch.zeros(3, 16, dtype=torch.int32, device=device) for _ in range(2)]
    gather(rooms[1], said[0][1], heard[1], stage="tell")
    for turn in range(2):
        gather(rooms[0], said[turn][0], heard[0])
        assert heard[0].unique().tolist() == [10 * turn, 10 * turn + 1]
        # rank 0 is one turn ahead, and as far as it can be without rank 1
        gather(rooms[0], said[turn + 1][0], heard[0], stage="tell")
        gather(rooms[1], said[turn][1], heard[1], stage="hear")
        assert heard[1].unique().tolist() == [10 * turn, 10 * turn + 1]
        gather(rooms[1], said[turn + 1][1], heard[1], stage="tell")
    assert not any(one.fault.any() for one in peers)


def test_a_rank_that_does_not_come_is_named_and_waited_for_once(device: torch.device) -> None:
    peers = simulated(4, room_bytes(4, 16, 32), device)
    room = peers.room(16, 32)
    peers.looks.fill_(3)
    parts = torch.ones(4, 1, 16, 32, device=device)
    weight, out = torch.ones(32, device=device), torch.zeros(4, 16, 32, device=device)
    exchange_norm(room, parts, weight, out, eps=EPS, stage="tell")
    # as if rank 2 had not been there
    for flag in flags_of(peers, room.flags, 16):
        flag[2 * 16 : 3 * 16] = 0
    exchange_norm(room, parts, weight, out, eps=EPS, stage="hear")
    assert peers.fault.tolist() == [3] * 4
    peers.looks.fill_((1 << 31) - 1)
    exchange_norm(room, parts, weight, out, eps=EPS, stage="hear")
    assert peers.fault.tolist() == [3] * 4


def test_misfits_are_refused(device: torch.device) -> None:
    peers = simulated(2, 2 * room_bytes(2, 16, 32), device)
    room = peers.room(16, 32)
    weight, out = torch.ones(32, device=device), torch.zeros(2, 16, 32, device=device)
    with pytest.raises(ValueError, match="exchange_norm wants"):
        exchange_norm(room, torch.ones(2, 1, 16, 31, device=device), weight, out, eps=EPS)
    with pytest.raises(ValueError, match="exchange_norm wants"):
        exchange_norm(room, torch.ones(3, 1, 16, 32, device=device), weight, out, eps=EPS)
    with pytest.raises(ValueError, match="gather wants"):
        gather(room, torch.ones(2, 16, 33, device=device), torch.ones(2, 16, 66, device=device))
    with pytest.raises(ValueError, match="choose wants"):
        choose(room, out, out.int(), torch.zeros(2, dtype=torch.int32, device=device), out, out)
    with pytest.raises(ValueError, match="needs heaps of"):
        peers.room(16, 1024)


@pytest.mark.parametrize("skew", [0, 40])
def test_every_round_is_right_to_the_bit(skew: int, device: torch.device) -> None:
    """A quarter of them with skew, which takes its time: `dspark bench collectives` has no end."""
    on_gpu = device.type == "cuda"
    ranks, size = (4, 2560) if on_gpu else (2, 32)
    rounds = (250_000 if skew else 1_000_000) if on_gpu else 2
    peers = simulated(ranks, room_bytes(ranks, 16, size), device)
    assert wrong_elements(peers.room(16, size), rounds, skew=skew if on_gpu else skew // 20) == 0
    assert not peers.fault.any()


@pytest.mark.parametrize("which", ["norm", "residual"])
def test_a_wrong_bit_is_counted(
    which: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    calls = 0

    def wrong(room: Room, part: Tensor, weight: Tensor, out: Tensor, **options: Any) -> None:
        nonlocal calls
        exchange_norm(room, part, weight, out, **options)
        calls += 1
        # of the last round, so that no norm behind it is wrong too
        if calls % (2 * len(stages(device))) == 0:
            (out if which == "norm" else options["residual"])[1, 3, 5] += 1

    monkeypatch.setattr(exchange_rounds, "exchange_norm", wrong)
    peers = simulated(2, room_bytes(2, 16, 32), device)
    assert wrong_elements(peers.room(16, 32), 2) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_seconds_are_about_two_seconds() -> None:
    device = torch.device("cuda")
    # a rank of four that is alone
    heaps = torch.zeros(4, room_bytes(4, 16, 2560), dtype=torch.uint8, device=device)
    peers = Peers(list(heaps), 1)
    room = peers.room(16, 2560)
    parts, weight = torch.ones(1, 16, 2560, device=device), torch.ones(2560, device=device)
    out = torch.zeros(16, 2560, device=device)
    peers.wait_at_most(0.0)
    exchange_norm(room, parts, weight, out, eps=EPS)  # compiles
    torch.cuda.synchronize()
    peers.fault.zero_()
    peers.wait_at_most(2.0)
    begun = time.monotonic()
    for _ in range(100):
        exchange_norm(room, parts, weight, out, eps=EPS)
    torch.cuda.synchronize()
    assert 0.7 < time.monotonic() - begun < 4
    assert peers.fault.tolist() == [1]


def _one_rank(rank: int, heaps: list[Tensor], results: list[Tensor], rounds: int) -> None:
    """A process of its own, which waits for the other in earnest."""
    torch.set_num_threads(1)
    peers = Peers(heaps, rank)
    room = peers.room(16, 32)
    weight = torch.ones(32)
    residual = torch.zeros(16, 32)
    out = torch.empty_like(residual)
    for turn in range(rounds):
        parts = drawn(1, 16, 32, seed=10 * turn + rank, device=weight.device, dtype=torch.float32)
        exchange_norm(room, parts, weight, out, eps=EPS, residual=residual)
    results[rank].copy_(torch.cat([residual, out, peers.fault.float().repeat(16, 32)]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_two_processes_wait_for_each_other() -> None:
    heaps = [torch.zeros(room_bytes(2, 16, 32), dtype=torch.uint8).share_memory_() for _ in "ab"]
    results = [torch.zeros(48, 32).share_memory_() for _ in "ab"]
    context: Any = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_one_rank, args=(rank, heaps, results, 3)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0
    assert torch.equal(results[0], results[1])
    assert not results[0][32:].any()
    total = torch.zeros(16, 32)
    for turn in range(3):
        for rank in range(2):
            seed = 10 * turn + rank
            total += drawn(16, 32, seed=seed, device=total.device, dtype=torch.float32)
    torch.testing.assert_close(results[0][:16], total)
