"""DeepSpec's released drafts for Qwen3 as they come: their tensors, and a decode with one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.bench.inspect import inspect
from dspark.bench.targets import read_target
from dspark.decoding import DecodeParams, decode
from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export.config_json import from_json
from dspark.export.load import TargetShape, check_fit, load_draft
from dspark.provenance import read_object
from dspark.target import HFTarget
from dspark.testing import tiny_target

ROOT = Path(__file__).parents[2]
LAYER = {
    "self_attn.q_proj": ("h", "d"), "self_attn.k_proj": ("kv", "d"),
    "self_attn.v_proj": ("kv", "d"), "self_attn.o_proj": ("d", "h"),
    "self_attn.q_norm": ("hd",), "self_attn.k_norm": ("hd",),
    "mlp.gate_proj": ("I", "d"), "mlp.up_proj": ("I", "d"), "mlp.down_proj": ("d", "I"),
    "input_layernorm": ("d",), "post_attention_layernorm": ("d",),
}  # fmt: skip
"""Of a layer, as published."""


def published(layers: int, **sizes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released state dict, without a prefix; a confidence bias beside."""
    d, rank = sizes["d"], sizes["r"]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (sizes["V"], d), "lm_head.weight": (sizes["V"], d),
        "fc.weight": (d, sizes["taps"] * d), "hidden_norm.weight": (d,), "norm.weight": (d,),
        "markov_head.markov_w1.weight": (sizes["V"], rank),
        "markov_head.markov_w2.weight": (sizes["V"], rank),
        "confidence_head.proj.weight": (1, d + rank), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for layer in range(layers):
        for name, size in LAYER.items():
            shapes[f"layers.{layer}.{name}.weight"] = tuple(sizes[one] for one in size)
    return shapes


def draft_config(size: str) -> dict[str, Any]:
    return read_object(ROOT / f"configs/drafts/qwen3-{size}-dspark-block7.json", ConfigError)


@pytest.mark.parametrize(
    ("size", "own", "every", "target"),
    [
        ("4b", 615_221_249, 1_393_133_569, 4_022_468_096),
        ("8b", 1_126_422_017, 2_371_081_729, 8_190_735_360),
    ],
)
def test_they_have_the_published_tensors(size: str, own: int, every: int, target: int) -> None:
    report = inspect(ROOT / f"configs/drafts/qwen3-{size}-dspark-block7.json")
    assert (report["own_parameters"], report["parameters"]) == (own, every)
    shape = read_target(ROOT / f"configs/targets/qwen3-{size}.json")
    assert shape.parameters == target  # type: ignore[union-attr]
    config = from_json(draft_config(size), "draft", target_layers=36)
    check_fit(config, TargetShape.of(shape, "target"), "draft")
    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    held = {name: tuple(one.shape) for name, one in draft.trainable()}
    d, inner = shape.hidden_size, shape.intermediate_size
    wanted = published(5, d=d, I=inner, h=4096, kv=1024, hd=128, V=151936, r=256, taps=5)
    # the tables are the target's, and are taken from it
    assert held == {name: one for name, one in wanted.items() if name.split(".")[0] not in
                    ("embed_tokens", "lm_head")}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(family="qwen3")


def released(directory: Path, target: HFTarget, **keys: Any) -> Path:
    """A checkpoint of the released form with random weights, in the widths of ``target``."""
    config = target.config
    widths = {
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": target.vocab_size, "max_position_embeddings": 512, "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2, "num_target_layers": 6, "markov_rank": 8,
        "target_layer_ids": [1, 2, 4], "mask_token_id": target.vocab_size - 1,
    }  # fmt: skip
    directory.mkdir()
    raw = {**draft_config("8b"), **widths, **keys}
    (directory / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    shapes = published(2, d=64, I=96, h=64, kv=32, hd=16, V=target.vocab_size, r=8, taps=3)
    held = {
        name: torch.randn(shape, generator=generator).bfloat16() * (1 if "norm" in name else 0.1)
        for name, shape in shapes.items()
    }
    held["embed_tokens.weight"] = target.embed_weight.bfloat16().clone()
    held["lm_head.weight"] = target.head_weight.bfloat16().clone()
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_one_loads_and_never_changes_the_output(tmp_path: Path, target: HFTarget) -> None:
    draft = load_draft(released(tmp_path / "draft", target), target=target)
    assert draft.block_size == 7
    prompt, params = list(range(10, 30)), DecodeParams(20, ignore_eos=True)
    with_draft = decode(target, draft, prompt, params)
    assert with_draft.token_ids == decode(target, None, prompt, params).token_ids


def test_one_of_another_target_is_refused(tmp_path: Path, target: HFTarget) -> None:
    with pytest.raises(CheckpointError, match="num_target_layers is 36 but"):
        load_draft(released(tmp_path / "draft", target, num_target_layers=36), target=target)
