"""Several ranks as one engine: what they are told, what they compare, and who is blamed."""

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dspark.cli import main
from dspark.config import TargetSettings
from dspark.decoding import Commit, DecodeParams
from dspark.errors import ConfigError, RunError, TargetError
from dspark.serving import process
from dspark.serving.engine import EngineLost
from dspark.serving.process import EngineProcess
from dspark.serving.ranks import board as boards
from dspark.serving.ranks import started
from dspark.serving.ranks.board import Board, Command, Topic
from dspark.serving.ranks.follow import keep_beating
from dspark.serving.ranks.group import join, sum_in_order
from dspark.serving.ranks.lead import Leader
from dspark.serving.ranks.loading import check, lead, load_rank
from dspark.serving.ranks.seat import Seat, check_gpus
from dspark.serving.settings import ServeSettings
from dspark.target import GoOn
from dspark.testing import save_tiny_ling, save_tiny_target
from tests.unit.scripted import KILL, STOP, A, Scripted, alive, until

TWO = ServeSettings(tp=2)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_METHOD", "fork")
    monkeypatch.setattr(started, "_SILENT_S", 0.6)


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board(3)
    yield made
    made.close(last=True)


def params(count: int) -> DecodeParams:
    return DecodeParams(max_new_tokens=count, ignore_eos=True)


# the board


def test_orders_are_read_once_and_in_turn_by_every_rank(board: Board) -> None:
    readers = [Board(3, board.name) for _ in range(2)]
    for reader in readers:
        assert reader.next_order(1) is None
    board.order(Command.BEGIN, b"a prompt")
    board.order(Command.NEXT)
    for rank, reader in enumerate(readers, 1):
        assert reader.next_order(rank) == (Command.BEGIN, b"a prompt")
        assert reader.next_order(rank) == (Command.NEXT, b"")
        assert reader.next_order(rank) is None
        reader.done(rank)
        reader.close()


def test_a_prompt_is_not_overwritten_before_every_rank_has_read_it(board: Board) -> None:
    reader = Board(3, board.name)
    board.order(Command.BEGIN, b"first")
    late = threading.Thread(target=board.order, args=(Command.BEGIN, b"second"))
    late.start()
    reader.next_order(1)
    reader.done(1)
    late.join(0.1)
    assert late.is_alive(), "rank 2 has not read the first one"
    other = Board(3, board.name)
    assert other.next_order(2) == (Command.BEGIN, b"first")
    other.done(2)
    late.join(5)
    assert not late.is_alive()
    assert other.next_order(2) == (Command.BEGIN, b"second")
    for one in (reader, other):
        one.close()


@pytest.mark.parametrize("place", range(5))
def test_an_order_that_is_being_written_is_not_read(board: Board, place: int) -> None:
    reader = Board(3, board.name)
    board.order(Command.NEXT)
    board._cells[5 + place] += 1
    assert reader.next_order(1) is None
    board._cells[5 + place] -= 1
    assert reader.next_order(1) == (Command.NEXT, b"")
    reader.close()


def test_a_prompt_that_is_not_all_there_is_not_read(board: Board) -> None:
    reader = Board(3, board.name)
    board.order(Command.BEGIN, b"whole")
    board._raw[board._payload] ^= 1
    assert reader.next_order(1) is None
    reader.close()


def test_orders_wait_for_a_rank_that_is_a_ring_behind(board: Board) -> None:
    ahead = threading.Thread(
        target=lambda: [board.order(Command.NEXT) for _ in range(boards._RING + 1)]
    )
    ahead.start()
    ahead.join(0.2)
    assert ahead.is_alive()
    for rank in (1, 2):
        reader = Board(3, board.name)
        assert reader.next_order(rank) == (Command.NEXT, b"")
        reader.done(rank)
        reader.close()
    ahead.join(5)
    assert not ahead.is_alive()


def test_words_and_results_of_the_ranks(board: Board) -> None:
    other = Board(3, board.name)
    assert board.said(1, Topic.JOIN) is None
    other.say(1, Topic.JOIN, b"")
    assert board.said(1, Topic.JOIN) == b""
    with pytest.raises(RunError, match=r"rank 0, 2 was not loaded within 0\.02 s"):
        board.all_said(Topic.JOIN, 0.02)
    with pytest.raises(RunError, match="20000 bytes to say, 16384 at most"):
        other.say(1, Topic.END, bytes(20000))
    other.post(2, 7, 99)
    assert (board.posted(2, 7), board.posted(2, 8), board.posted(1, 7)) == (99, None, None)
    other.beat(2)
    assert (board.beats(2), board.beats(1)) == (1, 0)
    other.close()
    with pytest.raises(RunError, match="no shared memory for 2 ranks"):
        Board(2, "dspark-none-of-this-name")


def test_sums_are_rounded_once_and_in_order() -> None:
    parts = [torch.tensor([big], dtype=torch.bfloat16) for big in (256.0, 1.0, 1.0, 1.0)]
    assert sum_in_order(parts).tolist() == [260.0]  # 259, to the even neighbour
    wide = [torch.tensor([x]) for x in (2.0**24, 1.0, -(2.0**24))]
    assert sum_in_order(wide).tolist() == [0.0]


# engines over scripted ranks


@dataclass
class Ranked:
    """Scripted ranks: the leader's model, and what another rank does otherwise."""

    model: Scripted
    other: Callable[[int], Any] = lambda step: None

    def lead(self, seat: Seat) -> Leader:
        board = Board(seat.ranks, seat.board)
        keep_beating(board, 0)
        return Leader(self.model.load(), board)  # type: ignore[arg-type]

    def load_rank(self, seat: Seat, board: Board) -> Any:
        other, pieces = self.other, self.model.pieces

        @dataclass
        class Other(Scripted):
            def stream(
                self, prompt_ids: Sequence[int], params: DecodeParams, go_on: GoOn = bool, /
            ) -> Any:
                for step, commit in enumerate(super().stream(prompt_ids, params, go_on)):
                    yield other(step) or commit

        return Other(step_s=0, pieces=pieces)

    def engine(self, settings: ServeSettings = TWO) -> EngineProcess:
        return EngineProcess(self.lead, settings, self.load_rank)


def test_all_ranks_make_the_commits_that_are_asked_for() -> None:
    model = Scripted(step_s=0)
    with Ranked(model).engine(ServeSettings(tp=4)) as engine:
        pids = engine.rank_pids
        assert sorted(pids) == [0, 1, 2, 3]
        assert len(set(pids.values())) == 4
        for count in (1, 70, 3):
            commits = list(engine.stream([A], params(count)))
            assert [c.token_ids for c in commits] == [[A + i % 26] for i in range(count)]
        # a client that goes away, and the next one
        stream = engine.stream([A], params(50))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert len(list(engine.stream([A], params(5)))) == 5
        engine.forget()
        assert len(list(engine.stream([A], params(5)))) == 5
        engine.check()
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.parametrize("asks", [0, 1, 3])
def test_a_prompt_that_is_given_up_is_given_up_by_all(asks: int) -> None:
    left = iter([True] * asks)
    with Ranked(Scripted(step_s=0.03, pieces=12)).engine() as engine:
        assert not list(engine.stream([A], params(3), lambda: next(left, False)))
        for _ in range(2):
            assert len(list(engine.stream([A], params(3)))) == 3


@pytest.mark.parametrize("when", [0, 3, 9])
def test_ranks_that_disagree_are_noticed_in_that_request(when: int) -> None:
    def other(step: int) -> Commit | None:
        return Commit([A - 1], None, 4, 0, 0.0) if step == when else None

    with (
        Ranked(Scripted(step_s=0), other).engine() as engine,
        pytest.raises(EngineLost, match="rank 1 and rank 0 came to different results"),
    ):
        list(engine.stream([A], params(10)))


def test_what_a_request_may_not_ask_for_is_refused_by_all_and_the_next_is_served() -> None:
    def refuse(step: int) -> None:
        if step == 2:
            raise ConfigError("no such sampling")

    with Ranked(Scripted(step_s=0, before=refuse), refuse).engine() as engine:
        with pytest.raises(RunError, match="no such sampling") as found:
            list(engine.stream([A], params(10)))
        assert not isinstance(found.value, EngineLost)
        assert len(list(engine.stream([A], params(2)))) == 2


def test_what_one_rank_alone_refuses_ends_the_service() -> None:
    def refuse(step: int) -> None:
        if step == 2:
            raise ConfigError("no such sampling")

    with (
        Ranked(Scripted(step_s=0, before=refuse)).engine() as engine,
        pytest.raises(EngineLost, match="different results"),
    ):
        list(engine.stream([A], params(10)))


def test_an_error_of_another_kind_ends_the_service() -> None:
    def fail(step: int) -> None:
        if step == 1:
            raise ZeroDivisionError("by nothing")

    with (
        Ranked(Scripted(step_s=0, before=fail)).engine() as engine,
        pytest.raises(EngineLost, match="rank 0 failed: ZeroDivisionError: by nothing"),
    ):
        list(engine.stream([A], params(10)))
    with (
        Ranked(Scripted(step_s=0), fail).engine() as engine,
        pytest.raises(EngineLost, match="rank 1 ended with exit code 1; its log says why"),
    ):
        list(engine.stream([A], params(10)))


def looks(engine: EngineProcess) -> Iterator[None]:
    """The server's, between two requests."""
    while True:
        engine.check()
        yield
        time.sleep(0.02)


def test_a_rank_that_was_missed_is_not_waited_for() -> None:
    def miss(step: int) -> None:
        if step == 2:
            raise EngineLost("rank 1 did not come")

    def hang(step: int) -> None:
        if step == 2:
            time.sleep(60)

    begun = time.monotonic()
    with (
        Ranked(Scripted(step_s=0, before=miss), hang).engine() as engine,
        pytest.raises(EngineLost, match="rank 1 did not come"),
    ):
        list(engine.stream([A], params(10)))
    assert time.monotonic() - begun < 3


def test_a_rank_may_be_as_far_behind_as_the_board_holds() -> None:
    with Ranked(Scripted(step_s=0), lambda step: time.sleep(0.002)).engine() as engine:
        assert len(list(engine.stream([A], params(400)))) == 400


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "busy"])
@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_is_named(rank: int, number: int, idle: bool) -> None:
    # a stopped rank that others need is one that they wait for
    with Ranked(Scripted(step_s=0.02)).engine() as engine:
        pids = engine.rank_pids
        stream = engine.stream([A], params(400))
        next(stream)
        if idle:
            stream.close()  # type: ignore[attr-defined]
        os.kill(pids[rank], number)
        begun = time.monotonic()
        how = "hangs: no sign of life" if number == STOP else "was ended by SIGKILL"
        which = "rank 0, the engine process, " if rank == 0 else "rank 1 "
        with pytest.raises(EngineLost, match=which + how):
            list(looks(engine) if idle else stream)
        assert time.monotonic() - begun < 3
        until(lambda: not any(alive(pid) for pid in pids.values()))


def test_a_rank_that_was_left_is_not_blamed() -> None:
    def left(step: int) -> None:
        raise EngineLost("another rank broke off")

    with (
        Ranked(Scripted(step_s=0), left).engine() as engine,
        pytest.raises(EngineLost, match="rank 1 was left by another rank"),
    ):
        list(engine.stream([A], params(400)))


def test_a_rank_that_cannot_load_says_why_and_the_others_end() -> None:
    def refuse(seat: Seat, board: Board) -> Any:
        raise TargetError(f"nothing for rank {seat.rank}")

    begun = time.monotonic()

    def slow_load(seat: Seat) -> Any:
        time.sleep(30)

    with pytest.raises(TargetError, match="nothing for rank 1"):
        EngineProcess(
            slow_load,
            TWO,
            refuse,
        )
    assert time.monotonic() - begun < 3


# machines and models that are none for ranks


@dataclass(frozen=True)
class Gpu:
    name: str = "H200"
    total_memory: int = 141 * 10**9


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def have(*kinds: Gpu, apart: Sequence[tuple[int, int]] = ()) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: kinds[index])
        monkeypatch.setattr(
            torch.cuda, "can_device_access_peer", lambda one, other: (one, other) not in apart
        )

    return have


def test_gpus_that_cannot_be_ranks_are_refused_in_a_sentence(gpus: Callable[..., None]) -> None:
    one = Gpu()
    for given, said in (
        ([], "machine has 0 GPUs: --device cpu runs ranks on the CPU"),
        ([one], "machine has 1 GPU: give --tp 1"),
        ([one] * 3, "machine has 3 GPUs: give --tp 2"),
        ([one, one, replace(one, name="H100"), one], "cuda:0 is H200 .* and cuda:2 is H100 with"),
        ([one, replace(one, total_memory=10**9)] * 2, "cuda:1 is H200 with 1 GB; choose others"),
    ):
        gpus(*given)
        with pytest.raises(ConfigError, match=said):
            check_gpus(4)
    gpus(*[one] * 4, apart=[(2, 3)])
    with pytest.raises(ConfigError, match=r"cuda:2 cannot read that of cuda:3 .*--exchange nccl"):
        check_gpus(4)
    check_gpus(4, peers=False)
    check_gpus(2)


def test_a_rank_has_its_own_gpu(gpus: Callable[..., None]) -> None:
    gpus(*[Gpu()] * 4)
    seat = Seat(2, 4, "board", "meeting")
    assert str(seat.device("auto")) == str(seat.device("cuda")) == "cuda:2"
    assert str(seat.device("cpu")) == "cpu"
    assert str(replace(seat, shared_gpu=True).device("auto")) == "cuda:0"
    with pytest.raises(ConfigError, match=r"target\.device is 'cuda:1', and serve.tp 4 puts"):
        seat.device("cuda:1")


def test_the_command_refuses_before_it_starts_a_process(
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    gpus(Gpu(), Gpu())
    save_tiny_ling(tmp_path)
    monkeypatch.setattr("sys.argv", ["dspark", "serve", "--target", str(tmp_path), "--tp", "4"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "serve.tp is 4, and this machine has 2 GPUs: give --tp 2" in said


@pytest.mark.parametrize(
    ("model", "device", "more", "said"),
    [
        ("ling", "cpu", {"exchange": "nccl"}, "serve.exchange is nccl, which is for ranks on GPUs"),
        ("ling", "auto", {"engine": "reference"}, "serve.engine is reference, and serve.tp 2 dec"),
        ("ling", "cuda", {}, "this machine has 0 GPUs"),
        # first what no other device would change
        ("smollm", "auto", {}, "is for Ling-3.0 targets; .* is another: leave --tp out"),
    ],
)
def test_what_ranks_would_not_do_is_refused_and_not_left_out(
    model: str,
    device: str,
    more: dict[str, Any],
    said: str,
    gpus: Callable[..., None],
    tmp_path: Path,
) -> None:
    gpus()
    (save_tiny_ling if model == "ling" else save_tiny_target)(tmp_path)
    with pytest.raises(ConfigError, match=said):
        check(TargetSettings(path=str(tmp_path), device=device), ServeSettings(tp=2, **more))


def test_on_a_cpu_ranks_may_be_asked_for_the_reference(tmp_path: Path) -> None:
    save_tiny_ling(tmp_path)
    settings = ServeSettings(tp=2, engine="reference")
    check(TargetSettings(path=str(tmp_path), device="cpu"), settings)


def test_ranks_exchange_in_one_of_two_ways() -> None:
    with pytest.raises(ConfigError, match=r"serve\.exchange must be peers, nccl, got 'gloo'"):
        ServeSettings(exchange="gloo")
    with pytest.raises(ConfigError, match=r"serve\.tp 1 has nothing to exchange"):
        ServeSettings(exchange="nccl")


def test_without_access_to_each_others_memory_ranks_meet_by_nccl_and_do_not_multicast(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(*[Gpu()] * 2, apart=[(0, 1)])
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, **_: torch.empty(*shape))
    met: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **how: met.update(how, kind=kind))
    seat, board = Seat(1, 2, "board", "/nowhere"), Board(2)
    device = seat.device("cuda", peers=False)
    board.say(0, Topic.JOIN, pickle.dumps({"context": 9}))
    group = join(seat, board, device, 0, 12, library=True)
    board.close(last=True)
    assert (met["kind"], met["rank"], met["world_size"]) == ("nccl", 1, 2)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert (group.context, group.peers.first, group.peers.ranks) == (9, 1, 2)


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_the_number_of_ranks_is_a_small_power_of_two(tp: int) -> None:
    with pytest.raises(ConfigError, match=r"serve\.tp must be one of"):
        ServeSettings(tp=tp)


@pytest.mark.parametrize(
    ("model", "draft", "more", "said"),
    [
        ("smollm", None, {}, "is for Ling-3.0 targets"),
        ("tiny", "nextn:2", {}, "has no NEXTN block to draft with"),
        ("ling", None, {"engine": "graph"}, "cannot run here: the target is on the cpu"),
        ("odd", None, {}, "num_attention_heads 3 cannot be shared by 2 ranks"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(
    model: str, draft: str | None, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    if model == "smollm":
        save_tiny_target(tmp_path)
    else:
        heads: dict[str, Any] = {}
        if model == "odd":
            heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
        save_tiny_ling(tmp_path, "tiny" if model == "tiny" else "flash", **heads)
    target = TargetSettings(path=str(tmp_path), dtype="float32", device="cpu")
    settings = ServeSettings(tp=2, **more)
    loads = (target, draft, frozenset[int](), settings)
    with pytest.raises((ConfigError, TargetError), match=said):
        EngineProcess(partial(lead, *loads), settings, partial(load_rank, *loads))
