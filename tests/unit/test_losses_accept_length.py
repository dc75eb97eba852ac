"""The detached slot weights have the gradient of the expected accepted drafts."""

import pytest
import torch
from torch import Tensor

from dspark.acceptance import expected_accepted
from dspark.losses.accept_length import (
    accept_weights,
    first_errors,
    reach_times_continuation,
    survival_weights,
)


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


def test_weights_of_a_hand_computed_block_in_each_form() -> None:
    alpha = torch.tensor([0.5, 0.25, 0.5])
    mask = torch.tensor([True, True, True])
    q, p = torch.tensor([0.25, 0.5, 0.5]), torch.tensor([0.5, 0.25, 0.625])
    # ratios .5, 1, .8

    def weights(form: str) -> list[list[float]]:
        found = accept_weights(form, alpha, -q.log(), -p.log(), mask)
        return [[round(float(value), 6) for value in one] for one in found]

    # reach 1, .5, .5; continuation 1.375, 1.5, 1
    assert weights("path") == [[1.375, 0.75, 0.5], [0.0, 0.0, 0.0]]
    # behind slot 0 lie .25 + 1·.5, and a ratio of 1 has no slope
    assert weights("path_exact") == [[1.0, 0.5, 0.5], [0.375, 0.0, 0.0]]
    # products .25, .125, .0625
    assert weights("chain") == [[0.0, 0.0, 0.0], [0.4375, 0.1875, 0.0625]]


def test_first_error_is_supervised_and_the_only_one() -> None:
    ce = torch.tensor([[1.0, 3.0, 3.0, 1.0], [1.0, 1.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4])
    found = first_errors(ce, torch.ones(3, 4), mask)
    assert found.tolist() == [[False, True, False, False], [False] * 4, [False] * 4]


class Bigrams:
    """A target and a draft that see the last token only, and all texts of K tokens."""

    def __init__(self, *, tokens: int = 3, slots: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        logits = 2 * torch.randn(2, tokens, tokens, generator=generator, dtype=torch.float64)
        self.p = logits[0].softmax(-1)  # [last, next]
        self.draft = logits.mean(0).requires_grad_()
        self.slots = slots
        texts = torch.cartesian_prod(*[torch.arange(tokens)] * slots)
        self.pairs = (torch.cat([torch.zeros_like(texts[:, :1]), texts[:, :-1]], -1), texts)
        self.chance = self.p[self.pairs].prod(-1)

    def truth(self) -> Tensor:
        """Expected accepted drafts when the draft proposes its own tokens."""
        kept = torch.minimum(self.draft.softmax(-1), self.p)
        behind = torch.zeros(len(self.p), dtype=torch.float64)
        for _ in range(self.slots):
            behind = (kept * (1 + behind)).sum(-1)
        return behind[0]

    def expected(self, form: str) -> tuple[Tensor, Tensor]:
        """Over all texts of the target: sum of reach · alpha, and the term's gradient."""
        q = self.draft.softmax(-1)
        alpha = torch.minimum(q, self.p).sum(-1)[self.pairs[0]]
        ce, target_ce = -q.log()[self.pairs], -self.p.log()[self.pairs]
        mask = torch.ones_like(alpha, dtype=torch.bool)
        by_alpha, by_ce = accept_weights(form, alpha, ce, target_ce, mask)
        loss = (by_alpha * (1 - alpha) + by_ce * ce).sum(-1) @ self.chance
        (gradient,) = torch.autograd.grad(loss, self.draft)
        reach = alpha.cumprod(-1) / alpha if form == "expected" else ratios_before(ce, target_ce)
        return ((reach * alpha).sum(-1) @ self.chance).detach(), gradient


def ratios_before(ce: Tensor, target_ce: Tensor) -> Tensor:
    mask = torch.ones_like(ce, dtype=torch.bool)
    return accept_weights("path_exact", torch.zeros_like(ce), ce, target_ce, mask).alpha


def test_ratios_of_the_data_make_the_expected_accepted_drafts_unbiased() -> None:
    pair = Bigrams()
    truth = pair.truth()
    (slope,) = torch.autograd.grad(-truth, pair.draft)
    truth = truth.detach()
    gaps = {}
    for form in ("expected", "path", "path_exact"):
        value, gradient = pair.expected(form)
        gaps[form] = (float(value - truth), float((gradient - slope).norm() / slope.norm()))
    assert abs(gaps["expected"][0]) > 0.05
    assert gaps["path"][0] == pytest.approx(0, abs=1e-14)
    # its continuations are still those of teacher forcing
    assert 1e-3 < gaps["path"][1] < gaps["expected"][1] / 2
    assert gaps["path_exact"] == pytest.approx((0, 0), abs=1e-14)
