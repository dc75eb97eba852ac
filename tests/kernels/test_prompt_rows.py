"""Element-wise work on many rows beside the modules it replaces."""

import pytest
import torch
from torch import Tensor

from dspark.kernels.prompt_rows import expert_rows, limited_swiglu_rows, norm_rows
from dspark.kernels.router import route_rows
from dspark.target.config import LingConfig
from dspark.target.joined import in_a_row, products
from dspark.target.moe import MoE, limited_swiglu
from dspark.target.norm import RMSNorm
from dspark.testing import TINY_LING

DTYPES = [torch.float32, torch.bfloat16]


def close(got: Tensor, expected: Tensor) -> None:
    """bfloat16: a rounding falls to the other side, or is cut off by the interpreter, twice."""
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 128, 1100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_norms(dtype: torch.dtype, size: int, seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    norm = RMSNorm(size, 1e-6).requires_grad_(False)
    norm.weight.data.normal_(generator=generator)
    norm.to(device, dtype)
    wide = torch.randn(1, 7, 2 * size, generator=generator).to(device, dtype)
    x, part = wide.chunk(2, -1)  # rows with a stride
    same, normed = norm_rows(x, norm.weight, norm.eps)
    assert same is x
    close(normed, norm(x))
    total, normed = norm_rows(x, norm.weight, norm.eps, part)
    close(total, x + part)
    close(normed, norm(total))
    assert total.is_contiguous()
    assert normed.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("inner", [48, 192, 300])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_swiglu_with_and_without_limits(
    dtype: torch.dtype, limit: float, inner: int, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    both = 2 * torch.randn(33, 2 * inner, generator=generator).to(device, dtype)
    gate, up = both.chunk(2, -1)
    close(limited_swiglu_rows(gate, up, limit), limited_swiglu(gate, up, limit))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rows_go_to_their_experts_and_back(
    dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 72, generator=generator).to(device, dtype)
    ids = torch.randint(0, 5, (12, 3), generator=generator).to(device)
    order = ids.flatten().argsort(stable=True)
    rows, places = expert_rows(x, order, 3)
    assert torch.equal(rows, x[order // 3])
    assert torch.equal(order[places.flatten()], torch.arange(36, device=device))
    assert torch.equal(rows[places], x[:, None].expand(12, 3, 72))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x = torch.zeros(4, 8, 32, device=device)
    with pytest.raises(ValueError, match="rows of one stride"):
        norm_rows(x.transpose(0, 1), x[0, 0], 1e-6)
    with pytest.raises(ValueError, match="a part like x"):
        norm_rows(x, x[0, 0], 1e-6, x[0])
    with pytest.raises(ValueError, match="gate and up alike"):
        limited_swiglu_rows(x, x[0], 0.0)
    with pytest.raises(ValueError, match="order"):
        expert_rows(x[0], torch.zeros(8, dtype=torch.int64, device=device), 2)


def layer(seed: int, device: torch.device, index: int = 4) -> MoE:
    """Limits on routed experts (4), or on the shared one (2)."""
    made = MoE(LingConfig.from_dict(TINY_LING["flash"]), index).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    made.gate.expert_bias.normal_(0, 0.3, generator=generator)
    return made.to(device)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_router_of_many_rows(seed: int, device: torch.device) -> None:
    gate = layer(seed, device).gate
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    with torch.enable_grad():  # the module's own functions
        ids, weights = gate(x)
    found, factors = gate.prompt(x)
    assert torch.equal(found.long(), ids)
    torch.testing.assert_close(factors, weights, rtol=1e-5, atol=1e-6)


def test_of_equal_experts_the_lower_id_wins(device: torch.device) -> None:
    ids, weights = route_rows(
        torch.zeros(3, 16, device=device), torch.zeros(16, device=device),
        groups=4, kept_groups=2, chosen=3, factor=3.0,
    )  # fmt: skip
    assert ids.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.ones_like(weights))
    with pytest.raises(ValueError, match="powers of two"):
        route_rows(
            torch.zeros(3, 12, device=device), torch.zeros(12, device=device),
            groups=4, kept_groups=2, chosen=3, factor=1.0,
        )  # fmt: skip


@pytest.mark.parametrize("index", [2, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_experts_of_many_rows(index: int, seed: int, device: torch.device) -> None:
    moe = layer(seed, device, index)
    x = torch.randn(45, 64, generator=torch.Generator().manual_seed(seed)).to(device)
    # an expert that nobody chose takes no rows
    moe.gate.expert_bias[5] = -10
    with torch.enable_grad():
        expected = moe(x[None])[0]
    shared = moe.shared_experts
    assert shared is not None
    ids, weights = moe.gate.prompt(x)
    out = moe.experts.prompt(x, ids, weights, shared(x))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    alone = moe.experts.prompt(x, ids, weights, None)
    torch.testing.assert_close(alone + shared(x), expected, rtol=1e-4, atol=1e-5)


def test_products_of_weights_in_a_row(device: torch.device) -> None:
    linears = [torch.nn.Linear(24, size, bias=False, device=device) for size in (16, 5, 8)]
    x = torch.randn(6, 24, device=device)
    apart = products(x, linears)
    assert in_a_row([one.weight.data for one in linears]) is None
    whole = torch.cat([one.weight.data for one in linears])
    for linear, part in zip(linears, whole.split([16, 5, 8]), strict=True):
        linear.weight.data = part
    together = products(x, linears)
    assert together[0].stride() == (29, 1)
    for one, other, linear in zip(apart, together, linears, strict=True):
        torch.testing.assert_close(one, linear(x))
        torch.testing.assert_close(other, linear(x))
