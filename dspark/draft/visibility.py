"""What a slot may look at: the context before its anchor, and its own block.

Anchors rise within a row, so that a tile of neighbouring slots sees almost the same context: of the
tiles of (slots, keys) about half are empty and most of the others full. `tiles` says which, for an
attention that skips the former; `dense` is the same as one mask.

Symbols: B batch, S positions, A anchors, K slots, Q = A*K; keys are [context S | slots Q].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["TILE", "Visibility"]

TILE = 128
"""Slots and keys of a tile; `tiles` wants S to be a multiple of it."""


@dataclass(frozen=True)
class Visibility:
    """Context of the anchor's document strictly before the anchor, the whole block in both ways.

    Blocks never see each other. The anchor's own feature is excluded: when the draft runs, the
    target has not consumed the anchor yet. Padding on the right lies behind every anchor and
    needs no mask. Blocks that are not kept see themselves, which keeps their softmax finite;
    nothing reads their output.
    """

    anchors: Tensor  # [B, A] int64
    starts: Tensor  # [B, A] int64, first position of the anchor's document
    length: int  # S
    block_size: int  # K

    def dense(self) -> Tensor:  # [B, Q, S + Q] bool
        """True where a slot may look."""
        batch, count = self.anchors.shape
        places = torch.arange(self.length, device=self.anchors.device)
        context = (places >= self.starts[..., None]) & (places < self.anchors[..., None])
        block = torch.eye(count, dtype=torch.bool, device=self.anchors.device)  # [A, A]
        size = self.block_size
        own = block.repeat_interleave(size, 0).repeat_interleave(size, 1)
        return torch.cat(
            [context.repeat_interleave(size, dim=1), own.expand(batch, -1, -1)], dim=-1
        )

    def tiles(self) -> BlockMask:
        """The same, tile by tile."""
        assert self.length % TILE == 0, f"{self.length} positions are no whole tiles of {TILE}"
        some, full = self._context_tiles()
        own = self._own_tiles().expand(len(some), -1, -1)
        some = torch.cat([some & ~full, own], dim=-1)
        full = torch.cat([full, torch.zeros_like(own)], dim=-1)
        queries = self.anchors.shape[1] * self.block_size
        anchors, starts, size = self.anchors, self.starts, self.block_size
        # tensors, since a changed number would compile the attention again
        limit = torch.tensor(self.length, device=anchors.device)

        def seen(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            block = q // size
            context = (k >= starts[b, block]) & (k < anchors[b, block])
            return torch.where(k < limit, context, (k - limit) // size == block)

        return BlockMask.from_kv_blocks(
            *_listed(some),
            *_listed(full),
            BLOCK_SIZE=TILE,
            mask_mod=seen,
            seq_lengths=(queries, self.length + queries),
        )

    def _blocks_of_tiles(self) -> tuple[Tensor, Tensor]:
        """First and last block that has slots in each tile of slots, twice [tiles]."""
        count = self.anchors.shape[1]
        slots = torch.arange(0, count * self.block_size, TILE, device=self.anchors.device)
        return slots // self.block_size, ((slots + TILE - 1) // self.block_size).clamp(
            max=count - 1
        )

    def _context_tiles(self) -> tuple[Tensor, Tensor]:
        """Tiles of which anything, and of which everything, is seen; twice [B, tiles, S tiles]."""
        first, last = self._blocks_of_tiles()
        most = (TILE + self.block_size - 2) // self.block_size + 1
        steps = torch.arange(most, device=first.device)
        members = torch.minimum(first[:, None] + steps, last[:, None])  # [tiles, most]
        begin, end = self.starts[:, members, None], self.anchors[:, members, None]
        edges = torch.arange(0, self.length, TILE, device=first.device)
        # [B, tiles, most, S tiles]
        some = torch.maximum(begin, edges) < torch.minimum(end, edges + TILE)
        full = (begin <= edges) & (end >= edges + TILE)
        return some.any(2), full.all(2)

    def _own_tiles(self) -> Tensor:  # [1, tiles, Q tiles] bool
        """Tiles of keys in which slots of a tile's own blocks lie; never full."""
        first, last = self._blocks_of_tiles()
        edges = torch.arange(0, self.anchors.shape[1] * self.block_size, TILE, device=first.device)
        begin, end = first * self.block_size, (last + 1) * self.block_size
        return ((edges < end[:, None]) & (edges + TILE > begin[:, None]))[None]


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[B, q, k] bool to how many a row has [B, 1, q] and which, in front [B, 1, q, k]; int32."""
    counts = tiles.sum(-1, dtype=torch.int32)
    order = tiles.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return counts[:, None], order[:, None].to(torch.int32)
