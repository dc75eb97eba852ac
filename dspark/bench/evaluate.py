"""`dspark eval`: real batch-1 decoding of prompt sets, with drafts and without, by one loop.

Acceptance figures are those of `dspark.acceptance`. Beside them, per set and pooled:

- ``interval``: 95% percentile bootstrap of ``accept_length``. Prompts are resampled, each with its
  emitted tokens and its rounds together, and the ratio of the two sums is taken (1,000 times,
  seeded), because rounds of one prompt are not independent.
- ``accept_length_macro``: mean of the prompts' own accept lengths.
- ``tpot_ms``: mean over prompts with more than one new token of (last - first) / (tokens - 1), as
  `sglang.bench_serving` defines it, here without HTTP. ``tpot_ms_plain``: the same loop without a
  draft on the same prompts, over the first ``plain_tokens`` tokens of each; in turns, so that a
  slow minute of the machine hits all.
- ``tokens_per_s``: new tokens / (prefill + decode time), with the draft.
- ``confidence``, of all prompts together: how far the draft's confidence head can be believed, as
  `decoding.calibration` defines it, ``before`` as the head has it and ``after`` with the
  checkpoint's temperatures (None without any). Told by replays, which no time above counts.
- ``lossless``: every prompt's token ids are equal with and without the draft, to their ends.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from dspark.acceptance import AcceptStats, macro_accept_length, pooled
from dspark.bench.lossless import Comparison, compare, first_difference, seeded
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
    decode,
    decode_plain,
    measures,
    proposal_limit,
    replay,
)
from dspark.errors import DataError
from dspark.progress import Bar, track
from dspark.target import Target

__all__ = [
    "EvalReport",
    "Prompt",
    "PromptRun",
    "bootstrap_interval",
    "encode_sets",
    "evaluate",
    "evaluate_all",
    "figures",
    "tpot_ms",
]

Prompt = str | Sequence[Mapping[str, Any]]
"""A user's text, or the messages of a conversation up to the turn to be answered."""

log = logging.getLogger(__name__)

_RESAMPLES = 1000
_WARMUP_TOKENS = 8


@dataclass(frozen=True)
class PromptRun:
    """One prompt, decoded with the draft and without."""

    drafted: Completion
    plain: list[int]
    """Token ids without the draft."""
    plain_timed: Completion
    """The first of them once more, step by step."""

    @property
    def lossless(self) -> bool:
        timed = self.plain_timed.token_ids
        return self.drafted.token_ids == self.plain and timed == self.plain[: len(timed)]


@dataclass(frozen=True)
class EvalReport:
    """Figures of each prompt set, of all together, and the checks beside them."""

    sets: dict[str, dict[str, Any]]
    pooled: dict[str, Any]
    lossless: dict[str, Comparison]
    """`greedy` and `sampled`: one over all prompts, the other over the first of them."""
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
            "lossless": all(one.equal for one in self.lossless.values()),
            "lossless_checks": {name: one.summary() for name, one in self.lossless.items()},
            "sets": self.sets,
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
    other_mode_prompts: int = 16,
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
    )
    everyones = _decode_all(target, drafts, encoded, params, settings.plain_tokens)
    prompts = [ids for one in encoded.values() for ids in one]
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
        draft = drafts[name]
        reports[name] = EvalReport(
            sets={part: figures(one, seed=settings.seed) for part, one in runs.items()},
            pooled={
                **figures(every, seed=settings.seed),
                "confidence": _confidence(target, draft, prompts, every, params),
            },
            lossless=_lossless(target, draft, prompts[:other_mode_prompts], params, every),
            rejects=rejects,
            settings={
                **settings.model_dump(mode="json", exclude={"prompts"}),
                "block_size": draft.block_size,
                "num_draft_tokens": most[name],
                "confidence_threshold": confidence_threshold,
                "thinking": thinking,
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


def _decode_all(
    target: Target,
    drafts: Mapping[str, Draft],
    encoded: Mapping[str, Sequence[Sequence[int]]],
    params: DecodeParams,
    plain_tokens: int,
) -> dict[str, dict[str, list[PromptRun]]]:
    """By draft, and by set."""
    prompts = [(name, ids) for name, one in encoded.items() for ids in one]
    seeds = [seeded(params, index) for index in range(len(prompts))]
    plain = decode_plain(target, [ids for _, ids in prompts], seeds)
    contenders: list[tuple[str | None, Draft | None]] = [*drafts.items(), (None, None)]
    # the first decode pays for allocations and thread start-up
    for _, one in contenders:
        decode(target, one, prompts[0][1], replace(params, max_new_tokens=_WARMUP_TOKENS))
    runs: dict[str, dict[str, list[PromptRun]]] = {
        draft: {name: [] for name in encoded} for draft in drafts
    }
    with Bar("evaluate", len(prompts)) as bar:
        for index, ((name, ids), known, mine) in enumerate(zip(prompts, plain, seeds, strict=True)):
            short = replace(mine, max_new_tokens=min(plain_tokens, mine.max_new_tokens))
            # whoever goes second finds warm caches: take turns
            first = index % len(contenders)
            done = {
                who: decode(target, one, ids, short if one is None else mine)
                for who, one in contenders[first:] + contenders[:first]
            }
            for draft, sets in runs.items():
                sets[name].append(PromptRun(done[draft], known, done[None]))
            bar.advance(set=name)
    return runs


def _confidence(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    runs: Sequence[PromptRun],
    params: DecodeParams,
) -> dict[str, Any] | None:
    """None without a confidence head, or a round that shows it."""
    if isinstance(draft, NextNDraft) or draft.confidence_head is None:
        return None
    rounds: list[Outcomes] = []
    pairs = list(zip(prompts, runs, strict=True))
    for index, (ids, run) in enumerate(track(pairs, "confidence", len(pairs))):
        mine = replace(seeded(params, index), confidence_threshold=0.0)
        replay(target, draft, ids, run.drafted.token_ids, mine, outcomes=rounds)
    if not rounds:
        return None
    whole, temperatures = Outcomes.together(rounds), draft.config.sts_temperatures
    return {
        "before": measures(whole),
        "after": measures(whole, temperatures) if temperatures else None,
    }


def _lossless(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    params: DecodeParams,
    runs: Sequence[PromptRun],
) -> dict[str, Comparison]:
    differences = (
        first_difference(run.drafted.token_ids, run.plain, index) for index, run in enumerate(runs)
    )
    mine = Comparison(
        len(runs),
        sum(len(run.plain) for run in runs),
        tuple(one for one in differences if one is not None),
    )
    greedy = params.sampling.temperature == 0
    if not prompts:
        return {"greedy" if greedy else "sampled": mine}
    sampling = SamplingParams(temperature=1.0 if greedy else 0.0, seed=params.sampling.seed)
    other = compare(
        target,
        draft,
        prompts,
        replace(params, max_new_tokens=min(64, params.max_new_tokens), sampling=sampling),
    )
    return {"greedy": mine, "sampled": other} if greedy else {"greedy": other, "sampled": mine}


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
        "interval": bootstrap_interval(stats, seed=seed),
        "accept_length_macro": macro_accept_length(stats),
        "tpot_ms": fast,
        "tpot_ms_plain": plain,
        "speedup": plain / fast if fast and plain else None,
        "tokens_per_s": tokens / seconds if seconds else None,
        "lossless": all(run.lossless for run in runs),
        "finished_by_stop": sum(run.drafted.finish_reason == "stop" for run in runs),
    }


def tpot_ms(completions: Sequence[Completion]) -> float | None:
    """Mean milliseconds per token after the first; None if no completion has a second token."""
    each = [
        1000.0 * one.decode_s / (len(one.token_ids) - 1)
        for one in completions
        if len(one.token_ids) > 1
    ]
    return fmean(each) if each else None


def bootstrap_interval(
    stats: Sequence[AcceptStats], *, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float] | None:
    """95% percentile interval of the pooled accept length; None for fewer than two prompts."""
    counts = torch.tensor(
        [(one.emitted, one.rounds) for one in stats if one.rounds], dtype=torch.float64
    ).reshape(-1, 2)
    if len(counts) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(counts), (resamples, len(counts)), generator=generator)
    sums = counts[picks].sum(1)
    low, high = torch.quantile(sums[:, 0] / sums[:, 1], torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)
