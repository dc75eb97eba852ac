"""Dense decoders: which of them have kernels, and what is said of the others."""

from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from dspark.target.families import DenseShape, unsupported_dense
from dspark.testing import tiny_target

ROPE = {"rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(), None),
        (Qwen3Config(), None),
        (LlamaConfig(rope_parameters={**ROPE, "rope_type": "linear"}), None),
        (
            LlamaConfig(rope_parameters={**ROPE, "rope_type": "dynamic"}),
            "its rope scaling 'dynamic' is none of default, linear, llama3, yarn",
        ),
        (
            Qwen2Config(),
            "Qwen2 adds biases to queries, keys and values, which no kernel does",
        ),
        (
            GPT2Config(),
            "there are kernels for Ling-3.0, Llama, Qwen3, and the target is 'gpt2'",
        ),
        (
            MistralConfig(),
            "there are kernels for Ling-3.0, Llama, Qwen3, and the target is 'mistral'",
        ),
        (
            Qwen3Config(use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "its attention has a sliding window of 64",
        ),
        (
            Qwen3Config(attention_bias=True),
            "its attention_bias is true, and no kernel adds biases",
        ),
        (LlamaConfig(mlp_bias=True), "its mlp_bias is true, and no kernel adds biases"),
        (LlamaConfig(hidden_act="gelu"), "its hidden_act is 'gelu', only silu has a kernel"),
        (LlamaConfig(head_dim=512), "its head size is 512, and the tiles take at most 256"),
        (LlamaConfig(intermediate_size=100), "a width of 100 is no multiple of 16"),
        (
            LlamaConfig(quantization_config={"quant_method": "fp8"}),
            "its weights are quantized, and the kernels read bfloat16",
        ),
    ],
    ids=lambda one: str(getattr(one, "model_type", "")),
)
def test_what_has_no_kernel_is_said(config: Any, reason: str | None) -> None:
    assert unsupported_dense(config) == reason


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_shape_counts_what_the_model_holds(family: str, tied: bool) -> None:
    target = tiny_target(family=family, tie_word_embeddings=tied, num_key_value_heads=1)
    shape = DenseShape.of(target.config)
    assert shape.parameters == sum(one.numel() for one in target.model.parameters())
    assert (shape.num_key_value_heads, shape.head_dim) == (1, 16)
