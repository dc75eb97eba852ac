"""Checkpoints without weights, whose loader draws them, and acceptance by a schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dspark.bench.draft_shape import official_shape
from dspark.cli import app
from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, accept_schedule, stream
from dspark.errors import CheckpointError, ConfigError, TargetError
from dspark.export.load import load_draft
from dspark.export.random_draft import write_random_draft
from dspark.serving.engine import LocalModel
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.settings import ServeSettings
from dspark.target import LingTarget, load_ling
from dspark.target.config import LingConfig
from dspark.target.drawn import Drawn
from dspark.target.moe import MoE
from dspark.target.synthetic import make_checkpoint
from dspark.testing import TINY_LING, tiny_draft

CONFIG = LingConfig.from_dict(TINY_LING["flash"])


def drawn(directory: Path, seed: int = 3, pool: int | None = None) -> Path:
    make_checkpoint(CONFIG, directory, drawn=Drawn(seed, pool))
    return directory


def ling(directory: Path, **options: Any) -> LingTarget:
    settings = TargetSettings(path=str(directory), device="cpu", dtype="float32")
    return load_ling(settings, device=torch.device("cpu"), dtype=torch.float32, **options)


def test_a_directory_without_weights_is_the_same_model_again(tmp_path: Path) -> None:
    directory = drawn(tmp_path / "a")
    assert not list(directory.glob("*.safetensors*"))
    one, again = (dict(ling(directory, nextn=True).model.state_dict()) for _ in range(2))
    other = ling(drawn(tmp_path / "b", seed=4), nextn=True).model.state_dict()
    for name, values in one.items():
        assert values.isfinite().all(), name
        assert torch.equal(values, again[name]), name
        assert not torch.equal(values, other[name]), name


def test_ranks_share_what_is_not_divided(tmp_path: Path) -> None:
    directory = drawn(tmp_path / "t")
    ranks = [
        ling(directory, ranks=2, rank=rank, reduce=lambda x: x, whole_embedding=True).model
        for rank in range(2)
    ]
    first, second = (one.state_dict() for one in ranks)
    assert first.keys() == second.keys()
    assert all(torch.equal(values, second[name]) for name, values in first.items())


def test_routers_choose_within_the_pool(tmp_path: Path) -> None:
    target = ling(drawn(tmp_path / "t", pool=8))
    allowed = {group * 4 + place for group in range(4) for place in range(2)}
    seen: set[int] = set()
    for layer in target.model.model.layers:
        if isinstance(layer.mlp, MoE):
            x = torch.randn(64, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
            ids, _ = layer.mlp.gate(x)
            seen |= set(ids.flatten().tolist())
    assert seen == allowed


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (7, "must be .* got 7"),
        ({}, r"must be .* got \{\}"),
        ({"seed": 0, "pool": 8}, "must be"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"seed": True}, "seed must be an integer >= 0, got True"),
        ({"seed": 0, "expert_pool": 7}, r"must lie in 8..16 .* got 7"),
        ({"seed": 0, "expert_pool": 17}, r"must lie in 8..16 .* got 17"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, asked: Any, message: str) -> None:
    raw = {**CONFIG.raw, "synthetic_weights": asked}
    with pytest.raises(TargetError, match=f"config.json: synthetic_weights.*{message}"):
        Drawn.of(LingConfig.from_dict(raw))


def test_a_checkpoint_with_weights_does_not_ask_for_drawn_ones(tmp_path: Path) -> None:
    config = LingConfig.from_file(drawn(tmp_path / "a"))
    make_checkpoint(config, tmp_path / "b")
    assert Drawn.of(LingConfig.from_file(tmp_path / "b")) is None


def test_layers_on_several_devices_are_not_drawn(tmp_path: Path) -> None:
    settings = TargetSettings(path=str(drawn(tmp_path / "t")))
    with pytest.raises(TargetError, match="for one device, not for 2"):
        load_ling(settings, device=[torch.device("cpu")] * 2, dtype=torch.float32)


def test_the_command_writes_both(tmp_path: Path) -> None:
    small = tmp_path / "small"
    make_checkpoint(CONFIG, small, drawn=Drawn(0))
    given = ["make-checkpoint", "--config", str(small)]

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*given, *options])
        return result.exit_code, str(result.exception or result.output)

    assert run("--out", str(tmp_path / "t"), "--without-weights", "--expert-pool", "12")[0] == 0
    assert Drawn.of(LingConfig.from_file(tmp_path / "t")) == Drawn(0, 12)
    assert run("--out", str(tmp_path / "d"), "--draft-block", "5")[0] == 0
    target = ling(tmp_path / "t")
    draft = load_draft(tmp_path / "d", target=target)
    assert draft.block_size == 5
    for options, told in (
        (["--expert-pool", "12"], "--expert-pool 12 is for drawn weights"),
        (["--draft-block", "5", "--without-weights"], "--draft-block 5 writes a draft"),
    ):
        assert told in run("--out", str(tmp_path / "x"), *options)[1]
        assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="already exists; give a new directory"):
        write_random_draft(official_shape(CONFIG, 4), tmp_path / "d")


def test_a_schedule_says_what_is_accepted(tmp_path: Path) -> None:
    target = ling(drawn(tmp_path / "t"))
    draft = tiny_draft(target, block_size=4)
    params = DecodeParams(max_new_tokens=24, ignore_eos=True)
    kept = [3, 0, 9, 1]
    commits = list(stream(target, draft, [5, 6, 7], params, schedule=kept))
    # 9 is more than the four that are proposed; the last round has room for one token
    assert [one.num_accepted for one in commits[1:]] == [3, 0, 4, 1, 3, 0, 4, 0]
    assert sum(len(one.token_ids) for one in commits) == 24
    # without proposals nothing can be kept
    bare = replace(params, num_draft_tokens=0)
    plain = list(stream(target, draft, [5, 6, 7], bare, schedule=kept))
    assert {len(one.token_ids) for one in plain} == {1}


def test_a_server_simulates_for_every_request(tmp_path: Path) -> None:
    target = ling(drawn(tmp_path / "t"))
    draft = tiny_draft(target, block_size=4)
    model = LocalModel(target, draft, ServeSettings(simulate_accept_length=2.5))
    assert model.card.synthetic_weights
    params = DecodeParams(max_new_tokens=41, ignore_eos=True)
    for _ in range(2):
        commits = list(model.stream([5, 6, 7], params, lambda: True))[1:]
        assert sum(len(one.token_ids) for one in commits) == 2.5 * len(commits)
    for length, there, message in (
        (6.0, draft, "simulate_accept_length: accept length must lie in 1..5 .* got 6"),
        (2.0, None, "simulate_accept_length is 2, but there is no draft"),
    ):
        with pytest.raises(ConfigError, match=message):
            LocalModel(target, there, ServeSettings(simulate_accept_length=length))
    for wrong in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="simulate_accept_length must be >= 1"):
            ServeSettings(simulate_accept_length=wrong)


def test_the_graph_gets_the_schedule_with_every_request() -> None:
    from tests.unit.test_graph_decoder import ScriptedStep

    step = ScriptedStep([10], [11])
    schedule = accept_schedule(2.5, 4)
    decoder = GraphDecoder(step, schedule=schedule)  # type: ignore[arg-type]
    for _ in range(2):
        step.schedule = []
        list(decoder.stream([1, 2], DecodeParams(max_new_tokens=2)))
        assert step.schedule == schedule
