"""Which engine a server decodes with: decided before loading and after, and said in one line."""

import copy
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from dspark.cli import main
from dspark.config import TargetSettings
from dspark.decoding import SamplingParams, nextn_draft
from dspark.errors import CheckpointError, ConfigError, RunError
from dspark.export.hf import export_draft
from dspark.serving import choice
from dspark.serving.engine import Engine, LocalModel, end_ids
from dspark.serving.graph import step as graph_step
from dspark.serving.graph.weights import unsupported_shapes
from dspark.serving.loading import load_model
from dspark.serving.plan import MemoryPlan
from dspark.serving.request import GenerateParams
from dspark.serving.server import running
from dspark.serving.settings import ENGINES, ServeSettings
from dspark.target import HFTarget, LingTarget, peek
from dspark.target.families import DenseShape
from dspark.testing import (
    TINY_LING,
    save_tiny_ling,
    save_tiny_target,
    tiny_draft,
    tiny_ling,
    tiny_target,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
ENDS = end_ids(TOKENIZER)
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BF16 = torch.bfloat16
MUCH = 10**12


def ling() -> LingTarget:
    return tiny_ling(dtype=BF16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Lets everything pass for a GPU with much memory; what steps are made with."""
    made: list[dict[str, Any]] = []

    def step(target: Any, draft: Any, **options: Any) -> Any:
        made.append(options)
        return SimpleNamespace(
            warm_up=lambda: options.update(warm=True), target=target, device=CPU, **options
        )

    monkeypatch.setattr(graph_step, "GraphStep", step)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(choice, "_free", lambda _: MUCH)
    monkeypatch.setattr(
        choice, "peek", lambda settings: (peek(settings)[0], CUDA, BF16), raising=True
    )
    real = choice.obstacle
    monkeypatch.setattr(
        choice,
        "obstacle",
        lambda config, draft, device, dtype, ranks=1: real(config, draft, CUDA, dtype, ranks),
    )
    return made


@pytest.mark.parametrize(
    ("variant", "shape", "device", "dtype", "reason"),
    [
        ("flash", {}, CUDA, BF16, None),
        (None, {}, CUDA, BF16, "the target's config.json is of no model that is known here"),
        ("flash", {}, CPU, BF16, "the target is on the cpu, not on a CUDA device"),
        ("flash", {}, CUDA, torch.float32, "the target is float32, not bfloat16"),
        ("tiny", {}, CUDA, BF16, "the low-rank query of 24 is no multiple of 16"),
        ("flash", {"block_size": 16}, CUDA, BF16, None),
        ("flash", {"block_size": 17}, CUDA, BF16, "the draft's block of 17 exceeds 16 rows"),
        (
            "flash",
            {"markov_head_type": "gated"},
            CUDA,
            BF16,
            "the draft's Markov head is 'gated', only vanilla has a kernel",
        ),
        ("flash", {"markov_head_type": "gated", "markov_rank": 0}, CUDA, BF16, None),
        (
            "flash",
            {"intermediate_size": 100},
            CUDA,
            BF16,
            "a width of 100 of the draft is no multiple of 16",
        ),
    ],
)
def test_what_keeps_the_graph_engine_from_running(
    variant: str | None, shape: dict[str, Any], device: Any, dtype: Any, reason: str | None
) -> None:
    target = tiny_ling(variant or "flash")
    draft = tiny_draft(target, **shape)
    config = target.model.config if variant else None
    assert choice.obstacle(config, draft.config, device, dtype) == reason


def test_a_draft_whose_rotation_depends_on_the_length_is_left_to_the_reference() -> None:
    target = tiny_target(family="qwen3")
    shape = tiny_draft(target).config
    assert choice.obstacle(target.config, shape, CUDA, BF16) is None
    for kind, reason in (
        ("yarn", None),
        (
            "dynamic",
            "the draft's rope scaling 'dynamic' is none of default, linear, llama3, yarn",
        ),
    ):
        shape.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
        assert choice.obstacle(target.config, shape, CUDA, BF16) == reason


def test_ranks_that_do_not_share_a_draft_are_said() -> None:
    target = tiny_ling()
    config, shape = target.model.config, tiny_draft(target).config
    assert unsupported_shapes(config, shape, 2) is None
    for name, size in (("num_key_value_heads", 1), ("num_attention_heads", 3)):
        other = copy.deepcopy(shape)
        setattr(other, name, size)
        said = f"the draft's {name} {size} cannot be shared by 2 ranks"
        assert unsupported_shapes(config, other, 2) == said
    narrow = replace(config, v_head_dim=6)
    assert unsupported_shapes(narrow, None) == "a width of 24 is no multiple of 16"


def test_the_reference_decodes_on_a_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dspark")
    reason = "the target is on the cpu, not on a CUDA device"
    for target in (tiny_target(), ling()):
        caplog.clear()
        assert choice.choose(target, None, ENDS, ServeSettings()) is None
        assert [one.getMessage() for one in caplog.records] == [f"reference engine: {reason}"]
        with pytest.raises(ConfigError, match=f"--engine graph cannot run here: {reason}"):
            choice.choose(target, None, ENDS, ServeSettings(engine="graph"))
        assert choice.choose(target, None, ENDS, ServeSettings(engine="reference")) is None


@pytest.mark.parametrize("engine", ["auto", "graph"])
def test_the_graph_engine_is_made_ready_where_it_can_run(
    gpu: list[dict[str, Any]], caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    caplog.set_level(logging.INFO, "dspark")
    target = ling()
    draft = tiny_draft(target, block_size=8).to(BF16)
    decoder = choice.choose(target, draft, ENDS, ServeSettings(engine=engine))
    assert decoder is not None
    assert (decoder.name, decoder.context) == ("graph", 512)
    made = {"context": 512, "num_draft_tokens": 7, "nextn": 0, "warm": True}
    assert gpu == [{**made, "prefixes": decoder.prefixes, "peers": None}]
    assert decoder.prefixes is not None
    assert decoder.prefixes.most_bytes == ServeSettings().prefix_cache_bytes
    assert "graph engine: tiny-flash on cpu, context 512" in caplog.text
    settings = ServeSettings(engine=engine, context=64, num_draft_tokens=3, prefix_cache_bytes=0)
    decoder = choice.choose(target, draft, ENDS, settings)
    assert decoder is not None
    made = {"context": 64, "num_draft_tokens": 3, "nextn": 0, "warm": True}
    assert gpu[1:] == [{**made, "prefixes": None, "peers": None}]
    # the default of a model with many positions
    target.config = SimpleNamespace(max_position_embeddings=100_000)
    choice.choose(target, None, ENDS, ServeSettings(engine=engine))
    assert gpu[2].pop("prefixes") is not None
    assert gpu[2].pop("peers") is None
    assert gpu[2:] == [{"context": 32768, "num_draft_tokens": None, "nextn": 0, "warm": True}]


def test_the_targets_own_block_drafts_in_the_graph_too(
    gpu: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_ling(dtype=BF16, nextn=True)
    draft = nextn_draft(target, 5)
    assert choice.choose(target, draft, ENDS, ServeSettings(engine="graph")) is not None
    made = {"context": 512, "num_draft_tokens": 5, "nextn": 5, "warm": True}
    assert gpu == [{**made, "prefixes": None, "peers": None}]  # it reads every prompt whole
    settings = TargetSettings(path=str(save_tiny_ling(tmp_path / "target")))
    # the block and its cache leave fewer positions than a target alone would have
    plan = MemoryPlan(target.config, None, 300, nextn=True)
    monkeypatch.setattr(choice, "_free", lambda _: plan.total)
    decided = choice.foresee(settings, "nextn:5", ServeSettings())
    assert decided.context == plan.most(plan.total) >= 300
    alone = choice.foresee(settings, None, ServeSettings(prefix_cache_bytes=0)).context
    assert alone is not None
    assert decided.context < alone
    with pytest.raises(ConfigError, match=r"num_draft_tokens must lie in 1\.\.5 .* got 9"):
        choice.foresee(settings, "nextn:5", ServeSettings(num_draft_tokens=9))
    without = save_tiny_ling(tmp_path / "without", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="the target has no NEXTN block"):
        choice.foresee(TargetSettings(path=str(without)), "nextn:5", ServeSettings())


def test_models_that_differ_or_end_in_too_many_ways_are_for_the_reference(
    gpu: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ling()
    graph = ServeSettings(engine="graph")
    with pytest.raises(ConfigError, match="the draft is float32, the target bfloat16"):
        choice.choose(target, tiny_draft(target), ENDS, graph)
    target.eos_ids = frozenset(range(100, 108))
    with pytest.raises(ConfigError, match=r"at most 8 ids may end an output, .* name 9"):
        choice.choose(target, None, ENDS, graph)
    assert choice.choose(target, None, ENDS, ServeSettings()) is None

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(graph_step, "GraphStep", full)
    with pytest.raises(
        ConfigError, match=r"too small for a context of 512: tried .*smaller --cont"
    ):
        choice.choose(ling(), None, ENDS, graph)


def test_the_reference_does_not_inherit_the_context_of_the_graphs_plan(
    gpu: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_ling(dtype=BF16)
    plan = MemoryPlan(target.config, None, 300, prefix_cache=0)
    monkeypatch.setattr(choice, "_free", lambda _: plan.total)
    ends = frozenset(range(100, 109))  # too many for the graph, which only the loaded target tells
    place = TargetSettings(path=str(save_tiny_ling(tmp_path)))
    for context in (None, 40):
        settings = ServeSettings(prefix_cache_bytes=0, context=context)
        card = load_model(place, None, ends, settings).card
        assert (card.engine, card.context) == ("reference", context or 512)
    assert not gpu


def test_a_plan_is_printed_and_checked_before_loading(
    gpu: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, target = save_tiny_ling(tmp_path / "target"), ling()
    draft = tiny_draft(target)
    export_draft(draft, tmp_path / "draft", target, check=False)
    settings = TargetSettings(path=str(place))
    decided = choice.foresee(settings, str(tmp_path / "draft"), ServeSettings())
    assert decided.context == 512
    said = capsys.readouterr().err
    assert "memory plan" in said
    assert "context 512, 1 of 1 ranks" in said
    assert "packed draft weights" in said
    # less memory, fewer positions; less still, none
    kept = ServeSettings().prefix_cache_bytes
    plan = MemoryPlan(target.config, draft.config, 300, prefix_cache=kept)
    monkeypatch.setattr(choice, "_free", lambda _: plan.total)
    decided = choice.foresee(settings, str(tmp_path / "draft"), ServeSettings())
    assert decided.context == plan.most(plan.total) >= 300
    assert f"too small for a context of 512: it is {decided.context}" in caplog.text
    with pytest.raises(ConfigError, match=f"context 512 needs .* up to {decided.context} pos"):
        choice.foresee(settings, str(tmp_path / "draft"), ServeSettings(context=512))
    monkeypatch.setattr(choice, "_free", lambda _: 10**6)
    with pytest.raises(ConfigError, match=r"reserve alone are .*, none fits"):
        choice.foresee(settings, None, ServeSettings())
    # so are proposals that the draft has not, and a draft of another target
    many = ServeSettings(num_draft_tokens=9)
    with pytest.raises(ConfigError, match=r"num_draft_tokens must lie in 1\.\.\d .* got 9"):
        choice.foresee(settings, str(tmp_path / "draft"), many)
    with pytest.raises(ConfigError, match="num_draft_tokens is 9, but there is no draft"):
        choice.foresee(settings, None, many)
    # and confidence where there is none
    for engine in ENGINES:
        cut = ServeSettings(confidence_threshold=0.5, engine=engine)
        for name, reason in (("nextn:3", "a NEXTN block has no confid"), (None, "there is no dra")):
            with pytest.raises(ConfigError, match=f"_threshold is 0.5, but {reason}.*leave it out"):
                choice.foresee(settings, name, cut)
    keys = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**keys, "vocab_size": 600}))
    with pytest.raises(CheckpointError, match=r"vocab_size is 600 but target .* has 512"):
        choice.foresee(settings, str(tmp_path / "draft"), ServeSettings())
    # what the reference decodes has no plan
    other = TargetSettings(path=str(save_tiny_target(tmp_path / "llama", attention_bias=True)))
    capsys.readouterr()
    asked = ServeSettings(engine="reference")
    assert choice.foresee(settings, None, asked) is asked
    assert choice.foresee(other, None, ServeSettings()) == ServeSettings()
    low_rank = TargetSettings(path=str(save_tiny_ling(tmp_path / "tiny", "tiny")))
    assert choice.foresee(low_rank, None, ServeSettings()) == ServeSettings()
    with pytest.raises(ConfigError, match="low-rank query of 24"):
        choice.foresee(low_rank, None, ServeSettings(engine="graph"))
    assert capsys.readouterr().err == ""
    assert TINY_LING["tiny"]["q_lora_rank"] == 24


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_dense_decoder_gets_a_plan_and_the_graph(
    gpu: list[dict[str, Any]],
    tmp_path: Path,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = save_tiny_target(tmp_path / "target", family=family)
    target = tiny_target(family=family)
    draft = tiny_draft(target, block_size=7)
    export_draft(draft, tmp_path / "draft", target, check=False)
    settings = TargetSettings(path=str(place))
    decided = choice.foresee(settings, str(tmp_path / "draft"), ServeSettings())
    assert decided.context == 512
    assert "packed draft weights" in capsys.readouterr().err
    kept = ServeSettings().prefix_cache_bytes
    plan = MemoryPlan(DenseShape.of(target.config), draft.config, 300, prefix_cache=kept)
    monkeypatch.setattr(choice, "_free", lambda _: plan.total)
    decided = choice.foresee(settings, str(tmp_path / "draft"), ServeSettings())
    assert decided.context == plan.most(plan.total) >= 300
    target.model.to(BF16)
    decoder = choice.choose(target, draft.to(BF16), ENDS, replace(decided, engine="graph"))
    assert decoder is not None
    assert (decoder.name, decoder.context) == ("graph", decided.context)
    assert gpu[0]["warm"]
    assert gpu[0]["num_draft_tokens"] == 7


def test_a_dense_decoder_that_is_not_for_the_graph_says_why(
    gpu: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dspark")
    target = tiny_target(mlp_bias=True).model.to(BF16)
    target = HFTarget(target, "biased")
    assert choice.choose(target, None, ENDS, ServeSettings()) is None
    assert "reference engine: its mlp_bias is true, and no kernel adds biases" in caplog.text
    with pytest.raises(ConfigError, match="--engine graph cannot run here: its mlp_bias is true"):
        choice.choose(target, None, ENDS, ServeSettings(engine="graph"))
    assert gpu == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="the graph engine can run")
def test_asking_for_the_graph_engine_on_a_cpu_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LING["flash"]))
    TOKENIZER.save_pretrained(tmp_path)
    # there are no weights: a run that went on would say so
    words = ["serve", "--target", str(tmp_path), "--engine", "graph", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    monkeypatch.setattr("dspark.serving.process._METHOD", "fork")  # quicker
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2, said
    assert "--engine graph cannot run here: the target is on the cpu" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=7)],
    ids=["greedy", "filters"],
)
def test_the_server_decodes_with_the_graph(sampling: SamplingParams) -> None:
    target = ling()
    target.model.to("cuda")
    draft = tiny_draft(target, block_size=8).to("cuda", BF16)
    draft.attach(target.embed_weight, target.head_weight)
    settings = ServeSettings(engine="graph", context=256)
    outputs = []
    for drafted in (draft, None):
        decoder = choice.choose(target, drafted, ENDS, settings)
        assert decoder is not None
        engine = Engine(LocalModel(target, drafted, settings, decoder), TOKENIZER, settings)
        try:
            params = GenerateParams(max_new_tokens=64, sampling=sampling, ignore_eos=True)
            prompts = [list(range(40, 40 + length)) for length in (1, 17, 100)]
            outputs.append([engine.generate(one, params).token_ids for one in prompts])
            with pytest.raises(RunError, match="more than the engine's 256 positions"):
                engine.generate([40] * 256, params)
        finally:
            engine.close()
    assert outputs[0] == outputs[1]
    assert all(len(one) == 64 for one in outputs[0])
    with (
        running(target, draft, TOKENIZER, settings=settings) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        info = http.get("/server_info").json()
        assert (info["engine"], info["context"]) == ("graph", 256)
        body = {"prompt": list(range(40, 57)), "max_tokens": 16, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 200
