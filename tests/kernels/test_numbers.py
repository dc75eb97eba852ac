"""Noise and angles of the kernels are the reference's."""

import pytest
import torch
import triton
import triton.language as tl

from dspark.decoding.sampling import gumbel
from dspark.kernels import angles as angles_of
from dspark.kernels import noise


@triton.jit
def _draw(ids, positions, out, low, high, C: tl.constexpr):
    c = tl.arange(0, C)
    row = tl.program_id(0)
    key = noise.noise_key(low, high, tl.load(positions + row))
    tl.store(out + row * C + c, noise.gumbel(key, tl.load(ids + c)))


@pytest.mark.parametrize("seed", [0, 7, -1, (1 << 62) + 12345])
def test_noise_is_that_of_the_reference(seed: int, device: torch.device) -> None:
    ids = torch.cat([torch.arange(3000), torch.arange(156000, 157096)]).int().to(device)
    positions = torch.tensor([0, 1, 513, 262143], device=device)
    out = torch.full((4, 4096), torch.nan, device=device)
    low = (seed & 0xFFFFFFFF) - (1 << 32) * ((seed >> 31) & 1)
    _draw[(4,)](ids, positions.int(), out, low, seed >> 32, C=4096)
    expected = gumbel(seed, positions, ids.long())
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=1e-6)
    assert torch.equal(out.argmax(1), expected.argmax(1))


@triton.jit
def _turn(angles, out, C: tl.constexpr):
    c = tl.arange(0, C)
    cos, sin = angles_of.cos_sin(tl.load(angles + c))
    tl.store(out + c, cos)
    tl.store(out + C + c, sin)


def test_large_angles_are_turned_exactly(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(4096, generator=generator) * 10 ** torch.linspace(-3, 5.4, 4096)
    out = torch.full((2, 4096), torch.nan, device=device)
    _turn[(1,)](angles.to(device), out, C=4096)
    wide = angles.double()
    expected = torch.stack([wide.cos(), wide.sin()]).float().to(device)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
