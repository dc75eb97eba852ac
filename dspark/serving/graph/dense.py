"""The weights of a dense decoder as the kernels read them: views, as in `graph.weights`."""

from typing import Any

import torch

from dspark.serving.graph.weights import (
    DenseFFN,
    GQAMixer,
    LayerWeights,
    TargetWeights,
    joined_rows,
)
from dspark.target import HFTarget
from dspark.target.families import DenseShape

__all__ = ["dense_weights", "fused"]

_LARGE = 1 << 22
"""Weights of a gate from which on one long loop is as fast as parts that are added behind it."""


def fused(gate: int) -> bool:
    """Whether a gate of so many weights, its up matrix and SwiGLU are one launch."""
    return gate >= _LARGE


def dense_weights(target: HFTarget) -> TargetWeights:
    """Views of ``target``, whose parameters move unless they lie as they should."""
    shape = DenseShape.of(target.config)
    # anew: a model that was cast has cast these too
    rotary = type(target.decoder.rotary_emb)(target.config)
    inverse = rotary.inv_freq.float().to(target.device)
    layers = []
    for layer in target.layers:
        layers.append(_layer(layer, shape, inverse, float(rotary.attention_scaling)))
        if target.device.type == "cuda":
            # what was joined has other sizes than before, which the allocator would keep
            torch.cuda.empty_cache()
    return TargetWeights(
        config=shape,
        embedding=target.embed_weight.data,
        layers=tuple(layers),
        norm=target.decoder.norm.weight.data,
        head=target.head_weight.data,
    )


def _layer(layer: Any, shape: DenseShape, inverse: torch.Tensor, amplitude: float) -> LayerWeights:
    mixer, ffn = layer.self_attn, layer.mlp
    norms = [getattr(mixer, name).weight.data for name in shape.family.norms or ()]
    q_norm, k_norm = norms or (None, None)
    return LayerWeights(
        norm=layer.input_layernorm.weight.data,
        mixer=GQAMixer(
            into=joined_rows([mixer.q_proj, mixer.k_proj, mixer.v_proj]),
            q_norm=q_norm,
            k_norm=k_norm,
            out=mixer.o_proj.weight.data,
            inverse=inverse,
            amplitude=amplitude,
            scale=float(mixer.scaling),
            heads=shape.num_attention_heads,
            groups=shape.num_key_value_heads,
            size=shape.head_dim,
        ),
        ffn_norm=layer.post_attention_layernorm.weight.data,
        ffn=DenseFFN(
            joined_rows([ffn.gate_proj, ffn.up_proj]),
            ffn.down_proj.weight.data,
            fused=fused(ffn.gate_proj.weight.numel()),
        ),
    )
