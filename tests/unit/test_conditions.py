"""Several conditions of one run, its reproduction, and how a killed one goes on."""

import io
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.bench import prompt_runs
from dspark.bench.conditions import Condition, Evaluation, check_thinking, conditions, run
from dspark.bench.evaluate_report import print_evaluation
from dspark.bench.plot import plot_evaluation
from dspark.config import EvalSettings
from dspark.decoding import Completion, decode
from dspark.errors import ConfigError
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SETS = {"a": ["hello", "Why?"], "b": ["x = 3"]}
GREEDY = Condition(0.0, None, "coupled")
SAMPLED = Condition(1.0, None, "coupled")
BLOCK = Condition(1.0, None, "block")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a second."""
    ticks = itertools.count()
    told = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr("dspark.decoding.loop.time", told)


def evaluated(target: Target, *asked: Condition, seed: int = 0, **options: Any) -> Evaluation:
    draft = tiny_draft(target)
    draft.config.sts_temperatures = [0.5, 2.0, 1.0, 1.0]
    drafts = {"d": draft, **options.pop("more", {})}
    settings = EvalSettings(max_new_tokens=6, plain_tokens=3, seed=seed)
    return run(target, drafts, TOKENIZER, SETS, settings, asked, **options)


def text(evaluation: Evaluation) -> str:
    return json.dumps(evaluation.summaries(), allow_nan=False)


def test_every_combination_is_measured_once_and_greedily_all_rules_are_one() -> None:
    found = conditions([0.0, 0.7, 0.7], [False, True], ["rejection", "block"])
    assert [one.name for one in found] == [
        "temperature 0, thinking off",
        "temperature 0, thinking on",
        "temperature 0.7, thinking off, rejection verification",
        "temperature 0.7, thinking off, block verification",
        "temperature 0.7, thinking on, rejection verification",
        "temperature 0.7, thinking on, block verification",
    ]


def test_a_template_without_a_switch_is_told() -> None:
    with pytest.raises(ConfigError, match="chat template has no thinking switch"):
        check_thinking(TOKENIZER)
    switching: Any = tiny_tokenizer()
    switching.chat_template += "{% if enable_thinking %}x{% endif %}"
    check_thinking(switching)


@pytest.mark.usefixtures("clock")
def test_the_same_seed_gives_the_same_report(target: Target) -> None:
    asked = (SAMPLED, BLOCK)
    first = evaluated(target, *asked, seed=5)
    assert text(evaluated(target, *asked, seed=5)) == text(first)
    other = evaluated(target, *asked, seed=6)
    assert text(other) != text(first)
    for condition in asked:
        tokens = [one.reports[condition]["d"].runs["a"][0].drafted for one in (first, other)]
        assert tokens[0].token_ids != tokens[1].token_ids


def test_confidence_that_cannot_be_told_says_why(target: Target) -> None:
    for condition, threshold, told in (
        (SAMPLED, 0.3, True),
        (BLOCK, 0.0, True),
        (BLOCK, 0.3, False),
    ):
        one = evaluated(target, condition, confidence_threshold=threshold)
        summary = one.reports[condition]["d"].summary()
        assert (summary["confidence"] is not None) is told
        shown = io.StringIO()
        print_evaluation(summary, file=shown)
        assert ("under block verification; leave the threshold out" in shown.getvalue()) is not told


def test_what_keeps_the_distribution_is_not_held_against_other_tokens(target: Target) -> None:
    found = evaluated(target, BLOCK).reports[BLOCK]["d"]
    one = found.summary()
    assert found.pooled["lossless"] is None
    assert found.sets["a"]["lossless"] is None
    assert list(one["lossless_checks"]) == ["greedy"]
    assert one["lossless"] is True
    assert one["settings"]["verification"] == "block"
    # the rounds of its own tokens are told as well
    assert one["confidence"]["reliability"]["after"]["survival"]
    both = evaluated(target, GREEDY, SAMPLED)
    for condition, mode in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
        report = both.reports[condition]["d"]
        # each is the other's check
        assert list(report.lossless) == [mode]
        assert report.pooled["confidence"]["reliability"]["after"]["survival"]


def test_the_base_of_a_comparison_is_named(target: Target) -> None:
    more = {"same": tiny_draft(target), "other": tiny_draft(target, seed=1)}
    (one,) = evaluated(target, GREEDY, base="same", more=more).summaries()
    assert list(one["paired"]) == ["d", "other"]
    assert one["paired"]["d"]["pooled"]["accept_length"]["difference"] == 0.0
    gap = one["drafts"]["other"]["accept_length"] - one["drafts"]["same"]["accept_length"]
    assert one["paired"]["other"]["pooled"]["accept_length"]["difference"] == pytest.approx(gap)


def test_a_threshold_that_cuts_no_block_of_a_draft_is_told(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"bare": tiny_draft(target, enable_confidence_head=False)}
    evaluated(target, GREEDY, more=more)
    assert not caplog.messages
    evaluated(target, GREEDY, more=more, confidence_threshold=0.25)
    said = "bare has no confidence head: --confidence-threshold 0.25 cuts none of its blocks"
    assert caplog.messages == [said]


@pytest.mark.usefixtures("clock")
def test_a_killed_run_goes_on_and_reports_the_same(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (GREEDY, BLOCK)
    whole = text(evaluated(target, *asked, out=tmp_path / "whole"))
    assert whole == text(evaluated(target, *asked))
    calls = itertools.count()

    def killed(*args: Any) -> Completion:
        if next(calls) == 13:  # in the second condition
            raise KeyboardInterrupt
        return decode(*args)

    out = tmp_path / "out"
    monkeypatch.setattr(prompt_runs, "decode", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluated(target, *asked, out=out)
    lines = (out / "prompts.jsonl").read_text().splitlines()
    assert 3 <= len(lines) < 6
    began = json.loads((out / "evaluation.json").read_text())["environment"]
    with (out / "prompts.jsonl").open("a") as file:
        file.write(lines[-1][:100])  # what a kill leaves of a line
    decoded = []

    def spy(*args: Any) -> Completion:
        decoded.append(args)
        return decode(*args)

    monkeypatch.setattr(prompt_runs, "decode", spy)
    again = evaluated(target, *asked, out=out)
    assert text(again) == whole
    assert again.environment == began
    assert (out / "prompts.jsonl").read_text() == (tmp_path / "whole/prompts.jsonl").read_text()
    assert decoded
    decoded.clear()
    assert text(evaluated(target, *asked, out=out)) == whole
    assert not decoded


def test_another_commands_directory_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(target, GREEDY, out=tmp_path / "o")
    for asked, options, words in (
        ((BLOCK,), {}, "conditions"),
        ((GREEDY,), {"seed": 1}, "settings"),
        ((GREEDY,), {"num_draft_tokens": 2}, "settings"),
        ((GREEDY,), {"more": {"e": tiny_draft(target)}}, "drafts"),
    ):
        with pytest.raises(ConfigError, match=rf"another evaluation \(not the same {words}\)"):
            evaluated(target, *asked, out=tmp_path / "o", **options)
    with pytest.raises(ConfigError, match=r"not the same target\)"):
        evaluated(tiny_target(seed=1), GREEDY, out=tmp_path / "o")
    monkeypatch.setitem(SETS, "b", ["y = 3"])
    with pytest.raises(ConfigError, match=r"not the same prompts\)"):
        evaluated(target, GREEDY, out=tmp_path / "o")
    (tmp_path / "p").mkdir()
    (tmp_path / "p/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds something else \(notes.txt\): choose an empty"):
        evaluated(target, GREEDY, out=tmp_path / "p")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        evaluated(target, GREEDY, out=tmp_path / "file")


def test_a_picture_shows_sets_slots_and_reliability(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evaluation = evaluated(target, SAMPLED, BLOCK)
    reports = {one["condition"]: one["drafts"]["d"] for one in evaluation.summaries()}
    plot_evaluation(tmp_path / "a.png", reports)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
