"""The rows a run trains on: responses (features are computed online) or capture shards."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dspark.config import Config
from dspark.corpus import head_check
from dspark.corpus.chat import template_hash
from dspark.corpus.dataset import ResponseRows, Row, ShardRows
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.hybrid import HybridRows
from dspark.corpus.ids import id_limit
from dspark.corpus.packing import PackedRows
from dspark.errors import ConfigError, DataError
from dspark.target import Target

__all__ = [
    "TrainingRows",
    "check_features",
    "check_fit",
    "documents_of",
    "facts",
    "hybrid_of",
    "identity",
    "open_rows",
]

log = logging.getLogger(__name__)

_SAMPLED = 16  # rows whose ids stand for all of them in `identity`


class TrainingRows(Protocol):
    """Training rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def used_ids(self) -> set[int]:
        """Every token id that occurs."""
        ...


def documents_of(rows: TrainingRows) -> ResponseRows | ShardRows:
    """What the rows were made of, before packing; responses where only some have features."""
    held: Any = rows.documents if isinstance(rows, PackedRows) else rows
    if isinstance(held, HybridRows):
        return held.responses
    assert isinstance(held, ResponseRows | ShardRows)
    return held


def hybrid_of(rows: TrainingRows) -> HybridRows | None:
    """The rows before packing, where features that shards do not hold are computed."""
    held: Any = rows.documents if isinstance(rows, PackedRows) else rows
    return held if isinstance(held, HybridRows) else None


def open_rows(config: Config, tokenizer: Any) -> TrainingRows:
    """The rows that `train.features` asks for; no target is needed yet.

    Raises:
        ConfigError: the setting that names them is empty.
        CheckpointError: the shards are missing, incomplete or damaged.
        DataError: responses cannot be read, or none can be trained on.
    """
    documents = _documents(config, tokenizer)
    if config.data.pack_length is None:
        return documents
    packed = PackedRows(documents, config.data.pack_length)
    log.info(
        "%d documents in %d rows of %d tokens, %.1f%% full",
        len(documents),
        len(packed),
        config.data.pack_length,
        100 * packed.fill,
    )
    return packed


def _documents(config: Config, tokenizer: Any) -> ResponseRows | ShardRows | HybridRows:
    data = config.data
    generate = data.on_missing == "generate"
    if generate and config.train.features != "offline":
        raise ConfigError(
            f"data.on_missing is generate but train.features is {config.train.features}, which "
            "reads no shards: set train.features=offline, or leave data.on_missing out"
        )
    if config.train.features == "offline":
        if data.shards is None:
            raise ConfigError(
                "train.features is offline but data.shards is not set: give the directory that "
                "`dspark capture` wrote, or set train.features=online"
            )
        if not generate:
            return ShardRows(data.shards)
        if not data.responses:
            raise ConfigError(
                "data.on_missing is generate but data.responses is empty: it names the rows of the "
                "run, of which data.shards may hold some"
            )
    if not data.responses:
        raise ConfigError(
            "data.responses is empty: give the responses.jsonl files that `dspark sample` wrote"
        )
    for source in data.responses:
        if source == config.sample.out and not Path(source).exists():
            raise DataError(f"data.responses {source} is not there yet: run `dspark sample` first")
    responses = ResponseRows(data, tokenizer, vocab_size=id_limit(tokenizer))
    if config.train.features == "offline" and data.shards is not None:
        return HybridRows(responses, Path(data.shards))
    return responses


def check_features(
    config: Config, target: Target, layer_ids: Sequence[int], tokenizer: Any
) -> None:
    """Refuse shards that hold the features of another target, other taps or another template.

    Raises:
        DataError: names what differs, with both values.
        CheckpointError: the output head is not the one they were captured with.
    """
    if config.train.features != "offline" or config.data.shards is None:
        return
    generate = config.data.on_missing == "generate"
    store = FeatureStore(Path(config.data.shards), partial=generate)
    store.check(
        target_fingerprint=target.fingerprint_like(store.header.target_fingerprint),
        # what is computed here stands beside what was computed there
        compute_dtype=_name(target.dtype) if generate and store.header.compute_dtype else None,
        layer_ids=list(layer_ids),
        template_hash=template_hash(tokenizer) if tokenizer.chat_template else None,
    )
    head_check.check_head(store, target.logits, where=config.data.shards)


def check_fit(rows: TrainingRows, target: Target) -> None:
    """Refuse rows that do not fit the target, and rows of which none can hold an anchor.

    Raises:
        DataError: an id is outside the target's vocabulary, a row (of responses; shards were
            checked when they were written) is longer than its positions, or nowhere do two
            supervised tokens follow each other.
    """
    used = rows.used_ids()
    largest, smallest = max(used), min(used)
    if smallest < 0:
        raise DataError(
            f"the data holds token id {smallest}, which is none: it is damaged; look at shards "
            "with `dspark inspect DIR --verify`, and run the same capture again"
        )
    if largest >= target.vocab_size:
        raise DataError(
            f"the data holds token id {largest} but target '{target.name}' has {target.vocab_size} "
            "ids: the rows were made with another tokenizer"
        )
    documents = documents_of(rows)
    if not isinstance(documents, ShardRows):
        longest = max(documents.lengths())
        if longest > target.max_position_embeddings:
            raise DataError(
                f"a row holds {longest} tokens but target '{target.name}' has "
                f"{target.max_position_embeddings} positions: set data.max_length to that or less"
            )
    masks = (documents[number].loss_mask for number in range(len(documents)))
    if not any(bool((mask[:-1] & mask[1:]).any()) for mask in masks):
        raise DataError(
            f"none of the {len(documents)} rows holds two supervised tokens in a row, so no block "
            "can be trained: check the loss masks with `dspark doctor`"
        )


def facts(rows: TrainingRows) -> dict[str, Any]:
    """For the record: how many rows there are, and of how many thinking was on, off or unset.

    Shards do not tell the latter.
    """
    documents = documents_of(rows)
    told: dict[str, Any] = {"rows": len(documents)}
    if isinstance(rows, PackedRows):
        told["packed_rows"] = len(rows)
    if isinstance(documents, ResponseRows):
        told["thinking"] = dict(sorted(documents.thinking.items()))
    return told


def identity(rows: TrainingRows) -> dict[str, Any]:
    """What tells these rows from others: their number, and the ids and masks of some of them."""
    digest = hashlib.sha256()
    for number in range(_SAMPLED):
        row = rows[number * (len(rows) - 1) // (_SAMPLED - 1)]
        digest.update(row.input_ids.numpy().tobytes())
        digest.update(row.loss_mask.numpy().tobytes())
    return {"data rows": len(rows), "data digest": digest.hexdigest()[:16]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
