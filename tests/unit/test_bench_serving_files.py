"""`dspark bench serving` as a command: options, definitions, and the files it leaves."""

import json
import sys
from pathlib import Path

import pytest

from dspark.bench import serving_html
from dspark.bench.definitions import DEFINITIONS
from dspark.bench.serving_report import RequestTiming, summarise
from dspark.cli import main
from dspark.testing import save_tiny_target, write_rows


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = tmp_path / "prompts.jsonl"
    write_rows(rows, ({"messages": [{"role": "user", "content": text}]} for text in ("ab", "cde")))
    return rows


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", "bench", "serving", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_every_row_of_the_table_is_defined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "--definitions") == 0
    told = capsys.readouterr().out
    assert told.startswith("For request i: ")
    report = summarise([RequestTiming(0.0, 1.0, [(0.5, 1)], 1, 2)], 1.0, model="m", info=None)
    for name, _, _ in report.rows():
        # the percentiles stand with the mean
        if not name.startswith(("p50", "p90", "p99", "median TTFT")):
            assert f"\n{name}: {DEFINITIONS[name]}" in told


def test_a_random_run_sends_the_ids_asked_for_and_leaves_three_files(
    address: str,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    model, out = save_tiny_target(tmp_path / "model"), tmp_path / "out"
    words = ("--prompts", str(prompts), "--workload", "random", "--tokenizer", str(model),
             "--address", address, "--num-prompts", "3", "--random-input-len", "20",
             "--random-output-len", "6", "--random-range-ratio", "1", "--out", str(out),
             "--json")  # fmt: skip
    assert bench(monkeypatch, *words) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole = json.loads((out / "report.json").read_text())
    assert (line["prompt_tokens"], line["output_tokens"], line["workload"]) == (60, 18, "random")
    assert "requests" not in line
    assert [one["output_tokens"] for one in whole["requests"]] == [6, 6, 6]
    assert all(one["rounds"] >= 1 for one in whole["requests"])
    assert whole["settings"]["random_input_len"] == 20
    assert whole["environment"]["cores"] >= 1
    page = (out / "report.html").read_text()
    assert f"{whole['mean_tpot_ms']:.2f} ms" in page
    for name in ("Steps by tokens added", "Accept rate by slot", "TPOT of each request, sorted"):
        assert f"<h2>{name}" in page
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_needs_nothing_else_and_shows_markup_as_text() -> None:
    timings = [RequestTiming(0.0, 1.0, [(0.5, 1)], 1, 3), RequestTiming(1.0, 3.0, [(1.5, 1)], 1, 3)]
    report = summarise(timings, 3.0, model="<script>alert(1)</script>", info=None)
    page = serving_html.page(report, {"command": ["a", "<b>"], "packages": {"torch": "1"}})
    for outside in ("<script", "http:", "https:", "src=", "@import", "url("):
        assert outside not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "a &lt;b&gt;" in page
    assert "torch 1" in page
    # 0.25 s and 0.75 s a token over 580 - 60 points, the greater one at the top
    assert 'd="M60.0,106.7 L580.0,20.0"' in page


def test_a_figure_above_the_ceiling_is_written_down_and_ends_with_code_1(
    address: str,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dspark.bench.serving_report.above_ceiling", lambda *_: "TOO FAST")
    monkeypatch.setattr("dspark.bench.plot.plot_serving", lambda *_: None)
    words = ("--prompts", str(prompts), "--address", address, "--max-tokens", "2")
    assert bench(monkeypatch, *words, "--out", str(tmp_path / "out")) == 1
    assert capsys.readouterr().err.endswith("error: TOO FAST\n")
    assert "<strong>TOO FAST</strong>" in (tmp_path / "out" / "report.html").read_text()


def test_a_place_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ("--prompts", "missing.jsonl", "--out", str(tmp_path / "file"))
    assert bench(monkeypatch, *words) == 2
    assert f"--out {tmp_path}/file/report.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workload", "sharegpt"), "--workload must be chat, prompts, random, got 'sharegpt'"),
        (("--random-input-len", "5"), "--random-input-len has no effect with --workload chat"),
        (("--workload", "random", "--max-tokens", "5"), "--max-tokens has no effect with"),
        ((), "bench serving needs --prompts"),
    ],
)
def test_options_without_effect_are_refused(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench(monkeypatch, *words) == 2
    assert message in capsys.readouterr().err
