"""`dspark bench step` as far as it goes without a GPU: options, and the floor of a NEXTN draft."""

from pathlib import Path

import pytest
import torch

from dspark.bench.roofline import step_floor
from dspark.bench.step import StepOptions
from dspark.errors import ConfigError
from dspark.serving.graph.step import GraphStep
from dspark.target.mtp import nextn_block
from dspark.testing import tiny_ling


def test_a_nextn_draft_is_named_with_its_depth() -> None:
    assert StepOptions(config=Path("x"), draft="nextn:5").nextn == 5
    assert StepOptions(config=Path("x")).nextn == 0
    for draft in ("nextn", "nextn:0", "nextn:16", "nextn:-1", "nextn:x", "mtp:5", "dspark:5"):
        with pytest.raises(ConfigError, match=f"nextn:N with N in 1..15, got '{draft}'"):
            StepOptions(config=Path("x"), draft=draft)


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
