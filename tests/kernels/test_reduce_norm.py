"""Sums, residual, norm and tap in one: the roundings of the layers, row by row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dspark.kernels.reduce_norm import (
    combine_norm,
    combine_norm_reference,
    embed_norm,
    parts_norm,
    reduce_norm,
    reduce_norm_reference,
)
from dspark.target.norm import RMSNorm

EPS = 1e-6


def drawn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def run(
    call: Callable[..., None], given: tuple[Tensor, ...], residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    new = residual.clone()
    out, tap = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)
    call(*given, new, weight, out, eps=EPS, tap=tap)
    return new, out, tap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 96, 257])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_parts_are_added_normed_and_kept(
    dtype: torch.dtype, size: int, seed: int, device: torch.device
) -> None:
    residual = drawn(16, size, seed=seed, device=device, dtype=dtype)
    weight = drawn(size, seed=seed + 10, device=device, dtype=dtype)
    parts = drawn(3, 16, size, seed=seed + 20, device=device, dtype=torch.float32)
    new, out, tap = run(reduce_norm, (parts,), residual, weight)
    expected, normed = reduce_norm_reference(parts, residual, weight, EPS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(new, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, normed, rtol=tolerance, atol=tolerance)
    assert torch.equal(tap, new)
    norm = RMSNorm(size, EPS).to(device, dtype)
    norm.weight.data.copy_(weight)
    torch.testing.assert_close(out, norm(new), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_experts_are_weighed_and_added(dtype: torch.dtype, seed: int, device: torch.device) -> None:
    each = drawn(16, 5, 96, seed=seed, device=device, dtype=dtype)
    factors = drawn(16, 5, seed=seed + 1, device=device, dtype=torch.float32)
    residual = drawn(16, 96, seed=seed + 2, device=device, dtype=dtype)
    weight = drawn(96, seed=seed + 3, device=device, dtype=dtype)
    new, out, tap = run(combine_norm, (each, factors), residual, weight)
    expected, normed = combine_norm_reference(each, factors, residual, weight, EPS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(new, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, normed, rtol=tolerance, atol=tolerance)
    assert torch.equal(tap, new)


def test_without_a_tap_nothing_else_is_written(device: torch.device) -> None:
    parts = torch.ones(1, 16, 32, device=device)
    residual, out = torch.zeros(16, 32, device=device), torch.zeros(16, 32, device=device)
    reduce_norm(parts, residual, torch.ones(32, device=device), out, eps=EPS)
    assert torch.equal(residual, torch.ones_like(residual))
    torch.testing.assert_close(out, torch.ones_like(out))


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    each = drawn(16, 5, 96, seed=0, device=device, dtype=torch.float32)
    factors = drawn(16, 5, seed=1, device=device, dtype=torch.float32)
    residual = drawn(16, 96, seed=2, device=device, dtype=torch.float32)
    weight = torch.ones(96, device=device)
    alone = run(combine_norm, (each, factors), residual, weight)
    each, factors, residual = each.clone(), factors.clone(), residual.clone()
    for one in (each, factors, residual):
        one[:3] = torch.nan
        one[7:] = 2.0
    both = run(combine_norm, (each, factors), residual, weight)
    for mine, theirs in zip(alone, both, strict=True):
        assert torch.equal(mine[3:7], theirs[3:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tap_is_a_slice_of_wider_rows(dtype: torch.dtype, device: torch.device) -> None:
    taps = torch.full((16, 96), torch.nan, dtype=dtype, device=device)
    residual = drawn(16, 32, seed=0, device=device, dtype=dtype)
    out, weight = torch.zeros_like(residual), torch.ones(32, dtype=dtype, device=device)
    parts = drawn(2, 16, 32, seed=1, device=device, dtype=torch.float32)
    reduce_norm(parts, residual, weight, out, eps=EPS, tap=taps[:, 32:64])
    assert torch.equal(taps[:, 32:64], residual)
    assert taps[:, :32].isnan().all()
    assert taps[:, 64:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_sum_without_residual_is_normed(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    wide = drawn(3, 16, 100, seed=seed, device=device, dtype=torch.float32)
    norm = RMSNorm(72, EPS).to(device, dtype)
    norm.weight.data.copy_(drawn(72, seed=seed + 1, device=device, dtype=dtype))
    out = torch.full((16, 72), torch.nan, dtype=dtype, device=device)
    parts_norm(wide[:, :, 8:80], norm.weight.data, out, eps=EPS)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    total = wide[:, :, 8:80].sum(0).to(dtype)
    torch.testing.assert_close(out, norm(total), rtol=tolerance, atol=tolerance)
    # a residual may begin with it
    again, residual = torch.full_like(out, torch.nan), torch.full_like(out, torch.nan)
    parts_norm(wide[:, :, 8:80], norm.weight.data, again, eps=EPS, residual=residual)
    assert torch.equal(again, out)
    torch.testing.assert_close(residual, total, rtol=tolerance, atol=tolerance)


def test_rows_of_a_step_are_looked_up_and_counted(device: torch.device) -> None:
    def number(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    table = drawn(50, 48, seed=0, device=device, dtype=torch.float32)
    norm = RMSNorm(48, EPS).to(device)
    proposals = torch.arange(30, 46, dtype=torch.int32, device=device)
    for count, done, rows in ((0, 0, 1), (7, 0, 8), (15, 0, 16), (7, 2, 0)):
        residual, out = (torch.full((16, 48), torch.nan, device=device) for _ in range(2))
        live = number(-5)
        embed_norm(
            number(3), table, norm.weight.data, residual, out, eps=EPS,
            proposals=(proposals, number(count), live, number(done)),
        )  # fmt: skip
        assert int(live) == rows
        tokens = [3, *range(30, 45)]
        expected = table[tokens[: max(rows, 1)]]
        assert torch.equal(residual[: len(expected)], expected)
        assert residual.isfinite().all()
        torch.testing.assert_close(out[: len(expected)], norm(expected), rtol=1e-5, atol=1e-5)
    embed_norm(number(3), table, norm.weight.data, residual, out, eps=EPS, fill=49)
    assert torch.equal(residual, table[[3] + [49] * 15])


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    rows, weight = torch.zeros(16, 32, device=device), torch.zeros(32, device=device)
    with pytest.raises(ValueError, match="reduce_norm wants"):
        reduce_norm(torch.zeros(2, 16, 33, device=device), rows, weight, rows, eps=EPS)
    with pytest.raises(ValueError, match="combine_norm wants"):
        combine_norm(
            torch.zeros(16, 3, 32, device=device), torch.zeros(16, 4, device=device),
            rows, weight, rows, eps=EPS,
        )  # fmt: skip
    with pytest.raises(ValueError, match="parts_norm wants"):
        parts_norm(torch.zeros(2, 16, 33, device=device), weight, rows, eps=EPS)
    with pytest.raises(ValueError, match="parts_norm wants a residual like out"):
        parts_norm(rows[None], weight, rows, eps=EPS, residual=rows.bfloat16())
    with pytest.raises(ValueError, match="either fill or proposals"):
        embed_norm(torch.zeros(1, dtype=torch.int32), rows, weight, rows, rows, eps=EPS)
    with pytest.raises(ValueError, match="residual, out and tap"):
        reduce_norm(torch.zeros(2, 16, 32, device=device), rows, weight[:9], rows, eps=EPS)
