"""What a round asks of a draft: its context, and proposals behind an anchor.

Symbols: n tokens, K slots of a block, F tapped layers, D hidden, C shortlist.
"""

from typing import Protocol

import torch
from torch import Tensor

from dspark.decoding.sampling import SamplingParams, filter_logits, pick_candidate
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError

__all__ = ["MAX_PROPOSALS", "SHORTLIST", "BlockProposer", "Proposer", "draft_limit"]

MAX_PROPOSALS = 15
"""A verify step has at most 16 rows, the anchor's among them."""

SHORTLIST = 256
"""Candidates of a slot that the Markov bias can reorder. Reading the whole second Markov matrix
once a slot would cost more than the draft's layers. It is not free: the released SmolLM2 draft's
accept length over 24 held-out prompts is 2.28 with this many, with 64 and with all 2.25 and 2.28
greedily; at temperature 1 it is 1.74, with 64 and with all 1.70 and 1.81."""


def draft_limit(block_size: int, num_draft_tokens: int | None, threshold: float = 0.0) -> int:
    """Proposals a round makes at most.

    By default the most that fill verify tiles of 8 or 16 rows: a block of 8 proposes 7 since an
    eighth proposal would double the rows for the least likely slot.

    Raises:
        ConfigError: more than the block or the verify step has, or a threshold outside 0..1.
    """
    if not 0 <= threshold <= 1:
        raise ConfigError(f"confidence_threshold must lie in 0..1, got {threshold}")
    if num_draft_tokens is None:
        return 7 if block_size == 8 else min(block_size, MAX_PROPOSALS)
    if not 1 <= num_draft_tokens <= block_size:
        raise ConfigError(
            f"num_draft_tokens must lie in 1..{block_size} (the draft's block size), "
            f"got {num_draft_tokens}"
        )
    if num_draft_tokens > MAX_PROPOSALS:
        raise ConfigError(
            f"num_draft_tokens must be at most {MAX_PROPOSALS}: a step verifies 16 rows, the "
            f"anchor's among them; got {num_draft_tokens}"
        )
    return num_draft_tokens


class Proposer(Protocol):
    """A draft of one sequence."""

    params: SamplingParams
    """How proposals are drawn."""
    proposal_p: list[Tensor] | None
    """What each proposal of the last call was drawn from, [V] float32; None: not kept."""

    def extend(self, features: Tensor, next_ids: Tensor) -> None:
        """Append what the target says of tokens [n, ...] that it has consumed and kept.

        ``next_ids`` [n]: the token behind each, the anchor behind the last.
        """
        ...

    def propose(self, anchor: Tensor, most: int) -> Tensor:
        """Up to ``most`` proposals [n] behind ``anchor`` ([] int64), which follows the context."""
        ...


class BlockProposer:
    """A DSpark draft: its context are the taps of committed tokens."""

    def __init__(
        self, draft: DSparkDraftModel, params: SamplingParams, *, threshold: float = 0.0
    ) -> None:
        self.draft = draft
        self.params = params
        self._threshold = threshold
        self._context = draft.new_context()
        self.proposal_p: list[Tensor] | None = None
        self._hidden: Tensor | None = None  # [K, D] of the last block

    def extend(self, features: Tensor, next_ids: Tensor | None = None) -> None:
        """Append taps [n, F*D]; what stands behind them is not read."""
        self.draft.extend(self._context, features)

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """Views of what the context holds from position ``start`` on."""
        return self._context.written(start)

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Append ``rows`` positions that `written` gave."""
        self._context.restore(written, rows)

    @torch.no_grad()
    def propose(self, anchor: Tensor, most: int) -> Tensor:
        """As `Proposer.propose`; ends before the first slot of too little confidence."""
        if self.proposal_p is not None:
            self.proposal_p = []
        if most < 1:
            return anchor.new_empty(0)
        draft, head = self.draft, self.draft.markov_head
        position = self._context.length
        self._hidden = hidden = draft.block_hidden(self._context, anchor)
        base = draft.block_logits(hidden)[:most].float()
        values, candidates = base.topk(min(SHORTLIST, base.shape[-1]), dim=-1)
        proposals: list[Tensor] = []
        previous, state = anchor, None
        for k in range(len(base)):
            embedding = None
            logits = values[k]
            if head is not None:
                embedding = head.embed(previous)
                latent, state = head.step(embedding, hidden[k], state)
                rows = head.markov_w2.weight[candidates[k]]
                logits = logits + (rows @ latent).float()
            if self._threshold > 0:
                confidence = draft.confidence(hidden[k], embedding, k)
                if confidence is not None and float(confidence) < self._threshold:
                    break
            if self.proposal_p is not None:
                some = filter_logits(logits[None], self.params)[0].softmax(-1)
                every = some.new_zeros(base.shape[-1])
                self.proposal_p.append(every.index_copy(0, candidates[k], some))
            previous = pick_candidate(logits, candidates[k], self.params, position + k + 1)
            proposals.append(previous)
        return torch.stack(proposals) if proposals else anchor.new_empty(0)

    @torch.no_grad()
    def confidence_logits(self, anchor: Tensor, proposals: Tensor) -> Tensor | None:
        """The confidence head's logits [n] behind what `propose` just gave; None without one."""
        draft, head = self.draft, self.draft.markov_head
        if self._hidden is None:
            return None
        before = torch.cat([anchor[None], proposals])[: len(proposals)]
        embedding = None if head is None else head.embed(before)
        return draft.confidence_logits(self._hidden[: len(proposals)], embedding)
