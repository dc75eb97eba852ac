"""Draft and target of a plan: shape and counts, from configs alone."""

from pathlib import Path
from typing import Any

import torch

from dspark.config import Config
from dspark.draft.config import DSparkConfig, check_mask_token, config_for_target
from dspark.draft.model import DSparkDraftModel
from dspark.export.config_json import from_json, read_json
from dspark.target import HFTarget, Target
from dspark.target.config import LingConfig
from dspark.target.sizes import parameter_counts
from dspark.training import build
from dspark.training.rows import TrainingRows

__all__ = ["draft_shape", "inner_size", "parameters", "target_counts"]


def draft_shape(
    config: Config, target: Target, tokenizer: Any, rows: TrainingRows | None, resume: Path | None
) -> DSparkConfig:
    """Shape of the draft as `build.draft_config` makes it; its mask id may have to stay open."""
    saved = None
    if resume is not None:
        saved = from_json(read_json(resume), str(resume / "config.json"))
    else:
        build.check_markov_start(config.draft, target)
    if tokenizer is not None or config.draft.init_from is not None or saved is not None:
        used = rows.used_ids if rows is not None else set
        return build.draft_config(config, target, tokenizer, used, saved=saved)
    mask = config.draft.mask_token_id
    if mask is not None:
        check_mask_token(
            mask,
            vocab_size=target.vocab_size,
            pad_id=getattr(target.config, "pad_token_id", None),
            eos_ids=target.eos_ids,
        )
    return config_for_target(target.config, config.draft, mask_token_id=0 if mask is None else mask)


def parameters(draft: DSparkConfig) -> dict[str, int]:
    """Of the draft by part, and of the two tables that it shares with the target."""
    with torch.device("meta"):
        model = DSparkDraftModel(draft)
    parts = {"layers": 0, "context": 0, "norms": 0, "markov_head": 0, "confidence_head": 0}
    names = {"fc": "context", "hidden_norm": "norms", "norm": "norms"}
    for name, parameter in model.trainable():
        first = name.partition(".")[0]
        parts[names.get(first, first)] += parameter.numel()
    own = sum(parts.values())
    tables = 2 * draft.vocab_size * draft.hidden_size
    return {**parts, "trainable": own, "shared_tables": tables, "with_tables": own + tables}


def target_counts(target: Target) -> tuple[int, int]:
    """Parameters, and those that a token passes through below the output head."""
    if isinstance(target.config, LingConfig):
        counts = parameter_counts(target.config)
        head = target.config.vocab_size * target.config.hidden_size
        return counts["main_parameters"], counts["active_parameters"] - head
    assert isinstance(target, HFTarget)
    named = dict(target.model.named_parameters())
    tables = {id(target.embed_weight), id(target.head_weight)}
    experts = getattr(target.config, "num_experts", None) or getattr(
        target.config, "num_local_experts", None
    )
    active = 0.0
    for name, parameter in named.items():
        if id(parameter) in tables:
            continue
        routed = bool(experts) and ".experts." in name
        chosen = getattr(target.config, "num_experts_per_tok", None) or 1
        active += parameter.numel() * (chosen / experts if routed and experts else 1.0)
    return sum(one.numel() for one in named.values()), round(active)


def inner_size(config: Any) -> int:
    """Widest that a token gets inside a layer of the target."""
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = chosen * (getattr(config, "moe_intermediate_size", None) or 0)
    return max(int(getattr(config, "intermediate_size", None) or 0), experts)
