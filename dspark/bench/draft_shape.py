"""The draft of a measurement: a NEXTN block by its name, or the official draft's shape."""

from typing import Any

from dspark.target.config import LingConfig

__all__ = ["nextn_proposals", "official_shape"]


def nextn_proposals(draft: str) -> int:
    """N of `nextn:N`; 0 for anything else."""
    kind, _, count = draft.partition(":")
    return int(count) if kind == "nextn" and count.isdecimal() else 0


def official_shape(config: LingConfig, block_size: int) -> dict[str, Any]:
    """config.json of the official draft (five layers, rank 256), in this target's widths."""
    layers = config.num_hidden_layers
    span = layers - 4
    return {
        "architectures": ["LingDSparkModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 5,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "block_size": block_size,
        "target_layer_ids": [round(1 + i * span / 4) for i in range(5)],
        "num_target_layers": layers,
        "mask_token_id": config.vocab_size - 1,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "hidden_act": "silu",
    }
