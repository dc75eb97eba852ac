"""Several ranks step together: processes with a slice each, and heaps they map of each other.

On a GPU all ranks share it, and long outputs go through the graph; on a CPU two ranks take a few
steps through the interpreter.
"""

import multiprocessing
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.decoding import DecodeParams, SamplingParams, decode
from dspark.kernels.peers import Peers
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.exchange import PromptSum
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.serving.plan import exchange_heap
from dspark.target import LingTarget
from dspark.target.config import LingConfig
from dspark.target.model import LingModel
from dspark.target.synthetic import synthetic
from dspark.target.weights import fill
from dspark.testing import TINY_LING, tiny_draft

GREEDY = DecodeParams(max_new_tokens=5, ignore_eos=True)
SEEDED = replace(GREEDY, sampling=SamplingParams(temperature=0.8, seed=(5 << 33) + 3))
FILTERED = replace(GREEDY, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=7))
# wide enough that a rank of four has whole tiles
CONFIG = LingConfig.from_dict({**TINY_LING["flash"], "intermediate_size": 128,
                               "moe_intermediate_size": 64,
                               "moe_shared_expert_intermediate_size": 64})  # fmt: skip


def ling(device: torch.device, **options: Any) -> LingTarget:
    model = LingModel(CONFIG, **options)
    fill(model, lambda spec: synthetic(spec, CONFIG, 0))
    model.to(device)
    return LingTarget(model, "tiny")


def outputs(step: GraphStep, asked: list[tuple[list[int], DecodeParams]]) -> list[list[int]]:
    decoder = GraphDecoder(step, patience_s=600)
    return [
        [token for commit in decoder.stream(ids, params) for token in commit.token_ids]
        for ids, params in asked
    ]


def rank_outputs(
    rank: int, heaps: list[Tensor], asked: list[tuple[list[int], DecodeParams]], drafted: bool
) -> list[list[int]]:
    device = heaps[rank].device
    peers = Peers(heaps, rank)
    peers.wait_at_most(600)
    target = ling(
        device, ranks=len(heaps), rank=rank, reduce=PromptSum(peers), whole_embedding=True
    )
    draft = None
    if drafted:
        draft = tiny_draft(ling(torch.device("cpu"))).to(device)
    tuning = Tuning() if device.type == "cuda" else Tuning(mla_lanes=2, draft_lanes=2)
    step = GraphStep(target, draft, context=300, tuning=tuning, peers=peers)
    # the draft's block has fewer slots than a heap has room for
    assert 0.9 * len(heaps[0]) < peers.held_bytes <= len(heaps[0])
    return outputs(step, asked)


def _interpreted(rank: int, heaps: list[Tensor], asked: Any, drafted: bool, said: Any) -> None:
    torch.set_num_threads(1)
    try:
        said.put((rank, rank_outputs(rank, heaps, asked, drafted)))
    except BaseException:
        said.put((rank, traceback.format_exc()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
def test_two_interpreted_ranks_are_one_model() -> None:
    # filtered: the whole path of a decision
    asked = [([7, 300, 41, 77, 300, 41], replace(FILTERED, max_new_tokens=4))]
    target = ling(torch.device("cpu"))
    expected = [decode(target, None, ids, params).token_ids for ids, params in asked]
    # of both ranks' parts of the vocabulary
    assert min(expected[0][1:]) < 256 <= max(expected[0][1:])
    size = exchange_heap(CONFIG, 2)
    heaps = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(2)]
    context: Any = multiprocessing.get_context("fork")
    said = context.Queue()
    ranks = [
        context.Process(target=_interpreted, args=(rank, heaps, asked, True, said))
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    found = dict(said.get(timeout=600) for _ in ranks)
    for one in ranks:
        one.join()
    assert found == {0: expected, 1: expected}
