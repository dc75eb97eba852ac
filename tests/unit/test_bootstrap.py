"""Intervals by hand, and of two drafts on the same prompts."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from torch import Tensor

from dspark.acceptance import AcceptStats
from dspark.bench.bootstrap import bootstrap_interval, intervals, over_sets, paired
from dspark.bench.records import PromptRun
from dspark.decoding import Completion


def completion(kept: list[int], step_s: float) -> Completion:
    stats = AcceptStats(4)
    for count in kept:
        stats.add(num_proposed=4, num_accepted=count, num_emitted=count + 1)
    tokens = list(range(1 + sum(kept) + len(kept)))
    return Completion(tokens, "length", stats, 1.0, [step_s] * len(kept))


def run(*kept: int, step_s: float = 0.1) -> PromptRun:
    return PromptRun(completion(list(kept), step_s), [0], completion([0] * 10, 0.1))


SOME = [run(0, 0), run(1, 1, 1), run(4, 4), run(2, 0)]


def test_every_headline_figure_has_an_interval_around_it() -> None:
    found = intervals(SOME, seed=3)
    assert found["accept_length"] == bootstrap_interval([r.drafted.stats for r in SOME], seed=3)
    estimates = {
        "accept_length": (2 + 6 + 10 + 4) / 9,
        "accepted_drafts": 13 / 9,
        "accept_length_macro": (1 + 2 + 5 + 2) / 4,
        "full_block_rate": 2 / 9,
        # seconds of steps over tokens behind the first
        "tpot_ms": 1000 * (0.2 / 2 + 0.3 / 6 + 0.2 / 10 + 0.2 / 4) / 4,
        "speedup": 0.1 / ((0.2 / 2 + 0.3 / 6 + 0.2 / 10 + 0.2 / 4) / 4),
    }
    assert set(found) == set(estimates)
    for name, estimate in estimates.items():
        low, high = found[name] or (0.0, 0.0)
        assert low < estimate < high, name
    assert intervals(SOME, seed=3) == found
    assert set(intervals(SOME[:1]).values()) == {None}


def test_prompts_that_are_all_alike_leave_no_doubt() -> None:
    exact = {
        "accept_length": 3.0,
        "accepted_drafts": 2.0,
        "accept_length_macro": 3.0,
        "full_block_rate": 0.5,
        "tpot_ms": 1000 * 0.2 / 6,
        "speedup": 3.0,
    }
    for name, found in intervals([run(4, 0)] * 5).items():
        assert found == pytest.approx((exact[name], exact[name])), name


def test_sets_count_alike_however_long_they_are() -> None:
    found = over_sets({"long": [run(4, 4)] * 30, "short": [run(0)], "empty": [run()]})
    assert found == {"accept_length": 3.0, "interval": None}  # one prompt tells of no others
    assert over_sets({"a": [run(4)] * 3, "b": [run(0)] * 2})["interval"] == (3.0, 3.0)
    assert over_sets({"empty": [run()]}) == {"accept_length": 0.0, "interval": None}


def test_what_is_hard_about_a_prompt_falls_out_of_the_difference() -> None:
    # prompts differ far more than the drafts, which differ by one token a round everywhere
    base = {"s": [run(k, k) for k in (0, 1, 2, 3) for _ in range(3)], "t": [run(0)] * 2}
    more = {"s": [run(k + 1, k + 1) for k in (0, 1, 2, 3) for _ in range(3)], "t": [run(0)] * 2}
    found = paired(base, more)
    gap = found["sets"]["s"]["accept_length"]
    assert gap["difference"] == pytest.approx(1.0)
    assert gap["interval"] == pytest.approx((1.0, 1.0))
    alone = bootstrap_interval([one.drafted.stats for one in base["s"]])
    assert alone is not None
    assert alone[1] - alone[0] > 0.5
    assert found["sets"]["t"]["accept_length"] == {"difference": 0.0, "interval": (0.0, 0.0)}
    assert found["pooled"]["accept_length"]["difference"] == pytest.approx(24 / 26)
    assert found["over_sets"]["accept_length"]["difference"] == pytest.approx(0.5)
    # the sign: the other minus the base
    back = paired(more, base)["sets"]["s"]
    assert back["accept_length"]["difference"] == pytest.approx(-1.0)
    assert back["speedup"]["difference"] < 0


def test_drafts_without_a_round_are_not_compared() -> None:
    found = paired({"s": [run()] * 2}, {"s": [run()] * 2})
    assert found["sets"]["s"]["accept_length"] == {"difference": None, "interval": None}
    assert found["over_sets"] is None


def test_the_study_draws_the_same_prompts_for_all_arms_by_this_bootstrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = {"a": [[2, 4], [3, 9], [5, 6]], "b": [[1, 7], [4, 8]]}  # rounds and tokens
    drawn: list[list[float]] = []

    def interval(values: Tensor) -> tuple[float, float]:
        drawn.append(values.tolist())
        return -1.0, 2.0

    rows = []
    for arm, factor in (("stock", 1), ("better", 2)):
        for name, counts in prompts.items():
            more = [[rounds, factor * tokens] for rounds, tokens in counts]
            told = {"set": name, "temperature": 0.0, "width": 2, "accept_length": 0.0}
            told |= {"reached_at": [8, 4 * factor], "kept_at": [2 * factor, len(counts)]}
            rows.append({"draft": f"{arm}-0", "prompts": more, **told})
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    place = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("dspark.bench.bootstrap.interval", interval)
    monkeypatch.setattr(sys, "argv", ["study_report.py", str(path), "--slots"])
    runpy.run_path(str(place / "study_report.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    # of both sets: 8 of 16 and 5 of 16, 4 of 16 and 5 of 8
    assert lines[-2:] == ["| better | 0.500 | 0.312 |", "| stock | 0.250 | 0.625 |"]
    better, stock = (line for line in lines if line.startswith(("| better | 1", "| stock | 1")))
    # the mean of (4 + 9 + 6) / 10 and (7 + 8) / 5
    assert "| 4.900 | +100.00% | -1.00 to +2.00 |" in better
    assert "| 2.450 | +0.00% | -1.00 to +2.00 |" in stock
    # in every resample twice as long, as it would not be with other prompts
    assert [pytest.approx([value] * 5000) for value in (100.0, 0.0)] == drawn
