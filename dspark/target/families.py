"""Dense decoders that the captured step knows, by what sets them apart: names, norms, refusals.

All of them are transformers models with the same tensors: `self_attn.{q,k,v,o}_proj`,
`mlp.{gate,up,down}_proj`, `input_layernorm` and `post_attention_layernorm` of a layer, and the
decoder's `norm`. A new family is a line in `FAMILIES`.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["FAMILIES", "ROTATIONS", "DenseShape", "Family", "unsupported_dense"]


@dataclass(frozen=True)
class Family:
    """Where the models of a `model_type` differ from Llama."""

    name: str
    norms: tuple[str, str] | None = None
    """Of queries and keys, a head each; names within `self_attn`."""


FAMILIES = {
    "llama": Family("Llama"),
    "qwen3": Family("Qwen3", norms=("q_norm", "k_norm")),
}
_REFUSED = {
    "qwen2": "Qwen2 adds biases to queries, keys and values, which no kernel does",
}
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the length of what is read."""
_LARGEST_HEAD = 256


@dataclass(frozen=True)
class DenseShape:
    """Numbers of a dense decoder, from its config alone; named as there."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_theta: float
    num_experts_per_tok: int = 0

    @classmethod
    def of(cls, config: Any) -> "DenseShape":
        """Of a transformers config for which `unsupported_dense` is None."""
        heads = int(config.num_attention_heads)
        return cls(
            model_type=config.model_type,
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_hidden_layers=int(config.num_hidden_layers),
            num_attention_heads=heads,
            num_key_value_heads=int(config.num_key_value_heads or heads),
            head_dim=_head_dim(config),
            vocab_size=int(config.vocab_size),
            max_position_embeddings=int(config.max_position_embeddings),
            rms_norm_eps=float(config.rms_norm_eps),
            tie_word_embeddings=bool(config.tie_word_embeddings),
            rope_theta=float(config.rope_parameters["rope_theta"]),
        )

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def parameters(self) -> int:
        """Of the whole model, tables included."""
        hidden, size = self.hidden_size, self.head_dim
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        norms = 2 * hidden + (2 * size if self.family.norms else 0)
        a_layer = hidden * (2 * heads + 2 * groups) * size
        a_layer += 3 * hidden * self.intermediate_size + norms
        tables = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        return self.num_hidden_layers * a_layer + tables + hidden


def unsupported_dense(config: Any) -> str | None:
    """Why the kernels cannot run a decoder of this transformers config; None if they can."""
    kind = str(config.model_type)
    if kind in _REFUSED:
        return _REFUSED[kind]
    if kind not in FAMILIES:
        known = ", ".join(one.name for one in FAMILIES.values())
        return f"there are kernels for Ling-3.0, {known}, and the target is '{kind}'"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantized, and the kernels read bfloat16"
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            return f"its {key} is true, and no kernel adds biases"
    if config.hidden_act != "silu":
        return f"its hidden_act is '{config.hidden_act}', only silu has a kernel"
    if any("sliding" in one for one in getattr(config, "layer_types", None) or ()):
        return f"its attention has a sliding window of {getattr(config, 'sliding_window', None)}"
    return _unsupported_rotation(config) or _unsupported_widths(config)


def _unsupported_rotation(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROTATIONS:
        return f"its rope scaling '{kind}' is none of {', '.join(ROTATIONS)}"
    share = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if share not in (None, 1, 1.0):
        return f"its partial_rotary_factor is {share}, and the kernels rotate whole heads"
    return None


def _unsupported_widths(config: Any) -> str | None:
    size = _head_dim(config)
    if size > _LARGEST_HEAD:
        return f"its head size is {size}, and the tiles take at most {_LARGEST_HEAD}"
    width = int(config.num_attention_heads) * size
    for one in (int(config.hidden_size), int(config.intermediate_size), width):
        if one % 16:
            return f"a width of {one} is no multiple of 16"
    return None


def _head_dim(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)
