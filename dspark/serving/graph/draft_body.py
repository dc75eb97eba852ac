"""Launches of the draft: committed rows into its context, then a block, then its proposals.

Symbols: R = 16 rows, K slots, C candidates of a slot.
"""

import torch
from torch import Tensor

from dspark.kernels.accept import Field, Real
from dspark.kernels.draft_attention import draft_append, draft_attend, draft_combine, draft_rotate
from dspark.kernels.launch import ROWS
from dspark.kernels.products import swiglu16
from dspark.kernels.proposals import chain, pair_bias, shortlist
from dspark.kernels.reduce_norm import embed_norm
from dspark.serving.graph.arena import Arena, Caches
from dspark.serving.graph.exchange import SHORTLIST_EACH, SHORTLIST_PARTS
from dspark.serving.graph.sums import add_norm, norm_sum
from dspark.serving.graph.target_body import head_logits, product
from dspark.serving.graph.weights import DraftWeights, TargetWeights

__all__ = ["DraftBody"]


class DraftBody:
    """Calls every kernel of the draft's part once."""

    def __init__(
        self,
        weights: DraftWeights,
        target: TargetWeights,
        arena: Arena,
        caches: Caches,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.weights, self.target, self.arena, self.caches = weights, target, arena, caches
        width = weights.fc.shape[1]
        # with several ranks each multiplies its share of the taps
        self.taps = arena.taps[:, rank * width : (rank + 1) * width] if ranks > 1 else arena.taps

    def __call__(self) -> None:
        self.inject()
        self.block()
        self.propose()

    def inject(self) -> None:
        """Keys and values of the rows that the last step kept."""
        weights, arena = self.weights, self.arena
        assert self.caches.keys is not None
        assert self.caches.values is not None
        parts = product(arena, "draft context", "fc", self.taps, weights.fc)
        if arena.on("draft context"):
            norm_sum(arena, parts, weights.context_norm, eps=weights.eps)
        projected = product(arena, "draft context", "context", arena.normed, weights.context)
        if arena.on("draft context"):
            draft_append(
                projected, weights.context_k_norms, weights.inverse, self.caches.keys,
                self.caches.values, base=arena.of(Field.INJECT_BASE),
                count=arena.of(Field.INJECT_COUNT), eps=weights.eps, amplitude=weights.amplitude,
            )  # fmt: skip

    def block(self) -> None:
        """The block's hidden states behind the final norm, in `arena.normed`."""
        weights, arena = self.weights, self.arena
        assert self.caches.keys is not None
        assert self.caches.values is not None
        heads, size, slots = weights.heads, weights.size, weights.block_size
        if arena.on("draft layers"):
            embed_norm(
                arena.of(Field.ANCHOR), self.target.embedding, weights.layers[0].norm,
                arena.residual, arena.normed, eps=weights.eps, fill=weights.mask_token_id,
            )  # fmt: skip
        lanes, groups = arena.tuning.draft_lanes, weights.groups
        qkv = arena.scratch("draft rotated", (heads + 2 * groups, ROWS, size), arena.dtype)
        total = arena.scratch("draft total", (lanes, ROWS, heads, size))
        peaks = arena.scratch("draft peaks", (lanes, ROWS, heads))
        masses = arena.scratch("draft masses", (lanes, ROWS, heads))
        mixed = arena.scratch("draft mixed", (ROWS, heads * size), arena.dtype)
        for index, layer in enumerate(weights.layers):
            projected = product(arena, "draft layers", "draft qkv", arena.normed, layer.qkv)
            if arena.on("draft attention"):
                draft_rotate(
                    projected, layer.q_norm, layer.k_norm, weights.inverse, qkv,
                    context=arena.of(Field.CURSOR), groups=groups, eps=weights.eps,
                    amplitude=weights.amplitude,
                )  # fmt: skip
                draft_attend(
                    qkv, self.caches.keys[index], self.caches.values[index], total, peaks, masses,
                    context=arena.of(Field.CURSOR), slots=slots, scale=size**-0.5,
                    chunk=arena.tuning.draft_chunk,
                )  # fmt: skip
                draft_combine(total, peaks, masses, mixed, slots=slots)
            out = product(arena, "draft layers", "mixed", mixed, layer.out)
            if arena.on("draft layers"):
                add_norm(arena, out, layer.ffn_norm, eps=weights.eps)
            parts = product(arena, "draft layers", "gate up", arena.normed, layer.gate_up)
            inner = arena.scratch("draft inner", (ROWS, layer.down.shape[1]), arena.dtype)
            if arena.on("draft layers"):
                swiglu16(parts, inner)
            out = product(arena, "draft layers", "fed", inner, layer.down)
            last = index + 1 == len(weights.layers)
            after = weights.norm if last else weights.layers[index + 1].norm
            if arena.on("draft layers"):
                add_norm(arena, out, after, eps=weights.eps)

    def propose(self) -> None:
        """Tokens for the slots, one after the other, and how many."""
        weights, arena, slots = self.weights, self.arena, self.weights.block_size
        logits = head_logits(arena, "draft head", self.target.head)
        count = SHORTLIST_PARTS * SHORTLIST_EACH
        if not arena.on("proposals"):
            return
        values, ids = self._candidates(logits, count)
        w1, w2 = weights.markov or (None, None)
        conf_weight, conf_bias, temperatures = weights.confidence or (None, None, None)
        bias = arena.scratch("bias", (slots, count, count))
        confidence = arena.scratch("confidence", (slots, count))
        pair_bias(
            ids, arena.of(Field.ANCHOR), w1, w2, arena.normed, conf_weight, conf_bias,
            temperatures, bias, confidence, slots=slots,
        )  # fmt: skip
        chain(
            values, ids, bias if weights.markov else None,
            confidence if weights.confidence else None, arena.proposals, arena.of(Field.COUNT),
            position=arena.of(Field.CURSOR), limit=arena.of(Field.LIMIT),
            threshold=arena.real(Real.THRESHOLD), temperature=arena.real(Real.TEMPERATURE),
            top_p=arena.real(Real.TOP_P), top_k=arena.of(Field.TOP_K),
            min_p=arena.real(Real.MIN_P), seed_low=arena.of(Field.SEED_LOW),
            seed_high=arena.of(Field.SEED_HIGH), slots=slots,
        )  # fmt: skip

    def _candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The best of each slot: logits and ids [K, C] from the whole vocabulary."""
        arena, slots, exchange = self.arena, self.weights.block_size, self.arena.exchange
        mine = count if exchange is None else exchange.candidates
        first = 0 if exchange is None else exchange.first
        both = arena.scratch("candidates", (2, slots, mine), torch.int32)
        shortlist(
            logits, both[0].view(torch.float32), both[1], slots=slots, first=first,
            per_part=SHORTLIST_EACH, parts=mine // SHORTLIST_EACH,
        )  # fmt: skip
        if exchange is not None:
            whole = arena.scratch("all candidates", (2, slots, count), torch.int32)
            exchange.shortlist(both, whole)
            both = whole
        return both[0].view(torch.float32), both[1]
