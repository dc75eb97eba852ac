"""One round of speculative decoding in plain PyTorch: propose, verify, commit.

Runs on any target, on CPU or GPU, and is what the graph-captured step is held against. Source:
DSpark, arXiv 2607.05147, inference algorithm.

State between rounds: s tokens committed to the target's cache and to the draft's context, and an
anchor, the token at position s, which is emitted but not yet consumed by either.

Symbols: S positions, n proposals, F tapped layers, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from dspark.decoding.block_verification import judge_block, params_of_round
from dspark.decoding.logprobs import Logprob, logprobs_of
from dspark.decoding.nextn import NextNDraft, NextNProposer
from dspark.decoding.prefix import PrefixCache, PromptContext, read_prompt
from dspark.decoding.proposer import BlockProposer, Proposer, draft_limit
from dspark.decoding.rejection import draw, judge
from dspark.decoding.sampling import SamplingParams, filter_logits, pick
from dspark.draft import DSparkDraftModel
from dspark.target import GoOn, Rows, Target

__all__ = ["Draft", "ReferenceStep", "StepResult", "Verification", "proposal_limit"]

Draft = DSparkDraftModel | NextNDraft

Verification = Literal["coupled", "rejection", "block"]
"""How sampled proposals are judged: by the noise that drew them (`sampling`), or by `rejection` or
`block_verification`, whose output is another one than without the draft, of the same distribution.
Greedily all are one."""


@dataclass(frozen=True)
class StepResult:
    """What one round added."""

    token_ids: list[int]
    """Accepted proposals, then the target's own token."""
    num_proposed: int
    num_accepted: int


def proposal_limit(draft: Draft, num_draft_tokens: int | None, threshold: float = 0.0) -> int:
    """`draft_limit` of any draft; a NEXTN block was given its number by name."""
    if num_draft_tokens is None and isinstance(draft, NextNDraft):
        num_draft_tokens = draft.block_size
    return draft_limit(draft.block_size, num_draft_tokens, threshold)


class ReferenceStep:
    """Decoding state of one sequence. Without a draft every round is one target step.

    ``top_logprobs``: keep `logprobs` of the tokens, with so many alternatives; None: don't.
    ``prefixes``: prompts that this target and draft have read, and where this one's go. A NEXTN
    block reads every prompt whole: it wants the hidden states of all of it. ``schedule``: accepted
    proposals step by step, in turn, where acceptance is simulated.

    Raises:
        ConfigError: `draft_limit` refuses the settings.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        params: SamplingParams,
        *,
        num_draft_tokens: int | None = None,
        confidence_threshold: float = 0.0,
        top_logprobs: int | None = None,
        verification: Verification = "coupled",
        prefixes: PrefixCache | None = None,
        schedule: Sequence[int] = (),
    ) -> None:
        self.target = target
        self._schedule, self._steps = schedule, 0
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
        self._of_hidden = isinstance(draft, NextNDraft)
        layer_ids: tuple[int, ...] = ()
        if draft is not None:
            self.limit = proposal_limit(draft, num_draft_tokens, confidence_threshold)
        if isinstance(draft, NextNDraft):
            self._proposer = NextNProposer(draft, params)
        elif draft is not None:
            self._proposer = BlockProposer(draft, params, threshold=confidence_threshold)
            layer_ids = draft.layer_ids
        self._rule: Verification = "coupled" if params.greedy else verification
        if self._proposer is not None and self._rule != "coupled":
            self._proposer.proposal_p = []
        self._cache = target.new_cache(layer_ids)
        self._anchor = torch.zeros((), dtype=torch.int64, device=target.device)

    @property
    def position(self) -> int:
        """Absolute position of the anchor."""
        return int(self._cache.length)

    def prefill(self, prompt_ids: Tensor, go_on: GoOn | None = None) -> int:
        """Consume the prompt [S]; the first token of the output, which is the first anchor.

        Raises:
            ReadingStopped: as `Target.read` does.
        """
        hidden: Tensor | None = None
        if self._of_hidden:
            rows = self.target.prefill(self._cache, prompt_ids, keep_hidden=True, go_on=go_on)
            logits, hidden = rows.logits, self._features(rows)
        else:
            # any other proposer is one of blocks
            context = cast(PromptContext | None, self._proposer)
            logits, self.num_reused = read_prompt(
                self.target, self._cache, prompt_ids, context, self._prefixes, go_on
            )
        where = torch.tensor([self._cache.length], device=self.target.device)
        self._anchor = pick(logits, self.params, where)[0]
        if hidden is not None and self._proposer is not None:
            following = torch.cat([prompt_ids[1:].to(self.target.device), self._anchor[None]])
            self._proposer.extend(hidden, following)
        if self._top_logprobs is not None:
            self.logprobs = logprobs_of(logits, [int(self._anchor)], self._top_logprobs)
        return int(self._anchor)

    def step(self, max_tokens: int | None = None) -> StepResult:
        """One round that emits at most ``max_tokens`` tokens (None: as many as come)."""
        most = self.limit if max_tokens is None else min(self.limit, max_tokens - 1)
        proposals = self.propose(most)
        choices, features = self.verify(proposals)
        return self.commit(proposals, choices, features)

    def propose(self, most: int) -> Tensor:
        """Up to ``most`` proposals [n] for the positions behind the anchor."""
        if self._proposer is None:
            return self._anchor.new_empty(0)
        self._proposer.params = self._params_of_round()
        return self._proposer.propose(self._anchor, most)

    @torch.no_grad()
    def verify(self, proposals: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choices [n+1] behind the anchor and each proposal, and what the draft is to
        read of these rows: taps [n+1, F*D] or, for a NEXTN block, hidden states [n+1, D]."""
        rows = self.target.verify(self._cache, torch.cat([self._anchor[None], proposals]))
        self._logits = rows.logits if self._top_logprobs is not None else None
        offsets = torch.arange(1, len(proposals) + 2, device=proposals.device)
        positions = self.position + offsets
        return self._choose(rows.logits, proposals, positions), self._features(rows)

    def _choose(self, logits: Tensor, proposals: Tensor, positions: Tensor) -> Tensor:
        if self._proposer is None or self._rule == "coupled":
            return pick(logits, self.params, positions)
        uniform, noise = draw(self._params_of_round().seed, positions, logits.shape[-1])
        target_p = filter_logits(logits, self.params).softmax(-1)
        drawn = self._proposer.proposal_p
        draft_p = torch.stack(drawn) if drawn else target_p[:0]
        rule = judge_block if self._rule == "block" else judge
        return rule(target_p, draft_p, proposals, uniform, noise)

    def _params_of_round(self) -> SamplingParams:
        if self._rule != "block":
            return self.params
        return params_of_round(self.params, self.position)

    def _features(self, rows: Rows) -> Tensor:
        if not self._of_hidden:
            return rows.taps
        assert rows.hidden is not None
        return rows.hidden

    @torch.no_grad()
    def commit(self, proposals: Tensor, choices: Tensor, features: Tensor) -> StepResult:
        """Keep the proposals that equal the target's choices, then the target's next choice."""
        kept = int((proposals == choices[:-1]).cumprod(0).sum())
        if self._schedule:
            kept = min(self._schedule[self._steps % len(self._schedule)], len(proposals))
            self._steps += 1
        self.target.commit(self._cache, kept + 1)
        if self._proposer is not None:
            self._proposer.extend(features[: kept + 1], choices[: kept + 1])
        self._anchor = choices[kept]
        token_ids = choices[: kept + 1].tolist()
        if self._top_logprobs is not None and self._logits is not None:
            self.logprobs = logprobs_of(self._logits[: kept + 1], token_ids, self._top_logprobs)
        return StepResult(token_ids, len(proposals), kept)
