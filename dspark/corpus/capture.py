"""Responses to feature shards: run the target once over every row and keep what training reads.

The size is known before anything is written, and a disk that is too small is refused. Shards are
planned from the rows' lengths, so a run that was killed goes on behind its last whole shard. A
shard is written while the target computes the next, so that at most two are in memory.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark import provenance
from dspark.config import CaptureSettings, DataSettings
from dspark.corpus import going_on, head_check, store
from dspark.corpus.chat import template_hash
from dspark.corpus.dataset import ResponseRows, Row
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.ids import id_limit
from dspark.corpus.storage import encode
from dspark.corpus.store import Header, Shard, ShardRow
from dspark.corpus.unusable import BadRow, Unusable, diagnose
from dspark.errors import ConfigError, RunError
from dspark.progress import Bar
from dspark.provenance import free_bytes
from dspark.target import Features, Target
from dspark.target.documents import document_features
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
    """Ids of rows whose features held NaN, Inf or nothing but zeros; quarantine.jsonl has more."""
    cut: int = 0
    agreement: float = 1.0
    """Share of the first positions whose stored final state gives the target's own arg max."""
    forward_s: float = 0.0
    """Seconds in the target's forward passes, without its loading."""
    other_s: float = 0.0
    """Seconds in all else that capturing the rows took: checks, conversion, waiting for the disk;
    not what ran beside a forward pass."""
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
        ConfigError: the disk is too small, another run is writing there, or the directory holds
            something else.
        CheckpointError: its manifest is damaged or of an unknown format.
        DataError: there is no usable row.
        RunError: the features of more than 1% of the rows are unusable, or the disk got full.
    """
    with going_on.writing(Path(settings.out)):
        return _capture(target, tokenizer, data, settings, layer_ids)


def _capture(
    target: Target,
    tokenizer: Any,
    data: DataSettings,
    settings: CaptureSettings,
    layer_ids: Sequence[int],
) -> CaptureReport:
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
        compute_dtype=str(target.dtype).removeprefix("torch."),
    )
    header = store.check_header(out, header, target.fingerprint_like)
    store.clear(out)
    plan = list(_plan(rows, header.token_bytes, settings.shard_bytes))
    names = [[_key(rows[i]) for i in part] for part in plan]
    present = []
    with Bar("checking shards", len(names), shown=(out / store.MANIFEST).exists()) as bar:
        for number, part in enumerate(names):
            present.append(store.present_shard(out, number, part))
            bar.advance(1)
    going_on.check_plan(out, names, present, settings.shard_bytes)
    missing = sum(
        len(rows[i].input_ids)
        for part, found in zip(plan, present, strict=True)
        if found is None
        for i in part
    )
    held = tables(target)
    _check_disk(out, rows.num_tokens, missing, header, held.values())
    report = CaptureReport(str(out), cut=rows.num_cut, rejects=rows.rejects.to_dict())
    if missing:
        first = [rows[i] for i in range(min(2, len(rows)))]
        report.agreement, _ = head_check.check_capture(target, first, layer_ids, settings.dtype)
    store.start(out, header)
    shards = _Capturing(target, header, settings, report).all(rows, plan, names, present)
    report.rows = sum(shard.rows for shard in shards)
    report.tokens = sum(shard.tokens for shard in shards)
    report.bytes = sum(shard.bytes for shard in shards)
    report.shards = len(shards)
    if not report.rows:
        raise RunError(f"no row has usable features: {', '.join(report.skipped[:5])}")
    provenance.write_json(out / "provenance.json", provenance.collect(capture=report.to_dict()))
    check = head_check.expected(FeatureStore(out, partial=True), target.logits)
    store.finish(out, header, shards, held, check=check)
    return report


class _Capturing:
    """The loop over shards, and where its time goes."""

    def __init__(
        self, target: Target, header: Header, settings: CaptureSettings, report: CaptureReport
    ) -> None:
        self._target, self._header, self._settings = target, header, settings
        self._report = report
        self._bad: list[BadRow] = []

    def all(
        self,
        rows: ResponseRows,
        plan: Sequence[Sequence[int]],
        names: Sequence[Sequence[str]],
        present: Sequence[Shard | None],
    ) -> list[Shard]:
        """Every shard, those that are not ``present`` computed and written."""
        begun = time.perf_counter()
        out, report = Path(self._settings.out), self._report
        unusable = Unusable(len(rows), self._target.dtype)
        waiting: list[tuple[Shard | Future[Shard], int]] = []
        shards: list[Shard] = []

        def take(shown: Bar) -> None:
            found, count = waiting.pop(0)
            shard = found.result() if isinstance(found, Future) else found
            shards.append(shard)
            if shard.skipped:
                self._bad += store.bad_rows(out, shard)
                store.write_quarantine(out, self._bad)
            report.skipped = unusable.ids
            unusable.add(shard.skipped)
            shown.advance(count)

        with Bar("capturing", len(rows)) as bar, ThreadPoolExecutor(1, "writer") as writer:
            for index, part in enumerate(plan):
                shard = present[index]
                if shard is None:
                    done, bad = self._features([rows[i] for i in part])
                    if waiting:
                        take(bar)
                    shard_ = writer.submit(store.write_shard, out, index, done, names[index], bad)
                    waiting.append((shard_, len(part)))
                    del done
                else:
                    report.resumed_shards += 1
                    waiting.append((shard, len(part)))
                    if len(waiting) > 1:
                        take(bar)
            while waiting:
                take(bar)
        store.write_quarantine(out, self._bad)
        report.other_s = time.perf_counter() - begun - report.forward_s
        return shards

    def _features(self, rows: Sequence[Row]) -> tuple[list[ShardRow], list[BadRow]]:
        """Features of the usable rows, in order, and what is wrong with the others."""
        done: dict[int, ShardRow] = {}
        bad: dict[int, BadRow] = {}
        layers, dtype = self._header.layer_ids, self._settings.dtype
        computed = document_features(
            self._target, layers, [row.input_ids for row in rows], most=self._settings.batch_size
        )
        for index, found in self._timed(computed):
            row, stored = rows[index], encode(found, dtype)
            whole = torch.tensor([len(row.input_ids)], device=found.taps.device)
            # as they are stored: what overflows there is unusable too
            seen = found if stored.tap_scales is not None else Features(**stored.tensors())
            if bool(Features(seen.taps[None], seen.last_hidden[None]).usable(whole)):
                # copies: a view would keep all rows alive that were computed with it
                own = {name: one.cpu().clone() for name, one in stored.tensors().items()}
                done[index] = ShardRow(row.id, row.input_ids, row.loss_mask, **own)
            else:
                bad[index] = diagnose(row.id, seen, layers)
        return [done[index] for index in sorted(done)], [bad[index] for index in sorted(bad)]

    def _timed(self, computed: Iterator[tuple[int, Features]]) -> Iterator[tuple[int, Features]]:
        while True:
            begun = time.perf_counter()
            one = next(computed, None)
            if one is not None and one[1].taps.is_cuda:
                torch.cuda.synchronize(one[1].taps.device)
            self._report.forward_s += time.perf_counter() - begun
            if one is None:
                return
            yield one


def _key(row: Row) -> str:
    return store.row_key(row.id, row.input_ids, row.loss_mask)


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
