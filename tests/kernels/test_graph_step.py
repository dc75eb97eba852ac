"""The captured step: the target's own output, whatever is proposed, in whatever width.

On a GPU long outputs through the graph; on a CPU a few steps of the same launches through the
interpreter, which takes half a minute a step.
"""

from dataclasses import replace

import pytest
import torch

from dspark.decoding import DecodeParams, SamplingParams, decode
from dspark.errors import ConfigError
from dspark.kernels.accept import Done, Field
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.target import LingTarget
from dspark.testing import TINY_LING, tiny_draft, tiny_ling
from tests.kernels.oracle import Oracle, outputs

GREEDY = DecodeParams(max_new_tokens=256, ignore_eos=True)
SAMPLED = replace(GREEDY, sampling=SamplingParams(temperature=0.8, seed=(5 << 33) + 3))
FILTERED = replace(
    GREEDY, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=11)
)


def ling(device: torch.device, variant: str = "flash") -> LingTarget:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = tiny_ling(variant, dtype=dtype)
    target.model.to(device)
    return target


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 500, (length,), generator=generator).tolist()
    return ids


def with_oracle(
    target: LingTarget, context: int = 512, limit: int = 15
) -> tuple[GraphStep, Oracle]:
    """A step without a draft model that verifies up to ``limit`` proposals all the same."""
    tuning = Tuning() if target.device.type == "cuda" else Tuning(mla_lanes=2)
    step = GraphStep(target, None, context=context, tuning=tuning)
    return step, Oracle(step, limit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "seeded", "filters"])
def test_proposals_never_change_the_output(params: DecodeParams) -> None:
    target = ling(torch.device("cuda"))
    plain = GraphStep(target, None, context=512)
    step, oracle = with_oracle(target)
    widths = set()
    for seed in range(32):
        ids = prompt(seed, 3 + 7 * seed)
        expected, _ = outputs(plain, ids, params)
        assert len(expected) == 256
        oracle.tell(ids + expected + [0] * 32, wrong=(seed % 8) / 10)
        limited = replace(params, num_draft_tokens=1 + seed % 15)
        found, kept = outputs(step, ids, limited)
        assert found == expected, seed
        widths.update(kept)
        if seed % 8 == 0:
            assert len(kept) <= 256 // (2 + seed % 15) + 1
    assert widths >= set(range(9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "seeded", "filters"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_real_draft_never_changes_the_output(params: DecodeParams, threshold: float) -> None:
    target = ling(torch.device("cuda"))
    draft = tiny_draft(target, block_size=12).to("cuda", torch.bfloat16)
    draft.attach(target.embed_weight, target.head_weight)
    plain, step = GraphStep(target, None, context=512), GraphStep(target, draft, context=512)
    for seed in range(8):
        ids = prompt(seed, 5 + 11 * seed)
        expected, _ = outputs(plain, ids, params)
        found, kept = outputs(step, ids, replace(params, confidence_threshold=threshold))
        assert found == expected, seed
        assert len(kept) <= 255


@pytest.mark.slow
def test_a_few_steps_are_those_of_the_reference(
    device: torch.device,
) -> None:
    target = ling(device)
    params = replace(GREEDY, max_new_tokens=7)
    ids = prompt(0, 20)
    expected = decode(target, None, ids, params).token_ids
    step, oracle = with_oracle(target, context=64, limit=3)
    oracle.tell([*ids, *expected[:3], 1, *expected[4:], 0, 0, 0, 0], wrong=0.0)
    found, kept = outputs(step, ids, params)
    assert found == expected
    assert kept == [2, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_are_those_of_the_reference() -> None:
    """In float32: in bfloat16 a router's choice between two experts may fall to the other side."""
    device = torch.device("cuda")
    target = tiny_ling("flash", dtype=torch.float32)
    target.model.to(device)
    step = GraphStep(target, None, context=512)
    for seed in range(4):
        ids = prompt(seed, 40 + 30 * seed)
        first = step.begin(ids, GREEDY)
        step.launch()
        torch.cuda.synchronize()
        cache = target.new_cache()
        target.prefill(cache, torch.tensor(ids))
        rows = target.verify(cache, torch.tensor([first]))
        found = step.arena.parts("logits", 1, 512)[0, 0]
        torch.testing.assert_close(found, rows.logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rows_logits_are_the_same_in_every_width(seed: int) -> None:
    step, oracle = with_oracle(ling(torch.device("cuda")))
    ids = prompt(seed, 70 + 61 * seed)
    oracle.tell([*ids, 5, *prompt(seed + 10, 40)], wrong=0.0)
    logits = []
    for rows in range(16, 0, -1):
        step.begin(ids, replace(GREEDY, num_draft_tokens=rows - 1))
        step.launch()
        torch.cuda.synchronize()
        assert int(step.arena.of(Field.LIVE_ROWS)) == rows
        logits.append(step.arena.parts("logits", 1, 512)[0, :rows].clone())
    for narrow in logits[1:]:
        assert torch.equal(narrow, logits[0][: len(narrow)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_stops_budgets_and_aborts_end_a_request() -> None:
    target = ling(torch.device("cuda"))
    step, oracle = with_oracle(target)
    ids = prompt(3, 30)
    expected, _ = outputs(step, ids, GREEDY)
    oracle.tell(ids + expected + [0] * 32, wrong=0.0)
    stop = expected[20]
    cut = expected.index(stop) + 1
    found, _ = outputs(step, ids, replace(GREEDY, stop_ids=frozenset({stop, 1}), ignore_eos=True))
    assert found == expected[:cut]
    for budget in (1, 2, 16, 17, 18):
        found, _ = outputs(step, ids, replace(GREEDY, max_new_tokens=budget))
        assert found == expected[:budget]
    # a caller that goes away, and the next request
    for _ in zip(range(2), GraphDecoder(step).stream(ids, GREEDY), strict=False):
        pass
    serial = step.launch()
    torch.cuda.synchronize()
    assert step.read(serial).done == Done.ABORT  # type: ignore[union-attr]
    assert outputs(step, ids, GREEDY)[0] == expected
    # the context ends it as well
    long = prompt(9, 500)
    assert len(outputs(step, long, GREEDY)[0]) == 12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_each_request_gets_the_graph_with_or_without_filters() -> None:
    step, _ = with_oracle(ling(torch.device("cuda")))
    ids = prompt(4, 40)
    greedy, _ = outputs(step, ids, GREEDY)
    free, _ = outputs(step, ids, SAMPLED)
    assert free != greedy
    only = replace(SAMPLED, sampling=replace(SAMPLED.sampling, top_k=1))
    assert outputs(step, ids, only)[0] == greedy
    assert outputs(step, ids, SAMPLED)[0] == free


def test_what_the_kernels_cannot_run_is_said(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="low-rank query of 24"):
        GraphStep(ling(device, "tiny"), None, context=64)
    target = ling(device)
    with pytest.raises(ConfigError, match=r"context must lie in 1\.\.512, got 513"):
        GraphStep(target, None, context=513)
    gated = tiny_draft(target, markov_head_type="gated")
    with pytest.raises(ConfigError, match="Markov head is 'gated'"):
        GraphStep(target, gated, context=64)
    assert TINY_LING["tiny"]["q_lora_rank"] == 24
