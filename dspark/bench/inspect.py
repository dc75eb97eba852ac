"""What a model or a draft holds, from its config alone: nothing is loaded."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dspark.bench.targets import read_target
from dspark.decoding import nextn_proposals
from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError, DSparkError, TargetError
from dspark.export.config_json import from_json
from dspark.export.config_keys import promote
from dspark.export.load import TargetShape, check_fit
from dspark.provenance import read_object
from dspark.serving.graph.weights import unsupported_draft, unsupported_shapes
from dspark.serving.plan import DEFAULT_CONTEXT, MemoryPlan
from dspark.serving.settings import ServeSettings
from dspark.target.config import LingConfig, is_ling
from dspark.target.families import FAMILIES, DenseShape
from dspark.target.sizes import Routing, parameter_counts, rank_bytes, step_bytes

__all__ = ["inspect"]

_BANDWIDTH = {"H200": 4.8, "B200": 8.0}
"""Terabytes a second on the data sheet."""


def inspect(
    path: Path,
    *,
    ranks: int = 1,
    verify_tokens: Sequence[int] = (),
    routing: str | None = None,
    context: int | None = None,
    plan: bool = False,
    draft: str | Path | None = None,
) -> dict[str, Any]:
    """Counts of a config.json, of a directory that holds one, or of a draft's.

    ``routing`` (default independent) and ``context`` (8192) say what ``verify_tokens`` read.
    ``plan``: also what the graph engine needs of a GPU's memory, at ``context`` (32768) and beside
    the ``draft`` of this config; `nextn:N` is the target's own NEXTN block with N proposals a step.

    Raises:
        TargetError: no config, one that is not understood, or ranks and verify steps of a model
            for which they are not known.
        ConfigError: a wrong routing or number of tokens, or either without a verify step; a draft
            that the target does not have.
    """
    if not verify_tokens and (routing is not None or (context is not None and not plan)):
        given = f"routing {routing}" if routing is not None else f"context {context}"
        raise ConfigError(f"{given} says what a verify step reads; give --verify-tokens too")
    if draft is not None and not plan:
        raise ConfigError(f"draft {draft} is for the memory plan; give --plan too")
    file = path / "config.json" if path.is_dir() else path
    raw, where = read_object(file, TargetError), str(file)
    names = raw.get("architectures")
    names = names if isinstance(names, list) and names else [names or ""]
    if is_ling(raw) or raw.get("model_type") == "bailing_hybrid":
        config = LingConfig.from_dict(raw, where)
        report: dict[str, Any] = {"architecture": names[0], **parameter_counts(config)}
        report["ranks"] = ranks
        report["bytes_per_rank"] = rank_bytes(config, ranks)
        notes = []
        if config.is_fp8:
            notes += ["the checkpoint holds fp8 blocks; bytes are those of bf16, as loaded"]
        if ranks > 1:
            more = (ranks - 1) * report["bytes_per_rank"]["embedding"] / 1e6
            notes += [
                f"dspark serve keeps the whole embedding on every rank, {more:,.1f} MB more; "
                "--plan counts it"
            ]
        if notes:
            report["note"] = ". ".join(notes)
        if plan:
            report["memory_plan"] = _plan(config, ranks, draft, context, where)
        if verify_tokens:
            most = config.max_position_embeddings
            if context is not None and context > most:
                raise ConfigError(f"context {context} is more than the model's {most} positions")
            routing = routing or "independent"
            context = min(8192, most) if context is None else context
            chosen = Routing.parse(routing)
            report["routing"], report["context"] = routing, context
            report["verify"] = [
                _step(config, ranks, tokens, chosen, context) for tokens in verify_tokens
            ]
        return report
    dense = raw.get("model_type") in FAMILIES and "DSpark" not in str(names[0])
    if plan and dense and ranks == 1 and not verify_tokens:
        shape = read_target(file)
        report = {"architecture": names[0], **_library(raw, where)}
        return {**report, "memory_plan": _plan(shape, 1, draft, context, where)}
    if ranks != 1 or verify_tokens or plan:
        left = "--plan" if plan else "--tp and --verify-tokens"
        raise TargetError(
            f"{where}: bytes per rank and per verify step are known for Ling-3.0 targets only, "
            f"this is {names[0] or raw.get('model_type')}; leave {left} out"
        )
    if "DSpark" in str(names[0]):
        return _draft(raw, where)
    return {"architecture": names[0], **_library(raw, where)}


def _step(
    config: LingConfig, ranks: int, tokens: int, routing: Routing, context: int
) -> dict[str, Any]:
    routing.check(config, tokens)
    step = step_bytes(config, ranks, tokens, routing, context)
    floors = {f"floor_us_{name}": step.floor_us(speed) for name, speed in _BANDWIDTH.items()}
    return {**asdict(step), "weights": step.weights, "total": step.total, **floors}


def _plan(
    config: LingConfig | DenseShape,
    ranks: int,
    draft: str | Path | None,
    context: int | None,
    where: str,
) -> dict[str, Any]:
    shape, nextn = None, draft is not None and nextn_proposals(str(draft)) is not None
    if draft is not None and not nextn and not Path(draft).exists():
        raise ConfigError(
            f"draft must be a config.json, its directory or nextn:N with N in "
            f"1..{MAX_PROPOSALS} (none: leave it out), got '{draft}'"
        )
    if draft is not None and not nextn:
        draft = Path(draft)
        file = draft / "config.json" if draft.is_dir() else draft
        raw = read_object(file, TargetError)
        shape = from_json(raw, str(file), target_layers=config.num_hidden_layers)
        check_fit(shape, TargetShape.of(config, where), str(file))
    if isinstance(config, DenseShape):
        reason = unsupported_draft(shape) if shape is not None else None
    else:
        reason = unsupported_shapes(config, shape, ranks)
    if reason:
        raise TargetError(f"{where}: the graph engine has no plan for it: {reason}")
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    kept = 0 if nextn else ServeSettings().prefix_cache_bytes
    return MemoryPlan(config, shape, context, ranks, nextn, prefix_cache=kept).to_dict()


def _draft(raw: dict[str, Any], where: str) -> dict[str, Any]:
    # a number that fits is enough to count by, if the config has none
    ids = (
        promote(raw, where).get("target_layer_ids") or raw.get("aux_hidden_state_layer_ids") or [0]
    )
    config = from_json(raw, where, target_layers=int(ids[-1]) + 1)
    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    own = sum(parameter.numel() for _, parameter in draft.trainable())
    tables = 2 * config.vocab_size * config.hidden_size
    return {
        "architecture": raw["architectures"][0],
        "parameters": own + tables,
        "own_parameters": own,
        "vocabulary_copies": tables,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids or ()),
        "mask_token_id": config.mask_token_id,
    }


def _library(raw: dict[str, Any], where: str) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**raw)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        if isinstance(error, DSparkError):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # transformers goes on with the names of all its models
        said = lines[0].partition(" Should contain one of")[0]
        raise TargetError(f"{where} is no model that can be inspected: {said}") from None
    parameters = dict(model.named_parameters())
    return {
        "parameters": sum(one.numel() for one in parameters.values()),
        "tensors": len(parameters),
    }
