"""What a Ling-3.0 target remembers of the tokens it has read, and how a step is taken back.

A verify call stages: KDA layers keep the state after every row, MLA layers write behind the cursor.
`commit` keeps the first few rows of it; everything else is forgotten or overwritten.

Symbols: B sequences, T rows, H heads, K key size, V value size, W kernel of the short convolutions,
L latent size (with the rotated shared key), C chunk length.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dspark.target.rows import CHUNK

__all__ = ["Call", "KDAState", "LatentState", "LingCache"]


class KDAState:
    """State and convolution inputs of one layer, and what the last call staged.

    ``state`` [B, H, K, V] float32; ``tail`` [B, W - 1, 3 * H * K], the last inputs of the three
    convolutions in the model's dtype.
    """

    def __init__(self, state: Tensor, tail: Tensor) -> None:
        self.state, self.tail = state, tail
        self._states: list[Tensor] = []
        self._inputs: Tensor | None = None

    def stage(self, states: list[Tensor], inputs: Tensor) -> None:
        """Keep the state after each row, and all inputs of the convolutions, until `commit`."""
        self._states, self._inputs = states, inputs

    def move(self, state: Tensor, inputs: Tensor) -> None:
        """To the state after a whole sequence [B, W - 1 + T, 3 * H * K] of inputs."""
        self.state = state
        self.tail = inputs[:, inputs.shape[1] - self.tail.shape[1] :].clone()

    def commit(self, rows: int) -> None:
        """Move to the state after ``rows`` of the staged rows; the others are forgotten."""
        if rows and self._inputs is not None:
            self.state = self._states[rows - 1]
            # a copy: the staged inputs of the whole call would stay alive behind a view
            self.tail = self._inputs[:, rows : rows + self.tail.shape[1]].clone()
        self._states, self._inputs = [], None

    def select(self, rows: Tensor) -> None:
        """Keep these sequences of the batch."""
        rows = rows.to(self.state.device)
        self.state, self.tail = self.state[rows], self.tail[rows]


class LatentState:
    """Latents of one MLA layer, [B, capacity, L] float32, written behind a cursor."""

    def __init__(self, batch: int, size: int, device: torch.device) -> None:
        self.held = torch.zeros(batch, 0, size, device=device)

    def write(self, latent: Tensor, start: int) -> None:
        """Put [B, T, L] at positions ``start``...; there is room for whole chunks."""
        end = start + latent.shape[1]
        if end > self.held.shape[1]:
            # doubling keeps the number of copies logarithmic in the context length
            capacity = max(-(-end // CHUNK) * CHUNK, 2 * self.held.shape[1])
            grown = self.held.new_zeros(latent.shape[0], capacity, latent.shape[2])
            grown[:, :start] = self.held[:, :start]
            self.held = grown
        self.held[:, start:end] = latent


@dataclass(frozen=True)
class Call:
    """One forward pass as the layers see it."""

    positions: Tensor
    """[B, T] int64, for RoPE."""
    by_row: bool = False
    """A step of few rows whose numbers do not depend on each other; else whole sequences."""
    count: int = 0
    """Rows of a step that are real; the others fill the tile."""
    valid: Tensor | None = None
    """[B, T] bool, False on padding on the left; None: no padding."""
    start: int = 0
    """Positions of the cache before this call."""
    kda: Mapping[int, KDAState] = field(default_factory=dict)
    latents: Mapping[int, LatentState] = field(default_factory=dict)
    masks: tuple[Tensor, ...] = ()
    """For `by_row`: per chunk of the cache [B, H * T, C] float32, 0 or -inf."""
    hidden: Tensor | None = None
    """For sequences behind a cache or with padding: [B, 1, T, start + T] bool, True where a
    position may not be seen."""

    def to(self, device: torch.device) -> "Call":
        """The same on ``device``; states are where their layers are."""
        if self.positions.device == device:
            return self
        valid, hidden = (
            None if one is None else one.to(device) for one in (self.valid, self.hidden)
        )
        return replace(
            self,
            positions=self.positions.to(device),
            valid=valid,
            hidden=hidden,
            masks=tuple(mask.to(device) for mask in self.masks),
        )


class LingCache:
    """State of a batch of sequences that are read together; decoding uses a batch of one."""

    def __init__(
        self,
        layer_ids: tuple[int, ...],
        kda: dict[int, KDAState],
        latents: dict[int, LatentState],
    ) -> None:
        self.layer_ids = layer_ids
        self.length = 0
        self.kda = kda
        self.latents = latents
        self._rows = 0

    def begin(self, rows: int) -> None:
        """A call of ``rows`` rows starts at the cursor."""
        self._rows = rows

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last call."""
        assert 0 <= rows <= self._rows
        self._rows = 0
        for state in self.kda.values():
            state.commit(rows)
        self.length += rows

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """By layer, views of the latents from ``start`` to the cursor, or the state at the cursor.

        Valid where nothing is staged.
        """
        left: dict[int, tuple[Tensor, ...]] = {
            layer: (latent.held[:, start : self.length],) for layer, latent in self.latents.items()
        }
        return left | {layer: (one.state, one.tail) for layer, one in self.kda.items()}

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Go on as if the next ``rows`` tokens were those that `written` was taken of."""
        for layer, latent in self.latents.items():
            latent.write(written[layer][0], self.length)
        for layer, one in self.kda.items():
            # moved on from, never written into
            one.state, one.tail = written[layer]
        self.length += rows

    def select(self, rows: Tensor) -> None:
        """Keep these sequences of the batch."""
        for state in self.kda.values():
            state.select(rows)
        for latent in self.latents.values():
            latent.held = latent.held[rows.to(latent.held.device)]
