"""Bytes that a step must read, by component, and the time that takes at a given bandwidth.

Symbols: MB is 1e6 bytes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.bench.draft_shape import official_shape
from dspark.bench.targets import dense_target
from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.export.config_json import from_json
from dspark.serving.graph.dense import dense_weights
from dspark.serving.graph.weights import (
    DenseFFN,
    DraftWeights,
    ExpertFFN,
    GQAMixer,
    KDAMixer,
    MLAMixer,
    NextNWeights,
    TargetWeights,
)
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape
from dspark.target.model import LingModel
from dspark.target.sizes import Routing

__all__ = ["Floor", "check_dense", "roofline", "step_floor"]


@dataclass(frozen=True)
class Floor:
    """Bytes of one step by component."""

    parts: dict[str, float]
    terabytes_per_s: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def us(self) -> float:
        """Microseconds of all of it."""
        return self.total / self.terabytes_per_s / 1e6

    def us_of(self, component: str) -> float:
        """Microseconds of one component."""
        return self.parts.get(component, 0.0) / self.terabytes_per_s / 1e6


def step_floor(
    weights: TargetWeights,
    draft: DraftWeights | None,
    experts: float,
    context: float,
    terabytes_per_s: float,
    *,
    nextn: NextNWeights | None = None,
    passes: int = 0,
    kept: float = 1.0,
) -> Floor:
    """What one step reads at least: every weight once, caches, KDA states.

    ``experts``: distinct routed experts of a layer. A KDA state counts as read once and written
    once, whatever the way a step is taken back. The draft's key and value matrices count twice: for
    the rows that were kept, and for the block that is proposed behind them.

    A NEXTN block counts once a proposal, since the head between two passes leaves nothing of it in
    a cache: its matrices, latents and experts, and the head again. The first pass reads the experts
    that the ``kept`` rows of a step choose independently, every other pass those of one row.
    """
    parts: dict[str, float] = {}

    def add(name: str, *tensors: Tensor, share: float = 1.0) -> None:
        size = sum(one.numel() * one.element_size() for one in tensors)
        parts[name] = parts.get(name, 0.0) + share * size

    for layer in weights.layers:
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, KDAMixer):
            add("KDA in", mixer.into)
            add("KDA out", mixer.out)
            parts["KDA"] = parts.get("KDA", 0.0) + 2 * 4 * mixer.heads * mixer.size**2
        elif isinstance(mixer, GQAMixer):
            add("attention in", mixer.into)
            add("attention out", mixer.out)
            pair = 2 * mixer.groups * mixer.size * weights.head.element_size()
            parts["attention"] = parts.get("attention", 0.0) + context * pair
        else:
            add("MLA in", mixer.into, *([mixer.query] if mixer.query is not None else []))
            add("MLA out", mixer.out)
            add("MLA", mixer.kv_b)
            latent = weights.ling.latent_dim * weights.head.element_size()
            parts["MLA"] += context * latent
        if isinstance(ffn, DenseFFN):
            add("dense FFN", ffn.gate_up, ffn.down)
        else:
            assert isinstance(ffn, ExpertFFN)
            add("router", ffn.router)
            add("experts", ffn.gate_up, ffn.down, share=(experts + 1) / len(ffn.down))
    add("head", weights.head)
    if nextn is not None:
        block = nextn.layer
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, MLAMixer)
        add("NEXTN", nextn.eh_proj, mixer.into, mixer.kv_b, mixer.out, share=passes)
        if mixer.query is not None:
            add("NEXTN", mixer.query, share=passes)
        if isinstance(ffn, DenseFFN):
            add("NEXTN", ffn.gate_up, ffn.down, share=passes)
        else:
            each = weights.ling.num_experts_per_tok
            first = Routing().experts(weights.ling, kept)
            add("NEXTN", ffn.router, share=passes)
            read = first + 1 + (passes - 1) * (each + 1)
            add("NEXTN", ffn.gate_up, ffn.down, share=read / len(ffn.down))
        latent = weights.ling.latent_dim * weights.head.element_size()
        parts["NEXTN"] += passes * context * latent
        add("draft head", weights.head, share=passes)
    if draft is not None:
        add("draft context", draft.fc, draft.context)
        for one in draft.layers:
            add("draft layers", one.qkv, one.out, one.gate_up, one.down)
        cached = 2 * len(draft.layers) * draft.groups * draft.size * draft.fc.element_size()
        parts["draft attention"] = context * cached
        add("draft head", weights.head)
    return Floor(parts, terabytes_per_s)


def check_dense(ranks: int, routing: str) -> None:
    """A dense target is on one GPU, and has no experts.

    Raises:
        ConfigError: something else is asked for.
    """
    if ranks != 1:
        raise ConfigError(f"a dense target runs on one rank (--tp 1), got {ranks}")
    if routing != "independent":
        raise ConfigError(f"routing {routing} is of experts, and the target has none")


def roofline(
    config: LingConfig | DenseShape,
    *,
    ranks: int,
    tokens: int,
    routing: str,
    context: int,
    block_size: int,
    terabytes_per_s: float,
) -> dict[str, Any]:
    """Floor of a step of one rank, with and without a draft; nothing is loaded.

    ``block_size`` 0: without a draft, else one of the official shape in the target's widths.

    Raises:
        ConfigError: a number is out of range.
        TargetError: a width does not divide by ``ranks``.
    """
    most = 1 + MAX_PROPOSALS
    if not 1 <= tokens <= most:
        raise ConfigError(f"tokens must lie in 1..{most}, the rows of a step, got {tokens}")
    if not 0 < terabytes_per_s < float("inf"):
        raise ConfigError(f"bandwidth must be a number above 0, got {terabytes_per_s}")
    if not 0 <= context <= config.max_position_embeddings:
        raise ConfigError(f"context must lie in 0..{config.max_position_embeddings}, got {context}")
    with torch.device("meta"):
        if isinstance(config, DenseShape):
            check_dense(ranks, routing)
            experts = 0.0
            target = dense_weights(dense_target(config, "meta"))
        else:
            chosen = Routing.parse(routing)
            chosen.check(config, tokens)
            experts = chosen.experts(config, tokens)
            target = TargetWeights.of(LingModel(config, ranks=ranks).to(torch.bfloat16))
        draft = None
        if block_size:
            raw = official_shape(config, block_size)
            shape = from_json(raw, "draft", target_layers=config.num_hidden_layers)
            draft = DraftWeights.of(DSparkDraftModel(shape).to(torch.bfloat16), ranks)
    floor = step_floor(target, draft, experts, context, terabytes_per_s)
    return {
        "ranks": ranks,
        "tokens": tokens,
        "routing": routing,
        "distinct_experts": experts,
        "context": context,
        "block_size": block_size or None,
        "tb_s": terabytes_per_s,
        "components": {
            name: {"mb": size / 1e6, "us": floor.us_of(name)} for name, size in floor.parts.items()
        },
        "total_mb": floor.total / 1e6,
        "floor_us": floor.us,
    }
