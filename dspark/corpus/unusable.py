"""Rows whose features the target could not compute: left out and named, within a budget."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dspark.errors import RunError
from dspark.target import Features

__all__ = ["BadRow", "Unusable", "diagnose"]

log = logging.getLogger(__name__)

_BUDGET = 0.01
"""Share of rows whose features may be unusable (at least one row may)."""


@dataclass(frozen=True)
class BadRow:
    """A row that was left out, and what is wrong with it."""

    id: str
    reason: str
    """nan, inf or all zero; empty where shards of format 1 do not tell."""
    state: str = ""
    """layer N, or final: the first of the taps that is wrong anywhere."""
    position: int | None = None
    """First token of the row that is wrong there; None where a state is zero throughout. What one
    token spoils is all over the row one layer later, since attention adds up zeros times NaN."""


def diagnose(
    row_id: str,
    features: Features,  # of one row: [S, F*D], [S, D]
    layer_ids: Sequence[int],
) -> BadRow:
    """What is wrong with the features of a row that `Features.usable` said no to."""
    hidden_size = features.last_hidden.shape[-1]
    taps = features.taps.view(len(features.taps), -1, hidden_size)
    states = torch.cat([taps, features.last_hidden[:, None]], dim=1)  # [S, F + 1, D]
    names = [*(f"layer {layer}" for layer in layer_ids), "final"]
    # by state, then by position: the state nearest to the embedding is the least spread
    broken = (~states.isfinite()).any(-1).T.nonzero().tolist()
    if broken:
        number, position = broken[0]
        reason = "nan" if bool(states[position, number].isnan().any()) else "inf"
        return BadRow(row_id, reason, names[number], position)
    empty = (states == 0).all(-1).all(0).nonzero().flatten().tolist()
    return BadRow(row_id, "all zero", names[empty[0]] if empty else "")


class Unusable:
    """The rows that `Features.usable` said no to, each counted once however often it comes."""

    def __init__(self, num_rows: int, dtype: torch.dtype) -> None:
        self.ids: list[str] = []
        self._num_rows = num_rows
        self._dtype = str(dtype).removeprefix("torch.")

    def add(self, ids: Iterable[str]) -> None:
        """Name the rows that are new here.

        Raises:
            RunError: they are more than 1% of all rows, and more than one.
        """
        for row_id in ids:
            if row_id not in self.ids:
                log.warning("row %s: features with NaN, Inf or only zeros; skipped", row_id)
                self.ids.append(row_id)
        if len(self.ids) > math.ceil(_BUDGET * self._num_rows):
            raise RunError(
                f"{len(self.ids)} of {self._num_rows} rows have features with NaN, Inf or only "
                f"zeros (first: {', '.join(self.ids[:5])}); check the target and its dtype "
                f"{self._dtype}, and shards with `dspark inspect DIR --verify`"
            )
