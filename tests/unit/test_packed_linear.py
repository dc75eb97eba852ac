"""Packed products give what the layers give, each layer its own part, for inputs that change."""

import pytest
import torch
from torch import nn

from dspark.kernels.packed_linear import PackedLinear, pack_linears


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 32, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias)
        self.o_proj = nn.Linear(32, 24)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16, 17])
@torch.no_grad()
def test_every_layer_gets_its_own_part(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(bias)
    names = ("q_proj", "k_proj", "v_proj")
    inputs = [torch.randn(1, rows, 24) for _ in range(3)]
    expected = [[getattr(layer, name)(x) for name in names] for x in inputs]
    other = layer.o_proj(torch.ones(rows, 32))
    if not pack_linears(layer):
        pytest.skip("no oneDNN on this machine")
    assert isinstance(layer.q_proj, PackedLinear)
    # in order, out of order, twice, and only some of them
    for x, wanted in zip([*inputs, *inputs], [*expected, *expected], strict=True):
        for index in (0, 2, 1, 1, 0):
            torch.testing.assert_close(getattr(layer, names[index])(x), wanted[index])
        torch.testing.assert_close(layer.k_proj(x), wanted[1])
    torch.testing.assert_close(layer.o_proj(torch.ones(rows, 32)), other)


@torch.no_grad()
def test_an_input_that_was_written_to_is_multiplied_again() -> None:
    torch.manual_seed(0)
    layer = Attention(bias=False)
    x = torch.randn(8, 24)
    doubled = layer.k_proj(2 * x)
    if not pack_linears(layer):
        pytest.skip("no oneDNN on this machine")
    layer.q_proj(x)
    x.mul_(2)
    torch.testing.assert_close(layer.k_proj(x), doubled)
