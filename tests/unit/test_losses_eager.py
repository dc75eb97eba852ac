"""The definition of the objective against plain Python and against hand-computed values."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.acceptance import expected_accepted
from dspark.config import LossSettings
from dspark.losses import denominators, objective
from dspark.losses.accept_length import survival_weights
from dspark.losses.slots import overlap

OPTIONS: list[dict[str, Any]] = [
    {},
    {"accept_length_temperature": 0.6},
    {"slot_weights": "survival"},
    {"slot_weights": "survival", "survival_smoothing": 0.0, "distance": "nla"},
    {"distance": "lk_hybrid"},
    {"distance": "nla", "decay": 1.5},
    {"accept_length_form": "path", "accept_length_temperature": 0.6},
    {"accept_length_form": "path_exact", "accept_length_focal": 3.0},
    {"accept_length_form": "chain"},
]


def draw(
    seed: int,
    blocks: int = 5,
    slots: int = 4,
    vocabulary: int = 7,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draft and target logits, labels, masks of every length 0..K, confidence logits."""
    generator = torch.Generator().manual_seed(seed)
    draft = 2 * torch.randn(blocks, slots, vocabulary, generator=generator, dtype=dtype)
    target = 2 * torch.randn(blocks, slots, vocabulary, generator=generator, dtype=dtype)
    labels = torch.randint(vocabulary, (blocks, slots), generator=generator)
    lengths = torch.arange(blocks) % (slots + 1)
    mask = torch.arange(slots) < lengths[:, None]
    confidence = torch.randn(blocks, slots, generator=generator, dtype=dtype)
    return draft, target, labels, mask, confidence


def softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    powers = [math.exp(value - peak) for value in logits]
    return [power / sum(powers) for power in powers]


def by_hand(
    draft: Tensor,
    target: Tensor,
    labels: Tensor,
    mask: Tensor,
    confidence: Tensor | None,
    settings: LossSettings,
) -> dict[str, float]:
    """All four numerators by loops over blocks, slots and ids."""
    total = dict.fromkeys(("ce", "l1", "confidence", "accept_length"), 0.0)
    for block in range(len(mask)):
        slots = range(int(mask[block].sum()))
        alpha, sharp_alpha, entropy, distance = [], [], [], []
        ratio, behind, errors = [], 0.0, []
        for k in slots:
            q = softmax(draft[block, k].tolist())
            p = softmax(target[block, k].tolist())
            heat = settings.accept_length_temperature
            sharp = softmax([value / heat for value in target[block, k].tolist()])
            alpha.append(sum(map(min, p, q)))
            sharp_alpha.append(sum(map(min, sharp, q)))
            label = int(labels[block, k])
            entropy.append(-math.log(q[label]))
            ratio.append(min(1.0, q[label] / sharp[label]))
            errors += [k] * (q[label] < max(q))
            if settings.distance == "l1":
                distance.append(sum(abs(a - b) for a, b in zip(p, q, strict=True)))
            elif settings.distance == "nla":
                distance.append(-2 * math.log(max(alpha[k], 1e-5)))
            else:
                divergence = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                blend = math.exp(-3 * alpha[k])
                distance.append(2 * (blend * divergence + (1 - blend) * (1 - alpha[k])))
        for k in slots:
            weight = math.exp(-k / settings.decay)
            if settings.slot_weights == "survival":
                a = settings.survival_smoothing
                smooth = [(1 - a) * value + a for value in alpha]
                weight = sum(math.prod(smooth[: j + 1]) for j in slots if j >= k)
            total["ce"] += weight * entropy[k]
            total["l1"] += weight * distance[k]
            if confidence is not None:
                rated = 1 / (1 + math.exp(-float(confidence[block, k])))
                total["confidence"] -= weight * (
                    alpha[k] * math.log(rated) + (1 - alpha[k]) * math.log(1 - rated)
                )
            # sum over the prefixes that hold slot k, without slot k's own factor
            value = sum(
                math.prod(sharp_alpha[i] for i in range(j + 1) if i != k) for j in slots if j >= k
            )
            by_label = settings.accept_length_focal * (k in errors[:1])
            if settings.accept_length_form == "path":
                value = math.prod(ratio[:k]) * sum(
                    math.prod(sharp_alpha[k + 1 : j + 1]) for j in slots if j >= k
                )
            elif settings.accept_length_form == "path_exact":
                value = math.prod(ratio[:k])
                behind = sum(math.prod(ratio[k + 1 : j]) * sharp_alpha[j] for j in slots if j > k)
                by_label += value * ratio[k] * (ratio[k] < 1) * behind
            elif settings.accept_length_form == "chain":
                value = 0.0
                by_label += sum(math.exp(-sum(entropy[: j + 1])) for j in slots if j >= k)
            total["accept_length"] += value * (1 - sharp_alpha[k]) + by_label * entropy[k]
    return total


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_objective_equals_plain_python(options: dict[str, Any], head: bool, seed: int) -> None:
    draft, target, labels, mask, confidence = draw(seed, dtype=torch.float64)
    settings = LossSettings(**options)
    rated = confidence if head else None
    sums = objective(draft, target, labels, mask, rated, settings)
    expected = by_hand(draft, target, labels, mask, rated, settings)
    for name, value in expected.items():
        # the position weights are float32
        assert getattr(sums, name).item() == pytest.approx(value, rel=1e-6), name


def test_l1_is_the_full_l1_and_not_the_total_variation() -> None:
    q, p = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    sums = objective(
        q.log().view(1, 1, 3),
        p.log().view(1, 1, 3),
        torch.tensor([[0]]),
        torch.tensor([[True]]),
        None,
        LossSettings(),
    )
    assert sums.l1.item() == pytest.approx(0.5, abs=1e-6)  # |.25| + 0 + |.25|; TV is .25
    assert sums.alpha.item() == pytest.approx(0.75, abs=1e-6)
    assert sums.ce.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_accept_length_gradient_is_that_of_minus_the_expected_accepted_drafts(
    temperature: float,
) -> None:
    draft, target, labels, mask, _ = draw(3, blocks=10, dtype=torch.float64)
    draft.requires_grad_()
    settings = LossSettings(
        ce_weight=0,
        l1_weight=0,
        confidence_weight=0,
        accept_length_weight=1,
        accept_length_temperature=temperature,
    )
    sums = objective(draft, target, labels, mask, None, settings)
    (actual,) = torch.autograd.grad(sums.loss(denominators(mask, settings), settings, 1.0), draft)
    gap = draft.softmax(-1) - (target / temperature).softmax(-1)
    accepted = expected_accepted(overlap(gap.abs().sum(-1)), mask)
    valid = mask.any(-1)
    (expected,) = torch.autograd.grad(-accepted[valid].mean() / mask.shape[-1], draft)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)


def products(form: str, draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """What each form has the gradient of, slot by slot and with a graph: [N, K]."""
    q, p = draft.softmax(-1), target.softmax(-1)
    of_labels = [one.gather(-1, labels[..., None])[..., 0] for one in (q, p)]
    if form == "chain":
        return of_labels[0].cumprod(-1)
    kept = (of_labels[0] / of_labels[1]).clamp_max(1).cumprod(-1)
    reach = torch.cat([torch.ones_like(kept[:, :1]), kept[:, :-1]], -1)
    return reach * torch.minimum(q, p).sum(-1)


@pytest.mark.parametrize("form", ["path_exact", "chain"])
def test_other_forms_have_the_gradient_of_their_products(form: str) -> None:
    draft, target, labels, mask, _ = draw(3, blocks=10, dtype=torch.float64)
    draft.requires_grad_()
    settings = LossSettings(accept_length_form=form)  # type: ignore[arg-type]
    sums = objective(draft, target, labels, mask, None, settings)
    (actual,) = torch.autograd.grad(sums.accept_length, draft)
    total = -(products(form, draft, target, labels) * mask).sum()
    (expected,) = torch.autograd.grad(total, draft)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)


def test_focal_is_the_cross_entropy_of_the_first_error_alone() -> None:
    likely = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    draft = 2.0 * torch.nn.functional.one_hot(likely, 2).double()
    draft[2, 0] = 0.0  # a label that shares the top is no error
    draft.requires_grad_()
    labels = torch.zeros(3, 4, dtype=torch.int64)
    mask = torch.tensor([[True, True, True, False], [True] * 4, [True, False, False, False]])
    target = torch.zeros_like(draft)
    slopes: list[Tensor] = []
    for focal in (0.0, 2.0):
        settings = LossSettings(accept_length_focal=focal)
        sums = objective(draft, target, labels, mask, None, settings)
        slopes += torch.autograd.grad(sums.accept_length, draft)
    expected = torch.zeros_like(draft)
    expected[0, 1] = 2.0 * torch.tensor([-1.0, 1.0]) / (1 + math.exp(-2.0))
    torch.testing.assert_close(slopes[1] - slopes[0], expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_disjoint_supports_give_finite_gradients(options: dict[str, Any]) -> None:
    # q and p underflow where the other has its mass
    draft = torch.full((2, 3, 6), -300.0)
    target = torch.full((2, 3, 6), -300.0)
    draft[..., :3], target[..., 3:] = 300.0, 300.0
    draft.requires_grad_()
    labels = torch.full((2, 3), 4)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    settings = LossSettings(**options)
    sums = objective(draft, target, labels, mask, torch.zeros(2, 3), settings)
    loss = sums.loss(denominators(mask, settings), settings, 1.0)
    (gradient,) = torch.autograd.grad(loss, draft)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 0].abs().sum() > 0  # CE still moves a hopeless slot
    assert sums.alpha.abs().max() < 1e-6


@pytest.mark.parametrize("options", OPTIONS)
def test_equal_distributions_have_no_distance(options: dict[str, Any]) -> None:
    draft, _, labels, mask, _ = draw(0)
    sums = objective(draft, draft.clone(), labels, mask, None, LossSettings(**options))
    torch.testing.assert_close(sums.alpha, sums.slots, rtol=0, atol=1e-5)
    assert sums.l1.abs() < 1e-4
    whole = options.get("accept_length_form") != "chain" and not options.get("accept_length_focal")
    assert not whole or "accept_length_temperature" in options or sums.accept_length.abs() < 1e-4


def test_unsupervised_slots_change_nothing() -> None:
    settings = LossSettings(distance="lk_hybrid", accept_length_temperature=0.7)
    draft, target, labels, mask, confidence = draw(0)
    other_draft, other_target, other_labels, _, other_confidence = draw(1)
    seen = mask[..., None]
    first = objective(draft, target, labels, mask, confidence, settings)
    second = objective(
        torch.where(seen, draft, other_draft),
        torch.where(seen, target, other_target),
        torch.where(mask, labels, other_labels),
        mask,
        torch.where(mask, confidence, other_confidence),
        settings,
    )
    assert torch.equal(first.to_vector(), second.to_vector())


def test_confidence_never_moves_alpha_and_the_target_gets_no_gradient() -> None:
    draft, target, labels, mask, confidence = draw(0)
    for tensor in (draft, target, confidence):
        tensor.requires_grad_()
    sums = objective(draft, target, labels, mask, confidence, LossSettings())
    by_draft, by_target, by_confidence = torch.autograd.grad(
        sums.confidence, [draft, target, confidence], allow_unused=True
    )
    assert by_draft is None
    assert by_target is None
    assert by_confidence is not None
    sums = objective(draft, target, labels, mask, confidence, LossSettings())
    assert torch.autograd.grad(sums.l1, [target], allow_unused=True) == (None,)


def test_nla_and_l1_have_one_scale_near_the_target() -> None:
    draft, target, labels, mask, _ = draw(0, dtype=torch.float64)
    near = (target + 1e-4 * draft).requires_grad_()
    slopes = {}
    for distance in ("l1", "nla"):
        settings = LossSettings(distance=distance)  # type: ignore[arg-type]
        sums = objective(near, target, labels, mask, None, settings)
        (slopes[distance],) = torch.autograd.grad(sums.l1, near)
    torch.testing.assert_close(slopes["nla"], slopes["l1"], rtol=1e-3, atol=0)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    draft, target, labels, mask, confidence = draw(0, vocabulary=501)
    draft, target = draft.bfloat16(), target.bfloat16()
    sums = objective(draft, target, labels, mask, confidence, LossSettings())
    exact = objective(
        draft.double(), target.double(), labels, mask, confidence.double(), LossSettings()
    )
    assert sums.ce.dtype == torch.float32
    torch.testing.assert_close(sums.to_vector(), exact.to_vector(), rtol=1e-5, atol=1e-5)


def test_weights_that_depend_on_alpha_have_no_gradient() -> None:
    draft, target, labels, mask, _ = draw(0, dtype=torch.float64)
    draft.requires_grad_()
    settings = LossSettings(distance="lk_hybrid", slot_weights="survival")
    sums = objective(draft, target, labels, mask, None, settings)
    (actual,) = torch.autograd.grad(sums.l1, draft)

    p, log_q = target.softmax(-1), draft.log_softmax(-1)
    divergence = (p * (p.log() - log_q)).sum(-1)
    variation = (p - log_q.exp()).abs().sum(-1) / 2
    alpha = 1 - variation.detach()
    blend = torch.exp(-3 * alpha)
    weight = survival_weights(alpha, mask, smoothing=settings.survival_smoothing)
    term = (weight * 2 * (blend * divergence + (1 - blend) * variation)).sum()
    (expected,) = torch.autograd.grad(term, draft)
    torch.testing.assert_close(actual, expected)
