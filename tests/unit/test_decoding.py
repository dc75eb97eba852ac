"""The decode loop: the draft changes no token, and output ends exactly where it must."""

import math

import pytest
import torch

from dspark.decoding import (
    DecodeParams,
    ReferenceStep,
    SamplingParams,
    check_request,
    decode,
    draft_limit,
    replay,
    stream,
)
from dspark.decoding.proposer import BlockProposer
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


class Oracle(ReferenceStep):
    """A step whose proposals are right for the first ``right`` slots of each round."""

    output: tuple[int, ...] = ()
    right = 0

    def propose(self, most: int) -> torch.Tensor:
        begin = self.position - len(PROMPT) + 1
        known = list(self.output[begin : begin + most])
        return torch.tensor(
            [t if k < self.right else (t + 1) % 250 for k, t in enumerate(known)],
            dtype=torch.int64,
        )


def oracle(
    monkeypatch: pytest.MonkeyPatch, target: Target, right: int, params: SamplingParams = GREEDY
) -> list[int]:
    plain = decode(target, None, PROMPT, DecodeParams(60, params, ignore_eos=True)).token_ids
    monkeypatch.setattr(Oracle, "output", tuple(plain))
    monkeypatch.setattr(Oracle, "right", right)
    monkeypatch.setattr("dspark.decoding.loop.ReferenceStep", Oracle)
    return plain


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        pytest.param(SamplingParams(temperature=1.0, seed=5), marks=pytest.mark.slow),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=1),
    ],
)
@pytest.mark.parametrize(
    "block_size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        4,
        pytest.param(8, marks=pytest.mark.slow),
        pytest.param(16, marks=pytest.mark.slow),
    ],
)
def test_the_draft_changes_no_token(
    target: Target, sampling: SamplingParams, block_size: int
) -> None:
    params = DecodeParams(40, sampling, ignore_eos=True)
    draft = tiny_draft(target, block_size=block_size)
    plain = decode(target, None, PROMPT, params)
    drafted = decode(target, draft, PROMPT, params)
    assert drafted.token_ids == plain.token_ids
    assert len(drafted.token_ids) == 40


@pytest.mark.parametrize(
    "right",
    [
        pytest.param(0, marks=pytest.mark.slow),
        1,
        pytest.param(2, marks=pytest.mark.slow),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=3)])
def test_rejection_at_every_slot_leaves_the_output_alone(
    monkeypatch: pytest.MonkeyPatch, target: Target, right: int, sampling: SamplingParams
) -> None:
    plain = oracle(monkeypatch, target, right, sampling)
    params = DecodeParams(41, sampling, ignore_eos=True)
    drafted = decode(target, tiny_draft(target), PROMPT, params)
    assert drafted.token_ids == plain[:41]
    # 40 tokens behind the prefill's, right + 1 a round
    assert drafted.stats.rounds == math.ceil(40 / (right + 1))
    assert drafted.stats.accept_length == pytest.approx(40 / drafted.stats.rounds)


def test_a_fully_accepted_block_brings_the_bonus(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    oracle(monkeypatch, target, right=4)
    commits = list(stream(target, tiny_draft(target), PROMPT, DecodeParams(11, ignore_eos=True)))
    assert [len(c.token_ids) for c in commits] == [1, 5, 5]
    assert [(c.num_proposed, c.num_accepted) for c in commits] == [(None, 0), (4, 4), (4, 4)]


@pytest.mark.slow
def test_sampled_output_follows_the_targets_distribution(target: Target) -> None:
    """First two tokens with draft against the exact joint distribution over a coarse partition."""
    draft = tiny_draft(target)
    temperature = 1.5
    prompt = torch.tensor(PROMPT)
    first = (target.model(prompt[None]).logits[0, -1] / temperature).softmax(-1)
    best = first.topk(3).indices.tolist()
    draws = 250
    cells = torch.zeros(4, 2)
    for seed in range(draws):
        out = decode(
            target,
            draft,
            PROMPT,
            DecodeParams(2, SamplingParams(temperature=temperature, seed=seed), ignore_eos=True),
        ).token_ids
        cells[best.index(out[0]) if out[0] in best else 3, int(out[1] % 2)] += 1
    expected = torch.zeros(4, 2)
    for row, token in enumerate([*best, None]):
        tokens = [token] if token is not None else [t for t in range(260) if t not in best]
        batch = torch.stack([torch.cat([prompt, torch.tensor([t])]) for t in tokens])
        with torch.no_grad():
            second = (target.model(batch).logits[:, -1] / temperature).softmax(-1)
        weights = first[tokens]
        expected[row, 0] = (weights * second[:, 0::2].sum(-1)).sum()
        expected[row, 1] = (weights * second[:, 1::2].sum(-1)).sum()
    expected *= draws
    keep = expected > 5
    chi_square = float(((cells - expected) ** 2 / expected)[keep].sum())
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "right", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_stop_id_ends_the_output_inside_a_block(
    monkeypatch: pytest.MonkeyPatch, target: Target, right: int
) -> None:
    plain = oracle(monkeypatch, target, right)
    for position in (0, 1, 3, 5, 9):
        stop = plain[position]
        first = plain.index(stop)
        done = decode(
            target,
            tiny_draft(target),
            PROMPT,
            DecodeParams(60, stop_ids=frozenset([stop]), ignore_eos=True),
        )
        assert done.token_ids == plain[: first + 1]
        assert done.finish_reason == "stop"
        assert done.stats.emitted == first  # the prefill's token is no round


def test_the_targets_own_end_id_stops_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    plain = decode(target, None, PROMPT, DecodeParams(20, ignore_eos=True)).token_ids
    monkeypatch.setattr(target, "eos_ids", frozenset([plain[6]]))
    first = plain.index(plain[6])
    assert decode(target, None, PROMPT, DecodeParams(20)).token_ids == plain[: first + 1]
    assert decode(target, None, PROMPT, DecodeParams(20, ignore_eos=True)).token_ids == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), 7],
)
@pytest.mark.parametrize("right", [0, 4])
def test_output_lengths_are_exact(
    monkeypatch: pytest.MonkeyPatch, target: Target, count: int, right: int
) -> None:
    plain = oracle(monkeypatch, target, right)
    done = decode(target, tiny_draft(target), PROMPT, DecodeParams(count, ignore_eos=True))
    assert done.token_ids == plain[:count]
    assert done.finish_reason == "length"


@pytest.mark.parametrize("room", [1, 2, 9, 20])
def test_the_context_limit_ends_the_output(room: int) -> None:
    target = tiny_target(max_position_embeddings=48)
    prompt = [7] * (48 - room)
    done = decode(target, tiny_draft(target), prompt, DecodeParams(100, ignore_eos=True))
    assert len(done.token_ids) == room
    assert done.finish_reason == "length"
    assert (
        done.token_ids == decode(target, None, prompt, DecodeParams(100, ignore_eos=True)).token_ids
    )


def test_what_cannot_fit_is_refused_with_both_numbers(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"500 prompt tokens.*13.*512"):
        check_request(target.max_position_embeddings, 500, 13)
    check_request(target.max_position_embeddings, 500, 12)
    with pytest.raises(ConfigError, match="no tokens"):
        check_request(target.max_position_embeddings, 0, 1)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_a_threshold_outside_zero_and_one_is_refused(target: Target, threshold: float) -> None:
    with pytest.raises(ConfigError, match="confidence_threshold"):
        ReferenceStep(target, tiny_draft(target), GREEDY, confidence_threshold=threshold)


def test_a_threshold_of_one_decodes_plainly_and_zero_never_cuts(target: Target) -> None:
    draft = tiny_draft(target)
    none = decode(
        target, draft, PROMPT, DecodeParams(20, ignore_eos=True, confidence_threshold=1.0)
    )
    assert none.stats.proposed == 0
    assert none.stats.rounds == 19
    every = decode(target, draft, PROMPT, DecodeParams(20, ignore_eos=True))
    # only the last rounds propose less: they may emit no more than what is left
    assert every.stats.proposed_at[3] >= every.stats.rounds - 4
    assert none.token_ids == every.token_ids


@pytest.mark.parametrize(
    ("block", "asked", "limit"),
    [(7, None, 7), (8, None, 7), (16, None, 15), (4, None, 4), (8, 8, 8), (16, 3, 3)],
)
def test_proposals_of_a_round(block: int, asked: int | None, limit: int) -> None:
    assert draft_limit(block, asked) == limit


@pytest.mark.parametrize(("block", "asked"), [(4, 5), (4, 0), (16, 16)])
def test_more_proposals_than_trained_or_verified_are_refused(block: int, asked: int) -> None:
    with pytest.raises(ConfigError, match=f"num_draft_tokens.*{asked}"):
        draft_limit(block, asked)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_proposals_are_the_teacher_forced_arg_max_of_the_trained_form(
    target: Target, kind: str
) -> None:
    draft: DSparkDraftModel = tiny_draft(target, markov_head_type=kind)
    step = ReferenceStep(target, draft, GREEDY)
    first = step.prefill(torch.tensor(PROMPT))
    proposals = step.propose(4)
    taps = target.features(torch.tensor([PROMPT]), draft.layer_ids).taps
    anchors = torch.tensor([[len(PROMPT)]])
    with torch.no_grad():
        # padding for the anchor's own row, which nothing may read
        taps = torch.cat([taps, torch.full_like(taps[:, :1], 1e3)], 1)
        hidden = draft(taps, torch.tensor([[first]]), anchors)[0, 0]
        prev = torch.cat([torch.tensor([first]), proposals[:-1]])
        logits = draft.slot_logits(hidden[None], prev[None])[0]
    # the shortlist holds 64 of 260 ids: the winner stands in it unless the bias is huge
    assert proposals.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=2)])
@pytest.mark.parametrize("count", [2, 9, pytest.param(60, marks=pytest.mark.slow)])
def test_a_replay_counts_the_rounds_of_the_real_decode(
    target: Target, sampling: SamplingParams, count: int
) -> None:
    params = DecodeParams(count, sampling, ignore_eos=True)
    for seed in range(3):
        draft = tiny_draft(target, seed=seed)
        done = decode(target, draft, PROMPT, params)
        again = replay(target, draft, PROMPT, done.token_ids, params)
        assert again.summary() == done.stats.summary()


def test_a_replay_sees_the_stop_token(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    plain = decode(target, None, PROMPT, DecodeParams(30, ignore_eos=True)).token_ids
    draft = tiny_draft(target)
    for stop in plain[3:9]:
        params = DecodeParams(30, stop_ids=frozenset([stop]), ignore_eos=True)
        done = decode(target, draft, PROMPT, params)
        again = replay(target, draft, PROMPT, done.token_ids, params)
        assert again.summary() == done.stats.summary()


def test_a_replay_ends_at_a_stop_token_that_was_proposed(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    """A random draft hardly ever proposes the stop token itself; this one is always right."""
    plain = oracle(monkeypatch, target, right=4)

    def right(self: BlockProposer, anchor: torch.Tensor, most: int) -> torch.Tensor:
        begin = self._context.length - len(PROMPT) + 1
        return torch.tensor(plain[begin : begin + most], dtype=torch.int64)

    monkeypatch.setattr(BlockProposer, "propose", right)
    draft = tiny_draft(target)
    inside = 0
    for stop in dict.fromkeys(plain[2:12]):
        params = DecodeParams(30, stop_ids=frozenset([stop]), ignore_eos=True)
        done = decode(target, draft, PROMPT, params)
        again = replay(target, draft, PROMPT, done.token_ids, params)
        assert again.summary() == done.stats.summary()
        inside += done.stats.emitted == done.stats.accepted + done.stats.rounds - 1
    assert inside > 2


def test_the_prefill_is_timed_apart_from_the_rounds(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("dspark.decoding.loop.time.perf_counter", lambda: float(next(clock)))
    done = decode(target, None, PROMPT, DecodeParams(5, ignore_eos=True))
    assert done.prefill_s == 1.0
    assert done.step_s == [1.0] * 4
    assert done.decode_s == 4.0
