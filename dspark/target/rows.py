"""Attention whose rows do not depend on how many rows are computed together.

Speculative decoding is lossless only if a token's logits are the same to the bit whether the token
is row 0 of a step of its own or row 5 of a verify pass. Library attention does not promise that
(on CPUs, bf16 SDPA picks another summation order at another width). Here a step always has 8 or 16
rows, keys are read in chunks of a fixed length at absolute positions, and a chunk that a row may
not see changes nothing in it: exp(-inf) adds an exact 0 and rescales by an exact 1.

Symbols: H query heads, G key/value heads, R rows of one call, N head size, C chunk length.
"""

from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "CHUNK",
    "MOST_ROWS",
    "RowAttention",
    "RowCache",
    "Windows",
    "chunk_masks",
    "padded_rows",
    "row_attention",
]

CHUNK = 256
_TILES = (8, 16)
MOST_ROWS = _TILES[-1]
"""Rows of the widest step."""
Windows = tuple[int | None, ...]
"""Of each layer, how far back a row sees, None: to the start; empty: no layer has one."""
_LOWEST = torch.finfo(torch.float32).min


def padded_rows(rows: int, device: torch.device) -> int:
    """Rows a step of ``rows`` tokens is computed with: 8 or 16 on a CPU, always 16 elsewhere.

    A GPU's library chooses another kernel for 16 rows than for 8, with another order of sums.

    Raises:
        ValueError: more than 16 rows.
    """
    for tile in _TILES if device.type == "cpu" else _TILES[-1:]:
        if rows <= tile:
            return tile
    raise ValueError(f"a verify step takes at most {MOST_ROWS} rows, got {rows}")


def chunk_masks(
    positions: Tensor,  # [R] int64, of the rows
    end: int,
    window: int | None,
) -> list[Tensor]:  # each [R, C] float32: 0 where a row sees a key, else -inf
    """What rows may see of keys 0..``end`` - 1: up to themselves, at most ``window`` back."""
    query = positions[:, None]
    masks = []
    for first in range(0, end, CHUNK):
        key = first + torch.arange(CHUNK, device=positions.device)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, device=positions.device)
        masks.append(mask.masked_fill_(hidden, float("-inf")))
    return masks


class RowAttention(Protocol):
    """A cache that a layer appends its rows to and attends through."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor: ...


class RowCache:
    """Keys and values of one sequence, contiguous per layer, rolled back by a cursor.

    ``length`` tokens are committed. A call writes its rows behind them; `commit` keeps the first
    few, and the next call overwrites the rest before anything reads it.
    """

    def __init__(self, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = layer_ids
        self.length = 0
        self._keys: dict[int, Tensor] = {}  # layer -> [G, capacity, N] float32
        self._values: dict[int, Tensor] = {}
        self._masks: dict[int | None, list[Tensor]] = {}  # by window
        self._windows: Windows = ()
        self._rows = 0

    def begin(self, rows: int, windows: Windows, device: torch.device) -> None:
        """Prepare the masks of a call of ``rows`` rows that start at the cursor."""
        self._rows, self._windows = rows, windows
        positions = self.length + torch.arange(rows, device=device)
        end = self.length + rows
        self._masks = {one: chunk_masks(positions, end, one) for one in {*windows} or {None}}

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [G, R, N] behind the cursor; return whole chunks, [G, chunks * C, N] float32."""
        needed = -(-(self.length + self._rows) // CHUNK) * CHUNK
        self._write(layer, key, value, needed)
        return self._keys[layer][:, :needed], self._values[layer][:, :needed]

    def _write(self, layer: int, key: Tensor, value: Tensor, needed: int) -> None:
        """Put [G, R, N] behind the cursor, with room for ``needed`` positions in all."""
        held = self._keys.get(layer)
        if held is None or held.shape[1] < needed:
            # doubling keeps the number of copies logarithmic in the context length
            capacity = max(needed, 2 * held.shape[1] if held is not None else 0)
            for store, new in ((self._keys, key), (self._values, value)):
                grown = torch.zeros(
                    new.shape[0], capacity, new.shape[2], dtype=torch.float32, device=new.device
                )
                if held is not None:
                    grown[:, : self.length] = store[layer][:, : self.length]
                store[layer] = grown
        end = self.length + key.shape[1]
        self._keys[layer][:, self.length : end] = key
        self._values[layer][:, self.length : end] = value

    def written(self, start: int) -> dict[int, tuple[Tensor, ...]]:
        """By layer, views of the keys and values of the tokens from ``start`` to the cursor."""
        rows = slice(start, self.length)
        return {
            layer: (self._keys[layer][:, rows], self._values[layer][:, rows])
            for layer in self._keys
        }

    def restore(self, written: dict[int, tuple[Tensor, ...]], rows: int) -> None:
        """Go on as if the next ``rows`` tokens were those that `written` was taken of."""
        for layer, (keys, values) in written.items():
            self._write(layer, keys, values, self.length + rows)
        self.length += rows

    def attend(
        self,
        layer: int,
        query: Tensor,  # [H, R, N]
        key: Tensor,  # [G, R, N]
        value: Tensor,  # [G, R, N]
        scaling: float,
    ) -> Tensor:  # [R, H, N]
        """`append`, then attention over everything that each row may see."""
        keys, values = self.append(layer, key, value)
        window = self._windows[layer] if self._windows else None
        masks = self._masks[window]
        if masks[0].dim() == 2:
            # once a call: the heads of a group lie one after the other
            repeat = query.shape[0] // key.shape[0]
            masks = self._masks[window] = [mask.repeat(repeat, 1)[None] for mask in masks]
        return row_attention(query, keys, values, masks, scaling)

    @property
    def device(self) -> torch.device:
        return next(iter(self._keys.values())).device

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that hold keys."""
        return tuple(self._keys)

    def committed(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the committed tokens, [G, length, N] float32."""
        return self._keys[layer][:, : self.length], self._values[layer][:, : self.length]

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last call."""
        assert 0 <= rows <= self._rows
        self.length += rows
        self._rows = 0


def row_attention(
    query: Tensor,  # [H, R, N]
    key: Tensor,  # [G, chunks * C, N] float32
    value: Tensor,  # [G, chunks * C, X] float32
    masks: list[Tensor],  # per chunk, broadcast to [G, H/G * R, C], float32
    scaling: float,
) -> Tensor:  # [R, H, X] in the dtype of `query`
    """Causal attention in float32, chunk after chunk with a running maximum.

    The arithmetic of a row depends on its own position and on nothing else: products have the
    shape [H/G * R, C] whatever the context length, and chunks are added in order.
    """
    heads, rows, size = query.shape
    groups = key.shape[0]
    packed = query.float().reshape(groups, heads // groups * rows, size)
    total: Tensor | None = None
    for index, mask in enumerate(masks):
        chunk = slice(index * CHUNK, (index + 1) * CHUNK)
        scores = torch.baddbmm(mask, packed, key[:, chunk].transpose(1, 2), alpha=scaling)
        # a row that sees nothing in a chunk has a maximum of -inf: keep exp() away from inf - inf
        peak = scores.amax(-1, keepdim=True).clamp_min_(_LOWEST)
        if total is None:
            best = peak
        else:
            new = torch.maximum(best, peak)
            scale = torch.exp(best - new)
            best = new
        weights = scores.sub_(best).exp_()
        mass = weights.sum(-1, keepdim=True)
        part = torch.bmm(weights, value[:, chunk])
        if total is None:
            total, norm = part, mass
        else:
            total = total * scale + part
            norm = norm * scale + mass
    assert total is not None
    out = total.div_(norm).view(heads, rows, -1)
    return out.transpose(0, 1).to(query.dtype)
