"""config.json of a draft: what is written, and what is understood when others wrote it.

Written: DeepSpec's layout (all Qwen3 layer fields plus the draft's keys at the top level, model
type qwen3 because every engine's AutoConfig knows it) with the keys repeated in a `dflash_config`
block, where SpecForge's readers look. Read: both places, from DeepSpec, SpecForge and SGLang
exports. No key that shapes the network has a default here: a wrong guess loads without a word and
drafts nothing that is ever accepted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError

from dspark.draft import DSparkConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.provenance import read_object

__all__ = ["ARCHITECTURES", "from_json", "read_json", "to_json"]

ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
"""One network under three names: the first two tell engines the target's family."""

_NESTED = ("dflash_config", "dspark_config")
_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
_OPTIONAL_KEYS = (
    "num_anchors",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_INTEGERS = frozenset(_LAYER_KEYS) - {"hidden_act", "rms_norm_eps"} | {
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "markov_rank",
}
_OTHER_MEANING = {
    # key: the only value under which slot k of a block predicts the token at anchor + k + 1
    "sample_from_anchor": True,
    "projector_type": "dspark",
    "shift_label": True,
    "rope_is_neox_style": True,
    "attention_bias": False,
    "use_sliding_window": False,
}


def read_json(directory: Path) -> dict[str, Any]:
    """`config.json` of a directory as written.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no config.json: it is not a draft")
    return read_object(path, CheckpointError)


def from_json(
    raw: Mapping[str, Any], where: str, *, target_layers: int | None = None
) -> DSparkConfig:
    """The draft's shape from the object in config.json; ``where`` names it in errors.

    ``target_layers`` stands in for a missing `num_target_layers`, which shapes nothing and which
    not every exporter writes.

    Raises:
        CheckpointError: another architecture, a key that is missing, contradictory or of the
            wrong type, or a convention under which the weights mean something else.
    """
    names = raw.get("architectures") or [None]
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: architectures is {names!r}, but a DSpark draft says "
            f"{', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}"
        )
    flat = _promote(raw, where)
    if flat.get("num_target_layers") is None:
        flat["num_target_layers"] = target_layers
    for key, value in _OTHER_MEANING.items():
        if flat.get(key, value) != value:
            raise CheckpointError(
                f"{where}: {key} is {flat[key]!r}; only {value!r} is understood (this draft's "
                "blocks, rows or weights would be read with another meaning)"
            )
    if flat.get("enable_confidence_head") is False:
        flat["confidence_head_with_markov"] = False
    missing = [key for key in (*_DRAFT_KEYS, *_LAYER_KEYS) if flat.get(key) is None]
    if missing:
        raise CheckpointError(
            f"{where} lacks {', '.join(missing)}: no default is right for every draft"
        )
    for key in sorted(_INTEGERS):
        if type(flat[key]) is not int:
            raise CheckpointError(f"{where}: {key} must be an integer, got {flat[key]!r}")
    _check_attention(flat, where)
    keys = (*_DRAFT_KEYS, *_LAYER_KEYS, *_OPTIONAL_KEYS)
    known: dict[str, Any] = {key: flat[key] for key in keys if flat.get(key) is not None}
    try:
        return DSparkConfig(
            **known,
            rope_parameters=_rope(flat, where),
            layer_types=["full_attention"] * flat["num_hidden_layers"],
            tie_word_embeddings=False,
        )
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {' '.join(str(error).split())}") from None


def _promote(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nested keys to the top level; the same key with two values is refused."""
    flat = dict(raw)
    for block in _NESTED:
        nested = flat.pop(block, None) or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{where}: {block} must be an object, got {nested!r}")
        for key, value in nested.items():
            if flat.get(key) is None:
                flat[key] = value
            elif key in (*_DRAFT_KEYS, *_LAYER_KEYS) and flat[key] != value:
                raise CheckpointError(
                    f"{where}: {key} is {flat[key]!r} at the top level and {value!r} in {block}"
                )
    return flat


def _check_attention(flat: Mapping[str, Any], where: str) -> None:
    others = sorted(set(flat.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise CheckpointError(
            f"{where}: layer_types holds {', '.join(others)}; only full_attention is understood"
        )
    reduced = flat.get("draft_vocab_size")
    if reduced not in (None, flat["vocab_size"]):
        raise CheckpointError(
            f"{where}: draft_vocab_size {reduced} differs from vocab_size {flat['vocab_size']}; "
            "drafts over a part of the vocabulary are not understood"
        )


def _rope(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """transformers' `rope_parameters`, from its new place or from theta and scaling."""
    rope = dict(flat.get("rope_parameters") or flat.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    # a target's partial factor copied along means nothing: DSpark rotates the whole head
    rope.pop("partial_rotary_factor", None)
    outer = flat.get("rope_theta")
    theta = rope.setdefault("rope_theta", outer)
    if theta is None:
        raise CheckpointError(f"{where} lacks rope_theta: no default is right for every draft")
    if outer not in (None, theta):
        raise CheckpointError(
            f"{where}: rope_theta is {outer} at the top level and {theta} in rope_parameters"
        )
    return rope


def to_json(config: DSparkConfig, *, architecture: str) -> dict[str, Any]:
    """The object that is written as config.json for weights in bfloat16."""
    rope = dict(config.rope_parameters or {})
    theta = rope.get("rope_theta")
    assert theta is not None, "a draft config carries its rotary base"
    scaled = rope.get("rope_type", "default") != "default"
    draft = {key: getattr(config, key) for key in _DRAFT_KEYS}
    draft["target_layer_ids"] = list(config.target_layer_ids or ())
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        # the name that readers before transformers 4.56 look for
        "torch_dtype": "bfloat16",
        **{key: getattr(config, key) for key in _LAYER_KEYS},
        "initializer_range": config.initializer_range,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": config.pad_token_id,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": rope,
        **draft,
        "num_anchors": config.num_anchors,
        "sample_from_anchor": True,
        "dflash_config": {"projector_type": "dspark", **draft},
        "transformers_version": transformers.__version__,
    }
