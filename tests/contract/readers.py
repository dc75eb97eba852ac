"""What three readers ask of a draft directory, by the rules of their loaders.

Written from the readers' side: nothing of `dspark.export` is used, and weights are looked at by
the header of their file alone. A reader returns what it takes the draft for, or raises `Refused`.

SGLang: `Qwen3DSparkModel` and `LingDSparkModel`. vLLM: `Qwen3DSparkForCausalLM` behind its
speculators config or behind a plain one. DeepSpec: `Qwen3DSparkModel.from_pretrained`.
"""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


class Refused(Exception):
    """The reader would stop, or go on with another draft than the one that was written."""


@dataclass(frozen=True)
class Served:
    """What a reader knows of the target."""

    vocabulary: int
    layers: int


@dataclass(frozen=True)
class Taken:
    """What a reader takes a draft for."""

    proposals: int
    mask: int
    taps: tuple[int, ...]
    """0-based layers, whose outputs are read."""
    rank: int
    theta: float
    positions: int


def read(directory: Path) -> tuple[dict[str, Any], Shapes]:
    """config.json, and shapes by name from the header of the weights."""
    config = json.loads((directory / "config.json").read_text())
    with (directory / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return config, {name: tuple(told["shape"]) for name, told in header.items()}


def sglang(config: Mapping[str, Any], shapes: Shapes, target: Served) -> Taken:
    """Tables are the target's own; a Markov head of any kind is a must."""
    names = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
    _must((config.get("architectures") or [""])[0] in names, "architectures")
    _must(config.get("model_type") == "qwen3", "model_type")
    # sizes the draft's cache
    _must("num_nextn_predict_layers" not in config, "num_nextn_predict_layers")
    blocks = [config, config.get("dflash_config") or {}, config.get("dspark_config") or {}]
    found = {
        key: next((one[key] for one in blocks if one.get(key) is not None), None)
        for key in (
            "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank",
            "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
        )
    }  # fmt: skip
    _must(found["markov_head_type"] in ("vanilla", "gated", "rnn"), "markov_head_type")
    _must(found["num_target_layers"] == target.layers, "num_target_layers")
    taken = _taken(found, config, target)
    plain = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    ignored = ("embed_tokens.", "lm_head.", "rotary_emb.")
    own = {name: shape for name, shape in plain.items() if not name.startswith(ignored)}
    # a missing flag counts as yes
    confident = found["enable_confidence_head"] is not False
    _same(own, {**_backbone(config, taken), **_heads(config, found, confident)})
    return taken


def vllm(config: Mapping[str, Any], shapes: Shapes, target: Served) -> Taken:
    """Vanilla heads only; tables that are not there are the target's."""
    if config.get("model_type") is None and config.get("speculators_config") is not None:
        flat, proposals = _from_speculators(config)
    else:
        names = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
        _must((config.get("architectures") or [""])[0] in names, "architectures")
        _must(config.get("model_type") == "qwen3", "model_type")
        flat, proposals = {**(config.get("dflash_config") or {}), **config}, None
    _must(flat.get("sample_from_anchor", True) is True, "sample_from_anchor")
    _must(flat.get("markov_head_type") == "vanilla", "markov_head_type")
    taken = _taken(flat, flat, target)
    _must(proposals is None or proposals == taken.proposals, "speculative_tokens")
    vocabulary = flat.get("draft_vocab_size") or flat["vocab_size"]
    if vocabulary < target.vocabulary:
        _must("lm_head.weight" in shapes and "d2t" in shapes, "draft_vocab_size")
    # every name but the head's gets a prefix, so one that has it already fits nothing
    loaded = {
        name if "lm_head" in name else f"model.{name}": shape
        for name, shape in shapes.items()
        if "t2d" not in name
    }
    wanted = _backbone(flat, taken)
    confident = bool(flat.get("enable_confidence_head", False))
    wanted |= _heads(flat, flat, confident)
    wanted = {f"model.{name}": shape for name, shape in wanted.items()}
    table = (vocabulary, flat["hidden_size"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in loaded:
            wanted[name] = table
    _same(loaded, wanted)
    return taken


def deepspec(config: Mapping[str, Any], shapes: Shapes, target: Served) -> Taken:
    """All keys at the top level, and the two tables in the file."""
    names = ("Qwen3DSparkModel", "LingDSparkModel")
    _must((config.get("architectures") or [""])[0] in names, "architectures")
    _must(config.get("model_type") == "qwen3", "model_type")
    _must(config.get("tie_word_embeddings") is False, "tie_word_embeddings")
    layers = ["full_attention"] * config.get("num_hidden_layers", 0)
    _must(config.get("layer_types") == layers, "layer_types")
    _must(config.get("markov_head_type") in ("vanilla", "gated", "rnn"), "markov_head_type")
    for key in ("num_anchors", "confidence_head_with_markov"):
        _must(config.get(key) is not None, key)
    _must(config.get("num_target_layers") == target.layers, "num_target_layers")
    _must(isinstance(config.get("enable_confidence_head"), bool), "enable_confidence_head")
    taken = _taken(config, config, target)
    wanted = {
        **_backbone(config, taken),
        **_heads(config, config, config["enable_confidence_head"]),
    }
    table = (config["vocab_size"], config["hidden_size"])
    _same(shapes, {**wanted, "embed_tokens.weight": table, "lm_head.weight": table})
    return taken


READERS: dict[str, Callable[[Mapping[str, Any], Shapes, Served], Taken]] = {
    "sglang": sglang,
    "vllm": vllm,
    "deepspec": deepspec,
}


def _from_speculators(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The plain config that vLLM makes of this layout, and the default number of proposals."""
    _must(config.get("speculators_model_type") == "dspark", "speculators_model_type")
    _must(isinstance(config.get("transformer_layer_config"), dict), "transformer_layer_config")
    settings = config["speculators_config"]
    methods = settings.get("proposal_methods") or [{}]
    _must(type(methods[0].get("speculative_tokens")) is int, "speculative_tokens")
    _must("name_or_path" in (settings.get("verifier") or {}), "verifier")
    # the library's own default is 32000
    _must(config.get("draft_vocab_size") is not None, "draft_vocab_size")
    # served without it, a draft was accepted in under 1% of slots
    _must(config.get("sample_from_anchor") is not None, "sample_from_anchor")
    flat = dict(config["transformer_layer_config"])
    for key in (
        "draft_vocab_size", "target_hidden_size", "mask_token_id", "markov_rank", "block_size",
        "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
        "sample_from_anchor",
    ):  # fmt: skip
        if config.get(key) is not None:
            flat[key] = config[key]
    _must(isinstance(config.get("aux_hidden_state_layer_ids"), list), "aux_hidden_state_layer_ids")
    flat["target_layer_ids"] = [one - 1 for one in config["aux_hidden_state_layer_ids"]]
    return flat, methods[0]["speculative_tokens"]


def _taken(draft: Mapping[str, Any], layers: Mapping[str, Any], target: Served) -> Taken:
    """Rules that all readers have in common."""
    block: Any = draft.get("block_size")
    mask: Any = draft.get("mask_token_id")
    taps: Any = draft.get("target_layer_ids")
    _must(type(block) is int and block > 0, "block_size")
    _must(type(mask) is int and 0 <= mask < target.vocabulary, "mask_token_id")
    _must(isinstance(taps, list) and bool(taps) and taps == sorted(set(taps)), "target_layer_ids")
    # the output behind the last layer is not to be had
    _must(taps[0] >= 0 and taps[-1] < target.layers - 1, "target_layer_ids")
    _must(type(draft.get("markov_rank")) is int and draft["markov_rank"] > 0, "markov_rank")
    _must(layers.get("vocab_size") == target.vocabulary, "vocab_size")
    _must(type(layers.get("max_position_embeddings")) is int, "max_position_embeddings")
    # old readers know one place, new ones the other
    theta: Any = layers.get("rope_theta")
    _must(theta is not None and theta > 0, "rope_theta")
    _must((layers.get("rope_parameters") or {}).get("rope_theta") == theta, "rope_parameters")
    return Taken(
        proposals=block,
        mask=mask,
        taps=tuple(taps),
        rank=draft["markov_rank"],
        theta=theta,
        positions=layers["max_position_embeddings"],
    )


def _backbone(config: Mapping[str, Any], taken: Taken) -> dict[str, tuple[int, ...]]:
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.{number}.{name}.weight": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes["fc.weight"] = (width, len(taken.taps) * width)
    return {**shapes, "hidden_norm.weight": (width,), "norm.weight": (width,)}


def _heads(
    config: Mapping[str, Any], draft: Mapping[str, Any], confident: bool
) -> dict[str, tuple[int, ...]]:
    width, rank, rows = config["hidden_size"], draft["markov_rank"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (rows, rank),
        "markov_head.markov_w2.weight": (config.get("draft_vocab_size") or rows, rank),
    }
    if draft["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, width + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if draft["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if confident:
        read = width + (rank if draft.get("confidence_head_with_markov") else 0)
        shapes["confidence_head.proj.weight"] = (1, read)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _must(rule: bool, what: str) -> None:
    if not rule:
        raise Refused(what)


def _same(found: Shapes, wanted: Shapes) -> None:
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise Refused(f"{name}: {found.get(name)} for {wanted.get(name)}")
