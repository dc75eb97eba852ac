"""Temperatures for the confidence head of an exported draft, from outputs of its target.

The target answers the prompts, the draft's rounds are replayed along the answers, and
`decoding.calibration` fits. How well the temperatures do is told of prompts that they were not
fitted on: every second prompt is judged by those of the others, and the other way round.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.decoding import (
    DecodeParams,
    Outcomes,
    SamplingParams,
    decode_plain,
    fit_temperatures,
    measures,
    replay,
)
from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.draft import DSparkDraftModel
from dspark.errors import ConfigError
from dspark.progress import track
from dspark.target import Target

__all__ = ["Calibration", "Fitted", "calibrate"]

log = logging.getLogger(__name__)

LEAST_ROUNDS = 200
"""Fewer tell an error of calibration no better than to some percent."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What to fit with."""

    prompt_ids: Sequence[Sequence[int]]
    name: str
    """Of the prompts, for the card."""
    temperature: float = 0.0
    """At which the target is sampled; acceptance, and so the fit, depends on it."""
    max_new_tokens: int = 128


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What the fit gave."""

    temperatures: tuple[float, ...]
    """One a slot of the block."""
    report: dict[str, Any]
    """Figures ``before`` and ``after``, what they were measured on, and whether the second
    ``gains``: only then are the temperatures worth writing."""


def calibrate(draft: DSparkDraftModel, target: Target, asked: Calibration) -> Fitted:
    """Fit temperatures to ``draft``, whatever temperatures it has.

    Raises:
        ConfigError: the draft has no confidence head, or the prompts give too few rounds.
    """
    if draft.confidence_head is None:
        raise ConfigError(
            "--calibrate fits the confidence head, and this draft has none "
            "(enable_confidence_head is false)"
        )
    each = _outcomes(draft, target, asked)
    rounds = sum(len(one.logits) for one in each)
    if rounds < LEAST_ROUNDS or len(each) < 2:
        raise ConfigError(
            f"--calibrate: {len(each)} prompts gave {rounds} rounds, and it takes {LEAST_ROUNDS} "
            "rounds of 2 prompts at least: give more or longer prompts"
        )
    whole = Outcomes.together(each)
    halves = [Outcomes.together(each[first::2]) for first in (0, 1)]
    fitted = fit_temperatures(whole)
    crossed = [
        replace(mine, logits=mine.logits / mine.logits.new_tensor(fit_temperatures(other)))
        for mine, other in zip(halves, reversed(halves), strict=True)
    ]
    # a block of 16 verifies 15 proposals at most
    rest = draft.block_size - len(fitted)
    before, after = measures(whole), measures(Outcomes.together(crossed))
    gains = after["survival"]["brier"] < before["survival"]["brier"]
    if not gains:
        log.warning(
            "--calibrate: on prompts that they were not fitted on, the temperatures tell survival "
            "no better than none (Brier %.4f, %.4f without), so they are not written: give more "
            "prompts, or leave it out",
            after["survival"]["brier"],
            before["survival"]["brier"],
        )
    return Fitted(
        temperatures=(*fitted, *[fitted[-1]] * rest),
        report={
            "prompts": asked.name,
            "num_prompts": len(each),
            "rounds": rounds,
            "temperature": asked.temperature,
            "max_new_tokens": asked.max_new_tokens,
            "gains": gains,
            "before": before,
            "after": after,
        },
    )


def _outcomes(draft: DSparkDraftModel, target: Target, asked: Calibration) -> list[Outcomes]:
    """Of every prompt."""
    params = [
        DecodeParams(
            asked.max_new_tokens,
            SamplingParams(temperature=asked.temperature, seed=index),
            num_draft_tokens=min(draft.block_size, MAX_PROPOSALS),
        )
        for index in range(len(asked.prompt_ids))
    ]
    outputs = decode_plain(target, asked.prompt_ids, params)
    pairs = list(zip(asked.prompt_ids, outputs, params, strict=True))
    found = []
    for prompt, output, one in track(pairs, "calibrate", len(pairs)):
        rounds: list[Outcomes] = []
        replay(target, draft, prompt, output, one, outcomes=rounds)
        if rounds:
            found.append(Outcomes.together(rounds))
    return found
