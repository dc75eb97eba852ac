"""95% intervals of an evaluation's figures, and of the difference of two drafts.

Every figure is a ratio of sums over prompts. Prompts are resampled whole, with all their counts and
times, because rounds of one prompt are not independent, and the ratio is taken again: 1,000 times,
seeded, percentiles. Two drafts are resampled together, so that what is hard about a prompt falls
out of their difference. Over sets, each set resamples its own prompts, and all sets count alike.

Symbols: P prompts, C columns, R resamples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.acceptance import AcceptStats
from dspark.bench.records import PromptRun
from dspark.decoding import Completion

__all__ = [
    "Interval",
    "bootstrap_interval",
    "interval",
    "intervals",
    "over_sets",
    "paired",
    "resampled",
    "time_per_token_ms",
]

Interval = tuple[float, float] | None
"""None for fewer than two prompts, or where nothing was counted."""

_RESAMPLES = 1000
_ROUNDS = 2  # of the columns below
_COMPARED = ("accept_length", "speedup")


def time_per_token_ms(one: Completion) -> float | None:
    """Behind the first token; None without a second."""
    tokens = len(one.token_ids) - 1
    return 1000.0 * one.decode_s / tokens if tokens > 0 else None


def _counts(one: AcceptStats) -> list[float]:
    own = [one.accept_length, 1.0] if one.rounds else [0.0, 0.0]
    last = [one.kept_at[-1], one.proposed_at[-1]] if one.block_size else [0, 0]
    return [one.emitted, one.accepted, one.rounds, *own, *last]


def _columns(runs: Sequence[PromptRun]) -> Tensor:  # [P, C] float64
    rows = []
    for run in runs:
        times: list[float] = []
        for done in (run.drafted, run.plain_timed):
            time = time_per_token_ms(done)
            times += [0.0, 0.0] if time is None else [time, 1.0]
        rows.append([*_counts(run.drafted.stats), *times])
    return torch.tensor(rows, dtype=torch.float64).reshape(len(runs), 11)


def _figures(sums: Tensor) -> dict[str, Tensor]:  # [..., C] -> [...] each
    emitted, accepted, rounds, own, owns, full, fulls, fast, fasts, plain, plains = sums.unbind(-1)
    return {
        "accept_length": emitted / rounds,
        "accepted_drafts": accepted / rounds,
        "accept_length_macro": own / owns,
        "full_block_rate": full / fulls,
        "tpot_ms": fast / fasts,
        "speedup": (plain / plains) / (fast / fasts),
    }


def resampled(
    rows: Tensor,  # [P, C]
    generator: torch.Generator,
    resamples: int = _RESAMPLES,
) -> Tensor:  # [R, C] sums
    """What P prompts, drawn anew ``resamples`` times, add up to."""
    picks = torch.randint(len(rows), (resamples, len(rows)), generator=generator)
    return torch.stack([column[picks].sum(1) for column in rows.T], -1)


def interval(values: Tensor) -> Interval:  # of [R]
    """Where 95% of the resamples lie."""
    known = values[values.isfinite()]
    if not len(known):
        return None
    low, high = torch.quantile(known, torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bootstrap_interval(stats: Sequence[AcceptStats], *, seed: int = 0) -> Interval:
    """Of the pooled accept length."""
    rows = torch.tensor(
        [(one.emitted, one.rounds) for one in stats if one.rounds], dtype=torch.float64
    ).reshape(-1, 2)
    if len(rows) < 2:
        return None
    sums = resampled(rows, _generator(seed))
    return interval(sums[:, 0] / sums[:, 1])


def intervals(runs: Sequence[PromptRun], *, seed: int = 0) -> dict[str, Interval]:
    """By figure."""
    rows = _columns([run for run in runs if run.drafted.stats.rounds])
    if len(rows) < 2:
        return dict.fromkeys(_figures(torch.ones(11)))
    values = _figures(resampled(rows, _generator(seed)))
    return {name: interval(one) for name, one in values.items()}


def over_sets(sets: Mapping[str, Sequence[PromptRun]], *, seed: int = 0) -> dict[str, Any]:
    """Mean of the sets' accept lengths, with its interval."""
    groups = [_columns(runs) for runs in sets.values()]
    groups = [rows for rows in groups if rows[:, _ROUNDS].sum() > 0]
    if not groups:
        return {"accept_length": 0.0, "interval": None}
    generator = _generator(seed)
    means = [float(_figures(rows.sum(0))["accept_length"]) for rows in groups]
    drawn = [_figures(resampled(rows, generator))["accept_length"] for rows in groups]
    return {
        "accept_length": sum(means) / len(means),
        "interval": interval(torch.stack(drawn).mean(0)) if _several(groups) else None,
    }


def paired(
    base: Mapping[str, Sequence[PromptRun]],
    other: Mapping[str, Sequence[PromptRun]],
    *,
    seed: int = 0,
) -> dict[str, Any]:
    """``other`` minus ``base``, which decoded the same prompts: each set, pooled, and over sets."""
    both = {name: torch.cat([_columns(base[name]), _columns(other[name])], -1) for name in base}
    every = torch.cat(list(both.values()))
    told = [rows for rows in both.values() if (rows[:, [_ROUNDS, 11 + _ROUNDS]].sum(0) > 0).all()]
    return {
        "sets": {name: _difference([rows], seed) for name, rows in both.items()},
        "pooled": _difference([every], seed),
        "over_sets": _difference(told, seed) if told else None,
    }


def _difference(groups: Sequence[Tensor], seed: int) -> dict[str, Any]:
    generator = _generator(seed)
    drawn = [_gaps(resampled(rows, generator)) for rows in groups]
    points = [_gaps(rows.sum(0)) for rows in groups]
    found = {}
    for name in _COMPARED:
        point = float(torch.stack([one[name] for one in points]).mean())
        values = torch.stack([one[name] for one in drawn]).mean(0)
        found[name] = {
            "difference": point if point == point else None,
            "interval": interval(values) if _several(groups) else None,
        }
    return found


def _gaps(sums: Tensor) -> dict[str, Tensor]:  # [..., 2C]
    base, other = (_figures(one) for one in sums.chunk(2, -1))
    return {name: other[name] - base[name] for name in _COMPARED}


def _several(groups: Sequence[Tensor]) -> bool:
    return all(len(rows) > 1 for rows in groups)
