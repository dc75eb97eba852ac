"""Several sequences, one token each a step: plain decoding of many prompts for the price of one.

A step reads every weight once, whether its rows belong to one sequence or to sixteen. Rows do not
depend on each other (`dspark.target.rows`), so each sequence gets the logits, to the bit, that it
would get alone. Only checks use this: serving decodes one prompt.

Symbols: M sequences, H query heads, G key/value heads, R rows, N head size, C chunk length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.target.rows import CHUNK, RowCache, Windows, chunk_masks, padded_rows, row_attention

__all__ = ["LockstepCache"]

_ROWS = padded_rows(1, torch.device("cpu"))
"""Each sequence's attention has the shape it has in a step of its own."""


class LockstepCache:
    """Keys and values of sequences that grow by at most one token a call.

    Args:
        caches: one a sequence, prefilled; they are copied.
        room: tokens that may still be appended to each.

    Raises:
        ValueError: no sequence, or more than a step has rows.
    """

    layer_ids: tuple[int, ...] = ()

    def __init__(self, caches: Sequence[RowCache], room: int) -> None:
        device = caches[0].device
        self.rows = padded_rows(len(caches), device)
        self.lengths = torch.tensor([cache.length for cache in caches], device=device)  # [M]
        needed = int(self.lengths.max()) + room
        self._capacity = -(-needed // CHUNK) * CHUNK
        self._keys: dict[int, Tensor] = {}  # layer -> [M, G, capacity, N] float32
        self._values: dict[int, Tensor] = {}
        self._masks: dict[int | None, list[Tensor]] = {}  # by window
        self._windows: Windows = ()
        for layer in caches[0].layers:
            held = [cache.committed(layer) for cache in caches]
            for store, parts in zip(
                (self._keys, self._values), zip(*held, strict=True), strict=True
            ):
                groups, _, size = parts[0].shape
                store[layer] = parts[0].new_zeros(len(caches), groups, self._capacity, size)
                for row, part in zip(store[layer], parts, strict=True):
                    row[:, : part.shape[1]] = part

    def begin(self, windows: Windows) -> Tensor:
        """Prepare the masks of a call; the rows' positions [R], the padding's 0."""
        groups = next(iter(self._keys.values())).shape[1]
        end, self._windows = int(self.lengths.max()) + 1, windows
        self._masks = {
            window: [
                mask.repeat_interleave(groups, 0)[:, None]
                for mask in chunk_masks(self.lengths, end, window)
            ]
            for window in {*windows} or {None}
        }
        return torch.nn.functional.pad(self.lengths, (0, self.rows - len(self.lengths)))

    def attend(
        self,
        layer: int,
        query: Tensor,  # [H, R, N]
        key: Tensor,  # [G, R, N]
        value: Tensor,  # [G, R, N]
        scaling: float,
    ) -> Tensor:  # [R, H, N]
        """Append row i to sequence i and attend over that sequence."""
        count, (heads, rows, size) = len(self.lengths), query.shape
        keys, values = self._keys[layer], self._values[layer]
        each = torch.arange(count, device=query.device)
        keys[each, :, self.lengths] = key[:, :count].transpose(0, 1).float()
        values[each, :, self.lengths] = value[:, :count].transpose(0, 1).float()
        masks = self._masks[self._windows[layer] if self._windows else None]
        end = len(masks) * CHUNK
        mine = query[:, :count].transpose(0, 1)[:, :, None].expand(count, heads, _ROWS, size)
        out = row_attention(
            mine.reshape(count * heads, _ROWS, size),
            keys[:, :, :end].flatten(0, 1),
            values[:, :, :end].flatten(0, 1),
            masks,
            scaling,
        )
        padded = out.new_zeros(rows, heads, size)
        padded[:count] = out[0].view(count, heads, size)
        return padded

    def commit(self, kept: Tensor) -> None:  # [M] bool
        """Keep the last call's rows of these sequences; the others stay where they are."""
        self.lengths = self.lengths + kept
