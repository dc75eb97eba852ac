"""Tiles of what a slot may see against the dense mask, and attention over them against SDPA."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dspark.draft.sparse_attention import sparse_attention
from dspark.draft.visibility import TILE, Visibility

DEVICES = ["cuda"] if torch.cuda.is_available() else ["cpu"]


def drawn(seed: int, count: int, length: int, size: int, *, device: str = "cpu") -> Visibility:
    """Rising anchors in documents of random lengths; the last block is not kept."""
    generator = torch.Generator().manual_seed(seed)
    anchors, starts = [], []
    for _ in range(2):
        at = torch.randint(1, length, (count,), generator=generator).sort().values
        edges = torch.randint(0, length, (3,), generator=generator).sort().values
        start = torch.tensor([0, *edges.tolist()])
        start = start[torch.searchsorted(start, at, right=True) - 1]
        at[-1] = start[-1] = 0
        anchors.append(at)
        starts.append(start)
    return Visibility(torch.stack(anchors).to(device), torch.stack(starts).to(device), length, size)


def listed(counts: Tensor, indices: Tensor, width: int) -> Tensor:
    """[B, 1, q] and [B, 1, q, k] back to [B, q, k] bool."""
    named = torch.arange(indices.shape[-1]) < counts[..., None]
    out = torch.zeros(*indices.shape[:-1], width, dtype=torch.bool)
    return out.scatter(-1, indices.long(), named)[:, 0]


@pytest.mark.parametrize(
    ("count", "length", "size"),
    [(40, 512, 8), (150, 1024, 7), (61, 384, 7), (9, 128, 5), (200, 256, 1), (3, 256, 64)],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_are_those_of_the_mask(seed: int, count: int, length: int, size: int) -> None:
    seen = drawn(seed, count, length, size)
    dense, tiles = seen.dense(), seen.tiles()
    assert isinstance(tiles, BlockMask)
    rows, keys = dense.shape[1:]
    some = torch.zeros(2, -(-rows // TILE), -(-keys // TILE), dtype=torch.bool)
    full = torch.zeros_like(some)
    for q in range(some.shape[1]):
        for k in range(some.shape[2]):
            tile = dense[:, q * TILE : (q + 1) * TILE, k * TILE : (k + 1) * TILE]
            some[:, q, k] = tile.flatten(1).any(1)
            # the attention looks at no key of a full tile behind the last one
            full[:, q, k] = tile.flatten(1).all(1) & (k < length // TILE)
    width = some.shape[2]
    assert tiles.full_kv_num_blocks is not None
    assert tiles.full_kv_indices is not None
    assert torch.equal(listed(tiles.full_kv_num_blocks, tiles.full_kv_indices, width), full)
    found = listed(tiles.kv_num_blocks, tiles.kv_indices, width)
    assert torch.equal(found, some & ~full)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_mask_within_a_tile_is_the_dense_one(seed: int) -> None:
    seen = drawn(seed, 30, 256, 7)
    batch, rows, keys = (torch.arange(n) for n in seen.dense().shape)
    found = seen.tiles().mask_mod(
        batch[:, None, None], torch.tensor(0), rows[:, None], keys[None, None]
    )
    assert torch.equal(found.expand_as(seen.dense()), seen.dense())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "length", "size", "heads"), [(40, 512, 8, (4, 4)), (61, 384, 7, (6, 2))]
)
def test_attention_over_tiles_is_attention_with_the_mask(
    device: str, count: int, length: int, size: int, heads: tuple[int, int]
) -> None:
    seen = drawn(3, count, length, size, device=device)
    generator = torch.Generator().manual_seed(1)
    rows = count * size

    def normal(heads: int, rows: int) -> Tensor:
        return torch.randn(2, heads, rows, 32, generator=generator).to(device)

    q, k, v = (
        normal(heads[0], rows),
        normal(heads[1], length + rows),
        normal(heads[1], length + rows),
    )
    if device == "cuda":  # torch has no backward of flex attention on a CPU
        q, k, v = (one.requires_grad_() for one in (q, k, v))
    repeat = heads[0] // heads[1]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1), seen.dense()[:, None]
    )
    found = sparse_attention(q, k, v, seen.tiles())
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    if device == "cuda":
        weight = torch.randn(expected.shape, generator=generator).to(device)
        left = torch.autograd.grad((found * weight).sum(), [q, k, v])
        right = torch.autograd.grad((expected * weight).sum(), [q, k, v])
        torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)
