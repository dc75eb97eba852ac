"""Rows whose features the target could not compute: left out and named, within a budget."""

import logging
import math
from collections.abc import Iterable

import torch

from dspark.errors import RunError

__all__ = ["Unusable"]

log = logging.getLogger(__name__)

_BUDGET = 0.01
"""Share of rows whose features may be unusable (at least one row may)."""


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
                f"{self._dtype}"
            )
