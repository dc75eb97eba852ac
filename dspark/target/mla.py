"""Gated multi-head latent attention: a shared latent a token, one sigmoid gate a head.

Two equal forms: `plain` rebuilds keys and values from the latents (prefill, training); `absorbed`
moves that product to the query and the output (decode), and reads the latents in fixed chunks, so
that a row does not depend on how many rows are computed with it. Source: DeepSeek-V2,
arXiv 2405.04434, section 2.1, with Ling's head-wise gate.

Symbols: B batch, T rows, H heads (of this rank), S positions, N unrotated and P rotated size of a
query, V value size, L latent rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.target.config import LingConfig
from dspark.target.norm import RMSNorm
from dspark.target.rotary import Rotary
from dspark.target.rows import CHUNK, row_attention
from dspark.target.state import Call, LatentState

__all__ = ["MLA"]


class MLA(nn.Module):
    """The mixer of an MLA layer; the output is this rank's part of a sum over ranks."""

    def __init__(self, config: LingConfig, layer: int, ranks: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads // ranks
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.rank = config.v_head_dim, config.kv_lora_rank
        hidden, width = config.hidden_size, self.heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6)
            self.q_b_proj = nn.Linear(config.q_lora_rank, width, bias=False)
        self.low_rank_query = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.g_proj = nn.Linear(hidden, self.heads, bias=False)
        self.dense = nn.Linear(self.heads * self.value, hidden, bias=False)
        self._rotary = Rotary(config)
        self.scale = config.qk_head_dim**-0.5 * self._rotary.score_factor

    def new_state(self, batch: int, device: torch.device) -> LatentState:
        """Nothing has been read."""
        return LatentState(batch, self.rank + self.rope, device)

    def forward(self, x: Tensor, call: Call) -> Tensor:  # [B, T, D] -> [B, T, D]
        batch, rows, _ = x.shape
        if self.low_rank_query:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            query = self.q_proj(x)
        query = query.view(batch, rows, self.heads, self.nope + self.rope)
        still, turned = query.split([self.nope, self.rope], -1)
        turned = self._rotary(turned, call.positions)
        latent = self.latents(x, call.positions)
        held = call.latents.get(self.layer)
        if held is not None:
            held.write(latent, call.start)
        if call.by_row:
            assert held is not None
            out = self._absorbed(still, turned, held.held, call.masks)
        else:
            if call.start:
                assert held is not None
                latent = held.held[:, : call.start + rows].to(x.dtype)
            mask = None if call.hidden is None else ~call.hidden
            if x.is_cuda and call.start and call.valid is None:
                # 140 MB of compiler, which a process that only reads data is spared
                from torch.nn.attention.bias import causal_lower_right

                # the same mask as a rule, which fused attention need not read
                mask = causal_lower_right(rows, latent.shape[1])
            out = self._plain(still, turned, latent, mask)
        gate = torch.sigmoid(self.g_proj(x).float())[..., None]
        mixed: Tensor = self.dense((out * gate).to(x.dtype).flatten(2))
        return mixed

    def latents(self, x: Tensor, positions: Tensor) -> Tensor:  # [B, T, D] -> [B, T, L + P]
        """What the layer remembers of each row: normed latent and rotated shared key."""
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        return torch.cat([self.kv_a_layernorm(latent), self._rotary(shared, positions)], -1)

    def _plain(
        self,
        still: Tensor,  # [B, T, H, N]
        turned: Tensor,  # [B, T, H, P]
        latent: Tensor,  # [B, S, L + P]
        mask: Tensor | None,  # [B, 1, T, S] bool, True where a position is seen; None: causal
    ) -> Tensor:  # [B, T, H, V]
        rebuilt = self.kv_b_proj(latent[..., : self.rank])
        rebuilt = rebuilt.unflatten(-1, (self.heads, self.nope + self.value))
        key, value = rebuilt.split([self.nope, self.value], -1)
        shared = latent[:, :, None, self.rank :].expand(*key.shape[:3], self.rope)
        # values as wide as keys: the library's fused attention takes no other, and the unfused one
        # holds a score for every pair of positions
        wide = F.pad(value, (0, max(0, self.nope + self.rope - self.value)))
        out = F.scaled_dot_product_attention(
            torch.cat([still, turned], -1).transpose(1, 2),
            torch.cat([key, shared], -1).transpose(1, 2),
            wide.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        return out.transpose(1, 2)[..., : self.value]

    def _absorbed(
        self,
        still: Tensor,  # [B, T, H, N]
        turned: Tensor,  # [B, T, H, P]
        held: Tensor,  # [B, capacity, L + P] float32
        masks: tuple[Tensor, ...],  # each [B, H * T, C]
    ) -> Tensor:  # [B, T, H, V] float32
        batch, rows = still.shape[:2]
        weight = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.rank)
        to_key, to_value = weight[:, : self.nope], weight[:, self.nope :]
        # [H, B * T, N] @ [H, N, L]
        moved = still.permute(2, 0, 1, 3).reshape(self.heads, batch * rows, self.nope) @ to_key
        moved = moved.view(self.heads, batch, rows, self.rank).transpose(0, 1)
        query = torch.cat([moved, turned.transpose(1, 2)], -1).float()  # [B, H, T, L + P]
        held = held[:, : len(masks) * CHUNK]
        mixed = row_attention(
            query.flatten(0, 1), held, held[..., : self.rank], list(masks), self.scale
        )  # [T, B * H, L]
        mixed = mixed.view(rows, batch, self.heads, self.rank)
        # [H, B * T, L] @ [H, L, V]
        mixed = mixed.permute(2, 1, 0, 3).reshape(self.heads, batch * rows, self.rank)
        out = mixed.to(weight.dtype) @ to_value.transpose(1, 2)
        out = out.view(self.heads, batch, rows, self.value).permute(1, 2, 0, 3)
        return out.float()
