"""`dspark eval`: hand-computed figures, intervals, equality, and prompts that cannot be decoded."""

import json
import math
from typing import Any

import pytest
import torch

from dspark.acceptance import AcceptStats
from dspark.bench import prompt_runs as module
from dspark.bench.bootstrap import bootstrap_interval
from dspark.bench.evaluate import (
    Prompt,
    evaluate,
    evaluate_all,
    figures,
    tpot_ms,
)
from dspark.bench.records import PromptRun
from dspark.config import EvalSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import (
    Completion,
    DecodeParams,
    Draft,
    ReferenceStep,
    SamplingParams,
    decode,
    nextn_draft,
)
from dspark.errors import ConfigError, DataError
from dspark.target import GoOn, Target
from dspark.testing import tiny_draft, tiny_ling, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.slow

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def ids(text: str) -> list[int]:
    return generation_prompt_ids(TOKENIZER, [{"role": "user", "content": text}])


class Scripted(ReferenceStep):
    """A step whose proposals are right for as many slots as the script says for each round."""

    script: tuple[int, ...] = ()
    outputs: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 (set by the fixture)

    def prefill(self, prompt_ids: torch.Tensor, go_on: GoOn | None = None) -> int:
        self._known = self.outputs[tuple(prompt_ids.tolist())]
        self._start = len(prompt_ids)
        self._round = 0
        return super().prefill(prompt_ids, go_on)

    def propose(self, most: int) -> torch.Tensor:
        if self.limit == 0:
            return super().propose(most)
        right = self.script[self._round] if self._round < len(self.script) else 0
        self._round += 1
        begin = self.position - self._start + 1
        known = self._known[begin : begin + most]
        tokens = [t if k < right else (t + 1) % 250 for k, t in enumerate(known)]
        return torch.tensor(tokens, dtype=torch.int64)


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    text: str,
    script: tuple[int, ...],
    *,
    max_new_tokens: int,
    eos_at: int | None = None,
) -> dict[str, Any]:
    """Figures of one prompt with a draft of block 4 that keeps ``script`` tokens a round."""
    known = decode(target, None, ids(text), DecodeParams(40, ignore_eos=True)).token_ids
    eos = frozenset() if eos_at is None else frozenset({known[eos_at]})
    assert not eos & set(known[: eos_at or 0])
    monkeypatch.setattr(target, "eos_ids", eos)
    monkeypatch.setattr(Scripted, "script", script)
    monkeypatch.setattr(Scripted, "outputs", {tuple(ids(text)): known})
    monkeypatch.setattr("dspark.decoding.loop.ReferenceStep", Scripted)
    settings = EvalSettings(max_new_tokens=max_new_tokens)
    draft = tiny_draft(target)
    report = evaluate(
        target, draft, TOKENIZER, {"one": [text]}, settings, other_mode_prompts=0
    ).summary()
    assert report["lossless"]
    return report


# --- hand values of the definitions ----------------------------------------------------------


def test_rejected_partly_and_wholly_accepted_rounds(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    # prefill 1 token, then rounds that propose 4, 4 and, with 3 tokens left, 2 tokens
    one = scripted(monkeypatch, target, "hello", (0, 4, 4), max_new_tokens=10)
    assert (one["num_tokens"], one["rounds"], one["emitted"]) == (10, 3, 1 + 5 + 3)
    assert one["accept_length"] == 3.0
    assert one["accepted_drafts"] == 2.0
    assert one["accept_length_macro"] == 3.0
    assert one["verify_rate"] == 9 / (10 + 3)
    assert one["survival"] == [2 / 3, 2 / 3, 1 / 2, 1 / 2]
    assert one["accept_rate"] == [2 / 3, 1.0, 1.0, 1.0]
    assert one["histogram"] == [0, 1, 0, 1, 0, 1]
    assert one["interval"] is None  # one prompt tells nothing about others


def test_a_stop_id_inside_the_accepted_prefix_ends_what_counts(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    # all four proposals are kept, but the third is the end: no fourth, no bonus token
    one = scripted(monkeypatch, target, "hello", (4,), max_new_tokens=20, eos_at=3)
    assert (one["num_tokens"], one["rounds"], one["emitted"]) == (4, 1, 3)
    assert (one["accept_length"], one["accepted_drafts"]) == (3.0, 3.0)
    assert one["histogram"] == [0, 0, 0, 1, 0, 0]
    assert one["finished_by_stop"] == 1


def test_every_proposal_rejected_is_an_accept_length_of_one(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    one = scripted(monkeypatch, target, "Why?", (0,) * 7, max_new_tokens=8)
    assert (one["rounds"], one["accept_length"], one["accepted_drafts"]) == (7, 1.0, 0.0)
    assert one["survival"] == one["accept_rate"] == [0.0] * 4


def test_an_output_without_a_round_has_no_figures_and_no_time_per_token(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    for one in (
        scripted(monkeypatch, target, "x = 3", (), max_new_tokens=20, eos_at=0),
        scripted(monkeypatch, target, "x = 3", (), max_new_tokens=1),
    ):
        assert (one["num_tokens"], one["rounds"], one["accept_length"]) == (1, 0, 0.0)
        assert one["interval"] is None
        assert one["tpot_ms"] is None
        assert one["speedup"] is None
        json.dumps(one, allow_nan=False)


def completion(num_tokens: int, step_s: list[float], *, kept: int = 0) -> Completion:
    stats = AcceptStats(4)
    for _ in step_s:
        stats.add(num_proposed=4, num_accepted=kept, num_emitted=kept + 1)
    return Completion(list(range(num_tokens)), "length", stats, 1.0, step_s)


def test_time_per_token_is_the_mean_over_prompts_and_not_the_step_time() -> None:
    done = [completion(5, [0.1, 0.1]), completion(11, [0.5, 0.5]), completion(1, [])]
    # 0.2 s / 4 and 1.0 s / 10; the one-token output has no second token to time
    assert tpot_ms(done) == pytest.approx((50.0 + 100.0) / 2)
    assert tpot_ms(done[2:]) is None


def test_pooled_and_macro_means_differ_as_they_should() -> None:
    runs = [
        PromptRun(completion(7, [0.1] * 2, kept=2), [0], completion(7, [0.1] * 6)),
        PromptRun(completion(9, [0.1] * 8), [0], completion(9, [0.1] * 8)),
    ]
    both = figures(runs)
    assert both["accept_length"] == (6 + 8) / 10
    assert both["accept_length_macro"] == (3.0 + 1.0) / 2
    assert both["tokens_per_s"] == pytest.approx(16 / (2.0 + 1.0))
    assert both["tpot_ms_plain"] == pytest.approx(100.0)
    assert both["speedup"] == pytest.approx(100.0 / ((0.2 / 6 + 0.1) / 2 * 1000))


# --- intervals -------------------------------------------------------------------------------


def test_the_interval_is_seeded_and_holds_the_estimate() -> None:
    generator = torch.Generator().manual_seed(0)
    stats = []
    for _ in range(40):
        one = AcceptStats(4)
        for kept in torch.randint(0, 5, (12,), generator=generator).tolist():
            one.add(num_proposed=4, num_accepted=kept, num_emitted=kept + 1)
        stats.append(one)
    estimate = sum(s.emitted for s in stats) / sum(s.rounds for s in stats)
    interval = bootstrap_interval(stats, seed=1)
    assert interval is not None
    assert interval[0] < estimate < interval[1]
    assert interval == bootstrap_interval(stats, seed=1)
    assert interval != bootstrap_interval(stats, seed=2)
    # standard error of a mean of 480 draws from 1..5 is 0.065
    assert interval[1] - interval[0] == pytest.approx(4 * 0.065, rel=0.35)


def test_tokens_and_rounds_of_a_prompt_are_resampled_together() -> None:
    stats = [AcceptStats(4, rounds=10, emitted=10), AcceptStats(4, rounds=100, emitted=400)]
    low, high = bootstrap_interval(stats) or (math.nan, math.nan)
    # apart, 400 tokens over 10 rounds would turn up
    assert (low, high) == (1.0, 4.0)
    assert bootstrap_interval([AcceptStats(4)]) is None


# --- the whole run ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_sets_pool_and_both_kinds_of_sampling_are_checked(
    target: Target, temperature: float
) -> None:
    settings = EvalSettings(max_new_tokens=8, temperature=temperature, limit=2, seed=4)
    sets: dict[str, list[Prompt]] = {
        "texts": ["hello", "Why?", "left out by the limit"],
        "talks": [
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
        ],
    }
    draft = tiny_draft(target)
    draft.config.sts_temperatures = [0.5, 2.0, 1.0, 1.0] if temperature else None
    report = evaluate(target, draft, TOKENIZER, sets, settings, other_mode_prompts=2)
    one = report.summary()
    assert one["num_prompts"] == 3
    confidence = one["confidence"]
    assert 0 <= confidence["before"]["survival"]["ece"] <= 1
    if temperature:
        assert confidence["after"]["slot"]["brier"] != confidence["before"]["slot"]["brier"]
    else:
        assert confidence["after"] is None
    assert [one["sets"][name]["num_prompts"] for name in sets] == [2, 1]
    assert one["rounds"] == sum(part["rounds"] for part in one["sets"].values())
    assert one["lossless"] is True
    main, other = ("sampled", "greedy") if temperature else ("greedy", "sampled")
    assert report.lossless[main].num_prompts == 3
    assert report.lossless[other].num_prompts == 2
    assert one["settings"]["num_draft_tokens"] == one["settings"]["block_size"] == 4
    assert one["settings"]["temperature"] == temperature
    json.dumps(one, allow_nan=False)


def test_draft_and_plain_take_turns_at_going_first(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bool] = []

    def spy(t: Target, draft: Any, prompt: list[int], params: DecodeParams) -> Completion:
        order.append(draft is not None)
        return decode(t, draft, prompt, params)

    monkeypatch.setattr(module, "decode", spy)
    settings = EvalSettings(max_new_tokens=3)
    sets = {"s": ["a", "b", "c"]}
    evaluate(target, tiny_draft(target), TOKENIZER, sets, settings, other_mode_prompts=0)
    assert order[2:] == [True, False, False, True, True, False]


def test_drafts_of_one_run_take_turns_over_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target's own NEXTN block, a DSpark draft and plain decoding."""
    ling = tiny_ling(nextn=True)
    drafts: dict[str, Draft] = {"block": nextn_draft(ling, 3), "model": tiny_draft(ling)}
    order: list[str | None] = []

    def spy(t: Target, draft: Draft | None, prompt: list[int], params: DecodeParams) -> Completion:
        if not params.sampling.greedy:  # the check at the other kind of sampling
            order.append(next((name for name, one in drafts.items() if one is draft), None))
        return decode(t, draft, prompt, params)

    monkeypatch.setattr(module, "decode", spy)
    settings = EvalSettings(max_new_tokens=6, temperature=2.0)
    sets = {"s": ["a", "b"], "t": ["c"]}
    both = evaluate_all(ling, drafts, TOKENIZER, sets, settings, other_mode_prompts=1)
    assert order[3:] == ["block", "model", None, "model", None, "block", None, "block", "model"]
    monkeypatch.undo()
    for name, draft in drafts.items():
        alone = decode(ling, draft, ids("b"), DecodeParams(6, SamplingParams(2.0, seed=1)))
        run = both[name].runs["s"][1]
        assert run.lossless
        assert (run.drafted.token_ids, run.drafted.stats) == (alone.token_ids, alone.stats)
        assert both[name].summary()["lossless"]
    settled = [both[name].settings["num_draft_tokens"] for name in drafts]
    assert settled == [3, 4]
    # the plain decode that both are held against is one
    runs = [both[name].runs["t"][0] for name in drafts]
    assert runs[0].plain_timed is runs[1].plain_timed
    assert runs[0].drafted.stats.accepted > 0


def test_prompts_that_cannot_be_decoded_are_counted(target: Target) -> None:
    settings = EvalSettings(max_new_tokens=2)
    draft = tiny_draft(target)
    sets = {"s": ["hello", "x" * 600]}
    one = evaluate(target, draft, TOKENIZER, sets, settings, other_mode_prompts=0).summary()
    assert one["num_prompts"] == 1
    assert one["rejects"]["reasons"] == {"prompt_too_long": 1}
    without: list[dict[str, list[Prompt]]] = [
        {"s": []},
        {"good": ["a"], "bad": ["x" * 600]},
        {},
    ]
    for bad in without:
        with pytest.raises(DataError, match="no prompt"):
            evaluate(target, draft, TOKENIZER, bad, settings)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"confidence_threshold": -0.1}, "confidence_threshold must lie in 0..1, got -0.1"),
        ({"confidence_threshold": 1.1}, "got 1.1"),
        ({"confidence_threshold": math.nan}, "got nan"),
        ({"num_draft_tokens": 5}, r"1\.\.4 .* got 5"),
        ({"num_draft_tokens": 0}, "got 0"),
    ],
)
def test_settings_out_of_range_are_refused(
    target: Target, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluate(target, tiny_draft(target), TOKENIZER, {"s": ["a"]}, EvalSettings(), **arguments)


def test_prompts_of_ids_behind_the_target_are_not_decoded() -> None:
    short = tiny_target(vocab_size=258, pad_token_id=0, eos_token_id=0)
    draft = tiny_draft(short)
    with pytest.raises(
        DataError, match=r"id_out_of_vocabulary 1; first: s:0 \(258, vocabulary 258"
    ):
        evaluate(short, draft, TOKENIZER, {"s": ["a"]}, EvalSettings(max_new_tokens=2))


@pytest.mark.parametrize(
    ("script", "alarm"), [((), True), pytest.param((1,), False, marks=pytest.mark.slow)]
)
def test_a_draft_of_which_nothing_is_accepted_raises_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: Target,
    script: tuple[int, ...],
    alarm: bool,
) -> None:
    one = scripted(monkeypatch, target, "hello", script, max_new_tokens=10)
    assert (one["accept_length"] == 1.0) is alarm
    assert ("drafted tokens was accepted" in caplog.text) is alarm


@pytest.mark.parametrize("threshold", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_threshold_changes_the_rounds_but_no_token(target: Target, threshold: float) -> None:
    report = evaluate(
        target,
        tiny_draft(target),
        TOKENIZER,
        {"s": ["hello"]},
        EvalSettings(max_new_tokens=8),
        confidence_threshold=threshold,
        other_mode_prompts=1,
    ).summary()
    assert report["lossless"]
    # no confidence reaches 1: every round then is a plain step
    assert (report["verify_rate"] == 1.0) == (threshold == 1.0)
