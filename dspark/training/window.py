"""The forward passes of one optimizer step, drawn before the first of them runs.

Rows come from `corpus.dataset.rows_at`, anchors from one generator per row, seeded by the run's
seed and the row's position in the run (which stands for step and row: a row that comes twice in a
step gets other anchors the second time). A window is therefore a function of (seed, step), the
same for every split over processes and forward passes, and can be drawn ahead in another thread.

Symbols: B rows of a forward pass, S positions, M documents in them (B without packing), A anchors,
K slots, N supervised blocks.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.config import LossSettings
from dspark.corpus.dataset import Row, collate, rows_at
from dspark.draft.anchors import sample_blocks
from dspark.draft.visibility import TILE
from dspark.losses import denominators

__all__ = ["Pass", "Rows", "Split", "Window", "Windows", "draw_pass"]

_PAD_TO = 64
_PAD_TO_GPU = TILE  # whole tiles for the attention over them
_AHEAD = 2  # windows drawn while one is trained on


class Rows(Protocol):
    """Training rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


@dataclass(frozen=True)
class Pass:
    """What one forward pass of one process needs."""

    input_ids: Tensor  # [B, S] int64
    taps: Tensor | None  # [B, S, F*D], from shards
    last_hidden: Tensor | None  # [B, S, D], from shards
    anchors: Tensor  # [B, A] int64
    anchor_ids: Tensor  # [B, A] int64
    anchor_starts: Tensor  # [B, A] int64, first position of the anchor's document
    block_rows: Tensor  # [N] int64, supervised blocks among B*A
    block_documents: Tensor  # [N] int64, the document of each among the M
    target_rows: Tensor  # [N, K] int64, positions among B*S whose hidden state predicts the labels
    labels: Tensor  # [N, K] int64
    prev_ids: Tensor  # [N, K] int64
    mask: Tensor  # [N, K] bool
    documents: Tensor  # [B, S] int64, the document of each position among the M; M in padding
    starts: Tensor | None  # [B, S] int64, first position of its document; None: 0 everywhere
    spans: tuple[tuple[int, int, int], ...]
    """Row, first position and tokens of each of the M documents."""
    row_ids: tuple[str, ...]
    """Of the M documents."""
    sources: tuple[str, ...] = ()
    """Where the features of each of the M documents are from; empty where they are to be computed
    (those of ``taps`` and ``last_hidden`` are then 0)."""
    loss_mask: Tensor | None = None  # [B, S] bool
    tap_scales: Tensor | None = None  # [B, S, F], of 8-bit taps
    last_scales: Tensor | None = None  # [B, S, 1], of an 8-bit final state

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return sum(tokens for _, _, tokens in self.spans)

    def blocks(self, **changed: Tensor) -> dict[str, Tensor | None]:
        """What `Objective.forward` takes of it, by name; ``changed`` in place of its own."""
        names = (
            "anchor_ids", "anchors", "starts", "anchor_starts", "block_rows", "labels", "prev_ids",
            "mask",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, **changed}

    def to(self, device: torch.device) -> "Pass":
        """The same on ``device``, copied without waiting for it."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Pass":
        """The same in page-locked memory, from which a GPU copies in the background."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Pass":
        changed: dict[str, Any] = {
            name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **changed)


@dataclass(frozen=True)
class Window:
    """The forward passes of this process in one optimizer step."""

    step: int
    passes: list[Pass]
    denominators: Tensor  # [2] float64, of this process only


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the rows of a step are dealt out: forward pass by forward pass, then by process."""

    batch_size: int
    grad_accumulation: int
    process_index: int = 0
    num_processes: int = 1

    @property
    def global_batch(self) -> int:
        """Rows of one step."""
        return self.batch_size * self.grad_accumulation * self.num_processes

    def places(self) -> list[range]:
        """For each forward pass of this process, its places among the step's rows."""
        firsts = [
            (number * self.num_processes + self.process_index) * self.batch_size
            for number in range(self.grad_accumulation)
        ]
        return [range(first, first + self.batch_size) for first in firsts]


class Windows:
    """All windows of a run, drawn a little ahead of the training."""

    def __init__(
        self,
        rows: Rows,
        split: Split,
        *,
        seed: int,
        num_anchors: int,
        block_size: int,
        loss: LossSettings,
        pin: bool,
        length: int | None = None,
    ) -> None:
        """``length``: pad rows and their anchors to the most there can be, so that all forward
        passes have one shape; None: as far as the longest row of a pass needs."""
        self._rows = rows
        self._split = split
        self._seed = seed
        self._num_anchors = num_anchors
        self._block_size = block_size
        self._loss = loss
        self._pin = pin
        self._length = length

    def draw(self, step: int) -> Window:
        """The window of optimizer step number ``step``."""
        split = self._split
        numbers = rows_at(
            step, global_batch=split.global_batch, num_rows=len(self._rows), seed=self._seed
        )
        passes = []
        total = torch.zeros(2, dtype=torch.float64)
        for places in split.places():
            one = draw_pass(
                [self._rows[numbers[place]] for place in places],
                [anchor_seed(self._seed, step * split.global_batch + place) for place in places],
                num_anchors=self._num_anchors,
                block_size=self._block_size,
                pad_to=_PAD_TO_GPU if self._pin else _PAD_TO,
                length=self._length,
            )
            total += denominators(one.mask, self._loss)
            passes.append(one.pinned() if self._pin else one)
        return Window(step, passes, total)

    def between(self, first: int, last: int) -> Iterator[Window]:
        """Windows of steps first .. last - 1."""
        with ThreadPoolExecutor(1, thread_name_prefix="windows") as drawer:
            waiting: list[Future[Window]] = []
            try:
                for step in range(first, last + _AHEAD):
                    if step < last:
                        waiting.append(drawer.submit(self.draw, step))
                    if step >= first + _AHEAD:
                        yield waiting.pop(0).result()
            finally:
                drawer.shutdown(cancel_futures=True)


def anchor_seed(seed: int, position: int) -> int:
    """Seed of the anchors of the row at ``position`` (step x global batch + place)."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw_pass(
    rows: Sequence[Row],
    seeds: Sequence[int],
    *,
    num_anchors: int,
    block_size: int,
    pad_to: int = _PAD_TO,
    length: int | None = None,
) -> Pass:
    """Rows and their anchors to the tensors of one forward pass.

    S is rounded up, so that a device sees few shapes; with ``length``, the most tokens of a row, S
    and A are as large as they can get. Only blocks with a supervised slot are
    listed; N may be 0.
    """
    held = max(len(row.input_ids) for row in rows)
    batch = collate(rows, -(-max(held, length or 0) // pad_to) * pad_to)
    spans = _spans(rows)
    documents = _by_position(batch.input_ids.shape, spans, range(len(spans)), len(spans))
    starts = None
    if any(row.documents for row in rows):
        starts = _by_position(batch.input_ids.shape, spans, [first for _, first, _ in spans], 0)
    blocks = sample_blocks(
        batch.input_ids,
        batch.loss_mask,
        num_anchors=num_anchors,
        block_size=block_size,
        generators=[torch.Generator().manual_seed(seed) for seed in seeds],
        starts=starts,
        width=1 if length is None else num_anchors,
    )
    mask = blocks.mask.flatten(0, 1)
    chosen = mask.any(-1).nonzero()[:, 0]
    line = torch.arange(len(rows))[:, None, None] * batch.input_ids.shape[1]
    return Pass(
        input_ids=batch.input_ids,
        taps=batch.taps,
        last_hidden=batch.last_hidden,
        anchors=blocks.anchors,
        anchor_ids=blocks.anchor_ids,
        anchor_starts=blocks.anchor_starts,
        block_rows=chosen,
        block_documents=documents.gather(1, blocks.anchors).flatten()[chosen],
        target_rows=(line + blocks.target_index).flatten(0, 1)[chosen],
        labels=blocks.label_ids.flatten(0, 1)[chosen],
        prev_ids=blocks.prev_ids.flatten(0, 1)[chosen],
        mask=mask[chosen],
        documents=documents,
        starts=starts,
        spans=spans,
        row_ids=tuple(name for row in rows for name, _ in row.parts()),
        sources=tuple(source for row in rows for source in row.origins()),
        loss_mask=batch.loss_mask,
        tap_scales=batch.tap_scales,
        last_scales=batch.last_scales,
    )


def _spans(rows: Sequence[Row]) -> tuple[tuple[int, int, int], ...]:
    found = []
    for number, row in enumerate(rows):
        first = 0
        for _, tokens in row.parts():
            found.append((number, first, tokens))
            first += tokens
    return tuple(found)


def _by_position(
    shape: torch.Size, spans: Sequence[tuple[int, int, int]], values: Sequence[int], rest: int
) -> Tensor:  # [B, S] int64
    """Each document's value on its positions, ``rest`` on padding."""
    out = torch.full(shape, rest, dtype=torch.int64)
    for (row, first, tokens), value in zip(spans, values, strict=True):
        out[row, first : first + tokens] = value
    return out
