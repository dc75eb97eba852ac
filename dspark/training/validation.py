"""Validation by decoding: the same loop that serves, on a few prompts, with the draft as it stands.

A lower loss is not always a longer accept length, so this figure, not the loss, chooses `best`.
The draft is measured as it will be exported: cast to the target's dtype.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from dspark.acceptance import AcceptStats, pooled
from dspark.config import TrainSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.prompts import read_prompts
from dspark.corpus.rejects import RowError
from dspark.decoding import DecodeParams, decode, draft_limit
from dspark.draft import DSparkDraftModel
from dspark.draft.config import DSparkConfig
from dspark.errors import DataError
from dspark.export.load import build_draft
from dspark.target import Target

__all__ = ["Counts", "counts", "figures", "prompt_ids", "validate"]

log = logging.getLogger(__name__)

Counts = Callable[[DSparkConfig, Mapping[str, Tensor], Sequence[Sequence[int]], int], AcceptStats]
"""`counts` of one target."""


def prompt_ids(
    settings: TrainSettings, tokenizer: Any, *, max_positions: int, vocab_size: int
) -> list[list[int]]:
    """Token ids of the validation prompts; those that leave no room for an answer are left out.

    Raises:
        DataError: prompts are asked for and none of them can be used.
    """
    if not settings.validation_prompts:
        return []
    usable = []
    for prompt in read_prompts(settings.validation_prompts, settings.validation_limit):
        try:
            ids = generation_prompt_ids(tokenizer, prompt.messages, vocab_size=vocab_size)
        except RowError as error:
            log.warning("validation prompt %s is left out: %s", prompt.id, error)
            continue
        if len(ids) + settings.validation_max_new_tokens <= max_positions:
            usable.append(ids)
        else:
            log.warning("validation prompt %s is left out: %d tokens", prompt.id, len(ids))
    if not usable:
        raise DataError(
            f"train.validation_prompts {list(settings.validation_prompts)} hold no prompt that "
            f"leaves room for {settings.validation_max_new_tokens} new tokens in "
            f"{max_positions} positions"
        )
    return usable


def validate(
    decoded: Counts,
    draft: DSparkDraftModel,
    weights: Mapping[str, Tensor],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    accelerator: Accelerator,
) -> AcceptStats:
    """Greedy decode of ``prompts``, split over the processes; all get the counts of all.

    ``decoded`` is `counts` with a target here, or where another process holds one. ``weights`` are
    the draft's whole ones, which it may hold only a part of itself.
    """
    mine = prompts[accelerator.process_index :: accelerator.num_processes]
    stats = decoded(draft.config, weights, mine, max_new_tokens)
    return pooled(gather_object([stats]), draft_limit(draft.block_size, None))


@torch.no_grad()
def counts(
    target: Target,
    config: DSparkConfig,
    weights: Mapping[str, Tensor],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> AcceptStats:
    """Greedy decode of ``prompts`` with the draft of ``config`` and whole ``weights``."""
    served = build_draft(config, dict(weights), where="the draft in training", target=target)
    params = DecodeParams(max_new_tokens=max_new_tokens)
    limit = draft_limit(served.block_size, None)
    return pooled((decode(target, served, ids, params).stats for ids in prompts), limit)


def figures(stats: AcceptStats) -> dict[str, float]:
    """``val/…`` lines of the metrics; names as in training, counted instead of expected."""
    return {
        "val/tau": stats.accept_length,
        "val/accepted_drafts": stats.accepted_drafts,
        **{f"val/accept_rate@{k}": rate for k, rate in enumerate(stats.accept_rate)},
        **{f"val/survival@{k}": share for k, share in enumerate(stats.survival)},
        "val/rounds": float(stats.rounds),
    }
