"""Training rows: from responses (features are computed online) or from feature shards.

Which rows a step trains on is a function of (seed, step) alone: an epoch is a permutation drawn
from (seed, epoch), and a step takes the next `global_batch` of it. So a run can be continued at
any step, with any number of processes.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.config import DataSettings
from dspark.corpus.buffers import Buffers
from dspark.corpus.chat import template_hash
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.rejects import Rejects
from dspark.corpus.responses import Response, read_responses, too_few
from dspark.corpus.row_file import RowFile
from dspark.corpus.store import Header
from dspark.errors import DataError

__all__ = ["Batch", "ResponseRows", "Row", "ShardRows", "collate", "order", "rows_at", "stored_row"]

log = logging.getLogger(__name__)

_BUFFERS = Buffers()


@dataclass(frozen=True)
class Row:
    """One document, or (from `packing`) several, one behind the other."""

    id: str
    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool
    taps: Tensor | None = None  # [S, F*D], only from shards; to be read, not written to
    last_hidden: Tensor | None = None  # [S, D], only from shards; to be read, not written to
    documents: tuple[tuple[str, int], ...] = ()
    """Id and tokens of every document; empty: the row is one."""
    tap_scales: Tensor | None = None  # [S, F], of 8-bit taps
    last_scales: Tensor | None = None  # [S, 1], of an 8-bit final state
    source: str = ""
    """Where its features are from: shards or window; empty where they are to be computed."""
    sources: tuple[str, ...] = ()
    """Of every document of several; the features of those to be computed hold zeros."""

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Id and tokens of every document, one or more."""
        return self.documents or ((self.id, len(self.input_ids)),)

    def origins(self) -> tuple[str, ...]:
        """Where the features of every document are from."""
        return self.sources or (self.source,) * len(self.parts())


@dataclass(frozen=True)
class Batch:
    """Rows side by side, padded on the right with id 0 and mask False."""

    input_ids: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] bool
    row_ids: list[str]
    taps: Tensor | None = None  # [B, S, F*D]
    last_hidden: Tensor | None = None  # [B, S, D]
    tap_scales: Tensor | None = None  # [B, S, F], of 8-bit taps
    last_scales: Tensor | None = None  # [B, S, 1], of an 8-bit final state


class ResponseRows:
    """Rows of `data.responses`, cut to `max_length`; too few supervised tokens reject a row.

    Ids and masks lie in a temporary file (`row_file`), not in memory.

    Args:
        data: where the rows are and what they may be.
        tokenizer: the target's; renders conversations that are not tokenised yet.
        vocab_size: rows with an id at or above it are rejected; None takes any id.

    Raises:
        DataError: a source cannot be read, or no row has enough supervised tokens.
        RunError: the disk for temporary files is too small.
    """

    def __init__(
        self, data: DataSettings, tokenizer: Any = None, *, vocab_size: int | None = None
    ) -> None:
        if not data.responses:
            raise DataError("data.responses is empty: name the responses.jsonl to train on")
        self.rejects = Rejects()
        self.num_cut = 0
        """Rows that were longer than `max_length`."""
        self.thinking: Counter[str] = Counter()
        """Rows by the template's switch: `on`, `off`, `unset`."""
        self._rows = RowFile()
        templates: set[str] = set()
        for response in read_responses(
            data.responses, tokenizer, rejects=self.rejects, vocab_size=vocab_size
        ):
            self._add(response, data)
            if response.template_hash:
                templates.add(response.template_hash)
        self._report(data, templates, tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return Row(*self._rows.read(index))

    @property
    def num_tokens(self) -> int:
        return self._rows.num_tokens

    def lengths(self) -> Sequence[int]:
        """Tokens of every row. Do not write to it."""
        return self._rows.lengths

    def used_ids(self) -> set[int]:
        """Every token id that occurs: none of them can be the mask token."""
        return set(self._rows.used)

    def _add(self, response: Response, data: DataSettings) -> None:
        cut = len(response.input_ids) > data.max_length
        if error := too_few(response, data):
            self.rejects.add(error, response.key)
            return
        mask = response.loss_mask[: data.max_length]
        self.num_cut += cut
        self.thinking[response.switch] += 1
        self._rows.append(response.key, response.input_ids[: data.max_length], mask)

    def _report(self, data: DataSettings, templates: set[str], tokenizer: Any) -> None:
        if not len(self._rows):
            raise DataError(
                f"no row of {', '.join(data.responses)} has {data.min_supervised_tokens} "
                f"supervised tokens within {data.max_length}: {self.rejects.explained()}"
            )
        if self.rejects.rejected:
            log.warning("%s", self.rejects.summary())
        if self.num_cut:
            log.warning("%d rows cut to data.max_length %d", self.num_cut, data.max_length)
        if tokenizer is not None and (others := templates - {template_hash(tokenizer)}):
            log.warning(
                "rows were rendered with another chat template (%s) than the target's (%s): the "
                "draft will be trained on contexts that are not served",
                ", ".join(sorted(others)),
                template_hash(tokenizer),
            )


class ShardRows:
    """Rows of a directory that `dspark capture` wrote, with their features.

    Args:
        path: the directory.
        target_fingerprint, layer_ids, template_hash: what the run uses; None is not compared.

    Raises:
        CheckpointError: the directory is missing, incomplete or damaged.
        DataError: the features belong to another target, other taps or another template.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target_fingerprint: str | None = None,
        layer_ids: Sequence[int] | None = None,
        template_hash: str | None = None,
    ) -> None:
        self._store = FeatureStore(Path(path))
        self._store.check(
            target_fingerprint=target_fingerprint,
            layer_ids=None if layer_ids is None else list(layer_ids),
            template_hash=template_hash,
        )

    def __len__(self) -> int:
        return len(self._store)

    @property
    def header(self) -> Header:
        """What the features depend on."""
        return self._store.header

    def __getitem__(self, index: int) -> Row:
        return stored_row(*self._store.row(index))

    @property
    def num_tokens(self) -> int:
        return self._store.num_tokens

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return self._store.lengths()

    def used_ids(self) -> set[int]:
        """Every token id that occurs: none of them can be the mask token."""
        return self._store.used_ids()


def stored_row(row_id: str, tensors: Mapping[str, Tensor], source: str = "shards") -> Row:
    """A row by the tensors of its shard; the features stay where and as they are."""
    ids, mask = tensors["input_ids"].long(), tensors["loss_mask"].bool()
    return Row(
        row_id,
        ids,
        mask,
        taps=tensors["taps"],
        last_hidden=tensors["last_hidden"],
        tap_scales=tensors.get("tap_scales"),
        last_scales=tensors.get("last_scales"),
        source=source,
    )


def collate(rows: Sequence[Row], length: int | None = None) -> Batch:
    """Rows to one batch of ``length`` tokens (None: of the longest row); everything is copied.

    8-bit features stay so: `storage.decoded` is for the device they go to. Where only some rows
    have features, the others' are zeros; where none has, there are none.
    """
    length = max(len(row.input_ids) for row in rows) if length is None else length
    return Batch(
        input_ids=_side_by_side([row.input_ids for row in rows], length),
        loss_mask=_side_by_side([row.loss_mask for row in rows], length),
        row_ids=[row.id for row in rows],
        taps=_features([row.taps for row in rows], length),
        last_hidden=_features([row.last_hidden for row in rows], length),
        tap_scales=_features([row.tap_scales for row in rows], length),
        last_scales=_features([row.last_scales for row in rows], length),
    )


def _side_by_side(tensors: Sequence[Tensor], length: int) -> Tensor:
    out = tensors[0].new_zeros(len(tensors), length)
    for place, tensor in zip(out, tensors, strict=True):
        place[: len(tensor)] = tensor
    return out


def _features(held: Sequence[Tensor | None], length: int) -> Tensor | None:
    like = next((values for values in held if values is not None), None)
    if like is None:
        return None
    out = _BUFFERS.empty(len(held), length, like.shape[-1], dtype=like.dtype)
    for place, values in zip(out, held, strict=True):
        count = 0 if values is None else len(values)
        if values is not None:
            place[:count] = values
        place[count:].zero_()
    return out


@lru_cache(maxsize=4)
def order(num_rows: int, seed: int, epoch: int) -> Tensor:  # [num_rows] int64
    """The permutation of an epoch, a function of (seed, epoch). Do not write to it."""
    digest = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    # 32 bits: the CPU generator uses no more of its seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.randperm(num_rows, generator=generator)


def rows_at(step: int, global_batch: int, num_rows: int, seed: int) -> list[int]:
    """Indices of the rows that optimizer step ``step`` (from 0) trains on.

    An epoch is `num_rows // global_batch` whole steps; the rows left over at its end are others in
    every epoch. With fewer rows than one global batch, the epochs' orders follow one another
    without a gap, and a step sees a row more than once.
    """
    if num_rows >= global_batch:
        epoch, position = divmod(step, num_rows // global_batch)
        first = position * global_batch
        indices: list[int] = order(num_rows, seed, epoch)[first : first + global_batch].tolist()
        return indices
    _say_once(global_batch, num_rows)
    places = (divmod(step * global_batch + i, num_rows) for i in range(global_batch))
    return [int(order(num_rows, seed, epoch)[place]) for epoch, place in places]


@lru_cache(maxsize=8)
def _say_once(global_batch: int, num_rows: int) -> None:
    log.warning(
        "%d rows are fewer than the global batch of %d: every step sees rows more than once",
        num_rows,
        global_batch,
    )
