"""The released drafts' shape, for measurements without one."""

from typing import Any

from dspark.target.config import LingConfig
from dspark.target.families import DenseShape

__all__ = ["official_shape"]


def official_shape(config: LingConfig | DenseShape, block_size: int) -> dict[str, Any]:
    """config.json of a released draft (five layers, rank 256), in this target's widths.

    Ling's has as many key heads as query heads, those of dense targets as few as their target.
    """
    layers = config.num_hidden_layers
    span = layers - 4
    dense = isinstance(config, DenseShape)
    return {
        "architectures": ["Qwen3DSparkModel" if dense else "LingDSparkModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 5,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads if dense else config.num_attention_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "block_size": block_size,
        # fewer than five of a target with few layers
        "target_layer_ids": sorted({round(1 + i * span / 4) for i in range(5)}),
        "num_target_layers": layers,
        "mask_token_id": config.vocab_size - 1,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "hidden_act": "silu",
    }
