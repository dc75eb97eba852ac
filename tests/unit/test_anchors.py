"""Slot and position arithmetic: what a block predicts, and what it may see."""

import torch

from dspark.draft.anchors import blocks_at, sample_blocks
from dspark.draft.visibility import Visibility


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


def test_slot_k_predicts_the_token_k_plus_one_behind_the_anchor() -> None:
    ids = torch.arange(100, 120)[None]
    mask = torch.ones(1, 20, dtype=torch.bool)
    blocks = blocks_at(ids, mask, torch.tensor([[3]]), torch.tensor([[True]]), 4)
    assert blocks.anchor_ids.tolist() == [[103]]
    assert blocks.label_ids.tolist() == [[[104, 105, 106, 107]]]
    assert blocks.prev_ids.tolist() == [[[103, 104, 105, 106]]]
    assert blocks.target_index.tolist() == [[[3, 4, 5, 6]]]
    assert blocks.mask.all()


def test_an_anchor_needs_a_supervised_next_token_and_to_be_supervised_itself() -> None:
    mask = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)
    blocks = sample_blocks(
        torch.arange(8)[None], mask, num_anchors=9, block_size=2, generators=generators(1)
    )
    assert blocks.anchors[blocks.keep].tolist() == [3]


def test_supervision_ends_at_the_first_unsupervised_token_and_at_the_row() -> None:
    ids = torch.arange(10)[None]
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    blocks = blocks_at(ids, mask, torch.tensor([[0, 7]]), torch.ones(1, 2, dtype=torch.bool), 4)
    assert blocks.mask.tolist() == [[[True, True, False, False], [True, True, False, False]]]


def test_a_row_without_supervision_gives_one_block_that_is_not_kept() -> None:
    blocks = sample_blocks(
        torch.arange(8)[None],
        torch.zeros(1, 8),
        num_anchors=3,
        block_size=2,
        generators=generators(1),
    )
    assert blocks.anchors.shape == (1, 1)
    assert not blocks.keep.any()
    assert not blocks.mask.any()


def test_anchors_are_distinct_rising_and_a_function_of_the_rows_own_generator() -> None:
    ids, mask = torch.arange(200).view(2, 100), torch.ones(2, 100, dtype=torch.bool)
    both = sample_blocks(ids, mask, num_anchors=20, block_size=4, generators=generators(2))
    alone = sample_blocks(
        ids[1:], mask[1:], num_anchors=20, block_size=4, generators=generators(1, seed=1)
    )
    for row in both.anchors:
        assert row.unique().tolist() == row.tolist()
    assert torch.equal(both.anchors[1], alone.anchors[0])
    assert not torch.equal(both.anchors[0], both.anchors[1])


def test_every_candidate_can_be_drawn() -> None:
    mask = torch.ones(1, 12, dtype=torch.bool)
    seen: set[int] = set()
    for seed in range(60):
        blocks = sample_blocks(
            torch.arange(12)[None],
            mask,
            num_anchors=2,
            block_size=2,
            generators=generators(1, seed),
        )
        seen |= set(blocks.anchors[blocks.keep].tolist())
    assert seen == set(range(11))


def test_context_is_strict_and_blocks_see_only_themselves_in_both_directions() -> None:
    anchors = torch.tensor([[2, 5]])
    seen = Visibility(anchors, torch.zeros_like(anchors), 8, 3).dense()[0]
    for block, anchor in enumerate((2, 5)):
        for slot in range(3):
            row = seen[block * 3 + slot]
            assert row[:8].tolist() == [t < anchor for t in range(8)]
            assert row[8:].tolist() == [t // 3 == block for t in range(6)]
