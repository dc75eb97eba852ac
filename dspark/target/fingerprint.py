"""What ties features and drafts to one target: its arithmetic and its weights in a few digits.

`2-CONFIG-WEIGHTS`: CONFIG of the settings that decide what is computed, so that it can be told
without weights, and WEIGHTS of samples of every tensor. Earlier versions wrote 16 digits of the
first numbers of every parameter; these are compared with such ones only. The dtype is in neither: a
checkpoint computed in another dtype is the same target.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["comparable", "config_part", "difference", "of", "of_config", "of_version_1"]

_PREFIX = "2-"
_SAMPLES = 256
"""Of a tensor: few enough for the many tensors of a large target, spread over all of it."""
_FOREIGN = {
    # names, ids, training, sampling and habits: no feature depends on them
    "architectures", "do_sample", "max_length", "temperature", "top_k", "top_p",
    "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "finetuning_task", "id2label", "initializer_range", "is_decoder", "label2id", "name_or_path",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "raw",
    "return_dict", "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version",
    "use_cache",
    # what is applied of these is told by the modules
    "expert_swiglu_limit_list", "share_expert_swiglu_limit_list",
}  # fmt: skip


def of(config: Any, model: nn.Module) -> str:
    """Of a target with its weights."""
    return f"{_PREFIX}{of_config(config, model)}-{_of_weights(model)}"


def of_config(config: Any, model: nn.Module) -> str:
    """The middle part; ``model`` may be an outline on the meta device."""
    if dataclasses.is_dataclass(config):
        values = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    else:
        values = config.to_diff_dict()
    # without what is off: a later transformers has more switches
    on = {name: value for name, value in values.items() if value not in (None, False)}
    kept = {k: v for k, v in on.items() if k not in _FOREIGN and not k.startswith("_")}
    limits = [
        getattr(module, "limit", None)
        for name, module in model.named_modules()
        if not _unread(model, f"{name}.")
    ]
    kept["limits"] = [float(one) for one in limits if isinstance(one, int | float)]
    text = json.dumps(kept, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_version_1(model: nn.Module) -> str:
    """As earlier versions wrote it."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if _unread(model, name):
            continue
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def comparable(one: str, other: str) -> bool:
    """Are these of one version?"""
    return one.startswith(_PREFIX) == other.startswith(_PREFIX)


def config_part(fingerprint: str) -> str | None:
    """`of_config` in a fingerprint; None in one of version 1."""
    parts = fingerprint.split("-")
    return parts[1] if fingerprint.startswith(_PREFIX) and len(parts) == 3 else None


def difference(one: str, other: str) -> str:
    """Which parts of two comparable fingerprints differ, for a sentence."""
    if config_part(one) is None or config_part(other) is None:
        return "weights"
    names = ("config (or its overrides)", "weights")
    pairs = zip(names, one.split("-")[1:], other.split("-")[1:], strict=False)
    return " and ".join(name for name, mine, theirs in pairs if mine != theirs)


def _unread(model: nn.Module, name: str) -> bool:
    """Is this of a block that takes no part in the model's output?"""
    return name.startswith(getattr(model, "unread", ()))


def _of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor) and not _unread(model, name):
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(_samples(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _samples(tensor: Tensor) -> Tensor:  # [at most _SAMPLES] float32
    flat = tensor.detach().flatten()
    # an odd step: one that divides a row's length would stay in a few columns
    step = -(-flat.numel() // _SAMPLES) | 1
    return flat[::step].float().cpu()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
