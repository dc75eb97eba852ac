"""The published figures on rounds that can be counted by hand."""

import pytest
import torch

from dspark.acceptance import (
    AcceptStats,
    expected_accepted,
    macro_accept_length,
    pooled,
    survival,
)


def stats_of(block_size: int, *rounds: tuple[int, int, int]) -> AcceptStats:
    stats = AcceptStats(block_size)
    for num_proposed, num_accepted, num_emitted in rounds:
        stats.add(num_proposed=num_proposed, num_accepted=num_accepted, num_emitted=num_emitted)
    return stats


def test_all_rejected_still_emits_the_targets_own_token() -> None:
    stats = stats_of(4, (4, 0, 1), (4, 0, 1))
    assert stats.accept_length == 1.0
    assert stats.accepted_drafts == 0.0
    assert stats.survival == [0.0, 0.0, 0.0, 0.0]
    assert stats.accept_rate == [0.0, 0.0, 0.0, 0.0]
    assert stats.verify_rate == 2 / 10
    assert stats.histogram == [0, 2, 0, 0, 0, 0]


def test_all_accepted_counts_the_bonus_token() -> None:
    stats = stats_of(4, (4, 4, 5), (4, 4, 5), (4, 4, 5))
    assert stats.accept_length == 5.0
    assert stats.accepted_drafts == 4.0
    assert stats.survival == [1.0, 1.0, 1.0, 1.0]
    assert stats.accept_rate == [1.0, 1.0, 1.0, 1.0]
    assert stats.verify_rate == 1.0
    assert stats.histogram == [0, 0, 0, 0, 0, 3]


def test_a_stop_inside_the_accepted_prefix_has_no_bonus_token() -> None:
    # the target kept all four drafts, but the third was a stop id: three stand, no bonus
    stats = stats_of(4, (4, 3, 3))
    assert stats.accept_length == 3.0
    assert stats.accepted_drafts == 3.0
    assert stats.survival == [1.0, 1.0, 1.0, 0.0]
    assert stats.histogram == [0, 0, 0, 1, 0, 0]


def test_figures_are_zero_without_rounds() -> None:
    stats = AcceptStats(3)
    assert stats.accept_length == stats.accepted_drafts == stats.verify_rate == 0.0
    assert stats.survival == stats.accept_rate == [0.0, 0.0, 0.0]
    assert stats.summary()["rounds"] == 0
    assert macro_accept_length([stats]) == 0.0
    assert pooled([], 3).accept_length == 0.0


def test_accept_rate_is_conditional_and_survival_is_not() -> None:
    stats = stats_of(2, (2, 0, 1), (2, 1, 2), (2, 2, 3), (2, 2, 3))
    assert stats.survival == [3 / 4, 2 / 4]
    assert stats.accept_rate == [3 / 4, 2 / 3]
    assert stats.accepted_drafts == sum(stats.survival)


def test_rounds_count_only_in_slots_that_they_proposed() -> None:
    stats = stats_of(3, (1, 1, 2), (3, 0, 1), (0, 0, 1))
    assert stats.proposed_at == [2, 1, 1]
    assert stats.survival == [1 / 2, 0.0, 0.0]
    # slot 1 was proposed once, but not reached; the round that got there had not proposed it
    assert stats.reached_at == [2, 0, 0]
    assert stats.accept_rate == [1 / 2, 0.0, 0.0]
    assert stats.verify_rate == 4 / (4 + 3)


def test_merged_counts_equal_those_of_all_rounds_together() -> None:
    first, second = [(4, 4, 5), (4, 1, 2)], [(4, 0, 1), (2, 2, 2), (4, 3, 4)]
    merged = stats_of(4, *first)
    merged.merge(stats_of(4, *second))
    assert merged == stats_of(4, *first, *second)
    assert pooled([stats_of(4, *first), stats_of(4, *second)], 4) == merged


def test_pooled_weighs_rounds_and_macro_weighs_prompts() -> None:
    long = stats_of(4, *[(4, 0, 1)] * 3)
    short = stats_of(4, (4, 4, 5))
    assert pooled([long, short], 4).accept_length == 8 / 4
    assert macro_accept_length([long, short, AcceptStats(4)]) == 3.0


@pytest.mark.parametrize(
    ("proposed", "accepted", "emitted"), [(2, 3, 4), (5, 0, 1), (3, 1, 3), (3, 2, 1)]
)
def test_impossible_rounds_are_refused(proposed: int, accepted: int, emitted: int) -> None:
    with pytest.raises(AssertionError):
        stats_of(4, (proposed, accepted, emitted))


def test_expected_accepted_of_a_hand_computed_block() -> None:
    alpha = torch.tensor([[0.5, 0.5, 1.0], [0.25, 0.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # 0.5 + 0.25 where the third slot is not supervised; 0.25 + 0 + 0
    assert survival(alpha, mask).tolist() == [[0.5, 0.25, 0.0], [0.25, 0.0, 0.0]]
    assert expected_accepted(alpha, mask).tolist() == [0.75, 0.25]
