"""Sums add, and are divided once, at the end."""

import math

import pytest
import torch
from torch import Tensor

from dspark.acceptance import expected_accepted, survival
from dspark.config import LossSettings
from dspark.losses import Sums, denominators, objective
from dspark.losses.slots import overlap

VOCABULARY, BLOCK = 11, 3
SETTINGS = LossSettings(decay=2.0)
MASK = torch.tensor([[True, True, False], [False] * 3, [True] * 3, [True, False, False]])


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft and target logits, labels, confidence logits of four blocks."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(MASK), BLOCK)
    draft = torch.randn(*shape, VOCABULARY, generator=generator).requires_grad_()
    target = torch.randn(*shape, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    return draft, target, labels, torch.randn(shape, generator=generator).requires_grad_()


def sums_of(
    rows: slice = slice(None), *, head: bool = True, settings: LossSettings = SETTINGS
) -> Sums:
    draft, target, labels, confidence = draw()
    return objective(
        draft[rows],
        target[rows],
        labels[rows],
        MASK[rows],
        confidence[rows] if head else None,
        settings,
    )


def test_denominators_of_a_hand_computed_mask() -> None:
    first, second = math.exp(-1 / 2), math.exp(-2 / 2)
    weight, valid = denominators(MASK, SETTINGS).tolist()
    # slot 0 three times, slot 1 twice, slot 2 once
    assert weight == pytest.approx(3 + 2 * first + second, rel=1e-7)
    assert valid == 3


def test_denominators_and_sums_add_over_any_split() -> None:
    whole = sums_of()
    parts = sums_of(slice(0, 1)) + sums_of(slice(1, 3)) + sums_of(slice(3, 4))
    torch.testing.assert_close(parts.to_vector(), whole.to_vector(), rtol=1e-6, atol=1e-6)
    split = denominators(MASK[:1], SETTINGS) + denominators(MASK[1:], SETTINGS)
    torch.testing.assert_close(split, denominators(MASK, SETTINGS))
    loss = whole.loss(split, SETTINGS, 1.0)
    torch.testing.assert_close(parts.loss(split, SETTINGS, 1.0), loss)


def test_denominators_are_those_of_the_statistics() -> None:
    sums = sums_of()
    weight, valid = denominators(MASK, SETTINGS)
    torch.testing.assert_close(sums.weight, weight, rtol=1e-7, atol=0)
    assert sums.valid_blocks == valid
    assert sums.slots.tolist() == [3, 2, 1]


def test_survival_weights_keep_the_denominators() -> None:
    settings = LossSettings(decay=2.0, slot_weights="survival")
    assert torch.equal(denominators(MASK, settings), denominators(MASK, SETTINGS))
    sums, stock = sums_of(settings=settings), sums_of()
    assert torch.equal(sums.weight, stock.weight)
    assert not torch.isclose(sums.ce, stock.ce)


def test_loss_of_hand_made_sums() -> None:
    settings = LossSettings(
        ce_weight=0.1, l1_weight=0.9, confidence_weight=2.0, accept_length_weight=0.5
    )
    zeros = Sums.from_vector(torch.zeros(3 * 2 + 10))
    values = [torch.tensor(value) for value in (3.0, 5.0, 7.0, 11.0)]
    sums = Sums(*values, *zeros._all()[4:])
    loss = sums.loss(torch.tensor([4.0, 3.0]), settings, 0.25)
    slot_wise = (0.1 * 3 + 0.9 * 5 + 2 * 7) / 4
    assert loss.item() == pytest.approx(slot_wise + 0.25 * 0.5 * 11 / (2 * 3))


def test_loss_without_supervised_slots_is_zero_with_zero_gradients() -> None:
    draft, target, labels, confidence = draw()
    mask = torch.zeros_like(MASK)
    sums = objective(draft, target, labels, mask, confidence, SETTINGS)
    loss = sums.loss(denominators(mask, SETTINGS), SETTINGS, 1.0)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, [draft, confidence]):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    figures = sums.metrics()
    assert figures["tau"] == 0.0
    assert set(figures.values()) == {0.0}


def test_vector_round_trip_keeps_every_figure() -> None:
    sums = sums_of()
    vector = sums.to_vector()
    assert vector.dtype == torch.float64
    assert not vector.requires_grad
    assert vector.shape == (3 * BLOCK + 10,)
    back = Sums.from_vector(vector)
    assert torch.equal(back.to_vector(), vector)
    assert back.metrics() == sums.metrics()
    twice = Sums.from_vector(vector + vector)
    assert twice.metrics() == pytest.approx(sums.metrics())  # as if a second rank held the same


def test_detached_sums_hold_no_graph() -> None:
    total = sums_of().detach() + sums_of().detach()
    assert not any(value.requires_grad for value in total._all())
    torch.testing.assert_close(total.ce, 2 * sums_of().ce.detach())


def test_metrics_are_means_over_slots_and_valid_blocks() -> None:
    draft, target, _, confidence = draw()
    alpha = overlap((draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)).detach()
    figures = sums_of().metrics()
    valid = MASK.any(-1)
    for k in range(BLOCK):
        rate = alpha[:, k][MASK[:, k]].mean().item()
        assert figures[f"accept_rate@{k}"] == pytest.approx(rate, abs=1e-6)
        survived = survival(alpha, MASK)[valid][:, k].mean().item()
        assert figures[f"survival@{k}"] == pytest.approx(survived, abs=1e-6)
    accepted = expected_accepted(alpha, MASK)[valid].mean().item()
    assert figures["accepted_drafts"] == pytest.approx(accepted, abs=1e-6)
    assert figures["tau"] == pytest.approx(accepted + 1, abs=1e-6)

    weight = torch.exp(-torch.arange(BLOCK) / SETTINGS.decay) * MASK
    rated = torch.sigmoid(confidence).detach()
    bias = (weight * (rated - alpha)).sum() / weight.sum()
    error = (weight * (rated - alpha).abs()).sum() / weight.sum()
    gap = (weight * (survival(rated, MASK) - survival(alpha, MASK))).sum() / weight.sum()
    assert figures["confidence_bias"] == pytest.approx(bias.item(), abs=1e-6)
    assert figures["confidence_abs_error"] == pytest.approx(error.item(), abs=1e-6)
    assert figures["confidence_cumprod_bias"] == pytest.approx(gap.item(), abs=1e-6)


def test_metrics_without_a_confidence_head_leave_its_figures_out() -> None:
    figures = sums_of(head=False).metrics()
    assert not [name for name in figures if name.startswith("confidence")]
    assert figures["ce_loss"] == pytest.approx(sums_of().metrics()["ce_loss"])


def test_loss_terms_in_metrics_make_up_the_loss() -> None:
    sums = sums_of()
    figures = sums.metrics()
    loss = sums.loss(denominators(MASK, SETTINGS), SETTINGS, 0.5).item()
    parts = (
        SETTINGS.ce_weight * figures["ce_loss"]
        + SETTINGS.l1_weight * figures["l1_loss"]
        + SETTINGS.confidence_weight * figures["confidence_loss"]
        + 0.5 * SETTINGS.accept_length_weight * figures["accept_length_loss"]
    )
    assert loss == pytest.approx(parts, rel=1e-6)
