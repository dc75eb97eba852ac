"""The draft asked at all anchors at once gives the rounds of the step-by-step replay."""

from typing import Any

import pytest
import torch

from dspark.decoding import DecodeParams, SamplingParams, draft_limit, replay
from dspark.decoding.everywhere import Known, Proposed, propose_everywhere, rounds
from dspark.decoding.proposer import BlockProposer
from dspark.draft import DSparkDraftModel
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def followed(
    target: Target, draft: DSparkDraftModel, prompt: list[int], count: int, sampling: SamplingParams
) -> Known:
    """The draft is right for 0, 1, 2, … slots in turn; the target gives taps only."""
    generator = torch.Generator().manual_seed(len(prompt))
    tokens = [3]
    right = 0
    while len(tokens) < count:
        ids = torch.tensor([prompt + tokens[:-1]])
        proposer = BlockProposer(draft, sampling)
        proposer.extend(target.features(ids, draft.layer_ids).taps[0])
        proposals = proposer.propose(torch.tensor(tokens[-1]), draft.block_size).tolist()
        other = int(torch.randint(200, (), generator=generator))
        tokens += [*proposals[:right], other]
        right = (right + 1) % (draft.block_size + 1)
    tokens = tokens[:count]
    taps = target.features(torch.tensor([prompt + tokens]), draft.layer_ids).taps[0]
    return Known(prompt, tokens, taps, sampling.seed)


@pytest.mark.parametrize("kind", ["vanilla", "rnn", None])
@pytest.mark.parametrize("temperature", [0.0, 30.0])
def test_rounds_are_those_of_the_replay(
    target: Target, temperature: float, kind: str | None
) -> None:
    shape: dict[str, Any] = {"markov_rank": 0} if kind is None else {"markov_head_type": kind}
    draft = tiny_draft(target, **shape)
    if draft.markov_head is not None:
        with torch.no_grad():  # as it starts, the head decides nothing
            draft.markov_head.markov_w1.weight.mul_(50)
            draft.markov_head.markov_w2.weight.mul_(50)
            if kind == "rnn":
                draft.markov_head.joint_proj.weight.mul_(50)
    limit = draft_limit(draft.block_size, None)
    outputs = [
        followed(
            target,
            draft,
            list(range(5, 5 + length)),
            count,
            SamplingParams(temperature=temperature, seed=11 * length),
        )
        for length, count in ((4, 40), (17, 9), (9, 72), (6, 1), (3, 2))
    ]
    found = propose_everywhere(draft, outputs, SamplingParams(temperature=temperature), most=limit)
    accepted = 0
    for threshold in (0.0, 0.49):
        for one, proposed in zip(outputs, found, strict=True):
            for budget in (len(one.token_ids), len(one.token_ids) + 7):
                params = DecodeParams(
                    budget,
                    SamplingParams(temperature=temperature, seed=one.seed),
                    confidence_threshold=threshold,
                )
                known = replay(target, draft, one.prompt_ids, one.token_ids, params, taps=one.taps)
                stats, anchors = rounds(proposed, limit=limit, budget=budget, threshold=threshold)
                assert stats.summary() == known.summary()
                assert len(anchors) == stats.rounds
                accepted += stats.accepted
    assert accepted > 50


def test_the_noise_is_the_outputs_own(target: Target) -> None:
    draft = tiny_draft(target)
    sampling = SamplingParams(temperature=30.0, seed=5)
    one = followed(target, draft, [5, 6, 7], 40, sampling)
    mine = propose_everywhere(draft, [one], SamplingParams(temperature=30.0), most=4)[0]
    other = Known(one.prompt_ids, one.token_ids, one.taps, seed=6)
    theirs = propose_everywhere(draft, [other], SamplingParams(temperature=30.0), most=4)[0]
    assert mine.hits.sum() > 2 * theirs.hits.sum()


def test_a_narrower_round_needs_no_new_proposals() -> None:
    hits = torch.tensor([[1, 1, 1, 0]] * 12, dtype=torch.bool)
    wide, _ = rounds(Proposed(hits, None), limit=4, budget=100)
    narrow, anchors = rounds(Proposed(hits, None), limit=2, budget=100)
    assert (wide.rounds, wide.accepted) == (3, 9)
    assert (narrow.rounds, narrow.accepted, anchors) == (4, 8, [0, 3, 6, 9])


def test_temperatures_move_the_confidence_before_it_cuts() -> None:
    hits = torch.arange(12)[:, None] + torch.arange(4) < 12  # none behind the output's end
    logits = torch.full((12, 4), 1.0)  # a confidence of 0.73
    logits[:, 2] = -1.0
    proposed = Proposed(hits, logits)
    cut, _ = rounds(proposed, limit=4, budget=100, threshold=0.4)
    assert cut.proposed == 2 * cut.rounds
    # sigmoid(-1 / 4) is 0.44
    mild, _ = rounds(proposed, limit=4, budget=100, threshold=0.4, temperatures=[1, 1, 4, 1])
    assert mild.rounds < cut.rounds
    assert mild.proposed > 3 * mild.rounds
