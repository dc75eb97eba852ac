"""The kernel's coefficients are autograd's of the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.config import LossSettings
from dspark.kernels.objective import SUMS
from dspark.kernels.slot_weights import slot_weights
from dspark.losses.slots import LK_SHARPNESS, NLA_FLOOR, SlotDistances, numerators

OPTIONS: list[dict[str, Any]] = [
    {},
    {"slot_weights": "survival", "survival_smoothing": 0.3},
    {"slot_weights": "survival", "survival_smoothing": 0.0, "distance": "lk_hybrid"},
    {"distance": "lk_hybrid"},
    {"distance": "nla", "decay": 2.0},
    {"distance": "nla", "slot_weights": "survival"},
    {"accept_length_form": "path"},
    {"accept_length_form": "path_exact", "accept_length_focal": 2.0, "distance": "nla"},
    {"accept_length_form": "chain"},
    {"accept_length_focal": 0.5, "slot_weights": "survival"},
]


def draw(seed: int, blocks: int, slots: int) -> tuple[Tensor, Tensor]:
    """`SlotDistances` [6, n, K] as the kernels before leave them, and the supervised prefixes."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(slots) < torch.randint(0, slots + 1, (blocks, 1), generator=generator)
    values = 2 * torch.rand(6, blocks, slots, generator=generator) ** 2
    # the label is the most likely token in two slots of three
    likely = torch.rand(blocks, slots, generator=generator) < 2 / 3
    values[5] = torch.where(likely, values[0], values[0] / 2)
    # rounding leaves the range, and slots without any overlap exist
    values[1:3, 0] = torch.tensor([-1e-6, 2 + 1e-6, 2.0, 0.0, 1.0, 2.0, 0.1, 0.3])[:slots]
    mask[0] = True
    return values * mask, mask


def by_definition(
    values: Tensor, mask: Tensor, scales: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Loss shares of the blocks, and the coefficients [4, n, K]; float64."""
    leaf, (target_ce, peak) = values[:4].double().requires_grad_(), values[4:].double()
    shares = []
    for block in range(len(mask)):
        one = slice(block, block + 1)
        ce, l1, accept_l1, kl = leaf[:, one].unbind()
        distances = SlotDistances(ce, l1, accept_l1, kl, target_ce[one], peak[one])
        terms = numerators(distances, mask[one], settings)[1]
        shares.append((torch.stack(terms) * scales.double()).sum())
    total = torch.stack(shares)
    (gradient,) = torch.autograd.grad(total.sum(), leaf)
    return total.detach(), gradient


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("blocks", "slots"), [(1, 8), (37, 7), (64, 8), (5, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coefficients_are_the_gradient(
    seed: int, blocks: int, slots: int, options: dict[str, Any], device: torch.device
) -> None:
    settings = LossSettings(**options)
    values, mask = draw(seed, blocks, slots)
    scales = torch.tensor([0.02, 0.3, 0.11])
    shares, expected = by_definition(values, mask, scales, settings)
    sums = torch.full((SUMS, blocks * slots), torch.nan, device=device)
    sums[[0, 1, 2, 3, 11, 8]] = values.flatten(1).to(device)
    out = torch.full((4, blocks * slots), torch.nan, device=device)
    found = torch.full((blocks,), torch.nan, device=device)
    survival = settings.slot_weights == "survival"
    slot_weights(
        sums,
        mask.to(device),
        scales.to(device),
        out,
        found,
        distance=settings.distance,
        form=settings.accept_length_form,
        focal=settings.accept_length_focal,
        decay=settings.decay,
        smoothing=settings.survival_smoothing if survival else None,
        sharpness=LK_SHARPNESS,
        floor=NLA_FLOOR,
    )
    torch.testing.assert_close(found.cpu().double(), shares, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.view_as(expected).cpu().double(), expected, rtol=1e-5, atol=1e-7)
    assert expected[:3].abs().sum() > 0
    assert not out.view_as(expected)[:, ~mask.to(device)].any()


def test_other_shapes_distances_and_forms_are_refused(device: torch.device) -> None:
    def call(rows: int = 6, distance: str = "l1", form: str = "expected") -> None:
        slot_weights(
            torch.zeros(SUMS, 6, device=device),
            torch.ones(3, 2, dtype=torch.bool, device=device),
            torch.zeros(3, device=device),
            torch.zeros(4, rows, device=device),
            torch.zeros(3, device=device),
            distance=distance,
            form=form,
            focal=0.0,
            decay=4.0,
            smoothing=None,
            sharpness=3.0,
            floor=1e-5,
        )

    with pytest.raises(ValueError, match="slot_weights wants contiguous out"):
        call(rows=5)
    with pytest.raises(ValueError, match="knows l1, lk_hybrid, nla, got 'l2'"):
        call(distance="l2")
    with pytest.raises(ValueError, match="knows expected, path, path_exact, chain, got 'reach'"):
        call(form="reach")
