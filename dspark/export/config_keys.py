"""Keys of a draft's config.json: which there are, where they may stand, and what they must say.

Of a target's keys, which many exporters copy along, most mean nothing to a draft; those that carry
one of the draft's own words are understood or refused, since a misspelt one loads without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dspark.errors import CheckpointError, nearest

__all__ = [
    "DRAFT_KEYS",
    "LAYER_KEYS",
    "ONLY_MEANING",
    "STS_KEY",
    "check_keys",
    "check_meaning",
    "promote",
]

DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
STS_KEY = "sts_temperatures"
"""Only in the config of a draft whose confidence was calibrated."""
LAYER_KEYS = (
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
_NESTED = ("dflash_config", "dspark_config")
ONLY_MEANING = {
    # key: the only value under which slot k of a block predicts the token at anchor + k + 1, and
    # under which the layers are those of `dspark.draft`
    "sample_from_anchor": True,
    "dspark_bonus_anchor": False,
    "projector_type": "dspark",
    "shift_label": True,
    "causal": False,
    "rope_is_neox_style": True,
    "attention_bias": False,
    "use_sliding_window": False,
}
_WITHOUT_EFFECT = (
    # on what the weights mean: training, derived figures, names
    "num_anchors",
    "max_anchors",
    "attention_mode",
    "mask_token",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "confidence_head_alpha",
    "loss_decay_gamma",
)
_OUTER_ONLY = (
    *_NESTED,
    "draft_vocab_size",
    "speculators_model_type",
    "speculators_config",
    "speculators_version",
    "aux_hidden_state_layer_ids",
    "use_aux_hidden_state",
)
_WORDS = (
    "anchor",
    "aux_hidden",
    "block_size",
    "confidence",
    "dflash",
    "draft",
    "dspark",
    "markov",
    "mask_token",
    "projector",
    "speculat",
    "sts_",
    "target_layer",
)
_OF_A_DRAFT = (*DRAFT_KEYS, STS_KEY, *ONLY_MEANING, *_WITHOUT_EFFECT)


def promote(raw: Mapping[str, Any], where: str, blocks: Iterable[str] = _NESTED) -> dict[str, Any]:
    """Keys of nested blocks at the top level; the same key with two values is refused."""
    flat = dict(raw)
    for block in blocks:
        nested = flat.pop(block, None) or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{where}: {block} must be an object, got {nested!r}")
        for key, value in nested.items():
            if flat.get(key) is None:
                flat[key] = value
            elif key in (*_OF_A_DRAFT, *LAYER_KEYS) and flat[key] != value:
                raise CheckpointError(
                    f"{where}: {key} is {flat[key]!r} at the top level and {value!r} in {block}"
                )
    return flat


def check_keys(raw: Mapping[str, Any], where: str) -> None:
    """Is every key understood that speaks of the draft?

    Raises:
        CheckpointError: names the first that is not, its value and the nearest known one.
    """
    outer = (*_OF_A_DRAFT, *_OUTER_ONLY)
    unknown = [
        ("", key, value, outer)
        for key, value in raw.items()
        if key not in outer and any(word in key for word in _WORDS)
    ]
    inner = (*_OF_A_DRAFT, *LAYER_KEYS)
    for block in _NESTED:
        nested = raw.get(block)
        if isinstance(nested, Mapping):
            unknown += [
                (f"{block}.", key, value, inner)
                for key, value in nested.items()
                if key not in inner
            ]
    for section, key, value, known in unknown:
        raise CheckpointError(
            f"{where}: {section}{key} is {value!r}, and there is no such key of a draft"
            f"{nearest(key, known, section)}; remove it if it means nothing"
        )


def check_meaning(flat: Mapping[str, Any], where: str) -> None:
    """Are blocks, rows and weights meant as ours are?

    Raises:
        CheckpointError: names the key, its value and the only one that is understood.
    """
    for key, value in ONLY_MEANING.items():
        if flat.get(key, value) != value:
            raise CheckpointError(
                f"{where}: {key} is {flat[key]!r}; only {value!r} is understood (this draft's "
                "blocks, rows or weights would be read with another meaning)"
            )
    types = flat.get("layer_types") or []
    others = [one for one in types if one != "full_attention"] if isinstance(types, list) else types
    if others:
        raise CheckpointError(
            f"{where}: layer_types is {types!r}; only a list of 'full_attention' is understood"
        )
    for key, same, of in (
        ("draft_vocab_size", "vocab_size", "drafts over a part of the vocabulary"),
        ("target_hidden_size", "hidden_size", "drafts of another width than their target's"),
    ):
        if flat.get(key) not in (None, flat.get(same)):
            raise CheckpointError(
                f"{where}: {key} {flat[key]} differs from {same} {flat.get(same)}; {of} are not "
                "understood"
            )
