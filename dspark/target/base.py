"""What every target offers: taps and last hidden states, and a decode that can be rolled back.

A tap is the output of decoder layer i, 0-based, behind its residual additions and before any norm
(`hidden_states[i + 1]` of transformers). The last hidden state is the one behind the final norm, so
that `logits` of it are the model's. Both are what the draft is trained on and what a verify step
hands to it.

Symbols: B batch, S positions, T verify rows, D hidden, F tapped layers, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.kernels.packed_linear import pack_linears
from dspark.target import fingerprint
from dspark.target.rows import padded_rows

__all__ = [
    "PREFILL_ROWS",
    "Cache",
    "Features",
    "GoOn",
    "ReadingStopped",
    "Rows",
    "Target",
    "check_layer_ids",
    "join_taps",
]

GoOn = Callable[[], bool]


class ReadingStopped(Exception):
    """Nobody wants the rest of a prompt to be read."""


PREFILL_ROWS = {"cpu": 512, "cuda": 8192}
"""Tokens of a piece of a prompt: a GPU reads the weights of all experts for every piece."""


@dataclass(frozen=True)
class Features:
    """What the draft learns from."""

    taps: Tensor  # [B, S, F*D]
    last_hidden: Tensor  # [B, S, D], behind the final norm

    def usable(self, lengths: Tensor) -> Tensor:  # [B] int64 -> [B] bool
        """Rows that can be learned from, by their first ``lengths`` positions."""
        batch, length = self.taps.shape[:2]
        real = torch.arange(length, device=lengths.device) < lengths[:, None]
        rows = torch.arange(batch, device=lengths.device)[:, None]
        return self.usable_documents(torch.where(real, rows, batch), batch)

    def usable_documents(
        self,
        documents: Tensor,  # [B, S] int64, the document of each position; ``count`` in padding
        count: int,
    ) -> Tensor:  # [count] bool
        """Documents that can be learned from.

        In the others a value is NaN or infinite (an overflow in float16, a damaged weight), or one
        of the layers is zero throughout.
        """
        hidden_size = self.last_hidden.shape[-1]
        layers = self.taps.view(*self.taps.shape[:2], -1, hidden_size).unbind(2)
        places = documents.flatten()
        fine = torch.ones(count, dtype=torch.bool, device=documents.device)
        for layer in (*layers, self.last_hidden):
            # the largest magnitude is NaN where any is, and no tensor of this size is made
            peaks = torch.linalg.vector_norm(layer, torch.inf, dim=-1).flatten()
            marks = torch.stack([~peaks.isfinite(), peaks != 0]).int()
            broken, filled = marks.new_zeros(2, count + 1).index_add_(1, places, marks)[:, :count]
            fine &= (broken == 0) & (filled > 0)
        return fine


@dataclass(frozen=True)
class Rows:
    """Result of a decode call."""

    logits: Tensor  # [T, V] (prefill: [1, V], of the last token)
    taps: Tensor  # [T, F*D] (prefill: of every prompt token)
    hidden: Tensor | None = (
        None  # [T, D], behind the final norm (prefill: [S, D], if it keeps them)
    )


class Cache(Protocol):
    """What a target remembers of one sequence."""

    layer_ids: tuple[int, ...]
    length: int

    def commit(self, rows: int) -> None: ...

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """By layer, views of what the tokens from ``start`` to the cursor have left."""

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Go on as if the next ``rows`` tokens were those that `written` was taken of."""


class Target(ABC):
    """A frozen model, its taps, and a batch-1 decode that can be rolled back.

    ``config`` has the names of a transformers config (`hidden_size`, `num_hidden_layers`, …).
    """

    model: Any
    name: str
    revision: str | None
    config: Any
    eos_ids: frozenset[int]
    _packed = False

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def max_position_embeddings(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, which may exceed the tokenizer's length."""
        return int(self.head_weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def prefill_rows(self) -> int:
        """Tokens of a piece of a prompt; the last one may have fewer."""
        return PREFILL_ROWS.get(self.device.type, PREFILL_ROWS["cpu"])

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    @abstractmethod
    def embed_weight(self) -> Tensor:  # [V, D]
        """The embedding table."""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:  # [V, D]
        """The output head."""

    @property
    @abstractmethod
    def architecture(self) -> str:
        """Class name in the target's config.json, or an empty string."""

    @abstractmethod
    def features(
        self,
        input_ids: Tensor,  # [B, S] int64
        layer_ids: Sequence[int],
        attention_mask: Tensor | None = None,  # [B, S], only needed for padding on the left
    ) -> Features:
        """Taps and last hidden states of whole sequences, in the target's dtype."""

    def packed_features(
        self,
        input_ids: Tensor,  # [B, S] int64
        layer_ids: Sequence[int],
        documents: Tensor,  # [B, S] int64, of each position; one lies in one row
    ) -> Features | None:
        """`features` of rows that hold several documents, which do not see each other.

        None: this target wants every document by itself.
        """
        return None

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] behind the final norm, of any device -> [..., V] on the head's."""

    @torch.no_grad()
    def own_logits(self, input_ids: Tensor) -> Tensor:  # [S] int64 -> [S, V]
        """Of every position, by a way that shares as little with `features` as there is."""
        hidden, _ = self._extend(self.new_cache(), input_ids.to(self.device), None)
        return self.logits(hidden)

    def pack(self) -> None:
        """Lay the weights out for steps of 8 and 16 rows; only what decodes pays for the copy."""
        if not self._packed:
            pack_linears(self.model)
            self._packed = True

    @abstractmethod
    def new_cache(self, layer_ids: Sequence[int] = ()) -> Any:
        """An empty `Cache` for one sequence whose calls return the taps of ``layer_ids``."""

    @abstractmethod
    def _extend(self, cache: Any, input_ids: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
        """Run tokens [T] behind the cursor; last hidden states [T, D] and taps [T, F*D].

        ``count`` is the number of real rows of a verify step, None in a prefill.
        """

    @torch.no_grad()
    def prefill(
        self,
        cache: Any,
        input_ids: Tensor,
        *,
        keep_hidden: bool = False,
        go_on: GoOn | None = None,
    ) -> Rows:
        """Run a prompt [S] behind the cursor and commit it; logits of its last token only.

        Raises:
            ReadingStopped: as `read` does.
        """
        taps, kept = [], []
        for hidden, tap in self.read(cache, input_ids, go_on):
            taps.append(tap)
            if keep_hidden:
                kept.append(hidden)
        every = torch.cat(kept) if keep_hidden else None
        return Rows(self.last_logits(hidden), torch.cat(taps), every)

    @torch.no_grad()
    def read(
        self, cache: Any, input_ids: Tensor, go_on: GoOn | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a prompt [S > 0] behind the cursor, piece by piece.

        Yields the last hidden states [T, D] and taps [T, F*D] of each piece, which is committed.

        Raises:
            ReadingStopped: ``go_on``, asked before each further piece, says no.
        """
        for index, piece in enumerate(torch.split(input_ids.to(self.device), self.prefill_rows)):
            if index and go_on is not None and not go_on():
                raise ReadingStopped
            hidden, taps = self._extend(cache, piece, None)
            cache.commit(len(piece))
            yield hidden, taps

    @torch.no_grad()
    def last_logits(self, hidden: Tensor) -> Tensor:  # [T, D] -> [1, V]
        """Of the last row of a piece, with the rows of a step: as `verify` has them, to the bit."""
        padded = hidden.new_zeros(padded_rows(1, self.device), hidden.shape[1])
        padded[:1] = hidden[-1:]
        return self.logits(padded)[:1]

    @torch.no_grad()
    def verify(self, cache: Any, input_ids: Tensor) -> Rows:
        """Run T <= 16 tokens [T] behind the cursor; nothing is committed until `commit`.

        A token's logits are the same to the bit for every T and every row it may stand in.
        """
        count = len(input_ids)
        padded = input_ids.new_full((padded_rows(count, self.device),), int(input_ids[0]))
        padded[:count] = input_ids
        hidden, taps = self._extend(cache, padded.to(self.device), count)
        return Rows(self.logits(hidden)[:count], taps[:count], hidden[:count])

    def commit(self, cache: Cache, rows: int) -> None:
        """Keep the first ``rows`` rows of the last `verify`."""
        cache.commit(rows)

    def fingerprint(self) -> str:
        """What ties features and drafts to this target: `target.fingerprint`."""
        return fingerprint.of(self.config, self.model)

    def fingerprint_like(self, stored: str) -> str:
        """Of the version that ``stored`` is of, to be compared with it."""
        mine = self.fingerprint()
        if fingerprint.comparable(mine, stored):
            return mine
        return fingerprint.of_version_1(self.model)


def check_layer_ids(layer_ids: Iterable[int], num_layers: int) -> None:
    """Taps are layer outputs 0..N-1.

    Raises:
        TargetError: an id is out of range.
    """
    for layer in layer_ids:
        if not 0 <= layer < num_layers:
            raise TargetError(
                f"tap layer {layer} is out of range: the target has layers 0..{num_layers - 1}"
            )


def join_taps(taken: dict[int, Tensor], layer_ids: Sequence[int], like: Tensor) -> Tensor:
    """Taps side by side in the order of ``layer_ids``; [..., 0] without any."""
    if not layer_ids:
        return like.new_empty(*like.shape[:-1], 0)
    return torch.cat([taken[i].to(like.device) for i in layer_ids], dim=-1)
