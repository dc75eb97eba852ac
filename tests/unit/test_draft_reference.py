"""The draft's layers and heads against their equations, written out slot by slot.

Training and cached form share their layers, so that their equality tells nothing about a layer in
which both are wrong; weights of other trainers would then load and draft nothing.
"""

import math

import pytest
import torch
from torch import Tensor

from dspark.draft import DSparkDraftModel
from dspark.testing import tiny_draft, tiny_target

Weights = dict[str, Tensor]


def scrambled(draft: DSparkDraftModel) -> Weights:
    """Weights of ``draft`` in float64, after no norm is left at ones and no bias at zero."""
    generator = torch.Generator().manual_seed(5)
    for _, parameter in draft.trainable():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.3 * noise
    return {name: parameter.detach().double() for name, parameter in draft.trainable()}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head: dimension i pairs with i + N/2."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * theta ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def block_by_hand(draft: DSparkDraftModel, w: Weights, taps: Tensor, anchor_id: int) -> Tensor:
    """Hidden states [K, D] of the block that follows the context ``taps`` [S, F*D]."""
    config = draft.config
    eps, size = config.rms_norm_eps, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    assert draft.embed_weight is not None
    ids = [anchor_id] + [config.mask_token_id] * (draft.block_size - 1)
    x = draft.embed_weight.double()[ids]
    context = rms(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."

        def project(rows: Tensor, name: str, at: str = at) -> list[list[Tensor]]:
            out = rows @ w[f"{at}self_attn.{name}_proj.weight"].T
            return [list(row.split(size)) for row in out]

        normed = rms(x, w[at + "input_layernorm.weight"], eps)
        rows = torch.cat([context, normed])
        keys, values = project(rows, "k"), project(rows, "v")
        q_norm, k_norm = (w[f"{at}self_attn.{name}_norm.weight"] for name in ("q", "k"))
        mixed = []
        for slot, query in enumerate(project(normed, "q")):
            of_heads = []
            for head in range(heads):
                group = head // (heads // groups)
                q = turned(rms(query[head], q_norm, eps), len(context) + slot, theta)
                scores = [
                    q @ turned(rms(key[group], k_norm, eps), position, theta) / math.sqrt(size)
                    for position, key in enumerate(keys)
                ]
                share = torch.stack(scores).softmax(0)
                of_heads.append(sum(p * v[group] for p, v in zip(share, values, strict=True)))
            mixed.append(torch.cat(of_heads))  # type: ignore[arg-type]
        x = x + torch.stack(mixed) @ w[at + "self_attn.o_proj.weight"].T
        normed = rms(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps)


def test_hidden_states_follow_the_equations() -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    weights = scrambled(draft)
    taps = target.features(torch.arange(9)[None] + 30, draft.layer_ids).taps
    anchor, anchor_id = 7, 41
    with torch.no_grad():
        ours = draft(taps, torch.tensor([[anchor_id]]), torch.tensor([[anchor]]))[0, 0]
    by_hand = block_by_hand(draft, weights, taps[0, :anchor], anchor_id)
    torch.testing.assert_close(ours.double(), by_hand, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_sequential_head_follows_its_equations(kind: str) -> None:
    target = tiny_target()
    draft = tiny_draft(target, markov_head_type=kind)
    weights = {name.removeprefix("markov_head."): w for name, w in scrambled(draft).items()}
    head = draft.markov_head
    assert head is not None
    rank = head.rank
    hidden = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(1))
    previous = [7, 90, 90, 3]
    state = torch.zeros(rank, dtype=torch.float64)
    expected = []
    for h, token in zip(hidden.double(), previous, strict=True):
        e = weights["markov_w1.weight"][token]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            gate = weights["gate_proj.weight"] @ torch.cat([h, e]) + weights["gate_proj.bias"]
            latent = torch.sigmoid(gate) * e
        else:
            z = torch.cat([state, e, h])
            joint = weights["joint_proj.weight"] @ z + weights["joint_proj.bias"]
            g = torch.sigmoid(joint[:rank])
            state = g * state + (1 - g) * torch.tanh(joint[rank : 2 * rank])
            latent = torch.tanh(joint[2 * rank :])
        expected.append(weights["markov_w2.weight"] @ latent)
    with torch.no_grad():
        ours = head.bias(head.embed(torch.tensor(previous)), hidden)
    torch.testing.assert_close(ours.double(), torch.stack(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_markov", [True, False])
def test_the_confidence_head_reads_the_hidden_state_first(with_markov: bool) -> None:
    target = tiny_target()
    draft = tiny_draft(target, confidence_head_with_markov=with_markov)
    weights = scrambled(draft)
    assert draft.markov_head is not None
    hidden = torch.randn(4, target.hidden_size, generator=torch.Generator().manual_seed(1))
    embedding = draft.markov_head.embed(torch.tensor([7, 90, 90, 3])).detach()
    read = torch.cat([hidden, embedding] if with_markov else [hidden], -1).double()
    weight, bias = weights["confidence_head.proj.weight"][0], weights["confidence_head.proj.bias"]
    ours = draft.confidence_logits(hidden, embedding)
    assert ours is not None
    torch.testing.assert_close(ours.detach().double(), read @ weight + bias, atol=1e-4, rtol=1e-4)
