"""Decode one prompt at batch 1: prefill, rounds, and where they stop.

A stop id ends the output inside a block: what the round emitted behind it is dropped before
anything counts it. The stop token itself is part of the output, as in transformers.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dspark.acceptance import AcceptStats
from dspark.decoding.logprobs import MAX_TOP_LOGPROBS, Logprob
from dspark.decoding.prefix import PrefixCache
from dspark.decoding.reference_step import Draft, ReferenceStep, Verification, proposal_limit
from dspark.decoding.sampling import SamplingParams
from dspark.errors import ConfigError
from dspark.target import GoOn, ReadingStopped, Target

__all__ = ["Commit", "Completion", "DecodeParams", "check_request", "decode", "stop_ids", "stream"]


@dataclass(frozen=True)
class DecodeParams:
    """What a request may set.

    Raises:
        ConfigError: max_new_tokens is below 1, or top_logprobs out of range.
    """

    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    """Beside the target's own end ids."""
    ignore_eos: bool = False
    """Do not stop at the target's end ids (``stop_ids`` still count)."""
    num_draft_tokens: int | None = None
    """Proposals a round; None: `draft_limit`'s default; 0: as if there were no draft."""
    confidence_threshold: float = 0.0
    """Cut the proposals before the first slot below it; 0 never cuts."""
    verification: Verification = "coupled"
    """Any but the first is for the reference engine."""
    top_logprobs: int | None = None
    """Log probabilities of the tokens, with so many alternatives; None: none are computed."""

    def __post_init__(self) -> None:
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ConfigError(f"top_logprobs must lie in 0..{MAX_TOP_LOGPROBS}, got {top}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Commit:
    """Tokens that became final together."""

    token_ids: list[int]
    finish_reason: str | None
    """``stop`` or ``length`` on the last commit."""
    num_proposed: int | None
    """None for the prefill's token, which is no round."""
    num_accepted: int
    step_s: float
    """Time the prefill or the round took."""
    logprobs: list[Logprob] | None = None
    """One a token, where they were asked for."""
    num_reused: int = 0
    """Of the prefill: tokens of the prompt that were not read again."""


@dataclass(frozen=True)
class Completion:
    """A whole output."""

    token_ids: list[int]
    finish_reason: str
    stats: AcceptStats
    prefill_s: float
    step_s: list[float]
    """One entry a round."""

    @property
    def decode_s(self) -> float:
        return sum(self.step_s)


def check_request(
    positions: int,
    prompt_tokens: int,
    max_new_tokens: int,
    name: str = "max_new_tokens",
    context: int | None = None,
) -> None:
    """Refuse what cannot fit the target's positions.

    ``name`` is what the caller calls ``max_new_tokens``. ``context``: positions that an engine has
    room for; None: as many as the target knows.

    Raises:
        ConfigError: the prompt is empty, or prompt and output exceed the positions.
    """
    whose, limit = "the target's", positions
    if context is not None and context < limit:
        whose, limit = "the engine's", context
    if prompt_tokens < 1:
        raise ConfigError("the prompt has no tokens")
    if prompt_tokens + max_new_tokens > limit:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {name} {max_new_tokens} make "
            f"{prompt_tokens + max_new_tokens}, more than {whose} {limit} positions"
        )


def stop_ids(target: Target, params: DecodeParams) -> frozenset[int]:
    """Ids that end an output."""
    return params.stop_ids | (frozenset() if params.ignore_eos else target.eos_ids)


def stream(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int],
    params: DecodeParams,
    prefixes: PrefixCache | None = None,
    go_on: GoOn | None = None,
    schedule: Sequence[int] = (),
) -> Iterator[Commit]:
    """Yield what each round makes final; the first commit is the prefill's token.

    With the same seed the tokens do not depend on the draft, nor on ``prefixes``: prompts that
    these two have read before. The context limit ends the output with ``length``. Where
    ``go_on``, asked between the pieces of the prompt, says no, there is no commit. ``schedule``:
    accepted proposals step by step, in turn, where acceptance is simulated.

    Raises:
        ConfigError: the prompt leaves no room for a token, or the draft settings are out of range.
    """
    check_request(target.max_position_embeddings, len(prompt_ids), 1)
    room = target.max_position_embeddings - len(prompt_ids)
    left = min(params.max_new_tokens, room)
    stops = stop_ids(target, params)
    step = ReferenceStep(
        target,
        draft if params.num_draft_tokens != 0 else None,
        params.sampling,
        num_draft_tokens=params.num_draft_tokens,
        confidence_threshold=params.confidence_threshold,
        top_logprobs=params.top_logprobs,
        verification=params.verification,
        prefixes=prefixes,
        schedule=schedule,
    )
    begun = time.perf_counter()
    try:
        tokens = [step.prefill(torch.tensor(prompt_ids, dtype=torch.int64), go_on)]
    except ReadingStopped:
        return
    proposed: int | None = None
    accepted = 0
    while True:
        cut = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        tokens = tokens[:cut]
        left -= len(tokens)
        reason = "stop" if cut is not None else "length" if left == 0 else None
        took = time.perf_counter() - begun
        logprobs = step.logprobs[:cut] if step.logprobs is not None else None
        reused = step.num_reused if proposed is None else 0
        kept = min(accepted, len(tokens))
        yield Commit(tokens, reason, proposed, kept, took, logprobs, reused)
        if reason is not None:
            return
        begun = time.perf_counter()
        result = step.step(max_tokens=left)
        tokens, proposed, accepted = result.token_ids, result.num_proposed, result.num_accepted


def decode(
    target: Target,
    draft: Draft | None,
    prompt_ids: Sequence[int],
    params: DecodeParams,
) -> Completion:
    """`stream`, gathered. Raises as `stream` does."""
    limit = 0
    if draft is not None and params.num_draft_tokens != 0:
        limit = proposal_limit(draft, params.num_draft_tokens, params.confidence_threshold)
    stats = AcceptStats(limit)
    tokens: list[int] = []
    steps: list[float] = []
    reason = "length"
    for commit in stream(target, draft, prompt_ids, params):
        tokens += commit.token_ids
        steps.append(commit.step_s)
        reason = commit.finish_reason or reason
        if commit.num_proposed is not None:
            stats.add(
                num_proposed=commit.num_proposed,
                num_accepted=commit.num_accepted,
                num_emitted=len(commit.token_ids),
            )
    return Completion(tokens, reason, stats, steps[0], steps[1:])
