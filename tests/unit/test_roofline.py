"""The byte floor of a step: the design's table, and the sizes that `inspect` tells."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dspark.bench.roofline import roofline
from dspark.bench.targets import dense_target, read_target
from dspark.cli import app
from dspark.decoding import accept_schedule
from dspark.errors import ConfigError, TargetError
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
    assert "experts a layer" in done.output
    line = ["bench", "roofline", "--target", "smollm2-135m", "--bandwidth", "4.3"]
    assert "experts" not in runner.invoke(app, line).output
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


def test_a_dense_target_reads_its_weights_and_its_cache_once() -> None:
    shape = read_target(TARGETS / "qwen3-8b.json")
    given = {"ranks": 1, "tokens": 8, "routing": "independent", "context": 8192}
    report = roofline(shape, **given, block_size=0, terabytes_per_s=4.5)  # type: ignore[arg-type]
    parts = {name: one["mb"] for name, one in report["components"].items()}
    for name, megabytes in {
        "attention in": 36 * 6144 * 4096 * 2e-6, "attention out": 36 * 4096 * 4096 * 2e-6,
        "dense FFN": 36 * 3 * 12288 * 4096 * 2e-6, "head": 151936 * 4096 * 2e-6,
        "attention": 36 * 8192 * 2 * 8 * 128 * 2e-6,
    }.items():  # fmt: skip
        assert parts.pop(name) == pytest.approx(megabytes, rel=1e-9), name
    assert not parts
    # everything but the table that single rows are taken from, and the norms
    weights = (shape.parameters - 151936 * 4096) * 2e-6  # type: ignore[union-attr]
    assert report["total_mb"] - 36 * 8192 * 4096e-6 == pytest.approx(weights, rel=1e-4)
    drafted = roofline(shape, **given, block_size=7, terabytes_per_s=4.5)  # type: ignore[arg-type]
    layers = 5 * (6144 * 4096 + 4096 * 4096 + 3 * 12288 * 4096) * 2e-6
    assert drafted["components"]["draft layers"]["mb"] == pytest.approx(layers, rel=1e-9)
    for options, message in (
        ({"ranks": 2}, "a dense target runs on one rank .*, got 2"),
        ({"routing": "experts:8"}, "experts:8 is of experts, and the target has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            roofline(shape, **{**given, **options}, block_size=0, terabytes_per_s=1.0)  # type: ignore[arg-type]


def test_what_is_no_target_with_kernels_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match=r"cannot run .*: Qwen2 adds biases"):
        read_target(tmp_path)
    file.write_text(json.dumps({"model_type": "no_such"}))
    with pytest.raises(TargetError, match="is of no model that is known here"):
        read_target(file)


def test_a_random_dense_target_decodes_and_is_a_function_of_its_seed(tmp_path: Path) -> None:
    raw = json.loads((TARGETS / "qwen3-4b.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **small}))
    shape = read_target(tmp_path)
    one, same, other = (dense_target(shape, "cpu", seed=seed) for seed in (1, 1, 2))  # type: ignore[arg-type]
    assert one.embed_weight is one.head_weight
    assert torch.equal(one.head_weight, same.head_weight)
    assert not torch.equal(one.head_weight, other.head_weight)
    rows = one.prefill(one.new_cache((0,)), torch.arange(5, 20))
    assert rows.logits.isfinite().all()
    assert sum(values.numel() for values in one.model.parameters()) == shape.parameters  # type: ignore[union-attr]
