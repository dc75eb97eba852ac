"""Router and experts: those of the model's own MoE, for as many rows as are live."""

import pytest
import torch
from torch import Tensor

from dspark.kernels.experts import experts_down, experts_reference, experts_up
from dspark.kernels.router import route, route_reference
from dspark.target.config import LingConfig
from dspark.target.moe import MoE
from dspark.testing import TINY_LING

# two limits that bind, one for each kind of expert
CONFIG = LingConfig.from_dict(
    {
        **TINY_LING["flash"],
        "expert_swiglu_limit_list": [1.0] * 7,
        "share_expert_swiglu_limit_list": [0.5] * 7,
    }
)


def tiny_moe(seed: int, device: torch.device) -> MoE:
    moe = MoE(CONFIG, 3)
    generator = torch.Generator().manual_seed(seed)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    moe.gate.expert_bias.normal_(0, 0.3, generator=generator)
    return moe.to(device).requires_grad_(False)


def stacked(moe: MoE) -> tuple[Tensor, Tensor]:
    shared = moe.shared_experts
    assert shared is not None
    gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])[None]
    return (
        torch.cat([moe.experts.gate_up, gate_up]),
        torch.cat([moe.experts.down, shared.down_proj.weight[None]]),
    )


def routed(moe: MoE, x: Tensor, live: int) -> tuple[Tensor, Tensor]:
    chosen = CONFIG.num_experts_per_tok
    halves = zip(x.chunk(2, 1), moe.gate.weight.chunk(2, 1), strict=True)
    logits = torch.stack([left @ right.T for left, right in halves])
    ids = torch.full((16, chosen), -7, dtype=torch.int32, device=x.device)
    factors = torch.full((16, chosen + 1), torch.nan, device=x.device)
    rows = torch.tensor([live], dtype=torch.int32, device=x.device)
    route(
        logits, moe.gate.expert_bias, rows, ids, factors,
        groups=CONFIG.n_group, kept_groups=CONFIG.topk_group, factor=CONFIG.routed_scaling_factor,
    )  # fmt: skip
    return ids, factors


def outputs(moe: MoE, x: Tensor, ids: Tensor, block: int = 64) -> Tensor:
    """By slot; NaN where nothing was written."""
    gate_up, down = stacked(moe)
    shared = moe.shared_experts
    assert shared is not None
    inner = torch.full((1 + ids.numel(), 16, down.shape[2]), torch.nan, device=x.device)
    out = torch.full((16, ids.shape[1] + 1, x.shape[1]), torch.nan, device=x.device)
    experts_up(
        x, gate_up, ids, inner, limit=moe.experts.limit, shared_limit=shared.limit,
        block_n=block // 2, block_k=32,
    )  # fmt: skip
    experts_down(inner, down, ids, out, block_n=block, block_k=32)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("live", [1, 7, 16])
def test_the_sum_over_slots_is_the_models_own(seed: int, live: int, device: torch.device) -> None:
    moe = tiny_moe(seed, device)
    assert moe.experts.limit == 1.0
    x = torch.randn(16, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed)).to(
        device
    )
    ids, factors = routed(moe, x, live)
    expected, weights = moe.gate(x)
    assert torch.equal(ids[:live], expected[:live].int())
    assert (ids[live:] == -1).all()
    torch.testing.assert_close(factors[:, :-1], weights)
    assert (factors[:, -1] == 1).all()
    out = outputs(moe, x, ids)
    assert out[live:].isnan().all()
    total = (out * factors[..., None]).sum(1)[:live]
    # the GPU multiplies float32 in tf32
    tolerance = 1e-5 if device.type == "cpu" else 1e-2
    torch.testing.assert_close(
        total, moe(x[None])[0][:live], rtol=tolerance, atol=tolerance * float(total.abs().max())
    )


def test_every_slot_holds_its_own_expert(device: torch.device) -> None:
    """Also with an expert that all rows share, and one that a row and only it asks for."""
    moe = tiny_moe(0, device)
    x = torch.randn(16, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3)).to(device)
    ids = torch.tensor([[5, 0, 9, row % 4 + 1] for row in range(16)], dtype=torch.int32)
    ids[6] = torch.tensor([14, 5, 1, 13])
    ids[12:] = -1
    ids = ids.to(device)
    shared = moe.shared_experts
    assert shared is not None
    expected = experts_reference(x, *stacked(moe), ids, moe.experts.limit, shared.limit)
    tolerance = 1e-5 if device.type == "cpu" else 1e-2
    out = outputs(moe, x, ids, block=32)
    torch.testing.assert_close(
        out[:12], expected[:12], rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )
    assert out[12:].isnan().all()


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    """Neither on how many are live, nor on which experts they share."""
    moe = tiny_moe(1, device)
    x = torch.randn(16, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).to(device)
    every, whole = routed(moe, x, 16)[0], None
    for live in range(1, 16) if device.type == "cuda" else (1, 9, 15):
        ids, _ = routed(moe, x, live)
        assert torch.equal(ids[:live], every[:live])
        out = outputs(moe, x, ids)
        whole = outputs(moe, x, every) if whole is None else whole
        assert torch.equal(out[:live], whole[:live]), live
    other = x.clone()
    other[:4] = 7.0
    ids, _ = routed(moe, other, 16)
    assert whole is not None
    assert torch.equal(outputs(moe, other, ids)[4:], whole[4:])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("experts", "groups", "kept"), [(512, 8, 4), (16, 1, 1), (32, 32, 5)])
def test_routes_of_other_shapes(
    experts: int, groups: int, kept: int, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 16, experts, generator=generator).to(device)
    bias = torch.randn(experts, generator=generator).to(device)
    chosen = min(8, kept * (experts // groups))
    ids = torch.full((16, chosen), -7, dtype=torch.int32, device=device)
    factors = torch.full((16, chosen + 1), torch.nan, device=device)
    live = torch.tensor([11], dtype=torch.int32, device=device)
    route(logits, bias, live, ids, factors, groups=groups, kept_groups=kept, factor=2.5)
    expected, weights = route_reference(
        logits.sum(0), bias, 11, groups=groups, kept_groups=kept, chosen=chosen, factor=2.5
    )
    assert torch.equal(ids, expected)
    torch.testing.assert_close(factors, weights)


def test_of_equal_scores_the_lower_id_wins(device: torch.device) -> None:
    ids = torch.full((16, 4), -7, dtype=torch.int32, device=device)
    factors = torch.zeros(16, 5, device=device)
    live = torch.tensor([16], dtype=torch.int32, device=device)
    logits, bias = torch.zeros(1, 16, 32, device=device), torch.zeros(32, device=device)
    route(logits, bias, live, ids, factors, groups=8, kept_groups=2, factor=1.0)
    assert (ids == torch.arange(4, device=device)).all()
    # as good a group as the first two, with a better expert in it, is one too many
    better = torch.zeros(8, 4, device=device)
    better[:7, :2], better[7, 0] = 1, 2
    route(logits, better.flatten(), live, ids, factors, groups=8, kept_groups=2, factor=1.0)
    assert (ids == torch.tensor([0, 1, 4, 5], device=device)).all()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ids, live = zeros(16, 4, dtype=torch.int32), zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="powers of two"):
        route(
            zeros(1, 16, 24),
            zeros(24),
            live,
            ids,
            zeros(16, 5),
            groups=8,
            kept_groups=2,
            factor=1.0,
        )
    with pytest.raises(ValueError, match="route wants"):
        route(
            zeros(1, 16, 16),
            zeros(16),
            live,
            ids,
            zeros(16, 4),
            groups=8,
            kept_groups=2,
            factor=1.0,
        )
    with pytest.raises(ValueError, match="experts_up wants"):
        experts_up(
            zeros(16, 128), zeros(17, 64, 128), ids, zeros(64, 16, 32), limit=0, shared_limit=0
        )
    with pytest.raises(ValueError, match="experts_down wants"):
        experts_down(zeros(65, 16, 32), zeros(17, 128, 32), ids, zeros(16, 5, 128))
