"""Router and experts against one token, one expert at a time."""

import pytest
import torch
from torch import Tensor

from dspark.target.model import LingModel
from dspark.target.moe import MoE, limited_swiglu
from dspark.testing import tiny_ling


def moe(limits: bool = True) -> MoE:
    """Layer 4 of the tiny flash: limits on routed experts; its shared expert has none."""
    found = tiny_ling(swiglu_limits=limits).model.layers[4].mlp
    assert isinstance(found, MoE)
    return found


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def naive_router(layer: MoE, x: Tensor) -> dict[int, float]:
    scores = (layer.gate.weight.detach() @ x).sigmoid().tolist()
    biased = [s + b for s, b in zip(scores, layer.gate.expert_bias.tolist(), strict=True)]
    best = []
    for group in range(4):
        of_group = sorted(biased[4 * group : 4 * group + 4], reverse=True)
        best.append((of_group[0] + of_group[1], group))
    groups = [group for _, group in sorted(best, reverse=True)[:2]]
    allowed = [e for e in range(16) if e // 4 in groups]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:4]
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total * 2.5 for e in chosen}


def naive_expert(gate: Tensor, up: Tensor, down: Tensor, x: Tensor, limit: float) -> Tensor:
    g, u = gate @ x, up @ x
    g = g * g.sigmoid()
    if limit:
        g = torch.minimum(g, torch.tensor(limit))
        u = torch.maximum(torch.minimum(u, torch.tensor(limit)), torch.tensor(-limit))
    return down @ (g * u)


def naive(layer: MoE, x: Tensor, limit: float) -> Tensor:
    out = []
    for row in x:
        total = torch.zeros(64)
        for expert, weight in naive_router(layer, row).items():
            gate, up = layer.experts.gate_up[expert].chunk(2)
            total += weight * naive_expert(gate, up, layer.experts.down[expert], row, limit)
        shared = layer.shared_experts
        assert shared is not None
        total += naive_expert(
            shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight, row, 0.0
        )
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("limits", [True, False])
@torch.no_grad()
def test_experts_equal_a_loop(by_row: bool, limits: bool) -> None:
    layer, x = moe(limits), rows(16)
    got = layer(x[None], by_row)[0]
    torch.testing.assert_close(got, naive(layer, x, 0.05 if limits else 0.0), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_limits_bind() -> None:
    x = rows(16)
    assert (moe(True)(x[None]) - moe(False)(x[None])).abs().max() > 1e-2


def test_the_limit_is_one_sided_on_the_gate() -> None:
    gate, up = torch.tensor([-9.0, 9.0, 9.0, 1.0]), torch.tensor([9.0, -9.0, 9.0, 0.5])
    silu = gate * gate.sigmoid()
    expected = torch.tensor([silu[0] * 4, -16.0, 16.0, silu[3] * 0.5])
    torch.testing.assert_close(limited_swiglu(gate, up, 4.0), expected)
    torch.testing.assert_close(limited_swiglu(gate, up, 0.0), silu * up)


@torch.no_grad()
def test_the_bias_chooses_and_does_not_weigh() -> None:
    layer, x = moe(), rows(200)
    ids, weights = layer.gate(x)
    torch.testing.assert_close(weights.sum(-1), torch.full((200,), 2.5))
    assert max(len(set((row // 4).tolist())) for row in ids) <= 2  # of the 4 groups
    layer.gate.expert_bias.zero_()
    others, _ = layer.gate(x)
    assert (ids.sort(-1).values != others.sort(-1).values).any(-1).float().mean() > 0.2
    # the same bias for all changes no choice, so it must change no weight
    layer.gate.expert_bias.fill_(0.7)
    shifted, same = layer.gate(x)
    assert torch.equal(shifted, others)
    torch.testing.assert_close(same, layer.gate(x)[1])
    scores = (x @ layer.gate.weight.T).sigmoid().gather(1, shifted)
    torch.testing.assert_close(same, scores / scores.sum(-1, keepdim=True) * 2.5)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer, x = moe(), rows(16)
    whole = layer(x[None], True)[0]
    for other in range(1, 4):
        mixed = torch.cat([x[:5], rows(11, seed=other)])
        assert torch.equal(layer(mixed[None], True)[0, :5], whole[:5])


def test_casts_leave_the_bias_and_the_decays_alone() -> None:
    model: LingModel = tiny_ling().model
    before = {n: x.clone() for n, x in model.state_dict().items() if x.dtype == torch.float32}
    model.to(torch.bfloat16)
    names = {n for n, x in model.state_dict().items() if x.dtype == torch.float32}
    assert {n.rsplit(".", 1)[1] for n in names} == {"A_log", "dt_bias", "expert_bias"}
    for name in names:
        assert torch.equal(model.state_dict()[name], before[name])
    assert model.lm_head.weight.dtype == torch.bfloat16
