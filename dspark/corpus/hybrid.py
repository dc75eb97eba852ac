"""Rows of responses whose features are read where shards hold them, and computed where not.

`data.responses` says which rows there are and in which order, so that a run is that of online
features. A row of the shards is taken where its id, its ids and its mask are the same.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.corpus.dataset import ResponseRows, Row, stored_row
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.rolling import RollingWindow
from dspark.corpus.storage import STORAGE
from dspark.corpus.store import Header, row_key
from dspark.errors import CheckpointError

__all__ = ["HybridRows"]

log = logging.getLogger(__name__)


class HybridRows:
    """`ResponseRows` with the features of a directory of shards, finished or not.

    Args:
        responses: the rows of the run.
        directory: shards, of all of them or some.

    Raises:
        CheckpointError: the directory holds no manifest, or one that is damaged.
    """

    def __init__(self, responses: ResponseRows, directory: Path) -> None:
        self.responses = responses
        self.directory = directory
        self._store = FeatureStore(directory, partial=True)
        self._places = {key: place for place, key in enumerate(self._store.row_keys())}
        self._window: RollingWindow | None = None
        self._refused: set[str] = set()
        self.num_present = sum(self._key(responses[i]) in self._places for i in range(len(self)))
        log.info(
            "data.shards '%s' holds the features of %d of %d rows; the target computes the others",
            directory,
            self.num_present,
            len(self),
        )

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, index: int) -> Row:
        row = self.responses[index]
        key = self._key(row)
        if key in self._places:
            try:
                return stored_row(*self._store.row(self._places[key]))
            except CheckpointError as error:
                if str(error) not in self._refused:
                    self._refused.add(str(error))
                    log.warning("%s; its rows count as missing", error)
        found = None if self._window is None else self._window.find(key)
        return row if found is None else stored_row(row.id, found, "window")

    @property
    def header(self) -> Header:
        """Of the shards."""
        return self._store.header

    @property
    def dtype(self) -> torch.dtype:
        """Of features in a batch."""
        return STORAGE[self.header.dtype].decoded

    def use(self, window: RollingWindow) -> None:
        """Look there too, for rows that the shards do not hold."""
        self._window = window

    def lengths(self) -> Sequence[int]:
        """Tokens of every row."""
        return self.responses.lengths()

    def used_ids(self) -> set[int]:
        """Every token id that occurs: none of them can be the mask token."""
        return self.responses.used_ids()

    @staticmethod
    def _key(row: Row) -> str:
        return row_key(row.id, row.input_ids, row.loss_mask)
