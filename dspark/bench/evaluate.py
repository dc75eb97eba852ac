"""`dspark eval`: real batch-1 decoding of prompt sets, with drafts and without, by one loop.

Acceptance figures are those of `dspark.acceptance`. Beside them, per set and pooled:

- ``interval``, ``intervals``: 95%, as `bench.bootstrap` takes them.
- ``accept_length_macro``: mean of the prompts' own accept lengths. ``over_sets``: of the sets'.
- ``tpot_ms``: mean over prompts with more than one new token of (last - first) / (tokens - 1), as
  `sglang.bench_serving` defines it, here without HTTP. ``tpot_ms_plain``: the same loop without a
  draft on the same prompts, over the first ``plain_tokens`` tokens of each; in turns, so that a
  slow minute of the machine hits all.
- ``tokens_per_s``: new tokens / (prefill + decode time), with the draft.
- ``confidence``, of all prompts together: how far the draft's confidence head can be believed, as
  `decoding.calibration` defines it, ``before`` as the head has it and ``after`` with the
  checkpoint's temperatures (None without any). Told by replays of whole blocks, which no time above
  counts. None where a threshold cut blocks whose proposals were judged by rejection or as a block:
  the whole ones would have given other tokens.
- ``lossless``: every prompt's token ids are equal with and without the draft, to their ends. None
  where sampled proposals are judged by rejection or as a block: that keeps the distribution, not
  the tokens of a seed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dspark.acceptance import macro_accept_length, pooled
from dspark.bench.bootstrap import bootstrap_interval, intervals, over_sets, time_per_token_ms
from dspark.bench.lossless import Comparison, Difference, first_difference
from dspark.bench.prompt_runs import comparable, decode_all
from dspark.bench.records import Pages, PromptRun
from dspark.config import EvalSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.decoding import (
    Completion,
    DecodeParams,
    Draft,
    NextNDraft,
    Outcomes,
    SamplingParams,
    Verification,
    measures,
    proposal_limit,
    reliability,
)
from dspark.errors import DataError
from dspark.target import Target

__all__ = [
    "EvalReport",
    "Prompt",
    "encode_sets",
    "evaluate",
    "evaluate_all",
    "figures",
    "tpot_ms",
]

Prompt = str | Sequence[Mapping[str, Any]]
"""A user's text, or the messages of a conversation up to the turn to be answered."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalReport:
    """Figures of each prompt set, of all together, and the checks beside them."""

    sets: dict[str, dict[str, Any]]
    pooled: dict[str, Any]
    lossless: dict[str, Comparison]
    """`greedy` and `sampled`: one over all prompts, the other over the first of them; what need not
    be equal is missing."""
    rejects: Rejects
    """Prompts that were not decoded: the template refused them, or the context has no room."""
    settings: dict[str, Any]
    prompt_ids: dict[str, list[list[int]]]
    """Token ids of the prompts that were decoded, by set."""
    runs: dict[str, list[PromptRun]]
    """What each of them gave, in the same order."""

    def summary(self) -> dict[str, Any]:
        """As one JSON object; the pooled figures stand at the top level."""
        return {
            **self.pooled,
            "lossless": all(one.equal for one in self.lossless.values()) if self.lossless else None,
            "lossless_checks": {name: one.summary() for name, one in self.lossless.items()},
            "sets": self.sets,
            "over_sets": over_sets(self.runs, seed=self.settings["seed"]),
            "rejects": self.rejects.to_dict(),
            "settings": self.settings,
        }


def evaluate(
    target: Target,
    draft: Draft,
    tokenizer: Any,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    settings: EvalSettings,
    **options: Any,
) -> EvalReport:
    """`evaluate_all` of a single draft."""
    return evaluate_all(target, {"": draft}, tokenizer, prompt_sets, settings, **options)[""]


def evaluate_all(
    target: Target,
    drafts: Mapping[str, Draft],
    tokenizer: Any,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    settings: EvalSettings,
    *,
    num_draft_tokens: int | None = None,
    confidence_threshold: float = 0.0,
    thinking: bool | None = None,
    verification: Verification = "coupled",
    other_mode_prompts: int = 16,
    pages: Pages | None = None,
) -> dict[str, EvalReport]:
    """Decode the first ``settings.limit`` prompts of each set; the report of each draft.

    All decode the same prompts, in turns, and are held against one plain decode of them.

    Args:
        tokenizer: the target's (transformers PreTrainedTokenizerBase); its template is used.
        prompt_sets: name -> prompts; further user turns are the caller's to send.
        num_draft_tokens: proposals a round; None is `decoding.proposal_limit`'s default.
        confidence_threshold: cut a block before the first slot below it, 0 keeps all.
        thinking: passed to the template.
        other_mode_prompts: prompts over which losslessness is checked at the other kind of
            sampling too (greedy if the run samples, sampled at temperature 1 if it is greedy),
            64 new tokens at most.
        pages: prompts that are finished already, and where the others go.

    Raises:
        DataError: a set has no prompt that can be decoded.
        TargetError: the tokenizer has no chat template.
        ConfigError: a setting is out of range.
    """
    encoded, rejects = encode_sets(target, tokenizer, prompt_sets, settings.limit, thinking)
    most = {
        name: proposal_limit(draft, num_draft_tokens, confidence_threshold)
        for name, draft in drafts.items()
    }
    params = DecodeParams(
        max_new_tokens=settings.max_new_tokens,
        sampling=SamplingParams(
            temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed
        ),
        num_draft_tokens=num_draft_tokens,
        confidence_threshold=confidence_threshold,
        verification=verification,
    )
    everyones = decode_all(
        target, drafts, encoded, params, settings.plain_tokens, other_mode_prompts, pages or Pages()
    )
    reports = {}
    for name, runs in everyones.items():
        every = [run for one in runs.values() for run in one]
        counts = pooled((run.drafted.stats for run in every), most[name])
        if counts.proposed and not counts.accepted:
            log.warning(
                "none of the %d drafted tokens was accepted: the draft is untrained, or its "
                "weights are read with another meaning than they were trained",
                counts.proposed,
            )
        reports[name] = EvalReport(
            sets={part: figures(one, seed=settings.seed) for part, one in runs.items()},
            pooled={
                **figures(every, seed=settings.seed),
                "confidence": _confidence(drafts[name], every),
            },
            lossless=_lossless(params, every),
            rejects=rejects,
            settings={
                **settings.model_dump(mode="json", exclude={"prompts"}),
                "block_size": drafts[name].block_size,
                "num_draft_tokens": most[name],
                "confidence_threshold": confidence_threshold,
                "thinking": thinking,
                "verification": verification,
            },
            prompt_ids={part: [list(ids) for ids in one] for part, one in encoded.items()},
            runs=runs,
        )
    return reports


def encode_sets(
    target: Target,
    tokenizer: Any,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    limit: int | None,
    thinking: bool | None = None,
) -> tuple[dict[str, list[list[int]]], Rejects]:
    """Token ids of the first ``limit`` prompts of each set; what cannot be decoded is counted.

    Raises:
        DataError: a set has no prompt that can be decoded.
        TargetError: the tokenizer has no chat template.
    """
    encoded: dict[str, list[list[int]]] = {}
    rejects = Rejects()
    for name, prompts in prompt_sets.items():
        encoded[name] = []
        for index, prompt in enumerate(list(prompts)[:limit]):
            rejects.read += 1
            try:
                encoded[name].append(_encode(target, tokenizer, prompt, thinking))
            except RowError as error:
                rejects.add(error, f"{name}:{index}")
        if not encoded[name]:
            why = rejects.explained() or "it is empty"
            raise DataError(f"prompt set '{name}' holds no prompt that can be decoded: {why}")
    if not encoded:
        raise DataError("there is no prompt set to evaluate")
    if rejects.rejected:
        log.warning("%s", rejects.summary())
    return encoded, rejects


def _encode(target: Target, tokenizer: Any, prompt: Prompt, thinking: bool | None) -> list[int]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    ids = generation_prompt_ids(
        tokenizer, [dict(one) for one in messages], thinking, vocab_size=target.vocab_size
    )
    room = target.max_position_embeddings
    if len(ids) >= room:
        raise RowError(Reason.PROMPT_TOO_LONG, f"{len(ids)} tokens, the target has {room}")
    return ids


def _confidence(draft: Draft, runs: Sequence[PromptRun]) -> dict[str, Any] | None:
    rounds = [run.outcomes for run in runs if run.outcomes is not None]
    if isinstance(draft, NextNDraft) or not rounds:
        return None
    whole, temperatures = Outcomes.together(rounds), draft.config.sts_temperatures
    told: dict[str, Any] = {"before": measures(whole), "after": None}
    told["reliability"] = {"before": reliability(whole), "after": None}
    if temperatures:
        told["after"] = measures(whole, temperatures)
        told["reliability"]["after"] = reliability(whole, temperatures)
    return told


def _lossless(params: DecodeParams, runs: Sequence[PromptRun]) -> dict[str, Comparison]:
    found = {}
    mine, other = ("greedy", "sampled") if params.sampling.greedy else ("sampled", "greedy")
    if comparable(params):
        found[mine] = _comparison(
            [
                (len(run.plain), first_difference(run.drafted.token_ids, run.plain, index))
                for index, run in enumerate(runs)
            ]
        )
    if beside := [run.other for run in runs if run.other is not None]:
        found[other] = _comparison(beside)
    return {kind: found[kind] for kind in ("greedy", "sampled") if kind in found}


def _comparison(told: Sequence[tuple[int, Difference | None]]) -> Comparison:
    differences = tuple(one for _, one in told if one is not None)
    return Comparison(len(told), sum(tokens for tokens, _ in told), differences)


def figures(runs: Sequence[PromptRun], *, seed: int = 0) -> dict[str, Any]:
    """All figures of some prompts by name, as the module's head defines them."""
    stats = [run.drafted.stats for run in runs]
    total = pooled(stats, stats[0].block_size)
    tokens = sum(len(run.drafted.token_ids) for run in runs)
    seconds = sum(run.drafted.prefill_s + run.drafted.decode_s for run in runs)
    fast = tpot_ms([run.drafted for run in runs])
    plain = tpot_ms([run.plain_timed for run in runs])
    return {
        "num_prompts": len(runs),
        "num_tokens": tokens,
        **total.summary(),
        "full_block_rate": total.full_block_rate,
        "interval": bootstrap_interval(stats, seed=seed),
        "intervals": intervals(runs, seed=seed),
        "accept_length_macro": macro_accept_length(stats),
        "tpot_ms": fast,
        "tpot_ms_plain": plain,
        "speedup": plain / fast if fast and plain else None,
        "tokens_per_s": tokens / seconds if seconds else None,
        "lossless": all(run.lossless for run in runs) if all(run.plain for run in runs) else None,
        "finished_by_stop": sum(run.drafted.finish_reason == "stop" for run in runs),
    }


def tpot_ms(completions: Sequence[Completion]) -> float | None:
    """Mean milliseconds per token after the first; None if no completion has a second token."""
    each = [time for one in completions if (time := time_per_token_ms(one)) is not None]
    return fmean(each) if each else None
