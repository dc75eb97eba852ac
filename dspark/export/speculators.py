"""config.json as the speculators library writes it and vLLM reads it.

The layers stand in `transformer_layer_config`, the draft's keys beside it, and the tapped layers
are counted as inputs of the next layer: one more than the 0-based layer whose output is meant.
There is no `model_type` at the top level: vLLM takes the layout for what it is only without one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import CheckpointError
from dspark.export.config_keys import DRAFT_KEYS, STS_KEY, promote

__all__ = ["ARCHITECTURE", "flatten", "is_speculators", "nest", "verifier_of"]

ARCHITECTURE = "DSparkSpeculator"
_TYPE = "dspark"
_LAYERS = "transformer_layer_config"
_OUTER = ("architectures", "dtype", "torch_dtype", "num_anchors", "sample_from_anchor")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Is this the layout of the speculators library?"""
    return raw.get("speculators_model_type") is not None


def nest(
    flat: Mapping[str, Any], *, verifier: str | None, verifier_architectures: Sequence[str]
) -> dict[str, Any]:
    """The same config in this layout, from the one with all keys at the top level.

    ``verifier``: the target's name; None: whoever serves must tell it.
    """
    version = flat["transformers_version"]
    keys = [key for key in (*DRAFT_KEYS, STS_KEY) if key in flat and key != "target_layer_ids"]
    layers = {
        key: value
        for key, value in flat.items()
        if key not in (*_OUTER, *DRAFT_KEYS, STS_KEY, "transformers_version")
    }
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": _TYPE,
        "dtype": flat["dtype"],
        "torch_dtype": flat["torch_dtype"],
        "tie_word_embeddings": False,
        **{key: flat[key] for key in keys},
        "draft_vocab_size": flat["vocab_size"],
        "target_hidden_size": flat["hidden_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in flat["target_layer_ids"]],
        "sample_from_anchor": flat["sample_from_anchor"],
        "num_anchors": flat["num_anchors"],
        "speculators_config": {
            "algorithm": _TYPE,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": flat["block_size"]}
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(verifier_architectures),
            },
        },
        _LAYERS: layers,
        "transformers_version": version,
    }


def flatten(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """All keys at the top level, with the 0-based tapped layers; `architectures` is left as it is.

    Raises:
        CheckpointError: another algorithm, no word on what the anchor's slot predicts, more
            proposals than the block has slots, or two values of one key.
    """
    kind = raw["speculators_model_type"]
    if kind != _TYPE:
        raise CheckpointError(f"{where}: speculators_model_type is {kind!r}, not {_TYPE!r}")
    if not isinstance(raw.get(_LAYERS), Mapping):
        raise CheckpointError(f"{where} lacks {_LAYERS}, the shape of the layers")
    settings = _settings(raw, where)
    block, proposed = raw.get("block_size"), _proposals(settings, where)
    if raw.get("sample_from_anchor") is None:
        raise CheckpointError(
            f"{where} lacks sample_from_anchor: with block_size {block} and speculative_tokens "
            f"{proposed} nothing else tells whether the anchor's slot predicts a token; add the "
            "value that it was trained with"
        )
    if proposed is not None and type(block) is int and proposed > block:
        raise CheckpointError(
            f"{where}: speculative_tokens is {proposed}, but the block was trained with "
            f"{block} slots (block_size)"
        )
    flat = promote(raw, where, (_LAYERS,))
    inputs, outputs = flat.pop("aux_hidden_state_layer_ids", None), flat.get("target_layer_ids")
    if inputs is not None:
        if not isinstance(inputs, list) or not all(type(one) is int for one in inputs):
            raise CheckpointError(
                f"{where}: aux_hidden_state_layer_ids must be a list of integers, got {inputs!r}"
            )
        meant = [one - 1 for one in inputs]
        if outputs not in (None, meant):
            raise CheckpointError(
                f"{where}: target_layer_ids is {outputs} and aux_hidden_state_layer_ids {inputs}, "
                f"which means {meant}"
            )
        flat["target_layer_ids"] = meant
    return flat


def _settings(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """`speculators_config`, of the types that its readers and `verifier_of` expect."""
    settings = raw.get("speculators_config") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{where}: speculators_config must be an object, got {settings!r}")
    if (kind := settings.get("algorithm", _TYPE)) != _TYPE:
        raise CheckpointError(f"{where}: speculators_config.algorithm is {kind!r}, not {_TYPE!r}")
    verifier = settings.get("verifier")
    name, architectures = verifier_of(raw)
    if not (
        isinstance(verifier, Mapping | None)
        and isinstance(name, str | None)
        and isinstance(architectures, list)
        and all(isinstance(one, str) for one in architectures)
    ):
        raise CheckpointError(
            f"{where}: speculators_config.verifier must hold name_or_path, a string, and "
            f"architectures, a list of strings, got {verifier!r}"
        )
    return settings


def _proposals(settings: Mapping[str, Any], where: str) -> int | None:
    """`speculative_tokens` of the first proposal method, which is the one that engines take."""
    methods = settings.get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise CheckpointError(
            f"{where}: speculators_config.proposal_methods must be a list of objects, got "
            f"{methods!r}"
        )
    told = methods[0].get("speculative_tokens")
    if told is not None and (type(told) is not int or told < 1):
        raise CheckpointError(f"{where}: speculative_tokens must be an integer >= 1, got {told!r}")
    return told


def verifier_of(raw: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Name and architectures of the target that a config in this layout was made for."""
    settings = raw.get("speculators_config")
    told = settings.get("verifier") if isinstance(settings, Mapping) else None
    if not isinstance(told, Mapping):
        return None, []
    return told.get("name_or_path"), told.get("architectures") or []
