"""Products whose inputs are made on the way: gated norm, SwiGLU."""

import pytest
import torch
from torch import Tensor

from dspark.kernels.gemm16 import gemm16_reference
from dspark.kernels.products import gate_up16, gated_gemm16, gated_reference, swiglu16
from dspark.kernels.tiles import tile_for
from dspark.target.moe import limited_swiglu

EPS = 1e-6


def drawn(*shape: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def gated(core: Tensor, gate: Tensor, norm: Tensor, weight: Tensor, parts: int) -> Tensor:
    """The product of what `kda_verify` would have left."""
    heads, size = core.shape[1] // len(norm), len(norm)
    left = core * torch.sigmoid(gate.float()) * norm.float().repeat(heads)
    squares = core.view(16, heads, 4, size // 4).square().sum(-1)
    out = torch.full((parts, 16, len(weight)), torch.nan, device=core.device)
    gated_gemm16(left, squares, weight, out, eps=EPS, block_n=16)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size", "n", "parts"), [(4, 16, 40, 2), (2, 128, 33, 1)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_heads_are_normed_before_the_product(
    dtype: torch.dtype, heads: int, size: int, n: int, parts: int, seed: int, device: torch.device
) -> None:
    width = heads * size
    core = drawn(16, width, seed=seed, device=device) * 3
    gate = drawn(16, width, seed=seed + 1, device=device).to(dtype)
    norm = drawn(size, seed=seed + 2, device=device).to(dtype)
    weight = drawn(n, width, seed=seed + 3, device=device).to(dtype)
    out = gated(core, gate, norm, weight, parts)
    x = gated_reference(core, gate, norm, EPS)
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (2e-2, 0.1)
    expected = gemm16_reference(x, weight, parts)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_a_row_of_a_gated_product_stands_for_itself(device: torch.device) -> None:
    core, gate = drawn(16, 64, seed=0, device=device), drawn(16, 64, seed=1, device=device)
    norm, weight = drawn(16, seed=2, device=device), drawn(40, 64, seed=3, device=device)
    alone = gated(core, gate, norm, weight, 2)
    core[5:], gate[:3] = torch.nan, torch.nan
    assert torch.equal(gated(core, gate, norm, weight, 2)[:, 3:5], alone[:, 3:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 300])
def test_swiglu_sums_its_parts_first(dtype: torch.dtype, width: int, device: torch.device) -> None:
    parts = drawn(3, 16, 2 * width, seed=width, device=device)
    out = torch.full((16, width), torch.nan, dtype=dtype, device=device)
    swiglu16(parts, out)
    gate, up = parts.sum(0).to(dtype).chunk(2, -1)
    # three roundings, which the interpreter does by cutting off
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out, limited_swiglu(gate, up, 0), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("n", "k"), [(5128, 2560), (2560, 3200), (848, 1536), (96, 64), (5, 48), (157184, 1536)]
)
def test_a_tile_fits_its_shape(n: int, k: int) -> None:
    tile = tile_for(n, k)
    assert k % (tile.splits * tile.block_k) == 0
    assert tile == tile_for(n, k)


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiple of 16 inputs, got 72"):
        tile_for(64, 72)
    rows = torch.zeros(16, 64, device=device)
    with pytest.raises(ValueError, match="gated_gemm16 wants"):
        gated(rows, rows, torch.ones(16, device=device), rows, 3)
    with pytest.raises(ValueError, match="swiglu16 wants"):
        swiglu16(rows[None], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "inner"), [(48, 40), (576, 1536 // 16 + 3), (256, 64)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gate_and_up_are_the_layers_in_one_product(
    dtype: torch.dtype, d: int, inner: int, seed: int, device: torch.device
) -> None:
    """The definition is transformers' `LlamaMLP` before its last product."""
    x = drawn(16, d, seed=seed, device=device).to(dtype)
    weight = (drawn(2 * inner, d, seed=seed + 1, device=device) * d**-0.5).to(dtype)
    out = torch.full((16, inner), torch.nan, dtype=dtype, device=device)
    block_k = 128 if d > 128 else 32  # the last step is a short one, or there are only whole ones
    block_n = 16 if inner < 64 else 32
    gate_up16(x, weight, out, block_n=block_n, block_k=block_k)
    gate, up = (x @ weight.T).chunk(2, 1)
    close = 1e-5 if dtype == torch.float32 and device.type == "cpu" else 3e-2
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, rtol=close, atol=close)
    # a row stands for itself
    others = torch.full_like(x, torch.nan)
    others[3] = x[3]
    again = torch.full_like(out, torch.nan)
    gate_up16(others, weight, again, block_n=block_n, block_k=block_k)
    assert torch.equal(again[3], out[3])


def test_gates_that_do_not_fit_are_refused(device: torch.device) -> None:
    x, out = torch.zeros(16, 48, device=device), torch.zeros(16, 40, device=device)
    with pytest.raises(ValueError, match=r"weight \[2 I, D\]"):
        gate_up16(x, torch.zeros(80, 32, device=device), out)
    with pytest.raises(ValueError, match="tensors of one dtype"):
        gate_up16(x, torch.zeros(80, 48, device=device).bfloat16(), out)
