"""The byte floor of a step: the design's table, and the sizes that `inspect` tells."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.bench.roofline import roofline
from dspark.bench.step import accept_schedule
from dspark.cli import app
from dspark.errors import ConfigError
from dspark.target.config import LingConfig
from dspark.target.sizes import Routing, step_bytes

TARGETS = Path(__file__).parents[2] / "configs" / "targets"
FLASH = LingConfig.from_file(TARGETS / "ling-3.0-flash.json")


def floor(**options: object) -> dict[str, object]:
    given = {
        "ranks": 4, "tokens": 9, "routing": "experts:44", "context": 8192, "block_size": 8,
        "terabytes_per_s": 4.3,
    }  # fmt: skip
    return roofline(FLASH, **{**given, **options})  # type: ignore[arg-type]


def test_the_released_model_reads_what_its_table_says() -> None:
    report = floor()
    parts = {name: one["mb"] for name, one in report["components"].items()}  # type: ignore[attr-defined]
    for name, megabytes in {
        "experts": 5190 + 118, "router": 105, "KDA in": 35 * 26.3, "KDA out": 35 * 5.2,
        "MLA in": 7 * 10.9, "head": 201, "draft head": 201, "draft context": 16.4 + 5 * 10.5,
        "draft layers": 223, "draft attention": 168, "KDA": 36.7, "dense FFN": 47,
    }.items():  # fmt: skip
        assert parts[name] == pytest.approx(megabytes, rel=0.01), name
    assert sum(parts.values()) == pytest.approx(report["total_mb"])
    assert report["floor_us"] == pytest.approx(report["total_mb"] / 4.3)  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["independent", "experts:8", "overlap:0.5"])
@pytest.mark.parametrize("tokens", [1, 9, 16])
def test_the_targets_part_is_that_of_inspect(routing: str, tokens: int) -> None:
    report = floor(block_size=0, routing=routing, tokens=tokens)
    assert "draft layers" not in report["components"]  # type: ignore[operator]
    bytes_ = step_bytes(FLASH, 4, tokens, Routing.parse(routing), 8192)
    # convolutions, their tails and norms are not counted here
    assert report["total_mb"] == pytest.approx(bytes_.total / 1e6, rel=0.002)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"tokens must lie in 1\.\.16, the rows of a step, got 17"
    ):
        floor(tokens=17)
    with pytest.raises(ConfigError, match="bandwidth must be a number above 0, got nan"):
        floor(terabytes_per_s=float("nan"))
    with pytest.raises(ConfigError, match="routing must be independent, overlap:SHARE"):
        floor(routing="experts:0")
    for count in (7, 73):
        with pytest.raises(ConfigError, match=rf"must lie in 8\.\.72 for 9 rows .* got {count}"):
            floor(routing=f"experts:{count}")
    with pytest.raises(ConfigError, match=r"context must lie in 0\.\.262144, got 262145"):
        floor(context=262145)


def test_the_command_prints_one_object_and_names_known_targets() -> None:
    runner = CliRunner()
    line = ["bench", "roofline", "--target", "ling-3.0-flash", "--tp", "4", "--bandwidth", "4.3"]
    done = runner.invoke(app, [*line, "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[-1])["ranks"] == 4
    with pytest.raises(ConfigError, match=r"neither a config\.json nor a shipped one \(ling-3"):
        runner.invoke(app, ["bench", "roofline", "--target", "ling"], catch_exceptions=False)


@pytest.mark.parametrize(("mean", "proposals"), [(1.0, 8), (5.29, 8), (9.0, 8), (3.25, 5)])
def test_a_schedule_has_the_mean_that_was_asked_for(mean: float, proposals: int) -> None:
    schedule = accept_schedule(mean, proposals)
    assert sum(schedule) / len(schedule) + 1 == pytest.approx(mean, abs=0.002)
    assert all(0 <= kept <= proposals for kept in schedule)


def test_a_schedule_cannot_keep_more_than_is_proposed() -> None:
    with pytest.raises(ConfigError, match=r"accept length must lie in 1\.\.9 .*got 9.95"):
        accept_schedule(9.95, 8)


def test_a_model_of_few_positions_is_counted_at_its_own_most() -> None:
    nano = str(TARGETS / "ling3-nano.json")
    words = ["bench", "roofline", "--target", nano, "--bandwidth", "4.3", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["context"] == 2048
