"""The written-out gradient equals autograd through the softmax."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dspark.losses import closed_form, eager
from dspark.losses.slots import SlotDistances

Form = Callable[..., SlotDistances]
CASES = [(1.0, False), (0.6, False), (1.0, True), (0.5, True)]


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    draft = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    target = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    weights = torch.rand(4, *shape[:-1], generator=generator, dtype=torch.float64)
    return draft.to(dtype).requires_grad_(), target.to(dtype), labels, weights


def value_and_gradient(
    form: Form,
    inputs: tuple[Tensor, ...],
    temperature: float,
    with_kl: bool,
    *,
    with_labels: bool = False,
) -> tuple[list[Tensor], Tensor]:
    draft, target, labels, weights = inputs
    distances = form(
        draft,
        target,
        labels,
        accept_temperature=temperature,
        with_kl=with_kl,
        with_labels=with_labels,
    )
    values = [getattr(distances, field.name) for field in fields(distances)]
    values = [value for value in values if value is not None]
    total = torch.stack(
        [(weight * value).sum() for weight, value in zip(weights, values, strict=False)]
    ).sum()
    (gradient,) = torch.autograd.grad(total, draft)
    return [value.detach() for value in values], gradient


@pytest.mark.parametrize(("temperature", "with_kl"), CASES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 4, 37), (2, 7, 1001)])
def test_values_and_gradient_equal_the_definition(
    temperature: float, with_kl: bool, shape: tuple[int, ...]
) -> None:
    inputs = draw(len(shape) + shape[-1], *shape)
    expected, slope = value_and_gradient(eager.slot_distances, inputs, temperature, with_kl)
    values, gradient = value_and_gradient(closed_form.slot_distances, inputs, temperature, with_kl)
    assert len(values) == len(expected) == 3 + with_kl
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("temperature", "with_kl"), CASES)
def test_what_is_asked_of_labels_equals_the_definition(temperature: float, with_kl: bool) -> None:
    inputs = draw(0, 3, 4, 37)
    expected, slope = value_and_gradient(
        eager.slot_distances, inputs, temperature, with_kl, with_labels=True
    )
    values, gradient = value_and_gradient(
        closed_form.slot_distances, inputs, temperature, with_kl, with_labels=True
    )
    assert len(values) == len(expected) == 5 + with_kl
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_each_distance_alone_has_the_right_gradient(index: int) -> None:
    draft, target, labels, weights = draw(index, 2, 3, 29)
    only = weights * (torch.arange(4) == index)[:, None, None]
    inputs = (draft, target, labels, only)
    _, slope = value_and_gradient(eager.slot_distances, inputs, 0.7, True)
    _, gradient = value_and_gradient(closed_form.slot_distances, inputs, 0.7, True)
    assert slope.abs().max() > 1e-3
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-14)


def test_an_unused_distance_needs_no_gradient() -> None:
    draft, target, labels, _ = draw(0, 2, 3, 29)
    distances = closed_form.slot_distances(
        draft, target, labels, accept_temperature=0.7, with_kl=True
    )
    (gradient,) = torch.autograd.grad(distances.ce.sum(), draft)
    onehot = torch.nn.functional.one_hot(labels, 29)
    torch.testing.assert_close(gradient, draft.detach().softmax(-1) - onehot)


def test_inputs_stay_as_they_are() -> None:
    draft, target, labels, weights = draw(0, 2, 3, 29)
    before = [each.detach().clone() for each in (draft, target, labels)]
    value_and_gradient(closed_form.slot_distances, (draft, target, labels, weights), 0.7, True)
    for each, copy in zip((draft, target, labels), before, strict=True):
        assert torch.equal(each, copy)


def test_a_second_backward_pass_is_refused() -> None:
    draft, target, labels, _ = draw(0, 2, 3, 29)
    distances = closed_form.slot_distances(
        draft, target, labels, accept_temperature=1.0, with_kl=False
    )
    loss = (distances.ce + distances.l1).sum()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_bfloat16_logits_get_a_bfloat16_gradient_of_float32_sums() -> None:
    exact = draw(0, 2, 3, 501)
    rounded = (exact[0].detach().bfloat16().requires_grad_(), exact[1].bfloat16(), *exact[2:])
    widened = (
        rounded[0].detach().double().requires_grad_(),
        rounded[1].double(),
        *exact[2:],
    )
    values, gradient = value_and_gradient(closed_form.slot_distances, rounded, 1.0, False)
    expected, slope = value_and_gradient(eager.slot_distances, widened, 1.0, False)
    assert {value.dtype for value in values} == {torch.float32}
    assert gradient.dtype == torch.bfloat16
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-6)
    # bfloat16 keeps 8 bits
    torch.testing.assert_close(gradient.double(), slope, rtol=2**-8, atol=1e-6)


def test_real_vocabulary_rounds_no_worse_than_autograd() -> None:
    draft, target, labels, weights = draw(0, 2, 2, 49152)
    _, truth = value_and_gradient(
        eager.slot_distances, (draft, target, labels, weights), 1.0, False
    )
    single = (draft.detach().float().requires_grad_(), target.float(), labels, weights.float())
    errors = []
    for form in (closed_form.slot_distances, eager.slot_distances):
        _, gradient = value_and_gradient(form, single, 1.0, False)
        errors.append(float((gradient.double() - truth).abs().max() / truth.abs().max()))
    closed, autograd = errors
    assert closed < 1e-5
    assert closed < 2 * autograd


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_l1_over_a_real_vocabulary_keeps_float32_accuracy(scale: float) -> None:
    draft, target, labels, _ = draw(1, 2, 4, 49152)
    draft, target = draft.detach() * scale / 3, target * scale / 3
    exact = eager.slot_distances(draft, target, labels, accept_temperature=1.0, with_kl=False)
    single = closed_form.slot_distances(
        draft.float(), target.float(), labels, accept_temperature=1.0, with_kl=False
    )
    # torch's own float32 softmax over a peaked row is off by some 1e-5
    torch.testing.assert_close(single.l1.double(), exact.l1, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("temperature", "with_kl"), CASES)
def test_disjoint_supports_are_finite(temperature: float, with_kl: bool) -> None:
    draft = torch.full((1, 2, 6), -300.0)
    target = torch.full((1, 2, 6), -300.0)
    draft[..., :3], target[..., 3:] = 300.0, 300.0
    inputs = (draft.requires_grad_(), target, torch.tensor([[4, 0]]), torch.ones(4, 1, 2))
    expected, slope = value_and_gradient(eager.slot_distances, inputs, temperature, with_kl)
    values, gradient = value_and_gradient(closed_form.slot_distances, inputs, temperature, with_kl)
    for value, reference in zip(values, expected, strict=True):
        torch.testing.assert_close(value, reference)
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 0.1
