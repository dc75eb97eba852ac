"""What an export writes, key by key and name by name, against files written by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from dspark.errors import ConfigError
from dspark.export.hf import export_draft
from dspark.export.layouts import FORMATS, LAYOUTS, Format
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target

GOLDEN = Path(__file__).parent / "golden"
TABLES = {"embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def target() -> Target:
    tiny = tiny_target()
    tiny.model.config.architectures = ["LlamaForCausalLM"]
    return tiny


@pytest.mark.parametrize("format", FORMATS)
def test_config_and_tensor_names_are_the_golden_ones(
    target: Target, tmp_path: Path, format: Format
) -> None:
    export_draft(tiny_draft(target), tmp_path / "out", target, format=format, check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["transformers_version"]
    assert config == json.loads((GOLDEN / f"{format}.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    names = set((GOLDEN / "tensors.txt").read_text().split())
    assert set(tensors) == (names if format == "sglang" else names | TABLES)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["markov_head.markov_w2.weight"].shape == (target.vocab_size, 8)


@pytest.mark.parametrize("format", FORMATS)
def test_a_slim_export_holds_the_drafts_own_weights_alone(
    target: Target, tmp_path: Path, format: Format
) -> None:
    out = tmp_path / "out"
    if LAYOUTS[format].needs_tables:
        with pytest.raises(ConfigError, match="--slim: DeepSpec needs the embedding"):
            export_draft(tiny_draft(target), out, target, format=format, slim=True, check=False)
        return
    export_draft(tiny_draft(target), out, target, format=format, slim=True, check=False)
    names = set((GOLDEN / "tensors.txt").read_text().split())
    assert set(load_file(out / "model.safetensors")) == names


@pytest.mark.parametrize("format", [one for one in FORMATS if one != "vllm"])
def test_transformers_reads_the_config(target: Target, tmp_path: Path, format: Format) -> None:
    export_draft(tiny_draft(target), tmp_path / "out", target, format=format, check=False)
    auto = AutoConfig.from_pretrained(tmp_path / "out")
    assert (auto.model_type, auto.block_size) == ("qwen3", 4)
    assert auto.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("format", FORMATS)
def test_positions_and_rotation_are_the_targets(tmp_path: Path, format: Format) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    target = tiny_target(max_position_embeddings=2048, rope_parameters={**yarn, "rope_theta": 5e5})
    export_draft(tiny_draft(target), tmp_path / "out", target, format=format, check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    assert layers["max_position_embeddings"] == 2048
    assert layers["rope_theta"] == 5e5
    assert layers["rope_parameters"] == layers["rope_scaling"] == {**yarn, "rope_theta": 5e5}
