"""Decode every prompt with each draft and without, in turns, and what is checked beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dspark.bench.lossless import Difference, first_difference, seeded
from dspark.bench.records import Pages, PromptRun
from dspark.decoding import (
    Completion,
    DecodeParams,
    Draft,
    NextNDraft,
    Outcomes,
    SamplingParams,
    decode,
    decode_plain,
    replay,
)
from dspark.progress import Bar
from dspark.target import Target

__all__ = ["comparable", "decode_all"]

_WARMUP_TOKENS = 8
_OTHER_TOKENS = 64
_TOGETHER = 16
"""Prompts that are decoded without a draft side by side."""


def decode_all(
    target: Target,
    drafts: Mapping[str, Draft],
    encoded: Mapping[str, Sequence[Sequence[int]]],
    params: DecodeParams,
    plain_tokens: int,
    other_prompts: int,
    pages: Pages,
) -> dict[str, dict[str, list[PromptRun]]]:
    """By draft, and by set."""
    prompts = [(name, ids) for name, one in encoded.items() for ids in one]
    contenders: list[tuple[str | None, Draft | None]] = [*drafts.items(), (None, None)]
    left = [index for index in range(len(prompts)) if index not in pages.kept]
    if left:
        # the first decode pays for allocations and thread start-up
        for _, one in contenders:
            decode(target, one, prompts[0][1], replace(params, max_new_tokens=_WARMUP_TOKENS))
    with Bar("evaluate", len(prompts)) as bar:
        bar.advance(len(prompts) - len(left))
        for first in range(0, len(left), _TOGETHER):
            group = left[first : first + _TOGETHER]
            known = _plain(target, prompts, group, params) if comparable(params) else {}
            other = _plain(
                target, prompts, [i for i in group if i < other_prompts], _other_kind(params)
            )
            for index in group:
                name, ids = prompts[index]
                mine = seeded(params, index)
                short = replace(mine, max_new_tokens=min(plain_tokens, mine.max_new_tokens))
                # whoever goes second finds warm caches: take turns
                turn = index % len(contenders)
                done = {
                    who: decode(target, one, ids, short if one is None else mine)
                    for who, one in contenders[turn:] + contenders[:turn]
                }
                pages.add(
                    index,
                    {
                        draft: PromptRun(
                            done[draft],
                            known.get(index, []),
                            done[None],
                            _outcomes(target, one, ids, done[draft], mine),
                            _beside(target, one, ids, params, index, other.get(index)),
                        )
                        for draft, one in drafts.items()
                    },
                )
                bar.advance(set=name)
    runs: dict[str, dict[str, list[PromptRun]]] = {
        draft: {name: [] for name in encoded} for draft in drafts
    }
    for index, (name, _) in enumerate(prompts):
        for draft, run in pages.kept[index].items():
            runs[draft][name].append(run)
    return runs


def comparable(params: DecodeParams) -> bool:
    """Whether the tokens must be those of decoding without a draft."""
    return params.sampling.greedy or params.verification == "coupled"


def _other_kind(params: DecodeParams) -> DecodeParams:
    temperature = 1.0 if params.sampling.greedy else 0.0
    return replace(
        params,
        max_new_tokens=min(_OTHER_TOKENS, params.max_new_tokens),
        sampling=SamplingParams(temperature=temperature, seed=params.sampling.seed),
        verification="coupled",
    )


def _plain(
    target: Target,
    prompts: Sequence[tuple[str, Sequence[int]]],
    group: Sequence[int],
    params: DecodeParams,
) -> dict[int, list[int]]:
    each = [seeded(params, index) for index in group]
    return dict(zip(group, decode_plain(target, [prompts[i][1] for i in group], each), strict=True))


def _outcomes(
    target: Target, draft: Draft, ids: Sequence[int], done: Completion, params: DecodeParams
) -> Outcomes | None:
    """None without a confidence head, or a round that shows it.

    Nor where blocks were cut and the tokens are the draft's own: what whole blocks would have kept
    is not known then.
    """
    cut = params.confidence_threshold > 0 and not comparable(params)
    if isinstance(draft, NextNDraft) or draft.confidence_head is None or cut:
        return None
    rounds: list[Outcomes] = []
    whole = replace(params, confidence_threshold=0.0)
    replay(target, draft, ids, done.token_ids, whole, outcomes=rounds)
    return Outcomes.together(rounds) if rounds else None


def _beside(
    target: Target,
    draft: Draft,
    ids: Sequence[int],
    params: DecodeParams,
    index: int,
    plain: list[int] | None,
) -> tuple[int, Difference | None] | None:
    if plain is None:
        return None
    drafted = decode(target, draft, ids, seeded(_other_kind(params), index)).token_ids
    return len(plain), first_difference(drafted, plain, index)
