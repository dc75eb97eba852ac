"""Few rows times a large matrix: the definition, row by row, whatever the other rows hold."""

import pytest
import torch
from torch import Tensor

from dspark.kernels.gemm16 import gemm16, gemm16_reference

# of the last two, a part of K ends within a step
SHAPES = [(80, 256, 1), (48, 256, 2), (33, 512, 4), (5, 128, 1), (40, 192, 1), (24, 192, 2)]


def drawn(n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    return x.bfloat16().to(device), weight.bfloat16().to(device)


def product(x: Tensor, weight: Tensor, splits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((splits, 16, len(weight)), torch.nan, dtype=dtype, device=x.device)
    gemm16(x, weight, out)
    return out


@pytest.mark.parametrize(("n", "k", "splits"), SHAPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_products_are_those_of_the_definition(
    n: int, k: int, splits: int, seed: int, device: torch.device
) -> None:
    x, weight = drawn(n, k, seed, device)
    expected = gemm16_reference(x, weight, splits)
    torch.testing.assert_close(product(x, weight, splits), expected, rtol=1e-5, atol=1e-4)
    if splits == 1:
        rounded = product(x, weight, 1, torch.bfloat16)
        torch.testing.assert_close(rounded, expected.bfloat16(), rtol=1e-2, atol=1e-2)


def test_rows_may_have_a_stride(device: torch.device) -> None:
    x, weight = drawn(40, 128, 0, device)
    wide = torch.full((16, 200), torch.nan, dtype=x.dtype, device=device)
    wide[:, :128] = x
    assert torch.equal(product(wide[:, :128], weight, 1), product(x, weight, 1))


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    x, weight = drawn(48, 256, 0, device)
    alone = product(x, weight, 2)
    other = x.clone()
    other[:5] = torch.inf
    other[9:] = -3.0
    assert torch.equal(product(other, weight, 2)[:, 5:9], alone[:, 5:9])


@pytest.mark.parametrize(
    ("x", "weight", "out"),
    [
        ((15, 128), (8, 128), (1, 15, 8)),
        ((16, 128), (8, 256), (1, 16, 8)),
        ((16, 128), (8, 128), (1, 16, 9)),
        ((16, 256), (8, 256), (3, 16, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    x: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], device: torch.device
) -> None:
    with pytest.raises(ValueError, match="gemm16 wants"):
        gemm16(*(torch.zeros(shape, device=device) for shape in (x, weight, out)))
