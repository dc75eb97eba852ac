"""The detached slot weights have the gradient of the expected accepted drafts."""

import pytest
import torch
from torch import Tensor

from dspark.acceptance import expected_accepted
from dspark.losses.accept_length import reach_times_continuation, survival_weights


def prefix_masks(block_size: int) -> Tensor:
    """Every supervised length 0..K once: [K + 1, K]."""
    return torch.arange(block_size) < torch.arange(block_size + 1)[:, None]


@pytest.mark.parametrize("block_size", [1, 2, 7, 8, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_are_the_derivative_of_the_expected_accepted_drafts(
    block_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = prefix_masks(block_size)
    alpha = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    alpha[-1, block_size // 2] = 0.0  # nothing behind it survives, it alone still gets a gradient
    alpha.requires_grad_()
    valid = int(mask.any(-1).sum())

    (expected,) = torch.autograd.grad(
        -expected_accepted(alpha, mask).sum() / block_size / valid, alpha
    )
    weight = reach_times_continuation(alpha, mask)
    loss = (weight * (1 - alpha)).sum() / block_size / valid
    (actual,) = torch.autograd.grad(loss, alpha)

    assert not weight.requires_grad
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)


def test_weights_of_a_hand_computed_block() -> None:
    alpha = torch.tensor([0.5, 0.25, 0.5])
    # reach 1, .5, .125; continuation 1 + .25·1.5, 1 + .5, 1
    whole = reach_times_continuation(alpha, torch.tensor([True, True, True]))
    assert whole.tolist() == [1.375, 0.75, 0.125]
    cut = reach_times_continuation(alpha, torch.tensor([True, True, False]))
    assert cut.tolist() == [1.25, 0.5, 0.0]


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_weights_at_the_ends_of_alpha(value: float) -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    weight = reach_times_continuation(torch.full((1, 4), value), mask)
    expected = [[1.0, 0.0, 0.0, 0.0]] if value == 0 else [[4.0, 3.0, 2.0, 1.0]]
    assert weight.tolist() == expected


def test_survival_weights_of_a_hand_computed_block() -> None:
    alpha = torch.tensor([0.0, 0.5, 1.0])
    # smoothed .5, .75, 1; survival .5, .375, .375
    weight = survival_weights(alpha, torch.tensor([True, True, True]), smoothing=0.5)
    assert weight.tolist() == [1.25, 0.75, 0.375]
    cut = survival_weights(alpha, torch.tensor([True, True, False]), smoothing=0.5)
    assert cut.tolist() == [0.875, 0.375, 0.0]


def test_full_smoothing_makes_survival_weights_a_count() -> None:
    mask = prefix_masks(3)
    weight = survival_weights(torch.rand(4, 3), mask, smoothing=1.0)
    assert weight.tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 2, 1]]
