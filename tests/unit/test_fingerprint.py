"""What of a target its fingerprint tells, and what it does not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import TargetSettings
from dspark.target import Target, fingerprint, load, outline
from dspark.target.front import Facts, Front, tables
from dspark.testing import save_tiny_ling, tiny_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ling(tmp_path_factory.mktemp("ling") / "t")


def changed_late(target: Target) -> None:
    """A number far behind the first 64 of every tensor."""
    for parameter in target.model.parameters():
        if parameter.numel() > 128:
            parameter.view(-1)[parameter.numel() // 2 :] += 1


def changed_eps(target: Target) -> None:
    target.config.rms_norm_eps = 0.01


@pytest.mark.parametrize(
    ("change", "parts"), [(changed_late, "weights"), (changed_eps, "config (or its overrides)")]
)
def test_what_was_not_seen_before_is_told_apart(change: Any, parts: str) -> None:
    one, other = tiny_target(), tiny_target()
    change(other)
    assert one.fingerprint() == tiny_target().fingerprint() != other.fingerprint()
    assert fingerprint.difference(one.fingerprint(), other.fingerprint()) == parts
    # as earlier versions compared them
    old = fingerprint.of_version_1(one.model)
    assert one.fingerprint_like(old) == old == other.fingerprint_like(old)


@pytest.mark.parametrize(
    "changes",
    [{"apply_swiglu_limits": False}, {"config_overrides": {"rms_norm_eps": 1e-3}}],
    ids=["limits", "overrides"],
)
def test_settings_that_change_the_arithmetic_of_a_ling_target(
    ling: Path, changes: dict[str, Any]
) -> None:
    limits = {"expert_swiglu_limit_list": [0.5] * load(str(ling)).num_layers}
    told = []
    for more in ({}, changes):
        keys = {**limits, **more.get("config_overrides", {})}
        settings = {"path": str(ling), "dtype": "float32", **more, "config_overrides": keys}
        told.append(load(TargetSettings(**settings)).fingerprint())
    assert fingerprint.difference(*told) == "config (or its overrides)"


@pytest.mark.parametrize("kind", ["hf", "ling"])
def test_outline_dtype_and_place_do_not_change_it(kind: str, ling: Path, tmp_path: Path) -> None:
    path = ling
    if kind == "hf":
        path = tmp_path / "t"
        tiny_target().model.bfloat16().save_pretrained(path)
    told = [load(TargetSettings(path=str(path), dtype=d)) for d in ("float32", "bfloat16")]
    config = fingerprint.config_part(told[0].fingerprint())
    assert config == fingerprint.config_part(told[1].fingerprint())
    bare = outline(TargetSettings(path=str(path)))
    assert fingerprint.of_config(bare.config, bare.model) == config
    if kind == "hf":  # the checkpoint's own numbers are bfloat16's
        assert told[0].fingerprint() == told[1].fingerprint()
    before = told[0].fingerprint()
    told[0].pack()
    assert told[0].fingerprint() == before


def test_a_target_without_layers_answers_in_either_version() -> None:
    target = tiny_target()
    old = fingerprint.of_version_1(target.model)
    front = Front(Facts.of(target), tables(target))
    assert front.fingerprint_like(old) == old
    assert front.fingerprint_like(target.fingerprint()) == target.fingerprint()
    # with nothing but what an old directory tells there is nothing to refuse by
    bare = Front(Facts.of(target, old), tables(target))
    assert bare.fingerprint_like("2-a-b") == "2-a-b"
    assert bare.fingerprint_like("0" * 16) == old


def test_a_copy_of_the_model_is_the_same_target() -> None:
    target = tiny_target()
    assert fingerprint.of(target.config, copy.deepcopy(target.model)) == target.fingerprint()
