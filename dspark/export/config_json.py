"""config.json of a draft: what is written, and what is understood when others wrote it.

Written here: DeepSpec's layout (all Qwen3 layer fields plus the draft's keys at the top level,
model type qwen3 because every engine's AutoConfig knows it) with the keys repeated in a
`dflash_config` block, where SpecForge's readers look; `layouts` makes the others of it. Read:
either place, and the layout of speculators. No key that shapes the network has a default here: a
wrong guess loads without a word and drafts nothing that is ever accepted.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.draft import DSparkConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.export.config_keys import (
    DRAFT_KEYS,
    LAYER_KEYS,
    STS_KEY,
    check_keys,
    check_meaning,
    promote,
)
from dspark.export.speculators import flatten, is_speculators, verifier_of
from dspark.provenance import read_object

__all__ = [
    "ARCHITECTURES",
    "LING",
    "family_of",
    "family_of_target",
    "from_json",
    "read_json",
    "to_json",
]

LING = "LingDSparkModel"
ARCHITECTURES = ("Qwen3DSparkModel", LING, "DSparkDraftModel")
"""One network under three names: the first two tell engines the target's family."""

_OPTIONAL_KEYS = (
    STS_KEY,
    "num_anchors",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
_INPUT = "confidence_head_with_markov"
_INTEGERS = frozenset(LAYER_KEYS) - {"hidden_act", "rms_norm_eps"} | {
    "block_size",
    "mask_token_id",
    "num_target_layers",
    "markov_rank",
}
_MAY_BE_ZERO = ("mask_token_id", "markov_rank")
_MOST = 2**31 - 1


def read_json(directory: Path) -> dict[str, Any]:
    """`config.json` of a directory as written.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no config.json: it is not a draft")
    return read_object(path, CheckpointError)


def family_of_target(architectures: Iterable[str]) -> str:
    """Name under which engines look for the draft of a target; the network is the same."""
    return LING if any(one.startswith("Bailing") for one in architectures) else ARCHITECTURES[0]


def family_of(raw: Mapping[str, Any]) -> str:
    """The same name for the draft that has the object in config.json."""
    if is_speculators(raw):
        return family_of_target(verifier_of(raw)[1])
    return LING if LING in (raw.get("architectures") or ()) else ARCHITECTURES[0]


def from_json(
    raw: Mapping[str, Any], where: str, *, target_layers: int | Callable[[], int] | None = None
) -> DSparkConfig:
    """The draft's shape from the object in config.json; ``where`` names it in errors.

    ``target_layers`` stands in for a missing `num_target_layers`, which shapes nothing and which
    not every exporter writes.

    Raises:
        CheckpointError: another architecture, a key that is missing, contradictory or of the
            wrong type, or a convention under which the weights mean something else.
    """
    check_keys(raw, where)
    if is_speculators(raw):
        raw = {**flatten(raw, where), "architectures": [family_of(raw)]}
    names = raw.get("architectures")
    if not (isinstance(names, list) and names and names[0] in ARCHITECTURES):
        raise CheckpointError(
            f"{where}: architectures is {names!r}, but a DSpark draft says "
            f"{', '.join(ARCHITECTURES[:-1])} or {ARCHITECTURES[-1]}"
        )
    flat = promote(raw, where)
    if flat.get("num_target_layers") is None:
        flat["num_target_layers"] = target_layers() if callable(target_layers) else target_layers
    if flat.get("enable_confidence_head") is False and flat.get(_INPUT) is None:
        flat[_INPUT] = False
    missing = [key for key in (*DRAFT_KEYS, *LAYER_KEYS) if flat.get(key) is None]
    if missing:
        hint = "; its target tells it (--target)" if missing == ["num_target_layers"] else ""
        raise CheckpointError(
            f"{where} lacks {', '.join(missing)}: no default is right for every draft{hint}"
        )
    for key in sorted(_INTEGERS):
        if type(flat[key]) is not int:
            raise CheckpointError(f"{where}: {key} must be an integer, got {flat[key]!r}")
        if flat[key] < 1 and key not in _MAY_BE_ZERO:
            raise CheckpointError(f"{where}: {key} must be >= 1, got {flat[key]}")
        if flat[key] > _MOST:
            raise CheckpointError(f"{where}: {key} must be <= {_MOST}, got {flat[key]}")
    eps, act = flat["rms_norm_eps"], flat["hidden_act"]
    if isinstance(eps, float) and not 0 < eps < math.inf:
        raise CheckpointError(f"{where}: rms_norm_eps must be finite and above 0, got {eps}")
    if isinstance(act, str) and act not in ACT2FN:
        raise CheckpointError(f"{where}: hidden_act {act!r} is no activation of transformers")
    check_meaning(flat, where)
    keys = (*DRAFT_KEYS, *LAYER_KEYS, *_OPTIONAL_KEYS)
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


def _rope(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """transformers' `rope_parameters`, from its new place or from theta and scaling."""
    new, old = flat.get("rope_parameters") or {}, flat.get("rope_scaling") or {}
    for key, block in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(block, Mapping):
            raise CheckpointError(f"{where}: {key} must be an object, got {block!r}")
    rope, scaling = (
        {("rope_type" if k == "type" else k): v for k, v in dict(one).items()}
        for one in (new or old, old)
    )
    kind = rope.setdefault("rope_type", "default")
    if kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise CheckpointError(f"{where}: rope_type {kind!r} is no rotary embedding of transformers")
    for key, value in scaling.items():
        if rope.get(key, value) != value:
            raise CheckpointError(
                f"{where}: {key} is {rope[key]} in rope_parameters and {value} in rope_scaling"
            )
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
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise CheckpointError(f"{where}: rope_theta must be finite and above 0, got {theta!r}")
    return rope


def to_json(config: DSparkConfig, *, architecture: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """The object that is written as config.json for weights of ``dtype``."""
    rope = dict(config.rope_parameters or {})
    theta = rope.get("rope_theta")
    assert theta is not None, "a draft config carries its rotary base"
    scaled = rope.get("rope_type", "default") != "default"
    draft = {key: getattr(config, key) for key in DRAFT_KEYS}
    draft["target_layer_ids"] = list(config.target_layer_ids or ())
    if config.sts_temperatures is not None:
        draft[STS_KEY] = list(config.sts_temperatures)
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": dtype,
        # the name that readers before transformers 4.56 look for
        "torch_dtype": dtype,
        **{key: getattr(config, key) for key in LAYER_KEYS},
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
