"""What `dspark bench step --ablate` runs in place of a technique computes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.bench.ablations import ABLATIONS, without
from dspark.decoding import DecodeParams
from dspark.errors import ConfigError
from dspark.serving.graph import draft_body, target_body
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.target import LingTarget
from dspark.target.config import LingConfig
from dspark.target.model import LingModel
from dspark.target.synthetic import synthetic
from dspark.target.weights import fill
from dspark.testing import TINY_LING


def test_a_step_without_a_technique_gives_the_same_logits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {**TINY_LING["flash"], "num_hidden_layers": 2, "layer_group_size": 2}
    raw["expert_swiglu_limit_list"] = raw["share_expert_swiglu_limit_list"] = None
    config = LingConfig.from_dict(raw)
    model = LingModel(config)
    fill(model, lambda spec: synthetic(spec, config, 0))
    target = LingTarget(model.to(device), "tiny")
    step = GraphStep(target, None, context=64, tuning=replace(Tuning(), mla_lanes=2))
    logits = step.arena.scratch("logits", (1, 16, target.config.vocab_size))
    captured: list[tuple[Tensor, tuple[object, ...], int]] = []

    def launched() -> tuple[object, ...]:
        return (
            *(vars(target_body)[name] for name in ("route", "product", "head_logits")),
            vars(draft_body)["head_logits"],
            step.run_body,
        )

    heads: list[None] = []
    plain_head = target_body.head_logits

    def counted(*given: Any) -> Tensor:
        heads.append(None)
        return plain_head(*given)

    monkeypatch.setattr(target_body, "head_logits", counted)

    def capture() -> None:
        heads.clear()
        step.begin([5, 6, 7], DecodeParams(max_new_tokens=8, ignore_eos=True))
        logits.fill_(torch.nan)
        step.run_body()
        # a row that is not live asks for no expert
        assert (step.arena.ids[1:] == -1).all()
        captured.append((logits[0, :1].clone(), launched(), len(heads)))

    monkeypatch.setattr(step, "capture", capture)
    capture()
    plain, kernels, _ = captured.pop()
    for name in ABLATIONS:
        with without(name, step):
            pass
        if name in ("run-ahead", "graph"):  # of the loop around the step
            assert not captured
            continue
        (found, other, narrow), (again, restored, _) = captured
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(again, plain), name
        assert restored == kernels, name
        assert (other == kernels) == (name == "pdl"), name
        assert narrow == (0 if name == "bf16-head" else 1), name
        captured.clear()
    with (
        pytest.raises(ConfigError, match=r"one of run-ahead, graph, .* got 'magic'"),
        without("magic", step),
    ):
        pass
