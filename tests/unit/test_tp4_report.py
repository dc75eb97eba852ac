"""The run on four GPUs: what it would do, and its table from what its rows have left."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError

PLACE = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(PLACE)
    return runpy.run_path(str(PLACE / "tp4_report.py"))


def row(
    draft: str, accept_length: float | None, tpot_ms: float, config: str = "ling-3.0-flash"
) -> dict[str, Any]:
    return {
        "draft": draft, "asked_accept_length": accept_length or 1.0,
        "config": f"configs/targets/{config}.json",
        "accept_length": accept_length, "mean_tpot_ms": tpot_ms, "median_tpot_ms": tpot_ms,
        "output_throughput": 1000 / tpot_ms, "peak_throughput": 1001.0, "mean_ttft_ms": 120.0,
        "step_ms": {"mean": 4.0, "min": 3.9, "p50": 4.0, "p90": 4.1, "p99": 4.5},
        "ceiling": 2250.0,
    }  # fmt: skip


def test_rows_stand_in_order_beside_what_was_measured_alone(
    tmp_path: Path, script: dict[str, Any]
) -> None:
    rows = {10: row("block16", 9.95, 0.6), 2: row("block8", 6.6, 0.61), 0: row("none", None, 2.7)}
    for number, one in rows.items():
        (tmp_path / f"row-{number}.json").write_text(json.dumps(one))
    alone = {
        "ranks": 4, "step_us_p50": 3600.0, "floor_us": 1750.0, "distinct_experts": 43.8,
        "host_us_p50": 29.0,
        "enqueued_ahead": 1.0, "exchanges_left_out": 100,
    }  # fmt: skip
    exchange = [{"skew": 20, "median_us": 9.0}, {"skew": 0, "median_us": 5.0}]
    (tmp_path / "step.json").write_text(json.dumps(alone))
    (tmp_path / "collectives.json").write_text(
        json.dumps({"exchange": exchange, "nccl": {"median_us": 17.0}})
    )
    lines = script["table"](script["report"](tmp_path)).splitlines()
    drafts = [line.split(" ")[1] for line in lines if line.startswith("| ")][1:]
    assert drafts == ["none", "block8", "block16"]
    assert "| none | 1.00 | 2.700 | 2.700 | 370 |" in lines[4]
    assert lines[4].endswith("| 3.33 |")
    assert "| 0.610 (goal 0.55) |" in lines[5]
    assert "4.00 / 4.10 / 4.50" in lines[5]
    # 100 of 5 us, of a step of 4 ms
    assert "make 500 us, 12% of a served step" in lines[-1]
    assert "NCCL takes 17.00 us" in lines[-1]


def test_without_the_rank_alone_the_rows_stand_alone(
    tmp_path: Path, script: dict[str, Any]
) -> None:
    one = row("none", None, 2.7, config="ling-3.0-tiny")
    (tmp_path / "row-0.json").write_text(json.dumps(one))
    last = script["table"](script["report"](tmp_path)).splitlines()[-1]
    # and nothing published of another model beside them
    assert last.startswith("| none |")
    assert last.endswith("| 120 |  |")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PLACE)
    main = runpy.run_path(str(PLACE / "tp4.py"))["main"]

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["tp4.py", "--dry-run", *options])
        main()

    return run


def test_it_says_what_it_would_run(
    tmp_path: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command("--out", str(tmp_path / "out"), "--ranks", "2")
    assert not (tmp_path / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    serves = [line for line in lines if line.startswith("dspark serve ")]
    assert len(serves) == 5
    assert all(" --tp 2 " in line for line in serves)
    # a step verifies at most 16 rows
    proposals = [line.partition("--num-draft-tokens ")[2].split(" ")[0] for line in serves]
    assert proposals == ["", "", "8", "8", "15"]
    limits = [line.partition("--limit ")[2].split(" ")[0] for line in lines if "--limit" in line]
    assert limits == ["5", "20", "20", "20", "20"]


@pytest.mark.parametrize("row", ["block8,0.5", "eagle,2", "block,2", "none3,1", "block8", "none,x"])
def test_a_wrong_row_is_named(row: str, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("--rows", row)
    assert ended.value.code == 2
    assert f"got '{row}'" in capsys.readouterr().err


def test_a_missing_config_is_named(command: Any) -> None:
    with pytest.raises(ConfigError, match=r"--config 'nowhere\.json' is neither"):
        command("--config", "nowhere.json")


def test_models_of_another_config_or_pool_have_places_of_their_own(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    places = []
    for config in ("flash", "tiny", "flash"):
        command("--config", f"configs/targets/ling-3.0-{config}.json")
        said = capsys.readouterr().out
        places.append(said.partition("--out ")[2].split()[0])
    assert places[0] == places[2] != places[1]


def test_a_wrong_count_is_named(command: Any) -> None:
    with pytest.raises(ConfigError, match="--plain-requests must be >= 1, got 0"):
        command("--plain-requests", "0")
