"""The draft a run starts with: from settings, from an exported draft, or from a checkpoint."""

import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark.config import Config, DraftSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.ids import id_limit
from dspark.draft.config import DSparkConfig, check_mask_token, config_for_target
from dspark.draft.model import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.load import build_draft, check_fit, load_draft, read_config
from dspark.target import Target

__all__ = [
    "check_markov_start",
    "checkpoint_layers",
    "draft_config",
    "initial_draft",
    "mask_token",
    "restored_draft",
    "shape",
]

log = logging.getLogger(__name__)

SHAPE_KEYS = (
    "num_hidden_layers",
    "intermediate_size",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
"""What must not change between a checkpoint and the run that goes on from it."""


def mask_token(
    settings: DraftSettings, tokenizer: Any, target: Target, used: Container[int]
) -> int:
    """The id in the slots behind the anchor: given, or the first special id without a use.

    Raises:
        ConfigError: the given id has another meaning, or the tokenizer has no id to spare.
    """
    pad, ends = tokenizer.pad_token_id, target.eos_ids | {tokenizer.eos_token_id}
    if settings.mask_token_id is not None:
        check_mask_token(
            settings.mask_token_id,
            vocab_size=target.vocab_size,
            pad_id=pad,
            eos_ids=ends - {None},
            used=used,
        )
        return settings.mask_token_id
    taken = ends | {pad, tokenizer.bos_token_id, tokenizer.unk_token_id}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    # rows of the table that no text reaches
    padding = range(id_limit(tokenizer), target.vocab_size)
    for candidate in [*sorted(special), *padding]:
        if candidate not in taken and candidate not in used and candidate < target.vocab_size:
            log.info("mask token: %d, which the data never holds", candidate)
            return int(candidate)
    free = (one for one in reversed(range(target.vocab_size)) if one not in {*taken, *special})
    never = next((one for one in free if one not in used), None)
    raise ConfigError(
        "the tokenizer has no special id without a use in the data: set draft.mask_token_id to an "
        + (f"id that never occurs, such as {never}" if never is not None else "id (all occur)")
    )


def draft_config(
    config: Config,
    target: Target,
    tokenizer: Any,
    used_ids: Callable[[], set[int]],
    *,
    saved: DSparkConfig | None,
) -> DSparkConfig:
    """Shape of the draft that the settings ask for; a checkpoint's where they leave it open.

    Raises:
        ConfigError: the settings do not fit the target.
        CheckpointError: `init_from` cannot be read or was made for another target.
    """
    settings = config.draft
    if settings.init_from is not None:
        if saved is not None:
            return saved  # `init_from` may be gone by now
        shape = read_config(settings.init_from, target)
        check_fit(shape, target, settings.init_from)
        shape.sts_temperatures = None  # the head will not stay what they were fitted to
        if shape.mask_token_id in used_ids():
            log.warning(
                "mask token %s of %s occurs in the data: these tokens look like open slots to it",
                shape.mask_token_id,
                settings.init_from,
            )
        return shape
    if saved is not None and settings.mask_token_id is None:
        mask = saved.mask_token_id
        assert mask is not None
    else:
        mask = mask_token(settings, tokenizer, target, {*used_ids(), *_template_ids(tokenizer)})
    shape = config_for_target(target.config, settings, mask_token_id=mask)
    shape.num_anchors = config.train.num_anchors
    return shape


def initial_draft(
    config: DSparkConfig, settings: DraftSettings, target: Target, *, seed: int
) -> DSparkDraftModel:
    """Random weights drawn from ``seed``, or those of `init_from`; fp32 masters.

    Raises:
        CheckpointError: `init_from` cannot be read or does not fit the target.
        ConfigError: the sequential head is too wide for its start from the embedding.
    """
    if settings.init_from is not None:
        draft = load_draft(settings.init_from, target=target, dtype=torch.float32)
        draft.config.sts_temperatures = None
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            draft = DSparkDraftModel(config)
        draft.to(device=target.device, dtype=torch.float32)  # type: ignore[call-arg]
        draft.attach(target.embed_weight, target.head_weight)
        if settings.markov_init == "embedding" and draft.markov_head is not None:
            check_markov_start(settings, target)
            draft.markov_head.start_from(target.embed_weight)
    draft.train()
    return draft


def check_markov_start(settings: DraftSettings, target: Target) -> None:
    """Can the sequential head of a new draft start as `markov_init` says?

    Raises:
        ConfigError: it is wider than the embedding that it would start from.
    """
    begins = settings.init_from is None and settings.markov_init == "embedding"
    if begins and settings.markov_rank > target.hidden_size:
        raise ConfigError(
            f"draft.markov_init embedding needs draft.markov_rank of at most "
            f"{target.hidden_size} (the target's hidden size), got {settings.markov_rank}"
        )


def restored_draft(
    config: DSparkConfig, weights: dict[str, Tensor], target: Target, *, where: str
) -> DSparkDraftModel:
    """The draft of a checkpoint.

    Raises:
        CheckpointError: its tensors do not fit its config.
    """
    draft = build_draft(config, weights, where=where, target=target, dtype=torch.float32)
    draft.train()
    return draft


def shape(config: DSparkConfig) -> dict[str, Any]:
    """`SHAPE_KEYS` under the names of the settings."""
    values: Mapping[str, Any] = {key: getattr(config, key) for key in SHAPE_KEYS}
    renamed = {"num_hidden_layers": "num_layers"}
    return {
        f"draft.{renamed.get(key, key)}": list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
    }


def _template_ids(tokenizer: Any) -> list[int]:
    """Ids that every served prompt holds, even if pre-tokenised training rows have none of them."""
    if not tokenizer.chat_template:
        return []
    return generation_prompt_ids(tokenizer, [{"role": "user", "content": "Hello"}])


def checkpoint_layers(draft: DSparkDraftModel) -> None:
    """Keep only each layer's input for the backward pass and compute the rest again there."""
    for layer in draft.layers:
        forward = layer.forward

        def recomputed(*args: Any, forward: Any = forward) -> Tensor:
            out: Tensor = checkpoint(forward, *args, use_reentrant=False)
            return out

        layer.forward = recomputed
