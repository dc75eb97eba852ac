"""Responses to feature shards: run the target once over every row and keep what training reads.

The size is known before anything is written, and a disk that is too small is refused. Shards are
planned from the rows' lengths, so a run that was killed goes on behind its last whole shard.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark import provenance
from dspark.config import CaptureSettings, DataSettings
from dspark.corpus import store
from dspark.corpus.chat import template_hash
from dspark.corpus.dataset import ResponseRows, Row, collate
from dspark.corpus.ids import id_limit
from dspark.corpus.store import Header, Shard, ShardRow
from dspark.corpus.unusable import Unusable
from dspark.errors import ConfigError, RunError
from dspark.progress import Bar
from dspark.provenance import free_bytes
from dspark.target import Features, Target
from dspark.target.front import tables

__all__ = ["CaptureReport", "capture"]

log = logging.getLogger(__name__)


@dataclass
class CaptureReport:
    """What a run did."""

    out: str
    rows: int = 0
    """In the directory now; `skipped` are not among them."""
    tokens: int = 0
    bytes: int = 0
    shards: int = 0
    resumed_shards: int = 0
    skipped: list[str] = field(default_factory=list)
    """Ids of rows whose features held NaN, Inf or nothing but zeros."""
    cut: int = 0
    rejects: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return asdict(self)


def capture(
    target: Target,
    tokenizer: Any,
    data: DataSettings,
    settings: CaptureSettings,
    layer_ids: Sequence[int],
) -> CaptureReport:
    """Write the features of `data.responses` to `capture.out`, in the order of the rows.

    Args:
        tokenizer: the target's; its template is pinned, and renders foreign conversations.
        layer_ids: 0-based decoder layers whose outputs are the taps.

    Raises:
        ConfigError: the disk is too small, or the directory holds something else.
        DataError: there is no usable row.
        RunError: the features of more than 1% of the rows are unusable.
    """
    rows = ResponseRows(data, tokenizer, vocab_size=min(id_limit(tokenizer), target.vocab_size))
    out = Path(settings.out)
    header = Header(
        target=target.name,
        target_revision=target.revision,
        target_fingerprint=target.fingerprint(),
        layer_ids=list(layer_ids),
        hidden_size=target.hidden_size,
        dtype=settings.dtype,
        template_hash=template_hash(tokenizer),
        max_length=data.max_length,
    )
    plan = list(_plan(rows, header.token_bytes, settings.shard_bytes))
    names = [[_fingerprint(rows[i]) for i in part] for part in plan]
    present = [store.present_shard(out, n, part) for n, part in enumerate(names)]
    missing = sum(
        len(rows[i].input_ids)
        for part, found in zip(plan, present, strict=True)
        if found is None
        for i in part
    )
    held = tables(target)
    _check_disk(out, rows.num_tokens, missing, header, held.values())
    store.start(out, header)
    report = CaptureReport(str(out), cut=rows.num_cut, rejects=rows.rejects.to_dict())
    unusable = Unusable(len(rows), target.dtype)
    shards: list[Shard] = []
    with Bar("capturing", len(rows)) as bar:
        for index, part in enumerate(plan):
            shard = present[index]
            if shard is None:
                done, skipped = _features(target, [rows[i] for i in part], header, settings)
                shard = store.write_shard(out, index, done, names[index], skipped)
            else:
                report.resumed_shards += 1
            shards.append(shard)
            unusable.add(shard.skipped)
            bar.advance(len(part))
    report.rows = sum(shard.rows for shard in shards)
    report.tokens = sum(shard.tokens for shard in shards)
    report.bytes = sum(shard.bytes for shard in shards)
    report.shards = len(shards)
    report.skipped = unusable.ids
    if not report.rows:
        raise RunError(f"no row has usable features: {', '.join(report.skipped[:5])}")
    provenance.write_json(out / "provenance.json", provenance.collect(capture=report.to_dict()))
    store.finish(out, header, shards, held)
    return report


def _plan(rows: ResponseRows, token_bytes: int, shard_bytes: int) -> Iterator[list[int]]:
    """Indices of the rows of each shard: whole rows, in order, until the size is reached."""
    part: list[int] = []
    size = 0
    for index in range(len(rows)):
        part.append(index)
        size += token_bytes * len(rows[index].input_ids)
        if size >= shard_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part


def _fingerprint(row: Row) -> str:
    digest = hashlib.sha256(row.input_ids.numpy().tobytes() + row.loss_mask.numpy().tobytes())
    return f"{row.id} {digest.hexdigest()[:16]}"


def _check_disk(
    out: Path, num_tokens: int, missing: int, header: Header, tables: Iterable[Tensor] = ()
) -> None:
    needed = missing * header.token_bytes
    needed += sum(one.numel() * one.element_size() for one in tables)
    free = free_bytes(out)
    log.info(
        "features of %s tokens: %d bytes each (hidden %d x (%d taps + 1) in %s), %.2f GiB in all, "
        "%.2f GiB to write, %.2f GiB free",
        f"{num_tokens:,}",
        header.token_bytes,
        header.hidden_size,
        len(header.layer_ids),
        header.dtype,
        num_tokens * header.token_bytes / 2**30,
        needed / 2**30,
        free / 2**30,
    )
    if needed > free:
        raise ConfigError(
            f"capture.out '{out}' needs {needed:,} bytes and its disk has {free:,} free; use fewer "
            "taps or rows, another disk, or train with features: online"
        )


def _features(
    target: Target, rows: Sequence[Row], header: Header, settings: CaptureSettings
) -> tuple[list[ShardRow], list[str]]:
    """Features of the usable rows, in order, and the ids of the others."""
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[settings.dtype]
    done: dict[int, ShardRow] = {}
    skipped = []
    # rows of like length together: less padding to compute
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    for first in range(0, len(rows), settings.batch_size):
        chosen = by_length[first : first + settings.batch_size]
        batch = collate([rows[i] for i in chosen])
        found = target.features(batch.input_ids, header.layer_ids)
        # as they are stored: what overflows there is unusable too
        features = Features(found.taps.to(dtype).cpu(), found.last_hidden.to(dtype).cpu())
        lengths = torch.tensor([len(rows[i].input_ids) for i in chosen])
        usable = features.usable(lengths).tolist()
        for place, index in enumerate(chosen):
            row, length = rows[index], int(lengths[place])
            if usable[place]:
                # copies: a view would keep the whole padded batch alive
                taps = features.taps[place, :length].clone()
                last = features.last_hidden[place, :length].clone()
                done[index] = ShardRow(row.id, row.input_ids, row.loss_mask, taps, last)
            else:
                skipped.append(row.id)
    return [done[index] for index in sorted(done)], skipped
