"""Several ranks step together: processes with a slice each, and heaps they map of each other.

On a GPU all ranks share it, and long outputs go through the graph; on a CPU two ranks take a few
steps through the interpreter.
"""

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.config import TargetSettings
from dspark.decoding import Commit, DecodeParams, SamplingParams, decode, nextn_draft, stream
from dspark.export.hf import export_draft
from dspark.kernels.peers import Peers
from dspark.serving.engine import EngineLost
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.exchange import PromptSum
from dspark.serving.graph.gathered import Library
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.serving.plan import MemoryPlan, exchange_heap
from dspark.serving.process import EngineProcess
from dspark.serving.ranks.board import Board
from dspark.serving.ranks.group import join
from dspark.serving.ranks.loading import lead, load_rank
from dspark.serving.ranks.seat import Seat
from dspark.serving.settings import ServeSettings
from dspark.target import LingTarget, load
from dspark.target.config import LingConfig
from dspark.target.model import LingModel, Reduce
from dspark.target.synthetic import synthetic
from dspark.target.weights import fill
from dspark.testing import TINY_LING, save_tiny_ling, tiny_draft

Round = tuple[list[int], int | None, int]
"""Tokens, proposals, and those that were kept."""
ROOT = Path(__file__).parents[2]
GREEDY = DecodeParams(max_new_tokens=5, ignore_eos=True)
SEEDED = replace(GREEDY, sampling=SamplingParams(temperature=0.8, seed=(5 << 33) + 3))
FILTERED = replace(GREEDY, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=7))
# wide enough that a rank of four has whole tiles
WIDER: dict[str, Any] = {"intermediate_size": 128, "moe_intermediate_size": 64,
                         "moe_shared_expert_intermediate_size": 64}  # fmt: skip
CONFIG = LingConfig.from_dict({**TINY_LING["flash"], **WIDER})
# the interpreter is slow: a dense layer, one with experts, and one with latent attention
FEWER = LingConfig.from_dict({**TINY_LING["flash"], "num_hidden_layers": 3,
                              "num_nextn_predict_layers": 0,
                              "expert_swiglu_limit_list": [0, 0, 0.05],
                              "share_expert_swiglu_limit_list": [0, 0.05, 0]})  # fmt: skip


# the draft is one more layer: with latent attention and experts
NEXTN = LingConfig.from_dict({**TINY_LING["flash"], "num_hidden_layers": 1,
                              "first_k_dense_replace": 0,
                              "expert_swiglu_limit_list": None,
                              "share_expert_swiglu_limit_list": None})  # fmt: skip


def few_layers(count: int) -> dict[str, Any]:
    """The released config with ``count`` layers and without a NEXTN block."""
    raw: dict[str, Any] = json.loads((ROOT / "configs/targets/ling-3.0-flash.json").read_text())
    raw.update(num_hidden_layers=count, num_nextn_predict_layers=0)
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if raw.get(name):
            raw[name] = raw[name][:count]
    return raw


def ling(device: torch.device, config: LingConfig = CONFIG, **options: Any) -> LingTarget:
    model = LingModel(config, **options)
    fill(model, lambda spec: synthetic(spec, config, 0))
    model.to(device)
    return LingTarget(model, "tiny")


def outputs(step: GraphStep, asked: list[tuple[list[int], DecodeParams]]) -> list[list[int]]:
    decoder = GraphDecoder(step, patience_s=600)
    return [
        [token for commit in decoder.stream(ids, params) for token in commit.token_ids]
        for ids, params in asked
    ]


def rank_outputs(
    rank: int,
    heaps: list[Tensor],
    asked: list[tuple[list[int], DecodeParams]],
    config: LingConfig = CONFIG,
) -> list[list[int]]:
    device = heaps[rank].device
    peers = Peers(heaps, rank)
    peers.wait_at_most(600)
    target = ling(
        device, config, ranks=len(heaps), rank=rank, reduce=PromptSum(peers), whole_embedding=True
    )
    taps = 1 if config is FEWER else 3
    draft = tiny_draft(ling(torch.device("cpu"), config), num_layers=1, num_taps=taps).to(device)
    tuning = Tuning() if device.type == "cuda" else Tuning(mla_lanes=2, draft_lanes=2)
    step = GraphStep(target, draft, context=300, tuning=tuning, peers=peers)
    # the draft's block has fewer slots than a heap has room for
    assert 0.9 * len(heaps[0]) < peers.held_bytes <= len(heaps[0])
    return outputs(step, asked)


def nextn_rounds(
    rank: int,
    heaps: list[Tensor],
    asked: list[tuple[list[int], DecodeParams]],
    config: LingConfig = NEXTN,
    meeting: tuple[str, str] | None = None,
) -> list[list[Round]]:
    """The same with the model's own block as the draft; ``meeting``: by a library's collectives."""
    device, ranks = heaps[rank].device, len(heaps)
    peers: Peers | Library
    if meeting is None:
        peers = Peers(heaps, rank)
        peers.wait_at_most(600)
        reduce: Reduce = PromptSum(peers)
    else:
        seat = Seat(rank, ranks, *meeting, 600)
        reduce = join(seat, Board(ranks, seat.board), device, 0, None).reduce
        peers = Library(ranks, rank, torch.zeros(1, dtype=torch.int32))
    target = ling(
        device, config, ranks=ranks, rank=rank, reduce=reduce, whole_embedding=True, nextn=True
    )
    tuning = Tuning() if device.type == "cuda" else Tuning(mla_lanes=2)
    step = GraphStep(target, None, context=300, tuning=tuning, nextn=2, peers=peers)
    decoder = GraphDecoder(step, patience_s=600)
    return [rounds(decoder.stream(ids, params)) for ids, params in asked]


def rounds(commits: Iterable[Commit]) -> list[Round]:
    return [(one.token_ids, one.num_proposed, one.num_accepted) for one in commits]


def _interpreted(rank: int, heaps: list[Tensor], decoded: Any, asked: Any, said: Any) -> None:
    torch.set_num_threads(1)
    try:
        said.put((rank, decoded(rank, heaps, asked)))
    except BaseException:
        said.put((rank, traceback.format_exc()))


def two_interpreted(config: LingConfig, decoded: Any, asked: Any) -> dict[int, Any]:
    """What ``decoded`` gives in each of two processes."""
    size = exchange_heap(config, 2)
    heaps = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(2)]
    context: Any = multiprocessing.get_context("fork")
    said = context.Queue()
    ranks = [
        context.Process(target=_interpreted, args=(rank, heaps, decoded, asked, said))
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    found = dict(said.get(timeout=600) for _ in ranks)
    for one in ranks:
        one.join()
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_two_interpreted_ranks_are_one_model() -> None:
    # filtered: the whole path of a decision
    asked = [([7, 300, 41, 77, 300, 41], replace(FILTERED, max_new_tokens=3))]
    target = ling(torch.device("cpu"), FEWER)
    expected = [decode(target, None, ids, params).token_ids for ids, params in asked]
    # of both ranks' parts of the vocabulary
    assert min(expected[0][1:]) < 256 <= max(expected[0][1:])
    found = two_interpreted(FEWER, partial(rank_outputs, config=FEWER), asked)
    assert found == {0: expected, 1: expected}


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
@pytest.mark.parametrize("library", [False, True], ids=["peers", "library"])
def test_two_interpreted_ranks_draft_by_the_nextn_block_of_one_model(
    library: bool, tmp_path: Path
) -> None:
    # noise enough that some proposals are kept, of both ranks' parts of the vocabulary
    noisy = replace(GREEDY, max_new_tokens=6, sampling=SamplingParams(temperature=8.0, seed=2))
    asked = [([7, 300, 41, 77], noisy)]
    target = ling(torch.device("cpu"), NEXTN, nextn=True)
    draft = nextn_draft(target, 2)
    expected = [rounds(stream(target, draft, ids, params)) for ids, params in asked]
    assert expected == [[([467], None, 0), ([483, 184], 2, 1), ([211, 48, 342], 2, 2)]]
    board = Board(2)
    meeting = (board.name, str(tmp_path / "meeting")) if library else None
    found = two_interpreted(NEXTN, partial(nextn_rounds, meeting=meeting), asked)
    board.close(last=True)
    assert found == {0: expected, 1: expected}


def _on_gpu(rank: int, ranks: int, name: str, decoded: Any, asked: Any, said: Any) -> None:
    device = torch.device("cuda:0")
    try:
        seat = Seat(rank, ranks, name, "", 600, shared_gpu=True)
        group = join(seat, Board(ranks, name), device, exchange_heap(CONFIG, ranks), None)
        said.put((rank, decoded(rank, list(group.peers.heaps), asked)))
    except BaseException:
        said.put((rank, traceback.format_exc()))


def sharing_a_gpu(ranks: int, decoded: Any, asked: Any) -> dict[int, Any]:
    """What ``decoded`` gives in each process."""
    context: Any = multiprocessing.get_context("spawn")
    said, board = context.Queue(), Board(ranks)
    processes = [
        context.Process(target=_on_gpu, args=(rank, ranks, board.name, decoded, asked, said))
        for rank in range(ranks)
    ]
    for one in processes:
        one.start()
    found = dict(said.get(timeout=1200) for _ in processes)
    for one in processes:
        one.join()
    board.close(last=True)
    return found


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_draft_by_one_nextn_block(ranks: int) -> None:
    noisy = replace(GREEDY, sampling=SamplingParams(temperature=8.0, seed=2))
    asked = [
        ([7, 300, 41, 77, *range(50, 90)], replace(params, max_new_tokens=100))
        for params in (GREEDY, noisy, FILTERED)
    ]
    whole = GraphStep(ling(torch.device("cuda:0"), nextn=True), None, context=300, nextn=2)
    expected = [rounds(GraphDecoder(whole).stream(ids, params)) for ids, params in asked]
    assert any(kept for _, _, kept in expected[1])
    found = sharing_a_gpu(ranks, partial(nextn_rounds, config=CONFIG), asked)
    assert found == dict.fromkeys(range(ranks), expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_gpu_are_one_model(ranks: int) -> None:
    """In float32: in bfloat16 sums in another order may turn a close decision."""
    asked = [
        ([7, 300, 41, 77, *range(50, 90)], replace(params, max_new_tokens=count))
        for params, count in ((GREEDY, 200), (SEEDED, 200), (FILTERED, 60))
    ]
    device = torch.device("cuda:0")
    expected = outputs(GraphStep(ling(device), None, context=300), asked)
    # with the draft and without
    asked += [(ids, replace(params, num_draft_tokens=0)) for ids, params in asked]
    found = sharing_a_gpu(ranks, rank_outputs, asked)
    assert found == dict.fromkeys(range(ranks), expected + expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_engine_of_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """As `dspark serve --tp 4` runs it, in bfloat16; what each step comes to is compared there."""
    save_tiny_ling(tmp_path / "target", **WIDER)
    whole = load(str(tmp_path / "target"), device="cpu", dtype="float32")
    export_draft(tiny_draft(whole), tmp_path / "draft", whole, check=False)
    target = TargetSettings(path=str(tmp_path / "target"), device="cuda")
    settings = ServeSettings(tp=4, context=300)
    loads = (target, str(tmp_path / "draft"), frozenset[int](), settings)
    with EngineProcess(
        partial(lead, *loads), settings, partial(load_rank, *loads), shared_gpu=True
    ) as engine:
        assert engine.card.engine == "graph"
        for params in (GREEDY, SEEDED, FILTERED):
            ids = list(range(5, 60))
            drafted, plain = (
                [
                    token
                    for commit in engine.stream(
                        ids, replace(params, max_new_tokens=40, num_draft_tokens=proposals)
                    )
                    for token in commit.token_ids
                ]
                for proposals in (None, 0)
            )
            assert len(drafted) == 40
            assert drafted == plain
        # a client that goes away
        stream = engine.stream([5, 6, 7], replace(GREEDY, max_new_tokens=200))
        next(stream)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        stream = engine.stream([5, 6, 7], replace(GREEDY, max_new_tokens=200))
        next(stream)
        os.kill(engine.rank_pids[2], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EngineLost, match="rank 2 was ended by SIGKILL"):
            list(stream)
        assert time.monotonic() - begun < 5


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rank_takes_the_memory_of_its_plan() -> None:
    """Eight layers of the real widths, one rank of four; reading a prompt is not measured here."""
    device, ranks, layers = torch.device("cuda:0"), 4, 8
    config = LingConfig.from_dict(few_layers(layers))
    plan = MemoryPlan(config, None, 32768, ranks)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LingModel(config, ranks=ranks, rank=1, whole_embedding=True)
    finally:
        torch.set_default_dtype(torch.float32)
    heaps = [torch.zeros(exchange_heap(config, ranks), dtype=torch.uint8, device=device)] * ranks
    peers = Peers(heaps, 1)
    model.reduce = PromptSum(peers)
    step = GraphStep(LingTarget(model, "flash"), None, context=32768, peers=peers)
    # nobody else comes: the launches are made, and are worth nothing
    peers.wait_at_most(0)
    step._filtered = True
    step.run_body()
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated(device) - before
    parts = plan.parts()
    planned = plan.total - parts["reserve"] - parts["reading a prompt"]
    assert abs(used - planned) < 0.03 * planned, (used, parts)
