"""What `evaluate` decodes: whose noise, how long, and what it calls lossless."""

from dataclasses import replace
from typing import Any

import pytest

from dspark.acceptance import AcceptStats
from dspark.bench import prompt_runs as module
from dspark.bench.evaluate import evaluate, figures
from dspark.bench.lossless import compare
from dspark.bench.records import PromptRun
from dspark.config import EvalSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import Completion, DecodeParams, SamplingParams, decode
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def test_each_prompt_is_sampled_with_a_seed_of_its_own(target: Target) -> None:
    settings = EvalSettings(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=4)
    report = evaluate(
        target, tiny_draft(target), TOKENIZER, {"s": ["hello"] * 3}, settings, other_mode_prompts=0
    )
    prompt = report.prompt_ids["s"][0]
    expected = [
        decode(
            target,
            None,
            prompt,
            DecodeParams(12, SamplingParams(temperature=1.0, top_p=0.9, seed=4 + index)),
        ).token_ids
        for index in range(3)
    ]
    assert [run.drafted.token_ids for run in report.runs["s"]] == expected
    assert expected[0] != expected[1]


def test_compare_gives_each_prompt_a_seed_of_its_own(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def spy(t: Target, draft: Any, prompt: list[int], params: DecodeParams) -> Completion:
        seeds.append(params.sampling.seed)
        return decode(t, draft, prompt, params)

    monkeypatch.setattr("dspark.bench.lossless.decode", spy)
    params = DecodeParams(4, SamplingParams(temperature=1.0, seed=10))
    assert compare(target, tiny_draft(target), [[5, 6]] * 3, params).equal
    assert seeds == [10, 11, 12]


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_the_other_kind_of_sampling_is_checked_over_short_outputs(
    target: Target, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    asked: list[DecodeParams] = []

    def spy(t: Any, draft: Any, prompt: Any, params: DecodeParams) -> Completion:
        done = decode(t, draft, prompt, params)
        if params.sampling.temperature == temperature:
            return done
        asked.append(params)
        return replace(done, token_ids=[-1, *done.token_ids[1:]])

    monkeypatch.setattr(module, "decode", spy)
    settings = EvalSettings(max_new_tokens=70, temperature=temperature, seed=3)
    report = evaluate(
        target,
        tiny_draft(target),
        TOKENIZER,
        {"s": ["hello"]},
        settings,
        num_draft_tokens=2,
        confidence_threshold=0.1,
    )
    # a difference there is one, though the run itself has none
    assert report.pooled["lossless"] is True
    summary = report.summary()
    assert summary["lossless"] is False
    (difference,) = summary["lossless_checks"]["greedy" if temperature else "sampled"][
        "differences"
    ]
    assert (difference["position"], difference["with_draft"]) == (0, -1)
    (params,) = asked
    assert params.max_new_tokens == 64
    assert params.sampling == SamplingParams(temperature=0.0 if temperature else 1.0, seed=3)
    assert (params.num_draft_tokens, params.confidence_threshold) == (2, 0.1)


def test_decoding_without_the_draft_is_timed_over_the_first_tokens(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "eos_ids", frozenset())
    settings = EvalSettings(max_new_tokens=9, plain_tokens=5)
    report = evaluate(
        target,
        tiny_draft(target),
        TOKENIZER,
        {"s": ["hello"]},
        settings,
        num_draft_tokens=2,
        other_mode_prompts=0,
    )
    (run,) = report.runs["s"]
    assert len(run.plain_timed.token_ids) == 5
    assert len(run.plain) == len(run.drafted.token_ids) == 9
    assert len(run.drafted.stats.proposed_at) == 2


def test_a_prompt_that_leaves_no_room_is_counted_and_one_token_of_room_is_enough(
    target: Target,
) -> None:
    frame = len(generation_prompt_ids(TOKENIZER, [{"role": "user", "content": ""}]))
    room = target.max_position_embeddings - frame
    sets = {"s": ["x" * room, "x" * (room - 1)]}
    report = evaluate(
        target, tiny_draft(target), TOKENIZER, sets, EvalSettings(), other_mode_prompts=0
    )
    assert report.rejects.rejected == 1
    assert [len(run.plain) for run in report.runs["s"]] == [1]


def test_the_template_is_told_whether_to_think(target: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{% if enable_thinking %}<think>{% endif %}"
    sets = {"s": ["hello"]}
    prompts = []
    for thinking in (True, False):
        report = evaluate(
            target,
            tiny_draft(target),
            tokenizer,
            sets,
            EvalSettings(max_new_tokens=1),
            thinking=thinking,
            other_mode_prompts=0,
        )
        prompts.append(tokenizer.decode(report.prompt_ids["s"][0]))
        assert report.settings["thinking"] is thinking
    assert prompts[0] == prompts[1] + "<think>"


def test_one_output_that_differs_anywhere_is_not_lossless() -> None:
    same = Completion([1, 2, 3], "length", AcceptStats(4), 1.0, [])
    timed = Completion([1, 2], "length", AcceptStats(4), 1.0, [])
    good = PromptRun(same, [1, 2, 3], timed)
    assert good.lossless
    off = replace(good, plain=[1, 2, 4])
    # the path that is timed must be the one that is compared
    mistimed = replace(good, plain_timed=replace(timed, token_ids=[1, 9]))
    assert not off.lossless
    assert not mistimed.lossless
    assert figures([good, good])["lossless"] is True
    assert figures([good, off])["lossless"] is False
    assert figures([mistimed, good])["lossless"] is False
