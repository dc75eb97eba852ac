"""What a run's data says about its size, or which bounds the settings give without it.

Features of shards are not read, only their ids' offsets.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.config import Config
from dspark.corpus.dataset import ResponseRows, ShardRows
from dspark.corpus.files import expand
from dspark.corpus.packing import PackedRows
from dspark.draft.visibility import TILE
from dspark.errors import DataError
from dspark.training.rows import TrainingRows, documents_of, hybrid_of, open_rows

__all__ = ["DataSize", "enlarged", "measure_rows", "open_if_there", "unread"]


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """Rows as a forward pass takes them: packed ones where `data.pack_length` is set."""

    known: bool
    note: str
    """Why it is unknown; empty where it is known."""
    documents: int | None
    rows: int | None
    tokens: int | None
    fill: float | None
    """Of packed rows: share of their room that tokens take."""
    longest_row: int
    """Tokens, padded as on a GPU; the bound of the settings where unknown."""
    row_tokens: float
    """Mean, like those below."""
    row_anchors: float
    most_anchors: int
    """Of one row."""
    context: float
    """Tokens between the start of an anchor's document and the anchor."""
    assumed: bool = False
    """Documents, rows and tokens were not counted: see `enlarged`."""
    storage: str | None = None
    """As `capture.dtype`, of the shards that are there; None: there are none."""
    missing: float = 1.0
    """Of `data.on_missing: generate`, the share of documents that the shards do not hold."""


def open_if_there(config: Config, tokenizer: Any) -> TrainingRows | str:
    """The rows of `open_rows`, or the sentence that says why there are none yet.

    Raises:
        DSparkError: what is there cannot be used, as in a run.
    """
    if missing := _missing(config):
        return missing
    return open_rows(config, tokenizer)


def measure_rows(rows: TrainingRows, num_anchors: int) -> DataSize:
    """Sizes of rows that are there."""
    documents = documents_of(rows)
    lengths = documents.lengths()
    groups = rows.groups if isinstance(rows, PackedRows) else [[i] for i in range(len(lengths))]
    # a shard's masks lie among its features
    places = _candidates(documents) if isinstance(documents, ResponseRows) else None
    places = places or [length - 1 for length in lengths]
    totals = [sum(lengths[i] for i in group) for group in groups]
    anchors = [min(num_anchors, sum(places[i] for i in group)) for group in groups]
    tokens = sum(lengths)
    hybrid = hybrid_of(rows)
    return DataSize(
        known=True,
        storage=hybrid.header.dtype
        if hybrid
        else documents.header.dtype
        if isinstance(documents, ShardRows)
        else None,
        missing=1 - hybrid.num_present / len(hybrid) if hybrid else 1.0,
        note="",
        documents=len(lengths),
        rows=len(groups),
        tokens=tokens,
        fill=rows.fill if isinstance(rows, PackedRows) else None,
        longest_row=_padded(max(totals)),
        row_tokens=tokens / len(groups),
        row_anchors=sum(anchors) / len(groups),
        most_anchors=max(1, *anchors),
        # anchors fall on documents by their tokens, and anywhere in them
        context=sum(length * length for length in lengths) / (2 * tokens),
    )


def unread(config: Config, note: str) -> DataSize:
    """The most that the settings allow: full rows, each of one document."""
    length = config.data.pack_length or config.data.max_length
    anchors = min(config.train.num_anchors, length - 1)
    return DataSize(
        known=False,
        note=note,
        documents=None,
        rows=None,
        tokens=None,
        fill=None,
        longest_row=_padded(length),
        row_tokens=float(length),
        row_anchors=float(anchors),
        most_anchors=anchors,
        context=config.data.max_length / 2,
    )


def enlarged(data: DataSize, tokens: int) -> DataSize:
    """The same kind of rows, so many that they hold ``tokens``."""
    rows = max(1, round(tokens / data.row_tokens))
    documents = None
    if data.documents is not None and data.rows is not None:
        documents = round(data.documents * rows / data.rows)
    return replace(data, rows=rows, documents=documents, tokens=tokens, assumed=True)


def _padded(length: int) -> int:
    return -(-length // TILE) * TILE  # as on a GPU


def _missing(config: Config) -> str:
    """What of the named data is not there yet; settings that name none are the run's to refuse."""
    data = config.data
    if config.train.features == "offline":
        if data.shards is not None and not (Path(data.shards) / "manifest.json").exists():
            return f"data.shards '{data.shards}' is not there yet"
        if data.shards is None or data.on_missing == "refuse":
            return ""
    for source in data.responses:
        try:
            expand([source])
        except DataError as error:
            if Path(source).expanduser().is_file():
                raise  # there, but of no format that is read
            return f"data.responses: {error}"
    return ""


def _candidates(documents: ResponseRows) -> list[int]:
    """Of every document: positions that can be an anchor."""
    masks = (documents[number].loss_mask for number in range(len(documents)))
    return [int((mask[:-1] & mask[1:]).sum()) for mask in masks]
