"""Launches of a NEXTN block as the draft: the rows that were kept, then one row a proposal.

Row t of the last step goes into the block with the token that turned out to follow it; the output
behind the last one gives the first proposal. Every further proposal is a pass over a single row:
the token just proposed, and the block's own output in the place of the target's hidden state. The
definition is `target.mtp`. Of several ranks each has its part of the block and of the head; the way
into the block is whole on every one.

Symbols: R = 16 rows, D hidden.
"""

from torch import Tensor

from dspark.kernels.accept import Field
from dspark.kernels.launch import ROWS
from dspark.kernels.nextn import join_norms, pick_row, take_token
from dspark.kernels.reduce_norm import parts_norm
from dspark.serving.graph.arena import PICK_PARTS, Arena, Caches
from dspark.serving.graph.target_body import TargetBody, head_logits, product
from dspark.serving.graph.weights import NextNWeights, TargetWeights

__all__ = ["NextNBody"]

_NAME, _HEAD = "NEXTN", "draft head"
"""Components of a step's breakdown."""


class NextNBody:
    """Calls every kernel of the draft's part: ``depth`` passes through the block."""

    def __init__(
        self,
        weights: NextNWeights,
        target: TargetWeights,
        arena: Arena,
        caches: Caches,
        depth: int,
    ) -> None:
        self.weights, self.target, self.arena, self.depth = weights, target, arena, depth
        self.eps = target.config.rms_norm_eps
        self._kept = TargetBody(
            target, arena, caches, (), depth + 1, cursor=Field.INJECT_BASE,
            live_rows=Field.INJECT_COUNT, component=_NAME,
        )  # fmt: skip
        self._one = TargetBody(
            target, arena, caches, (), 1, cursor=Field.DRAFT_CURSOR,
            live_rows=Field.DRAFT_ROWS, component=_NAME,
        )  # fmt: skip
        hidden = arena.residual.shape[1]
        self._joined = arena.scratch("NEXTN joined", (ROWS, 2 * hidden), arena.dtype)

    def __call__(self) -> None:
        weights, arena = self.weights, self.arena
        if arena.on(_NAME):
            join_norms(
                arena.ints, arena.proposals, self.target.embedding, arena.normed, weights.enorm,
                weights.hnorm, self._joined, depth=self.depth, eps=self.eps,
            )  # fmt: skip
        self.block(self._kept)
        self.propose(0)
        for slot in range(1, self.depth):
            self.block(self._one)
            self.propose(slot)

    def block(self, body: TargetBody) -> None:
        """What was joined through the block; its hidden states in `arena.normed`."""
        weights, arena = self.weights, self.arena
        parts = product(arena, _NAME, "NEXTN in", self._joined, weights.eh_proj)
        if arena.on(_NAME):
            parts_norm(
                parts, weights.layer.norm, arena.normed, eps=self.eps, residual=arena.residual
            )
        # its cache stands behind those of the target's layers
        body.layer(len(self.target.layers), weights.layer, weights.norm)

    def propose(self, slot: int) -> None:
        """Proposal ``slot``, and the input of the pass behind it."""
        weights, arena = self.weights, self.arena
        logits = head_logits(arena, _HEAD, self.target.head)
        values, ids = self._best(logits, slot)
        if arena.on(_NAME):
            take_token(
                values, ids, arena.proposals, arena.ints, self.target.embedding, arena.normed,
                weights.enorm, weights.hnorm, self._joined, slot=slot, eps=self.eps,
            )  # fmt: skip

    def _best(self, logits: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Best scores of parts of the vocabulary for proposal ``slot``, and their ids."""
        arena, exchange = self.arena, self.arena.exchange
        if exchange is None:
            values = arena.scratch("NEXTN picked", (PICK_PARTS,))
            ids = arena.scratch("NEXTN picked ids", (PICK_PARTS,), arena.ints.dtype)
            if arena.on(_HEAD):
                pick_row(logits, arena.ints, arena.reals, values, ids, slot=slot)
            return values, ids
        # a row of the step's choice is exchanged; the others are nobody's
        mine = arena.scratch("NEXTN picked", (ROWS, PICK_PARTS))
        mine_ids = arena.scratch("NEXTN picked ids", (ROWS, PICK_PARTS), arena.ints.dtype)
        best = arena.scratch("NEXTN best", (ROWS, exchange.peers.ranks))
        best_ids = arena.scratch("NEXTN best ids", (ROWS, exchange.peers.ranks), arena.ints.dtype)
        if arena.on(_HEAD):
            pick_row(
                logits, arena.ints, arena.reals, mine[0], mine_ids[0], slot=slot,
                first=exchange.first,
            )  # fmt: skip
            exchange.choose(mine, mine_ids, arena.mailbox, best, best_ids)
        return best[0], best_ids[0]
