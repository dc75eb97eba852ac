"""Tables for people and the facts about the machine."""

import io
import json
from typing import Any

from dspark.bench.evaluate_report import print_comparison, print_evaluation
from dspark.bench.report import environment, print_table


def figures(**changes: Any) -> dict[str, Any]:
    return {
        "num_prompts": 2,
        "num_tokens": 40,
        "rounds": 20,
        "accept_length": 1.9,
        "accepted_drafts": 0.95,
        "interval": (1.5, 2.25),
        "intervals": {
            "accept_length": (1.5, 2.25),
            "accepted_drafts": (0.5, 1.25),
            "accept_length_macro": None,
            "full_block_rate": (0.25, 0.375),
            "tpot_ms": (9.0, 11.0),
            "speedup": (1.125, 1.75),
        },
        "full_block_rate": 0.3,
        "accept_length_macro": 1.85,
        "tpot_ms": 10.0,
        "tpot_ms_plain": 15.0,
        "speedup": 1.5,
        "lossless": True,
        "survival": [0.6, 0.3],
        "accept_rate": [0.6, 0.5],
        "histogram": [0, 8, 6, 6],
        **changes,
    }


def comparison(**changes: Any) -> dict[str, Any]:
    return {"equal": True, "num_prompts": 2, "num_tokens": 40, "differences": [], **changes}


def report(**checks: dict[str, Any]) -> dict[str, Any]:
    return {
        **figures(),
        "sets": {"gsm8k": figures(), "empty": figures(interval=None, tpot_ms=None, speedup=None)},
        "over_sets": {"accept_length": 1.875, "interval": (1.625, 2.125)},
        "settings": {
            "verification": "block",
            "temperature": 0.0,
            "max_new_tokens": 64,
            "num_draft_tokens": 2,
            "confidence_threshold": 0.0,
            "block_size": 2,
        },
        "rejects": {"rejected": 1},
        "lossless_checks": checks,
    }


def test_environment_names_what_a_figure_depends_on() -> None:
    facts = json.loads(json.dumps(environment()))
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert {"torch", "transformers"} <= set(facts["packages"])
    assert {"git_commit", "time", "command", "gpus", "torch_threads"} <= set(facts)


def test_a_table_keeps_all_columns_in_a_pipe() -> None:
    out = io.StringIO()
    columns = [f"column {i}" for i in range(12)]
    print_table("T", columns, [["set", None, 1.23456, 7, True, *range(7)]], file=out)
    text = out.getvalue()
    for word in ("set", " - ", "1.235", " 7 ", "yes"):
        assert word in text


def test_an_evaluation_shows_each_set_the_pooled_line_and_the_law() -> None:
    out = io.StringIO()
    differing = {"prompt": 3, "position": 5, "with_draft": 7, "without": 9}
    print_evaluation(
        report(greedy=comparison(), sampled=comparison(equal=False, differences=[differing])),
        file=out,
    )
    text = out.getvalue()
    assert "1.500..2.250" in text
    assert "0.250..0.375" in text
    assert "mean of the sets: 1.875, 95% interval 1.625..2.125" in text
    assert "given the slots before │ 0.600 │ 0.500" in text
    assert "all, pooled" in text
    assert "1: 8, 2: 6, 3: 6" in text
    assert "greedy: identical output with and without the draft over 2 prompts, 40 tokens" in text
    assert "sampled: OUTPUT DIFFERS in 1 of 2 prompts" in text
    assert "prompt 3, new token 5: 7 with the draft, 9 without" in text


def test_a_comparison_shows_every_draft_beside_the_plain_loop() -> None:
    out = io.StringIO()
    slow = report(greedy=comparison(equal=False))
    slow["sets"]["gsm8k"] = figures(accept_length=1.25, tpot_ms=20.0, speedup=0.75)
    print_comparison({"fast": report(greedy=comparison()), "slow": slow}, file=out)
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in out.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert rows[:3] == [
        ["gsm8k", "fast", "2", "40", "1.900", "1.500..2.250", "0.950", "10.000", "1.500", "yes"],
        ["gsm8k", "slow", "2", "40", "1.250", "1.500..2.250", "0.950", "20.000", "0.750", "yes"],
        ["gsm8k", "plain", "2", "40", "1.000", "-", "0.000", "15.000", "1.000", "-"],
    ]
    assert [row[0] for row in rows[:9]] == ["gsm8k"] * 3 + ["empty"] * 3 + ["all, pooled"] * 3
    assert "fast, greedy: identical output" in out.getvalue()
    assert "slow, greedy: nothing was compared" in out.getvalue()


def test_outputs_that_need_not_be_equal_are_not_called_different() -> None:
    out = io.StringIO()
    sets = {name: figures(lossless=None) for name in ("a", "b")}
    # equal greedily, which is all that was compared
    print_evaluation({**report(greedy=comparison()), "sets": sets}, file=out)
    text = out.getvalue()
    assert "sampled, block verification: lossless in distribution, not seed by seed" in text
    assert " yes │" not in text
    assert " no │" not in text


def test_a_difference_is_shown_with_its_interval_and_its_base() -> None:
    gap = {
        "accept_length": {"difference": 0.125, "interval": (0.0625, 0.25)},
        "speedup": {"difference": None, "interval": None},
    }
    paired = {"slow": {"sets": {"gsm8k": gap, "empty": gap}, "pooled": gap, "over_sets": None}}
    out = io.StringIO()
    both = {"fast": report(greedy=comparison()), "slow": report(greedy=comparison())}
    print_comparison(both, paired, base="fast", file=out)
    text = out.getvalue()
    assert "Difference from fast" in text
    assert text.count("0.062..0.250") == 3
    assert "mean of the sets, slow" in text
