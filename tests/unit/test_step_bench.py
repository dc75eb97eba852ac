"""`dspark bench step` as far as it goes without a GPU: options, and the floor of a NEXTN draft."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.bench.roofline import step_floor
from dspark.bench.step_options import Settled, StepOptions
from dspark.bench.targets import read_target
from dspark.cli import main
from dspark.errors import ConfigError
from dspark.serving.graph.step import GraphStep
from dspark.target.config import LingConfig
from dspark.target.mtp import nextn_block
from dspark.testing import tiny_ling


def test_a_nextn_draft_is_named_with_its_depth() -> None:
    assert StepOptions(config=Path("x"), draft="nextn:5").nextn == 5
    assert StepOptions(config=Path("x")).nextn == 0
    for draft in ("nextn", "nextn:0", "nextn:16", "nextn:-1", "nextn:x", "mtp:5", "dspark:5"):
        with pytest.raises(ConfigError, match=f"nextn:N with N in 1..15, got '{draft}'"):
            StepOptions(config=Path("x"), draft=draft)


FLASH = Path(__file__).parents[2] / "configs/targets/ling-3.0-flash.json"


def settled(**options: Any) -> Settled:
    return Settled.of(StepOptions(config=FLASH, **options), LingConfig.from_file(FLASH))


def test_options_are_settled_before_anything_is_filled() -> None:
    plain = settled()
    assert plain.shape is not None
    assert (plain.shape.block_size, plain.proposals) == (8, 8)
    assert sum(plain.schedule) / len(plain.schedule) == pytest.approx(3.5, abs=0.01)
    assert settled(block_size=16).proposals == 15
    assert settled(num_draft_tokens=3, accept_length=4.0).schedule[:2] == [3, 3]
    assert settled(draft="nextn:5", accept_length=1.0).schedule[:2] == [0, 0]
    none = settled(draft="none", accept_length=1.0)
    assert (none.shape, none.proposals, none.schedule) == (None, 0, [0])
    assert settled(context=262144 - 1024 - 16).proposals == 8


def test_a_nextn_draft_needs_the_block() -> None:
    tiny = LingConfig.from_file(FLASH.with_name("ling-3.0-tiny.json"))
    with pytest.raises(ConfigError, match="nextn:2, but the target has no NEXTN block"):
        Settled.of(StepOptions(config=FLASH, draft="nextn:2"), tiny)


def test_a_dense_target_has_a_draft_as_narrow_as_itself() -> None:
    place = FLASH.with_name("qwen3-8b.json")
    config = read_target(place)

    def dense(**options: Any) -> Settled:
        return Settled.of(StepOptions(config=place, **options), config)

    plain = dense()
    assert plain.shape is not None
    assert (plain.shape.block_size, plain.proposals) == (7, 7)
    assert (plain.shape.num_attention_heads, plain.shape.num_key_value_heads) == (32, 8)
    assert plain.shape.target_layer_ids == [1, 9, 17, 25, 33]
    released = place.parents[1] / "drafts/qwen3-8b-dspark-block7.json"
    other = dense(draft_config=released).shape
    assert other is not None
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "markov_rank")
    assert [getattr(plain.shape, one) for one in names] == [getattr(other, one) for one in names]
    assert dense(draft="none").proposals == 0
    for options, message in (
        ({"ranks": 4}, "a dense target runs on one rank"),
        ({"routing": "overlap:0.5"}, "the target has none"),
        ({"draft": "nextn:5"}, "nextn:5, but the target has no NEXTN block"),
        ({"context": 40960}, "40960 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            dense(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 262144 - 1024 - 15}, r"context must be <= 261104 .* got 261105"),
        ({"context": 10**9}, "262144 positions"),
        ({"accept_length": 9.5}, r"accept length must lie in 1\.\.9"),
        ({"accept_length": float("nan")}, "got nan"),
        ({"accept_length": 0.0}, "got 0"),
        ({"draft": "none", "accept_length": 2.0}, "must be 1 without a draft, got 2"),
        ({"num_draft_tokens": 9}, r"tokens must lie in 2\.\.9 with a block of 8.* got 10"),
        ({"num_draft_tokens": 0}, "tokens must be >= 2 with a draft.* got 1; one row is --draft"),
        ({"draft": "none", "num_draft_tokens": 4}, "tokens must be 1 without a draft, got 5"),
        ({"draft": "none", "block_size": 4}, "block_size 4 is of a dspark draft.* is 'none'"),
        ({"draft": "nextn:5", "draft_config": FLASH}, "is of a dspark draft.* is 'nextn:5'"),
        ({"block_size": 8, "draft_config": FLASH}, "both say the draft's block"),
        ({"ranks": 64}, "the graph engine cannot run this: .* no multiple of 16"),
        ({"block_size": 99}, r"block_size must lie in 1\.\.16, got 99"),
        ({"draft_config": Path("nowhere.json")}, "nowhere.json"),
    ],
)
def test_what_cannot_be_run_is_refused_before(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settled(**options)


SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "step"], "needs a GPU"),
        (["bench", "step", "--tokens", "99"], "tokens must lie in 2..9"),
        (["bench", "step", "--routing", "experts:9999"], "got 9999"),
        (["bench", "step", "--table", "--routing", "experts:9999"], "got 9999"),
        (["bench", "step", "--table", "--routing", "experts:44"], "needs a GPU"),
        (["bench", "step", "--table", "--ablate"], "--table runs its own drafts"),
        (["bench", "objective"], "needs a GPU"),
        (["bench", "objective", "--distance", "kl"], "got 'kl'"),
        (["step_replays.py"], "needs a GPU"),
        (["step_replays.py", "--count", "1"], "--count must be >= 2, got 1"),
        (["step_replays.py", "--config", str(FLASH), "--ranks", "0"], "ranks must be >= 1, got 0"),
        (["step_replays.py", "--config", "nowhere.json"], "nowhere.json"),
        (["prefill.py", "--config", str(FLASH)], "needs a GPU"),
        (["prefill.py", "--config", str(FLASH), "--count", "0"], "--count must be >= 1, got 0"),
        (["prefill.py", "--config", str(FLASH), "--tokens", "99999999"], "context must be <="),
        (["prefill.py", "--config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_option_is_told_before_a_missing_gpu(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script = words[0].endswith(".py")
    target = ["--target", "ling-3.0-flash"] if words[:2] == ["bench", "step"] else []
    monkeypatch.setattr(sys, "argv", ["dspark", *words, *target] if not script else words)
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / words[0]), run_name="__main__") if script else main()
    told = capsys.readouterr().err
    assert end.value.code == 2, told
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1


def test_the_floor_counts_the_block_once_a_proposal() -> None:
    target = tiny_ling(dtype=torch.bfloat16, nextn=True)
    plain = step_floor(GraphStep(target, None, context=64).weights, None, 6.0, 100, 1.0)
    step = GraphStep(target, None, context=64, nextn=3)
    floor = step_floor(
        step.weights, None, 6.0, 100, 1.0, nextn=step.nextn, passes=step.limit, kept=2.0
    )
    for name, size in plain.parts.items():
        assert floor.parts[name] == size
    assert set(floor.parts) == {*plain.parts, "NEXTN", "draft head"}
    assert floor.parts["draft head"] == 3 * plain.parts["head"]
    block = nextn_block(target.model)
    matrices = {name: one.nbytes for name, one in block.named_parameters() if one.dim() > 1}
    routed = sum(size for name, size in matrices.items() if ".experts." in name)
    fixed = sum(matrices.values()) - routed
    # 4 of 16 experts for one row, and 7 expected for two that choose independently
    expected = 3 * (fixed + 100 * target.config.latent_dim * 2) + (7 + 4 + 4) / 16 * routed
    assert floor.parts["NEXTN"] == pytest.approx(expected, rel=1e-12)
