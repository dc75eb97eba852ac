"""Does the draft change any token, and do a step's logits depend on the step's width?

The first is the law a user can test on their own target; the second is why it holds: a token's
logits are equal to the bit whether it is the only row of a step or row 5 of a verify pass.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dspark.decoding import DecodeParams, Draft, SamplingParams, decode, decode_plain
from dspark.progress import track
from dspark.target import Target

__all__ = [
    "Comparison",
    "Difference",
    "RowsReport",
    "compare",
    "compare_modes",
    "first_difference",
    "rows_are_exact",
    "seeded",
]


@dataclass(frozen=True)
class Difference:
    """Where the output with the draft leaves the output without it."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index among the new tokens; both outputs agree before it."""
    with_draft: int | None
    """Token id; None: the output ended before it."""
    without: int | None


@dataclass(frozen=True)
class Comparison:
    """Outputs with and without a draft over some prompts."""

    num_prompts: int
    num_tokens: int
    """New tokens without the draft."""
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """True only if something was compared and nothing differed."""
        return self.num_tokens > 0 and not self.differences

    def summary(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "differences": [asdict(one) for one in self.differences],
        }


def first_difference(
    with_draft: Sequence[int], without: Sequence[int], prompt: int
) -> Difference | None:
    """The first position at which two outputs of one prompt differ, their ends included."""
    for position in range(max(len(with_draft), len(without))):
        one = with_draft[position] if position < len(with_draft) else None
        other = without[position] if position < len(without) else None
        if one != other:
            return Difference(prompt, position, one, other)
    return None


def compare(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    params: DecodeParams,
    *,
    description: str = "lossless",
) -> Comparison:
    """Decode every prompt with and without ``draft`` and compare token ids.

    Prompt i is sampled with seed ``params.sampling.seed + i``, as `evaluate` does.

    Raises:
        ConfigError: a prompt is too long for the target, or a parameter is out of range.
    """
    found = []
    num_tokens = 0
    each = [seeded(params, index) for index in range(len(prompts))]
    plain = decode_plain(target, prompts, each)
    for index, prompt in enumerate(track(prompts, description, len(prompts))):
        drafted = decode(target, draft, prompt, each[index]).token_ids
        difference = first_difference(drafted, plain[index], index)
        num_tokens += len(plain[index])
        if difference is not None:
            found.append(difference)
    return Comparison(len(prompts), num_tokens, tuple(found))


def compare_modes(
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> dict[str, Comparison]:
    """`compare` twice: `greedy`, and `sampled` at ``temperature`` with ``seed``."""
    return {
        mode: compare(
            target,
            draft,
            prompts,
            DecodeParams(max_new_tokens, sampling),
            description=f"lossless, {mode}",
        )
        for mode, sampling in (
            ("greedy", SamplingParams()),
            ("sampled", SamplingParams(temperature=temperature, seed=seed)),
        )
    }


@dataclass(frozen=True)
class RowsReport:
    """Logit rows that were compared to the bit."""

    compared: int
    mismatches: int
    largest_gap: float
    """Largest absolute difference of a logit; 0 when all are equal."""

    @property
    def exact(self) -> bool:
        return self.compared > 0 and self.mismatches == 0


@torch.no_grad()
def rows_are_exact(
    target: Target,
    ids: Sequence[int],
    *,
    prompt_tokens: int = 1,
    widths: Sequence[int] = (1, 2, 5, 8, 9, 13, 16),
) -> RowsReport:
    """Compare each token's logits as the only row of a step with those as row i of a wider one.

    Tokens after the first ``prompt_tokens`` are walked twice: one at a time, and in verify passes
    of ``widths`` rows in turn. Each pass is followed by one whose tail is wrong and rolled back, as
    after a rejection, so that the next rows run over a cache that held something else.
    """
    tokens = torch.tensor(list(ids))
    prompt, rest = tokens[:prompt_tokens], tokens[prompt_tokens:]
    single = target.new_cache()
    target.prefill(single, prompt)
    reference = []
    for index in range(len(rest)):
        reference.append(target.verify(single, rest[index : index + 1]).logits[0])
        target.commit(single, 1)

    wide = target.new_cache()
    target.prefill(wide, prompt)
    start, turn, compared, mismatches, gap = 0, 0, 0, 0, 0.0
    while start < len(rest):
        width = widths[turn % len(widths)]
        logits = target.verify(wide, rest[start : start + width]).logits
        for row, mine in enumerate(logits):
            theirs = reference[start + row]
            compared += 1
            if not torch.equal(mine, theirs):
                mismatches += 1
                gap = max(gap, float((mine.float() - theirs.float()).abs().max()))
        # keep a third: the other tokens are run again as rows of another offset
        kept = max(1, len(logits) // 3)
        wrong = rest[start : start + width].clone()
        wrong[kept:] = (wrong[kept:] + 1) % target.vocab_size
        target.verify(wide, wrong)
        target.commit(wide, kept)
        start += kept
        turn += 1
    return RowsReport(compared, mismatches, gap)


def seeded(params: DecodeParams, index: int) -> DecodeParams:
    """``params`` with the seed of prompt ``index``: prompts must not share their noise."""
    sampling = replace(params.sampling, seed=params.sampling.seed + index)
    return replace(params, sampling=sampling)
