"""How far the confidence head can be believed, and the temperatures that mend it.

A slot's confidence is sigmoid(s / t): s the head's logit, t the slot's temperature. Survival is the
product of the confidences up to a slot, the chance that the round keeps all of them. Sequential
temperature scaling (STS; DSpark, arXiv 2607.05147) fits t from the first slot to the last, each so
that survival there is right behind the slots before it. The paper takes the t of the least ``ece``,
here it is that of the least ``brier``: on some thousand rounds of a released draft the first
wandered from 0.1 to 8, and on other prompts the slots were told worse than without any.

- ``ece``: expected calibration error over 20 equal bins of the chance.
- ``auroc``: how often, of a slot that was kept and one that was not, the kept one has more.
- ``brier``: mean squared difference of chance and outcome.

Of the slots' own confidence all three are over the rounds that reached a slot, of survival over
all rounds that proposed it; each is the mean over slots, weighted by their rounds.

Symbols: N rounds, K slots.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Outcomes", "fit_temperatures", "measures", "reliability"]

_BINS = 20
_WIDEST = 4.0
_STEPS = 40
_GRID = tuple(
    # from 1 outwards, so that of equally good temperatures the mildest is taken
    sorted(
        (round(_WIDEST ** (i / _STEPS), 4) for i in range(-_STEPS, _STEPS + 1)),
        key=lambda t: abs(math.log(t)),
    )
)
_LEAST_ROUNDS = 50
"""A slot that fewer rounds reached takes the temperature of the slot before it."""


@dataclass(frozen=True)
class Outcomes:
    """Rounds whose proposals were not cut by confidence."""

    logits: Tensor  # [N, K] float64, of the head
    kept: Tensor  # [N, K] bool: this slot and all before it were kept
    known: Tensor  # [N, K] bool: `kept` can be told; no proposal or the output's end hide it

    @classmethod
    def of_round(cls, logits: Tensor, num_kept: int, num_told: int, slots: int) -> "Outcomes":
        """One round with proposals of ``logits`` [n], of which the output tells the first ones."""
        place = torch.arange(slots)
        row = torch.zeros(slots, dtype=torch.float64)
        row[: len(logits)] = logits.double().cpu()
        # behind a slot that was not kept none is, whatever the output holds
        told = len(logits) if num_kept < num_told else num_told
        return cls(row[None], (place < num_kept)[None], (place < told)[None])

    @classmethod
    def together(cls, parts: Iterable["Outcomes"]) -> "Outcomes":
        """All rounds of several, which have as many slots; at least one."""
        held = list(parts)
        return cls(
            torch.cat([one.logits for one in held]),
            torch.cat([one.kept for one in held]),
            torch.cat([one.known for one in held]),
        )

    @property
    def reached(self) -> Tensor:  # [N, K] bool
        """Every slot before was kept."""
        before = torch.ones_like(self.kept)
        before[:, 1:] = self.kept[:, :-1]
        return self.known & before

    def confidence(self, temperatures: Sequence[float] | None = None) -> Tensor:  # [N, K] float64
        """Of every slot; ``temperatures`` of at least as many, None: as the head has it."""
        slots = self.logits.shape[1]
        scale = torch.tensor(list(temperatures or [1.0] * slots)[:slots], dtype=torch.float64)
        return (self.logits / scale).sigmoid()


def fit_temperatures(outcomes: Outcomes) -> tuple[float, ...]:
    """One temperature a slot by STS, on a grid from 1/4 to 4; no randomness."""
    before = torch.ones(len(outcomes.logits), dtype=torch.float64)
    found: list[float] = []
    for slot, reached in enumerate(outcomes.reached.sum(0).tolist()):
        logits, known = outcomes.logits[:, slot], outcomes.known[:, slot]
        best = found[-1] if found else 1.0
        if reached >= _LEAST_ROUNDS:
            s, chance, hit = logits[known], before[known], outcomes.kept[known, slot]
            errors = [_brier(chance * (s / t).sigmoid(), hit) for t in _GRID]
            best = _GRID[min(range(len(_GRID)), key=errors.__getitem__)]
        found.append(best)
        before = before * (logits / best).sigmoid()
    return tuple(found)


def measures(
    outcomes: Outcomes, temperatures: Sequence[float] | None = None
) -> dict[str, dict[str, Any]]:
    """`ece`, `auroc` and `brier` of the ``slot``s' own confidence and of their ``survival``.

    ``ece_at`` has the first of them slot by slot; None where no round tells.
    """
    own = outcomes.confidence(temperatures)
    return {
        "slot": _figures(own, outcomes.kept, outcomes.reached),
        "survival": _figures(own.cumprod(1), outcomes.kept, outcomes.known),
    }


def reliability(
    outcomes: Outcomes, temperatures: Sequence[float] | None = None
) -> dict[str, list[tuple[int, float, float]]]:
    """For a plot: of the bins that hold any, how many, their mean chance, and the share kept.

    All slots together, of the ``slot``s' own confidence and of ``survival``.
    """
    own = outcomes.confidence(temperatures)
    return {
        "slot": _bins(own[outcomes.reached], outcomes.kept[outcomes.reached]),
        "survival": _bins(own.cumprod(1)[outcomes.known], outcomes.kept[outcomes.known]),
    }


def _bins(chance: Tensor, hit: Tensor) -> list[tuple[int, float, float]]:
    place = (chance * _BINS).long().clamp_max(_BINS - 1)
    counts, chances, hits = (
        torch.bincount(place, weights=weights, minlength=_BINS).tolist()
        for weights in (torch.ones_like(chance), chance, hit.double())
    )
    rows = zip(counts, chances, hits, strict=True)
    return [(int(n), total / n, kept / n) for n, total, kept in rows if n]


def _figures(chance: Tensor, kept: Tensor, told: Tensor) -> dict[str, Any]:
    columns = [(p[seen], hit[seen]) for p, hit, seen in zip(chance.T, kept.T, told.T, strict=True)]

    def mean(figure: Callable[[Tensor, Tensor], float | None]) -> tuple[float | None, list[Any]]:
        each = [figure(p, hit) if len(p) else None for p, hit in columns]
        pairs = [(len(p), x) for (p, _), x in zip(columns, each, strict=True) if x is not None]
        weight = sum(rounds for rounds, _ in pairs)
        return (sum(n * x for n, x in pairs) / weight if weight else None), each

    ece, ece_at = mean(_ece)
    return {"ece": ece, "auroc": mean(_auroc)[0], "brier": mean(_brier)[0], "ece_at": ece_at}


def _ece(chance: Tensor, hit: Tensor) -> float:
    place = (chance * _BINS).long().clamp_max(_BINS - 1)
    gaps = torch.bincount(place, weights=chance - hit.double(), minlength=_BINS)
    return float(gaps.abs().sum()) / len(chance)


def _auroc(chance: Tensor, hit: Tensor) -> float | None:
    wins, losses = int(hit.sum()), int((~hit).sum())
    if not wins or not losses:
        return None
    _, place, counts = torch.unique(chance, return_inverse=True, return_counts=True)
    # equal chances share the mean of their ranks
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[place]
    return (float(ranks[hit].sum()) - wins * (wins + 1) / 2) / (wins * losses)


def _brier(chance: Tensor, hit: Tensor) -> float:
    return float((chance - hit.double()).square().mean())
