"""One round of speculative decoding in plain PyTorch: propose, verify, commit.

Runs on any target, on CPU or GPU, and is what the graph-captured step is held against. Source:
DSpark, arXiv 2607.05147, inference algorithm.

State between rounds: s tokens committed to the target's cache and to the draft's context, and an
anchor, the token at position s, which is emitted but not yet consumed by either.

Symbols: K slots of a block, n proposals (<= K), D hidden, V vocabulary, C shortlist.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decoding.logprobs import Logprob, logprobs_of
from dspark.decoding.prefix import PrefixCache, read_prompt
from dspark.decoding.sampling import SamplingParams, pick, pick_candidate
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.target import Target

__all__ = ["MAX_PROPOSALS", "SHORTLIST", "Proposer", "ReferenceStep", "StepResult", "draft_limit"]

MAX_PROPOSALS = 15
"""A verify step has at most 16 rows, the anchor's among them."""

SHORTLIST = 64
"""Candidates of a slot that the Markov bias can reorder. Reading the whole second Markov matrix
once a slot would cost more than the draft's layers; a shortlist leaves acceptance as it is."""


@dataclass(frozen=True)
class StepResult:
    """What one round added."""

    token_ids: list[int]
    """Accepted proposals, then the target's own token."""
    num_proposed: int
    num_accepted: int


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


class Proposer:
    """The draft's side: its context of committed taps, and proposals behind an anchor."""

    def __init__(
        self, draft: DSparkDraftModel, params: SamplingParams, *, threshold: float = 0.0
    ) -> None:
        self.draft = draft
        self._params = params
        self._threshold = threshold
        self._context = draft.new_context()
        self._hidden: Tensor | None = None  # [K, D] of the last block

    def extend(self, taps: Tensor) -> None:
        """Append the taps [n, F*D] of tokens that the target has consumed and kept."""
        self.draft.extend(self._context, taps)

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """Views of what the context holds from position ``start`` on."""
        return self._context.written(start)

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Append ``rows`` positions that `written` gave."""
        self._context.restore(written, rows)

    @torch.no_grad()
    def propose(self, anchor: Tensor, most: int) -> Tensor:
        """Up to ``most`` proposals [n] behind ``anchor`` ([] int64), which follows the context."""
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
            previous = pick_candidate(logits, candidates[k], self._params, position + k + 1)
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


class ReferenceStep:
    """Decoding state of one sequence. Without a draft every round is one target step.

    ``top_logprobs``: keep `logprobs` of the tokens, with so many alternatives; None: don't.
    ``prefixes``: prompts that this target and draft have read, and where this one's go.

    Raises:
        ConfigError: `draft_limit` refuses the settings.
    """

    def __init__(
        self,
        target: Target,
        draft: DSparkDraftModel | None,
        params: SamplingParams,
        *,
        num_draft_tokens: int | None = None,
        confidence_threshold: float = 0.0,
        top_logprobs: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.target = target
        self.params = params
        self.logprobs: list[Logprob] | None = None
        """Of the tokens that `prefill` or `commit` added last."""
        self.num_reused = 0
        """Tokens of the prompt that were not read again."""
        self._prefixes = prefixes
        self._top_logprobs = top_logprobs
        self._logits: Tensor | None = None
        self.limit = 0
        self._proposer: Proposer | None = None
        if draft is not None:
            self.limit = draft_limit(draft.block_size, num_draft_tokens, confidence_threshold)
            self._proposer = Proposer(draft, params, threshold=confidence_threshold)
        self._cache = target.new_cache(draft.layer_ids if draft else ())
        self._anchor = torch.zeros((), dtype=torch.int64, device=target.device)

    @property
    def position(self) -> int:
        """Absolute position of the anchor."""
        return int(self._cache.length)

    def prefill(self, prompt_ids: Tensor) -> int:
        """Consume the prompt [S]; the first token of the output, which is the first anchor."""
        logits, self.num_reused = read_prompt(
            self.target, self._cache, prompt_ids, self._proposer, self._prefixes
        )
        where = torch.tensor([self._cache.length], device=self.target.device)
        self._anchor = pick(logits, self.params, where)[0]
        if self._top_logprobs is not None:
            self.logprobs = logprobs_of(logits, [int(self._anchor)], self._top_logprobs)
        return int(self._anchor)

    def step(self, max_tokens: int | None = None) -> StepResult:
        """One round that emits at most ``max_tokens`` tokens (None: as many as come)."""
        most = self.limit if max_tokens is None else min(self.limit, max_tokens - 1)
        proposals = self.propose(most)
        choices, taps = self.verify(proposals)
        return self.commit(proposals, choices, taps)

    def propose(self, most: int) -> Tensor:
        """Up to ``most`` proposals [n] for the positions behind the anchor."""
        if self._proposer is None:
            return self._anchor.new_empty(0)
        return self._proposer.propose(self._anchor, most)

    @torch.no_grad()
    def verify(self, proposals: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choices [n+1] behind the anchor and each proposal, and the rows' taps."""
        rows = self.target.verify(self._cache, torch.cat([self._anchor[None], proposals]))
        self._logits = rows.logits if self._top_logprobs is not None else None
        offsets = torch.arange(1, len(proposals) + 2, device=proposals.device)
        return pick(rows.logits, self.params, self.position + offsets), rows.taps

    @torch.no_grad()
    def commit(self, proposals: Tensor, choices: Tensor, taps: Tensor) -> StepResult:
        """Keep the proposals that equal the target's choices, then the target's next choice."""
        kept = int((proposals == choices[:-1]).cumprod(0).sum())
        self.target.commit(self._cache, kept + 1)
        if self._proposer is not None:
            self._proposer.extend(taps[: kept + 1])
        self._anchor = choices[kept]
        token_ids = choices[: kept + 1].tolist()
        if self._top_logprobs is not None and self._logits is not None:
            self.logprobs = logprobs_of(self._logits[: kept + 1], token_ids, self._top_logprobs)
        return StepResult(token_ids, len(proposals), kept)
