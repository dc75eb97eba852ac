"""Decoder layer of the draft: block slots attend to target features and to their own block.

The same key and value matrices serve both streams; the context has passed `fc` and `hidden_norm`
once for all layers and is never updated by a layer. Source: DSpark, arXiv 2607.05147; layer form
of Qwen3 (pre-norm, per-head q/k RMSNorm, grouped queries, SwiGLU).

Symbols: B batch, Q block slots of all blocks, C context rows, D hidden, H query heads, G key/value
heads, N head size.
"""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from dspark.draft.config import DSparkConfig
from dspark.draft.sparse_attention import sparse_attention

__all__ = ["DraftAttention", "DraftLayer", "Rotary", "rotate"]

Rotary = tuple[Tensor, Tensor]  # cos and sin, [B or 1, positions, N]


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of [B, heads, positions, N]."""
    cos, sin = (part[:, None] for part in rotary)
    turned: Tensor = x * cos + rotate_half(x) * sin
    return turned.to(x.dtype)


class DraftAttention(nn.Module):
    """Projections and the two attention forms, trained (masked) and cached."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.heads = config.num_attention_heads
        self.groups = int(config.num_key_value_heads or self.heads)
        self.size = size
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=False)
        self.k_proj = nn.Linear(hidden, self.groups * size, bias=False)
        self.v_proj = nn.Linear(hidden, self.groups * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=False)
        self.q_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)

    def queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """[B, Q, D] -> [B, H, Q, N]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.size)))
        return rotate(q.transpose(1, 2), rotary)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[B, positions, D] -> twice [B, G, positions, N]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.groups, self.size)))
        v = self.v_proj(x).unflatten(-1, (self.groups, self.size))
        return rotate(k.transpose(1, 2), rotary), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """[B, H, Q, N] over [B, G, C + Q, N], mask [B, 1, Q, C + Q] or its tiles -> [B, Q, D]."""
        if isinstance(mask, BlockMask):
            out = sparse_attention(q, k, v, mask)
        else:
            repeat = self.heads // self.groups
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP over the block stream."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,  # [B, Q, D]
        context: tuple[Tensor, Tensor],  # keys and values of the context, [B, G, C, N]
        rotary: Rotary,  # of the block positions
        mask: Tensor | BlockMask | None,  # [B, 1, Q, C + Q] bool; None: everything is visible
    ) -> Tensor:  # [B, Q, D]
        """One layer; the context's keys and values come from `DraftAttention.keys_values`."""
        normed = self.input_layernorm(hidden)
        keys, values = self.self_attn.keys_values(normed, rotary)
        keys = torch.cat([context[0], keys], dim=2)
        values = torch.cat([context[1], values], dim=2)
        queries = self.self_attn.queries(normed, rotary)
        hidden = hidden + self.self_attn.attend(queries, keys, values, mask)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
