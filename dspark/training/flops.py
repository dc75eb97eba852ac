"""How much arithmetic a pass of the draft needs: matrix products of forward and backward.

What the definition needs, not what some way of computing it does: no recomputation, and of
attention only the keys that a slot may see. A product with a trainable factor counts three times
(forward, and back to both of its factors), one with a frozen factor twice, the target's once.
"""

from dataclasses import dataclass

from dspark.draft.config import DSparkConfig
from dspark.training.window import Pass

__all__ = ["PassWork", "draft_flops", "needed_flops"]


@dataclass(frozen=True, kw_only=True)
class PassWork:
    """What one or many forward passes hold; means and totals do alike."""

    context: float
    """Tokens of the rows."""
    slots: float
    """Slots of all blocks."""
    seen: float
    """Pairs of a slot and a key it may see, its block's own among them."""
    supervised: float
    """Slots of the blocks that pass through the heads."""

    @classmethod
    def of(cls, one: Pass, block_size: int) -> "PassWork":
        """Of a pass as it was drawn, padding included."""
        slots = one.anchors.numel() * block_size
        distances = int((one.anchors - one.anchor_starts).sum())
        return cls(
            context=one.input_ids.numel(),
            slots=slots,
            seen=(distances + slots) * block_size,
            supervised=one.mask.numel(),
        )


def draft_flops(config: DSparkConfig, work: PassWork) -> dict[str, float]:
    """Floating-point operations by part: attention, layers, context, heads (the target's too)."""
    hidden = config.hidden_size
    inner = config.num_attention_heads * config.head_dim
    outer = int(config.num_key_value_heads or 0) * config.head_dim
    taps = len(config.target_layer_ids or ()) * hidden
    layer = work.slots * (2 * hidden * inner + 3 * hidden * config.intermediate_size)
    layer += (work.slots + work.context) * 2 * hidden * outer
    # scores and values: two products forward, four backward
    attention = 12 * work.seen * inner
    head = 6 * work.supervised * hidden * config.vocab_size  # of the draft and the target, and back
    markov = 6 * work.supervised * config.markov_rank * config.vocab_size
    return {
        "attention": float(config.num_hidden_layers * attention),
        "layers": float(config.num_hidden_layers * 6 * layer),
        "context": float(4 * work.context * taps * hidden),  # the taps need no gradient
        "heads": float(head + markov),
    }


def needed_flops(config: DSparkConfig, one: Pass) -> float:
    """All of `draft_flops` for a pass as it was drawn."""
    work = PassWork.of(one, int(config.block_size or 0))
    return sum(draft_flops(config, work).values())
