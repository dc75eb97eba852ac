"""The doctor's report of figures given by hand: what it says, and that it says it in every form."""

import io
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from dspark.corpus.doctor_html import page
from dspark.corpus.doctor_report import DoctorReport
from dspark.corpus.doctor_tables import Tally, plain
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.errors import DataError

OTHER = ("a" * 16, "b" * 16)
WARNINGS = [
    "10 of 100 rows rejected: duplicate_id 7, invalid_json 3",
    "all 5 rows of category 'math' are rejected",
    "2 of 70 answers are empty",
    "9 rows repeat the content of another row",
    "15 of 70 answers are word for word another row's: are they an error message or a refusal?",
    "3 rows supervise their prompt too: every mask is 1",
    "8 rows are longer than 64 tokens and get cut",
    "11 of 40 answers were stopped by length, not by the target",
    "only 4.0% of the tokens are supervised",
    f"11 rows were rendered with another chat template ({', '.join(OTHER)}) than the tokenizer's "
    "(mine)",
    "4 rows teach nothing: no two supervised tokens in a row",
    "20 rows are prompts without an answer",
    "training stops at p1, p2, p3, which holds no answer: leave it out of data.responses",
]


def rejected(read: int, **counts: int) -> Rejects:
    rejects = Rejects(read=read)
    for reason, count in counts.items():
        for line in range(count):
            rejects.add(RowError(Reason(reason), f"[red]{reason}"), f"r.jsonl:{line + 1}")
    return rejects


@pytest.fixture
def report() -> DoctorReport:
    """No two figures are alike; a row in ten is rejected."""
    return DoctorReport(
        max_length=64,
        template="mine",
        rejects=rejected(100, invalid_json=3, duplicate_id=7),
        kinds=Counter(sampled=40, tokenised=19, conversation=11, prompt=20),
        lengths=Counter({3: 50, 100: 40}),
        tokens=5000,
        supervised=200,
        cut=8,
        finish_reasons=Counter(length=11, stop=29),
        thinking=Counter(on=14, off=21, unset=35),
        reasoning=28,
        languages={"zh": Tally(30, 50, 1), "en": Tally(60, 150, 10)},
        settings={"temperature 0": Tally(16, 90, 4), "temperature 1": Tally(24, 110, 7)},
        categories={"math": [5, 5], "chat": [6, 1]},
        empty_answers=2,
        all_supervised=3,
        without_anchor=4,
        prompt_files=["p1", "p2", "p3", "p4"],
        repeated_answers=15,
        other_templates=Counter(dict(zip(OTHER, (5, 6), strict=True))),
        duplicate_contents=9,
        previews=[[("[red]q", "context"), ("yes", "supervised"), ("and more", "cut")]],
    )


def shown(report: DoctorReport, **how: Any) -> str:
    out = io.StringIO()
    report.render(Console(file=out, width=250, **how))
    return out.getvalue()


def test_every_figure_is_told_under_its_name(report: DoctorReport) -> None:
    told = report.to_dict()
    places = told["rows"].pop("places")
    assert {reason: len(lines) for reason, lines in places.items()} == {
        "invalid_json": 3,
        "duplicate_id": 5,
    }
    assert told == {
        "ok": True,
        "verdict": "70 rows can be trained on, 200 supervised tokens",
        "warnings": WARNINGS,
        "rows": {
            "read": 100,
            "accepted": 90,
            "rejected": 10,
            "reasons": {"duplicate_id": 7, "invalid_json": 3},
        },
        "useless_files": {},
        "kinds": {"sampled": 40, "tokenised": 19, "conversation": 11, "prompt": 20},
        "tokens": 5000,
        "supervised_tokens": 200,
        "supervised_share": 0.04,
        "length": {"min": 3, "p50": 3, "p90": 100, "p99": 100, "max": 100},
        "length_histogram": {"<=4": 50, "<=128": 40},
        "max_length": 64,
        "cut_share": 0.1143,
        "finish_reasons": {"length": 11, "stop": 29},
        "length_stopped_share": 0.275,
        "thinking": {"on": 14, "off": 21, "unset": 35},
        "thinking_share": 0.2,
        "reasoning_rows": 28,
        "reasoning_share": 0.4,
        "languages": {
            "en": {
                "rows": 60,
                "row_share": 0.6667,
                "supervised_tokens": 150,
                "supervised_share": 0.75,
            },
            "zh": {
                "rows": 30,
                "row_share": 0.3333,
                "supervised_tokens": 50,
                "supervised_share": 0.25,
            },
        },
        "settings": {
            "temperature 1": {"rows": 24, "supervised": 110, "stopped": 7},
            "temperature 0": {"rows": 16, "supervised": 90, "stopped": 4},
        },
        "categories": {
            "math": {"read": 5, "rejected": 5},
            "chat": {"read": 6, "rejected": 1},
        },
        "empty_answers": 2,
        "all_supervised": 3,
        "rows_without_anchor": 4,
        "repeated_answers": 15,
        "duplicate_ids": 7,
        "duplicate_id_share": 0.07,
        "duplicate_contents": 9,
        "duplicate_content_share": 0.1,
        "template_hash": "mine",
        "other_templates": dict(zip(OTHER, (5, 6), strict=True)),
    }
    assert list(told["languages"]) == ["en", "zh"]
    assert list(told["settings"]) == ["temperature 1", "temperature 0"]


def test_a_terminal_shows_the_figures_the_places_and_the_warnings(report: DoctorReport) -> None:
    facts = dict(report.facts())
    assert facts == {
        "rows": "100 read, 90 usable",
        "kinds": "sampled 40, tokenised 19, conversation 11, prompt 20",
        "tokens a row": "min 3, p50 3, p90 100, p99 100, max 100",
        "histogram": "<=4: 50, <=128: 40",
        "languages": "en 66.7% (75.0% of the supervised), zh 33.3% (25.0% of the supervised)",
        "duplicates": "7.0% by id, 10.0% by content",
        "supervised": "200 of 5,000 tokens (4.0%)",
        "finish": "length 11, stop 29",
        "thinking": "on 14, off 21, unset 35; reasoning text in 40.0% of the rows",
        "sampled at temperature 1": "24 rows, 110 supervised tokens, 29.2% stopped by length",
        "sampled at temperature 0": "16 rows, 90 supervised tokens, 25.0% stopped by length",
        "template": "mine",
    }
    # brackets of a data file are no markup
    report.settings = {"[red]temperature[/] 1": Tally(24, 110, 7)}
    report.template = "[red]mine"
    text = shown(report)
    for name, value in report.facts():
        assert f" {value} " in text, name
    assert "  invalid_json: r.jsonl:1 ([red]invalid_json), r.jsonl:2 (" in text
    assert [line[9:] for line in text.splitlines() if line.startswith("warning: ")] == (
        report.warnings
    )
    assert text.splitlines()[-2:] == ["[red]qyesand more", report.verdict]
    coloured = shown(report, force_terminal=True, color_system="standard")
    assert "\x1b[2m[red]q\x1b[0m\x1b[30;42myes\x1b[0m\x1b[30;43mand more" in coloured
    assert f"\x1b[1;32m{report.verdict}" in coloured
    report.supervised = report.without_anchor = 0
    report.rejects.add(RowError(Reason.PROMPT_TOO_LONG), "r")
    assert f"\x1b[1;31m{report.verdict}" in shown(
        report, force_terminal=True, color_system="standard"
    )


def test_the_page_shows_the_figures_the_places_and_the_warnings(report: DoctorReport) -> None:
    text = page(report, ["r.jsonl", "s.jsonl"])
    assert "<h1>dspark doctor: r.jsonl, s.jsonl</h1>" in text
    assert f'<p class="good"><strong>{report.verdict}</strong></p>' in text
    for _, value in report.facts():
        assert f"<td>{value.replace('<', '&lt;')}</td>" in text
    assert text.count('<li class="warn">') == len(WARNINGS)
    for rows in (
        ("en", "60", "66.7%", "75.0%"),
        ("zh", "30", "33.3%", "25.0%"),
        ("temperature 1", "24", "110", "29.2%"),
        ("math", "5", "5"),
        ("chat", "6", "1"),
        ("duplicate_id", "7", "\n".join(f"r.jsonl:{n} ([red]duplicate_id)" for n in range(1, 6))),
    ):
        assert "<tr>" + "".join(f"<td>{value}</td>" for value in rows) + "</tr>" in text
    # 50 rows are the longest bar, 40 have four fifths of it
    assert '<rect x="80" y="2" width="400" height="15"/>' in text
    assert '<rect x="80" y="22" width="320" height="15"/>' in text
    assert ">50</text>" in text
    assert "cut at 64 tokens" in text
    report.template = "lone \ud800"
    report.kinds, report.empty_answers = Counter(sampled=50), 50
    text = page(report, [])
    assert '<p class="bad"><strong>all 50 answers are empty: nothing but' in text
    assert "<td>lone ?</td>" in text


def test_up_to_the_bounds_nothing_is_warned_of() -> None:
    """A fifth of the answers repeated, a fifth stopped, a twentieth supervised."""
    report = DoctorReport(
        max_length=64,
        template="mine",
        rejects=Rejects(read=10),
        kinds=Counter(sampled=10),
        tokens=2000,
        supervised=100,
        finish_reasons=Counter(length=2, stop=8),
        repeated_answers=2,
        other_templates=Counter(),
    )
    assert report.warnings == []
    report.supervised, report.repeated_answers = 99, 3
    report.finish_reasons = Counter(length=21, stop=79)
    assert [warning.split(":")[0] for warning in report.warnings] == [
        "3 of 10 answers are word for word another row's",
        "21 of 100 answers were stopped by length, not by the target",
        "only 5.0% of the tokens are supervised",
    ]
    # of a handful of rows nothing follows
    report.kinds, report.repeated_answers = Counter(sampled=9), 8
    assert not any("word for word" in warning for warning in report.warnings)


def test_where_no_row_is_left_that_alone_is_said() -> None:
    report = DoctorReport(64, "mine", categories={"math": [2, 2]})
    assert not report.ok
    report.rejects = rejected(2, prompt_too_long=2)
    assert report.warnings == ["2 of 2 rows rejected: prompt_too_long 2"]
    assert report.to_dict()["ok"] is False
    report.kinds["prompt"] = report.rejects.read = 3
    assert report.verdict == "no row can be trained on: 2 of 3 rows rejected: prompt_too_long 2"
    with pytest.raises(DataError, match="no row can be trained on"):
        report.check()
    report.useless = {"r.jsonl": 2}
    assert report.verdict == (
        "'r.jsonl' holds no usable row: all 2 are rejected (2 of 3 rows rejected: "
        "prompt_too_long 2; first: r.jsonl:1 ([red]prompt_too_long))"
    )


def test_a_name_from_a_file_is_one_short_line() -> None:
    assert plain("a\nb\u2028c\x1b\ud800") == "a?b?c??"
    assert plain("x" * 81) == "x" * 80
