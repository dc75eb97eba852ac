"""Bytes that a step must read, by component, and the time that takes at the measured bandwidth.

Symbols: MB is 1e6 bytes.
"""

from dataclasses import dataclass

from torch import Tensor

from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.weights import DenseFFN, ExpertFFN, KDAMixer, MLAMixer
from dspark.target.sizes import Routing

__all__ = ["Floor", "step_floor"]


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
    step: GraphStep,
    rows: int,
    experts: float,
    context: float,
    terabytes_per_s: float,
    kept: float = 1.0,
) -> Floor:
    """What one step of ``rows`` rows reads at least: every weight once, caches, KDA states.

    ``experts``: distinct routed experts of a layer. A KDA state counts as read once and written
    once, whatever the way a step is taken back.

    A NEXTN block counts once a proposal, since the head between two passes leaves nothing of it in
    a cache: its matrices, latents and experts, and the head again. The first pass reads the experts
    that the ``kept`` rows of a step choose independently, every other pass those of one row.
    """
    parts: dict[str, float] = {}

    def add(name: str, *tensors: Tensor, share: float = 1.0) -> None:
        size = sum(one.numel() * one.element_size() for one in tensors)
        parts[name] = parts.get(name, 0.0) + share * size

    weights = step.weights
    for layer in weights.layers:
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, KDAMixer):
            add("KDA in", mixer.into)
            add("KDA out", mixer.out)
            parts["KDA"] = parts.get("KDA", 0.0) + 2 * 4 * mixer.heads * mixer.size**2
        else:
            add("MLA in", mixer.into, *([mixer.query] if mixer.query is not None else []))
            add("MLA out", mixer.out)
            add("MLA", mixer.kv_b)
            latent = weights.config.latent_dim * weights.head.element_size()
            parts["MLA"] += context * latent
        if isinstance(ffn, DenseFFN):
            add("dense FFN", ffn.gate_up, ffn.down)
        else:
            assert isinstance(ffn, ExpertFFN)
            add("router", ffn.router)
            add("experts", ffn.gate_up, ffn.down, share=(experts + 1) / len(ffn.down))
    add("head", weights.head)
    if step.nextn is not None:
        passes, block = step.limit, step.nextn.layer
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, MLAMixer)
        add("NEXTN", step.nextn.eh_proj, mixer.into, mixer.kv_b, mixer.out, share=passes)
        if mixer.query is not None:
            add("NEXTN", mixer.query, share=passes)
        if isinstance(ffn, DenseFFN):
            add("NEXTN", ffn.gate_up, ffn.down, share=passes)
        else:
            each = weights.config.num_experts_per_tok
            first = Routing().experts(weights.config, kept)
            add("NEXTN", ffn.router, share=passes)
            read = first + 1 + (passes - 1) * (each + 1)
            add("NEXTN", ffn.gate_up, ffn.down, share=read / len(ffn.down))
        latent = weights.config.latent_dim * weights.head.element_size()
        parts["NEXTN"] += passes * context * latent
        add("draft head", weights.head, share=passes)
    draft = step.draft
    if draft is not None:
        add("draft context", draft.fc, draft.context)
        for one in draft.layers:
            add("draft layers", one.qkv, one.out, one.gate_up, one.down)
        cached = 2 * len(draft.layers) * draft.groups * draft.size * draft.fc.element_size()
        parts["draft attention"] = context * cached
        add("draft head", weights.head)
    return Floor(parts, terabytes_per_s)
