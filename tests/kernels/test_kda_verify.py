"""A KDA verify step beside the layer it replaces: outputs, states, convolutions, rollback."""

import pytest
import torch
from torch import Tensor

from dspark.kernels.gemm16 import gemm16_reference
from dspark.kernels.kda_verify import KDASlots, kda_verify
from dspark.target import kda
from dspark.target.config import LingConfig
from dspark.target.kda import KDA
from dspark.target.state import Call, KDAState
from dspark.testing import TINY_LING

CONFIG = LingConfig.from_dict(TINY_LING["flash"])


def tiny_layer(seed: int, device: torch.device) -> KDA:
    layer = KDA(CONFIG, 0)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    return layer.to(device).requires_grad_(False)


class Kernel:
    """The kernel with its slots, moved on by `commit`."""

    def __init__(self, layer: KDA, device: torch.device) -> None:
        self.layer = layer
        parts = (layer.q_proj, layer.k_proj, layer.v_proj, layer.f_proj, layer.g_proj, layer.b_proj)
        self.weight = torch.cat([part.weight for part in parts])
        convolutions = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        self.conv = torch.cat([one.weight for one in convolutions])[:, 0].contiguous()
        self.slots = KDASlots.empty(layer.heads, layer.size, 4, torch.float32, device)
        self.start = torch.zeros(1, dtype=torch.int32, device=device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, live: int, block_v: int = 16, splits: int = 1) -> Tensor:
        out = torch.full((16, self.layer.heads * self.layer.size), torch.nan, device=x.device)
        parts = gemm16_reference(x, self.weight, splits)
        tiles = self.layer.size // block_v
        self.squares = torch.full((16, self.layer.heads, tiles), torch.nan, device=x.device)
        rows = torch.full((16, self.layer.heads, 6, self.layer.size), torch.nan, device=x.device)
        kda_verify(
            parts, self.conv, self.layer.A_log, self.layer.dt_bias,
            self.layer.o_norm.weight, self.slots, out, self.squares, rows,
            start_slot=self.start,
            live_rows=torch.tensor([live], dtype=torch.int32, device=x.device),
            turn=self.turn, lower_bound=CONFIG.kda_lower_bound, block_v=block_v,
        )  # fmt: skip
        return out

    def commit(self, rows: int) -> None:
        self.start.fill_(rows)
        self.turn += 1


class Reference:
    """The layer, and what its recurrence put out."""

    def __init__(self, layer: KDA, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
        self.layer = layer
        self.state: KDAState = layer.new_state(1, device, torch.float32)
        self.rows = torch.empty(0)
        plain = kda.recurrence

        def kept(*given: Tensor) -> tuple[Tensor, list[Tensor]]:
            out, states = plain(*given)
            self.rows = out[0].flatten(1)
            return out, states

        monkeypatch.setattr(kda, "recurrence", kept)

    def __call__(self, x: Tensor, live: int) -> Tensor:
        positions = torch.zeros(1, 16, device=x.device)
        self.layer(x[None], Call(positions=positions, by_row=True, count=live, kda={0: self.state}))
        return self.rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_steps_and_rejections_are_those_of_the_layer(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = tiny_layer(seed, device)
    kernel, reference = Kernel(layer, device), Reference(layer, monkeypatch, device)
    generator = torch.Generator().manual_seed(seed)
    for step, (live, kept) in enumerate(
        [(9, 4), (5, 5), (16, 1), (1, 1), (9, 9), (16, 16), (7, 3), (2, 1)]
    ):
        x = torch.randn(16, CONFIG.hidden_size, generator=generator).to(device)
        gate = layer.g_proj(x).sigmoid()[:live] * layer.o_norm.weight.repeat(layer.heads)
        out, expected = kernel(x, live, block_v=8, splits=1 + step % 2), reference(x, live)
        torch.testing.assert_close(out[:live], expected * gate, rtol=1e-4, atol=1e-5)
        squares = expected.view(live, layer.heads, -1).square().sum(-1)
        torch.testing.assert_close(kernel.squares[:live].sum(-1), squares, rtol=1e-4, atol=1e-5)
        assert kernel.squares[live:].isnan().all()
        assert out[live:].isnan().all()
        kernel.commit(kept)
        reference.state.commit(kept)
        held = kernel.slots.states[kept].transpose(1, 2)
        torch.testing.assert_close(held, reference.state.state[0], rtol=1e-4, atol=1e-4)
        side = kernel.slots.inputs[int(kernel.turn) % 2]
        torch.testing.assert_close(side[kept : kept + 3], reference.state.tail[0])


@pytest.mark.slow
def test_a_row_depends_on_those_before_it_and_on_nothing_else(device: torch.device) -> None:
    layer = tiny_layer(0, device)
    x = torch.randn(16, CONFIG.hidden_size, generator=torch.Generator().manual_seed(5)).to(device)
    whole = Kernel(layer, device)(x, 16)
    for live in range(1, 16) if device.type == "cuda" else (1, 8, 9, 15):
        other = x.clone()
        other[live:] = 3.0
        assert torch.equal(Kernel(layer, device)(other, live)[:live], whole[:live]), live
    for block_v in (4, 8):
        torch.testing.assert_close(Kernel(layer, device)(x, 16, block_v), whole)


def test_a_step_without_live_rows_changes_nothing_that_counts(device: torch.device) -> None:
    layer = tiny_layer(0, device)
    x = torch.randn(3, 16, CONFIG.hidden_size, generator=torch.Generator().manual_seed(6)).to(
        device
    )
    one, other = Kernel(layer, device), Kernel(layer, device)
    for kernel in (one, other):
        kernel(x[0], 6)
        kernel.commit(4)
    assert other(x[1], 0).isnan().all()  # a finished request: nothing is committed behind it
    assert torch.equal(one(x[2], 5)[:5], other(x[2], 5)[:5])


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    kernel = Kernel(tiny_layer(0, device), device)
    kernel.conv = kernel.conv[:-1].contiguous()
    with pytest.raises(ValueError, match="wants contiguous conv"):
        kernel(torch.zeros(16, CONFIG.hidden_size, device=device), 1)
