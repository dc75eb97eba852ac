"""The NEXTN block as the draft of the captured step: its proposals, and the target's own output."""

from dataclasses import replace

import pytest
import torch

from dspark.decoding import DecodeParams, SamplingParams, decode, nextn_draft
from dspark.decoding.nextn import NextNProposer
from dspark.errors import ConfigError
from dspark.kernels.accept import Done, Field
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.target import LingTarget
from dspark.target.config import LingConfig
from dspark.target.model import LingModel
from dspark.target.synthetic import synthetic
from dspark.target.weights import fill
from dspark.testing import TINY_LING, tiny_draft, tiny_ling

GREEDY = DecodeParams(max_new_tokens=256, ignore_eos=True)
SAMPLED = replace(GREEDY, sampling=SamplingParams(temperature=0.8, seed=(5 << 33) + 3))
NOISY = replace(GREEDY, sampling=SamplingParams(temperature=12.0, seed=7))
"""So much noise that draft and target, which share it, often agree."""
FILTERED = replace(GREEDY, sampling=SamplingParams(temperature=9.0, top_k=40, top_p=0.99, seed=4))


def ling(device: torch.device, dtype: torch.dtype, layers: int = 7) -> LingTarget:
    """With fewer layers a KDA and an MLA one are enough, and the interpreter is done sooner."""
    changed = {"num_hidden_layers": layers}
    if layers < 7:
        changed["layer_group_size"] = layers
    raw = {**TINY_LING["flash"], **changed}
    if layers < 7:
        raw["expert_swiglu_limit_list"] = raw["share_expert_swiglu_limit_list"] = None
    config = LingConfig.from_dict(raw)
    model = LingModel(config, nextn=True).to(dtype)
    fill(model, lambda spec: synthetic(spec, config, 0))
    return LingTarget(model.to(device), "tiny")


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 500, (length,), generator=generator).tolist()
    return ids


def small(target: LingTarget, nextn: int, context: int = 64) -> GraphStep:
    tuning = Tuning() if target.device.type == "cuda" else Tuning(mla_lanes=2)
    return GraphStep(target, None, context=context, tuning=tuning, nextn=nextn)


@pytest.mark.slow
@torch.no_grad()
def test_two_rounds_are_those_of_the_plain_loop(device: torch.device) -> None:
    """A rejection between them: the second one reads three rows, and writes over what is stale."""
    target = ling(device, torch.float32, layers=2)
    depth, ids = 3, prompt(0, 20)
    step, draft = small(target, depth), nextn_draft(target, depth)
    anchor = torch.tensor(step.begin(ids, GREEDY), device=device)
    arena = step.arena
    hidden = target.features(torch.tensor([ids]), ()).last_hidden[0]
    loop = NextNProposer(draft, GREEDY.sampling)
    loop.extend(hidden, torch.tensor([*ids[1:], int(anchor)], device=device))
    assert (int(arena.of(Field.INJECT_BASE)), int(arena.of(Field.INJECT_COUNT))) == (19, 1)
    step.propose()
    first = loop.propose(anchor, depth).tolist()
    assert arena.proposals[:depth].tolist() == first
    assert int(arena.of(Field.COUNT)) == depth
    # the target has kept the anchor and two proposals, and chosen another token than the third
    chosen = first[2] ^ 1
    rows = target.features(torch.tensor([[*ids, int(anchor), *first]]), ()).last_hidden[0, 20:]
    # sampled from here on, with one proposal less
    step.set_state(cursor=23, anchor=chosen, left=3, params=SAMPLED)
    arena.of(Field.INJECT_BASE).fill_(20)
    arena.of(Field.INJECT_COUNT).fill_(3)
    arena.normed.fill_(torch.nan)
    arena.normed[:3] = rows[:3]
    arena.proposals[3:] = 1 << 30
    step.propose()
    loop = NextNProposer(draft, SAMPLED.sampling)
    following = torch.tensor([*ids[1:], int(anchor), *first[:2], chosen], device=device)
    loop.extend(torch.cat([hidden, rows[:3]]), following)
    second = loop.propose(following[-1], 2).tolist()
    assert arena.proposals[:3].tolist() == [*second, first[2]]
    assert int(arena.of(Field.COUNT)) == 2
    assert first[:2] != second


def outputs(
    step: GraphStep, ids: list[int], params: DecodeParams
) -> tuple[list[int], list[int | None], list[int]]:
    """Tokens, and how many proposals each step made and kept."""
    commits = list(GraphDecoder(step).stream(ids, params))
    assert commits[-1].finish_reason is not None
    tokens = [one for c in commits for one in c.token_ids]
    return tokens, [c.num_proposed for c in commits[1:]], [c.num_accepted for c in commits[1:]]


@pytest.mark.slow
def test_a_few_steps_are_those_of_the_reference(device: torch.device) -> None:
    target = ling(device, torch.float32, layers=2)
    # noise enough that the first step keeps one of two proposals, and the second one both
    sampling = SamplingParams(temperature=8.0)
    params = replace(GREEDY, max_new_tokens=6, sampling=sampling)
    ids = prompt(0, 20)
    expected = decode(target, None, ids, params).token_ids
    step = small(target, 2)
    found = [step.begin(ids, params)]
    steps: list[tuple[int, int, Done]] = []
    while not steps or steps[-1][2] == Done.NO:
        serial = step.launch()
        if device.type == "cuda":
            torch.cuda.synchronize()
        record = step.read(serial)
        assert record is not None
        found += record.token_ids
        steps.append((record.num_proposed, record.num_accepted, record.done))
    assert found == expected
    assert steps[-1][2] == Done.LENGTH
    if device.type == "cpu":  # elsewhere other random numbers are accepted
        assert steps == [(2, 1, Done.NO), (2, 2, Done.LENGTH)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, NOISY, FILTERED], ids=["greedy", "seeded", "noisy", "filters"]
)
def test_proposals_never_change_the_output(params: DecodeParams) -> None:
    target = ling(torch.device("cuda"), torch.bfloat16)
    plain = GraphStep(target, None, context=512)
    widths: set[int] = set()
    for depth in (1, 5, 15):
        step = GraphStep(target, None, context=512, nextn=depth)
        for seed in range(4):
            ids = prompt(seed, 1 + 37 * seed)
            expected, _, _ = outputs(plain, ids, params)
            found, proposed, kept = outputs(step, ids, params)
            assert found == expected, (depth, seed)
            assert proposed[0] == depth
            widths.update(kept)
    if params is NOISY:
        assert len(widths) > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_proposes_what_an_eager_one_does() -> None:
    """The capture, which runs the step once, leaves what the block is to read as it was."""
    target = ling(torch.device("cuda"), torch.bfloat16)
    params, ids = replace(NOISY, max_new_tokens=64), prompt(1, 30)
    records, states = [], []
    for eager in (True, False):
        step = GraphStep(target, None, context=512, nextn=5)
        step.begin(ids, params)
        serials = [step.launch(eager=eager) for _ in range(8)]
        torch.cuda.synchronize()
        found = [step.read(serial) for serial in serials]
        records.append([(one.token_ids, one.num_accepted) for one in found if one is not None])
        states.append(step.arena.ints.tolist())
    assert len(records[0]) == 8
    assert records[0] == records[1]
    assert states[0] == states[1]


def test_what_cannot_be_a_draft_is_said(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="no NEXTN block, or it was not loaded"):
        small(tiny_ling(), 2)
    target = ling(device, torch.float32, layers=2)
    with pytest.raises(ConfigError, match=r"nextn must lie in 0\.\.15, got 16"):
        small(target, 16)
    whole = ling(device, torch.float32)
    with pytest.raises(ConfigError, match="one draft"):
        GraphStep(whole, tiny_draft(whole), context=64, nextn=2)
    with pytest.raises(ConfigError, match=r"num_draft_tokens must lie in 1\.\.2"):
        GraphStep(target, None, context=64, nextn=2, num_draft_tokens=3)
    assert GraphStep(target, None, context=64, nextn=8).limit == 8
    assert GraphStep(target, None, context=64, nextn=8, num_draft_tokens=3).limit == 3
