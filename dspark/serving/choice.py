"""Which engine decodes: the captured graph where it can run, else the reference, and why.

`foresee` decides before weights are loaded, from configs; `choose` once they are.
"""

import logging
from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from dspark import kernels
from dspark.config import TargetSettings
from dspark.decoding import Draft, NextNDraft, draft_limit, nextn_proposals
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.load import TargetShape, check_fit, read_config
from dspark.serving.engine import (
    NEXTN_HAS_NONE,
    Decoder,
    check_confidence,
    prefix_cache,
    proposals,
    simulated,
)
from dspark.serving.graph.weights import unsupported_draft, unsupported_shapes
from dspark.serving.plan import DEFAULT_CONTEXT, MemoryPlan
from dspark.serving.settings import ServeSettings
from dspark.target import HFTarget, LingTarget, Target, library_config, peek
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape, unsupported_dense

__all__ = ["choose", "foresee", "obstacle"]

log = logging.getLogger(__name__)

_MOST_STOPS = 8
_SPREAD = "the target's layers are on several devices"


def obstacle(
    config: Any,
    draft: DSparkConfig | None,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
) -> str | None:
    """Why the graph engine cannot decode this target, None if it can.

    ``config``: of Ling-3.0, or transformers' of a decoder; None: neither knows it.
    """
    if device.type != "cuda":
        return f"the target is on the {device.type}, not on a CUDA device"
    if dtype != torch.bfloat16:
        return f"the target is {_name(dtype)}, not bfloat16"
    if not kernels.installed():
        return "triton is not installed (pip install 'dspark[gpu]')"
    if config is None:
        return "the target's config.json is of no model that is known here"
    if isinstance(config, LingConfig):
        return unsupported_shapes(config, draft, ranks)
    reason = unsupported_dense(config)
    return reason or (unsupported_draft(draft, ranks) if draft is not None else None)


def foresee(
    target: TargetSettings,
    draft: str | None,
    settings: ServeSettings,
    ranks: int = 1,
    *,
    quiet: bool = False,
) -> ServeSettings:
    """Before loading: print the memory plan where the graph engine will run, and fix its context.

    The plan is that of one of ``ranks``. ``quiet``: another one prints it.

    Raises:
        ConfigError: the graph engine was asked for and cannot run, the memory is too small, or
            ``num_draft_tokens`` or ``confidence_threshold`` does not fit the draft.
    """
    nextn = None if draft is None else nextn_proposals(draft)
    if draft is None:
        proposals(None, settings)
    if nextn is not None:
        check_confidence(NEXTN_HAS_NONE, settings.confidence_threshold)
    if settings.engine == "reference":
        return settings
    ling, device, dtype = peek(target)
    # asked for only where it matters: it imports transformers
    config: Any = ling or (library_config(target) if device.type == "cuda" else None)
    reason, shape = obstacle(config, None, device, dtype, ranks), None
    if "+" in target.device:
        reason = _SPREAD
    if nextn is not None:
        draft_limit(nextn, settings.num_draft_tokens, settings.confidence_threshold)
    elif reason is None and draft is not None:
        shape = read_config(draft, target_layers=config.num_hidden_layers)
        check_fit(shape, TargetShape.of(ling or DenseShape.of(config), target.path), draft)
        draft_limit(shape.block_size or 0, settings.num_draft_tokens, settings.confidence_threshold)
        reason = obstacle(config, shape, device, dtype, ranks)
    if reason is not None:
        _refuse(settings, reason)
        return settings
    free = _free(device)
    kept = 0 if nextn is not None else settings.prefix_cache_bytes
    sized = ling or DenseShape.of(config)
    least = MemoryPlan(sized, shape, 2, ranks, nextn=nextn is not None, prefix_cache=kept)
    plan = replace(least, context=settings.context or _default_context(least, free))
    if not quiet:
        Console(stderr=True).print(plan.table(free))
    plan.check(free)
    return replace(settings, context=plan.context)


def choose(
    target: Target,
    draft: Draft | None,
    ends: Set[int],
    settings: ServeSettings,
    peers: Any = None,
) -> Decoder | None:
    """The graph engine, ready for its first request; None: the reference is to decode.

    ``ends``: ids that end an output beside the target's own. ``peers``: of `ranks.group.Group`,
    where ``target`` is one rank's part.

    Raises:
        ConfigError: the graph engine was asked for and cannot run, or the context does not fit.
    """
    most = int(target.max_position_embeddings)
    if settings.context is not None and settings.context > most:
        raise ConfigError(
            f"serve.context is {settings.context}, more than the target's {most} positions"
        )
    if settings.engine == "reference":
        log.info("reference engine: as asked for")
        return None
    reason = _obstacle(target, draft, ends)
    if reason is not None:
        _refuse(settings, reason)
        log.info("reference engine: %s", reason)
        return None
    assert isinstance(target, LingTarget | HFTarget)
    # only here: the kernels need a package that a CPU does without
    from dspark.serving.graph.decoder import GraphDecoder
    from dspark.serving.graph.step import GraphStep

    context = settings.context or min(most, DEFAULT_CONTEXT)
    prefixes = prefix_cache(settings, draft)
    try:
        torch.cuda.set_device(target.device)
        step = GraphStep(
            target,
            None if isinstance(draft, NextNDraft) else draft,
            context=context,
            num_draft_tokens=proposals(draft, settings) or None,
            nextn=draft.block_size if isinstance(draft, NextNDraft) else 0,
            prefixes=prefixes,
            peers=peers,
        )
        step.warm_up()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the device's memory is too small for a context of {context}: {error}; "
            "give a smaller --context"
        ) from error
    log.info("graph engine: %s on %s, context %d", target.name, target.device, context)
    decode = GraphDecoder(step, schedule=simulated(draft, settings)).stream
    return Decoder("graph", decode, context, _MOST_STOPS, prefixes=prefixes)


def _obstacle(target: Target, draft: Draft | None, ends: Set[int]) -> str | None:
    ling = target if isinstance(target, LingTarget) else None
    model = draft if isinstance(draft, DSparkDraftModel) else None
    config = target.config if isinstance(target, HFTarget) else None
    reason = obstacle(
        ling.model.config if ling else config,
        model.config if model is not None else None,
        target.device,
        target.dtype,
        ling.model.ranks if ling else 1,
    )
    if reason is None and ling is not None and ling.model.placement:
        reason = _SPREAD
    if reason is not None:
        return reason
    if model is not None and model.fc.weight.dtype != target.dtype:
        return f"the draft is {_name(model.fc.weight.dtype)}, the target {_name(target.dtype)}"
    stops = target.eos_ids | ends
    if len(stops) > _MOST_STOPS:
        return (
            f"at most {_MOST_STOPS} ids may end an output, target and tokenizer name {len(stops)}"
        )
    return None


def _refuse(settings: ServeSettings, reason: str) -> None:
    if settings.engine == "graph":
        raise ConfigError(f"--engine graph cannot run here: {reason}")


def _default_context(plan: MemoryPlan, free: int) -> int:
    wanted = min(plan.config.max_position_embeddings, DEFAULT_CONTEXT)
    most = plan.most(free)
    if 0 < most < wanted:
        log.warning("the memory is too small for a context of %d: it is %d", wanted, most)
        return most
    return wanted


def _free(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
