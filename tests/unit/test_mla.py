"""Gated MLA: rebuilt keys and absorbed queries give the same, whatever is cached."""

import math

import pytest
import torch
from torch import Tensor

from dspark.target.config import LingConfig
from dspark.target.rotary import Rotary
from dspark.target.state import Call
from dspark.testing import TINY_LING, tiny_ling


def config(**keys: object) -> LingConfig:
    return LingConfig.from_dict({**TINY_LING["flash"], **keys})


def naive(layer: torch.nn.Module, x: Tensor) -> Tensor:  # [T, D] -> [T, D]
    """One head, one query, one key at a time."""
    weights = dict(layer.named_parameters())

    def norm(z: Tensor, weight: Tensor) -> Tensor:
        return z / (z.square().mean() + 1e-6).sqrt() * weight

    def turn(z: Tensor, position: int) -> Tensor:
        out = z.clone()
        for j in range(4):
            angle = position * 6e6 ** (-2 * j / 8)
            cos, sin = math.cos(angle), math.sin(angle)
            out[2 * j] = z[2 * j] * cos - z[2 * j + 1] * sin
            out[2 * j + 1] = z[2 * j] * sin + z[2 * j + 1] * cos
        return out

    outputs = []
    for t in range(len(x)):
        if "q_proj.weight" in weights:
            query = weights["q_proj.weight"] @ x[t]
        else:
            low = weights["q_a_proj.weight"] @ x[t]
            query = weights["q_b_proj.weight"] @ norm(low, weights["q_a_layernorm.weight"])
        gate = (weights["g_proj.weight"] @ x[t]).sigmoid()
        heads = []
        for h in range(4):
            mine = query[24 * h : 24 * h + 24]
            scores, values = [], []
            for s in range(t + 1):
                both = weights["kv_a_proj_with_mqa.weight"] @ x[s]
                latent = norm(both[:32], weights["kv_a_layernorm.weight"])
                rebuilt = weights["kv_b_proj.weight"][32 * h : 32 * h + 32] @ latent
                score = mine[:16] @ rebuilt[:16] + turn(mine[16:], t) @ turn(both[32:], s)
                scores.append(score * 24**-0.5)
                values.append(rebuilt[16:])
            heads.append(gate[h] * (torch.stack(scores).softmax(0) @ torch.stack(values)))
        outputs.append(weights["dense.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


@pytest.mark.parametrize(("variant", "index"), [("flash", 2), ("tiny", 5)])
def test_it_is_attention_over_rebuilt_keys(variant: str, index: int) -> None:
    target = tiny_ling(variant)
    layer = target.model.layers[index].attention
    x = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        positions = torch.arange(11)[None]
        torch.testing.assert_close(
            layer(x[None], Call(positions=positions))[0], naive(layer, x), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("variant", ["flash", "tiny"])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_absorbed_equals_rebuilt(variant: str, rows: int) -> None:
    target = tiny_ling(variant)
    ids = torch.randint(0, 512, (250 + rows,), generator=torch.Generator().manual_seed(1))
    whole, cached = target.new_cache((5,)), target.new_cache((5,))
    expected = target.prefill(whole, ids)
    target.prefill(cached, ids[:-rows])  # 16 rows reach into a second chunk of keys
    got = target.verify(cached, ids[-rows:])
    torch.testing.assert_close(got.taps, expected.taps[-rows:], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(got.logits[-1], expected.logits[0], atol=2e-4, rtol=2e-4)


def test_scores_do_not_care_how_rotated_pairs_are_stored() -> None:
    """Interleaved pairs, or evens then odds with halves rotated: the same products."""
    rotary = Rotary(config())
    assert (rotary.amplitude, rotary.score_factor) == (1.0, 1.0)
    query, key = torch.randn(2, 1, 7, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7)[None] * 13

    def halves(x: Tensor) -> Tensor:
        x = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
        angles = (positions[..., None].float() * rotary.inverse).repeat(1, 1, 2)
        turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        return x * angles.cos() + turned * angles.sin()

    ours = rotary(query, positions) @ rotary(key, positions).transpose(1, 2)
    torch.testing.assert_close(ours, halves(query) @ halves(key).transpose(1, 2))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mscale_all_dim": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"beta_fast": 8, "beta_slow": 2},
        {"attention_factor": 1.5},
    ],
)
def test_yarn_is_that_of_transformers(more: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, **more}
    sizes = {"qk_rope_head_dim": 64, "qk_head_dim": 80}
    ours = Rotary(config(rope_scaling=scaling, rope_theta=10000.0, **sizes))
    theirs = LlamaConfig(
        head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={**scaling, "rope_theta": 10000.0},
    )
    inverse, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    torch.testing.assert_close(ours.inverse, inverse)
    assert ours.amplitude == pytest.approx(amplitude)
    every = more.get("mscale_all_dim", 0)
    assert ours.score_factor == pytest.approx((0.1 * every * math.log(4) + 1) ** 2)
