"""Shape of a draft as a transformers config, and how it follows from a target.

The keys are DeepSpec's (`deepseek-ai/dspark_qwen3_*`): all of Qwen3's, plus those below at the top
level. Exports say `model_type: qwen3`, because serving engines must be able to read the config
with their own AutoConfig.
"""

import math
from collections.abc import Container, Iterable
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from dspark.config import DraftSettings
from dspark.errors import ConfigError

__all__ = ["DSparkConfig", "check_mask_token", "config_for_target", "default_layer_ids"]


@strict
class DSparkConfig(Qwen3Config):
    """Qwen3 layer fields plus the draft's own.

    transformers builds a config without arguments to learn its defaults, so the draft's fields
    may be None there; everything else is checked on construction.

    Raises:
        ConfigError: a draft field is missing or out of range.
    """

    model_type = "qwen3"

    block_size: int | None = None
    """Slots drafted from one anchor (K), the anchor's own slot included."""
    target_layer_ids: list[int] | tuple[int, ...] | None = None
    """0-based target decoder layers whose outputs are the taps, strictly increasing."""
    num_target_layers: int | None = None
    mask_token_id: int | None = None
    """Input id of the slots behind the anchor."""
    num_anchors: int = 512
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    sts_temperatures: list[Any] | tuple[Any, ...] | None = None
    """Of each slot's confidence logit, which is divided by it; None: nothing was calibrated."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.block_size is None:
            return
        if self.block_size < 1:
            raise ConfigError(f"block_size must be >= 1, got {self.block_size}")
        if self.mask_token_id is None or not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask_token_id must lie in 0..{self.vocab_size - 1}, got {self.mask_token_id}"
            )
        layers, ids = self.num_target_layers, list(self.target_layer_ids or ())
        if layers is None or not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers:
            raise ConfigError(
                f"target_layer_ids must rise strictly within 0..{(layers or 0) - 1} "
                f"(num_target_layers {layers}), got {ids}"
            )
        if self.markov_head_type not in ("vanilla", "gated", "rnn"):
            raise ConfigError(
                f"markov_head_type must be vanilla, gated or rnn, got '{self.markov_head_type}'"
            )
        if self.markov_rank < 0:
            raise ConfigError(f"markov_rank must be >= 0, got {self.markov_rank}")
        if self.confidence_head_with_markov and self.markov_rank == 0:
            # the confidence head then has no Markov embedding to read
            self.confidence_head_with_markov = False
        if self.sts_temperatures is not None:
            self._check_temperatures(list(self.sts_temperatures))

    def _check_temperatures(self, temperatures: list[Any]) -> None:
        if not self.enable_confidence_head:
            raise ConfigError(
                "sts_temperatures are those of a confidence head, which enable_confidence_head "
                "says is not there"
            )
        if len(temperatures) != self.block_size:
            raise ConfigError(
                f"sts_temperatures must have one value for each of {self.block_size} slots "
                f"(block_size), got {len(temperatures)}"
            )
        for one in temperatures:
            if type(one) not in (int, float) or not 0 < one < math.inf:
                raise ConfigError(
                    f"sts_temperatures must be finite numbers above 0, got {temperatures}"
                )


def default_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps from layer 1 to layer N-3, evenly spread (DeepSpec's rule); a single tap is N // 2.

    The last layer is never a tap: transformers shows its output behind the final norm, engines
    do not show it at all.

    Raises:
        ConfigError: the target has too few layers for so many taps.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    if num_taps > num_layers - 3:
        raise ConfigError(
            f"draft.num_taps {num_taps} does not fit a target of {num_layers} layers; "
            f"give draft.target_layer_ids or at most {max(1, num_layers - 3)} taps"
        )
    return tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def check_mask_token(
    mask_token_id: int,
    *,
    vocab_size: int,
    pad_id: int | None,
    eos_ids: Iterable[int],
    used: Container[int] | None = None,
) -> None:
    """Refuse a mask id that means something else when a draft is trained.

    Raises:
        ConfigError: it is outside the vocabulary, or the pad, an end or an occurring id.
    """
    name = f"draft.mask_token_id {mask_token_id}"
    if not 0 <= mask_token_id < vocab_size:
        raise ConfigError(f"{name} is outside the target's vocabulary of {vocab_size} ids")
    if mask_token_id == pad_id:
        raise ConfigError(f"{name} is the pad id {pad_id}; choose an id that never occurs")
    if mask_token_id in set(eos_ids):
        raise ConfigError(f"{name} is an end id of the target; choose an id that never occurs")
    if used is not None and mask_token_id in used:
        raise ConfigError(f"{name} occurs in the training data; choose an id that never occurs")


def config_for_target(
    target_config: Any, draft: DraftSettings, *, mask_token_id: int
) -> DSparkConfig:
    """A draft config whose layers copy the target's geometry (heads, head size, RoPE, norms).

    Raises:
        ConfigError: the settings do not fit the target.
    """
    layers = int(target_config.num_hidden_layers)
    ids = draft.target_layer_ids or default_layer_ids(layers, draft.num_taps)
    if ids[-1] == layers - 1:
        raise ConfigError(
            f"draft.target_layer_ids contains the target's last layer {layers - 1}, which engines "
            "do not expose; tap at most layer " + str(layers - 2)
        )
    heads = int(target_config.num_attention_heads)
    rope = getattr(target_config, "rope_parameters", None) or {}
    eos = getattr(target_config, "eos_token_id", None)
    width = draft.intermediate_size or getattr(target_config, "intermediate_size", None)
    if not width:
        raise ConfigError("draft.intermediate_size must be given: the target has no dense MLP")
    return DSparkConfig(
        vocab_size=int(target_config.vocab_size),
        hidden_size=int(target_config.hidden_size),
        intermediate_size=int(width),
        num_hidden_layers=draft.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(target_config, "num_key_value_heads", None) or heads),
        head_dim=int(
            getattr(target_config, "head_dim", None) or target_config.hidden_size // heads
        ),
        hidden_act="silu",
        max_position_embeddings=int(target_config.max_position_embeddings),
        rms_norm_eps=float(getattr(target_config, "rms_norm_eps", 1e-6)),
        rope_parameters=dict(rope) or None,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * draft.num_layers,
        pad_token_id=getattr(target_config, "pad_token_id", None),
        bos_token_id=getattr(target_config, "bos_token_id", None),
        eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
        block_size=draft.block_size,
        target_layer_ids=list(ids),
        num_target_layers=layers,
        mask_token_id=mask_token_id,
        markov_rank=draft.markov_rank,
        markov_head_type=draft.markov_head_type,
        enable_confidence_head=draft.enable_confidence_head,
        confidence_head_with_markov=draft.confidence_head_with_markov,
    )
