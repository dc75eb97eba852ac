"""FFNs of Ling-3.0: dense SwiGLU, and routed experts behind a group-limited sigmoid router.

The router's bias chooses experts and never weighs them. Routed and shared experts have SwiGLU
limits on some layers, which serving engines apply and the official modeling code leaves out;
without them HumanEval was seen to fall from 88.4 to 71.3. Sources: DeepSeek-V3, arXiv 2412.19437,
section 2.1.2; Ling's checkpoint keys.

Symbols: R rows, D hidden, I inner width (of this rank), E experts, X experts a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.target.config import LingConfig
from dspark.target.joined import products
from dspark.target.norm import Float32Module, reads_prompt
from dspark.target.rows import MOST_ROWS

__all__ = ["MLP", "Experts", "MoE", "Router", "limited_swiglu"]


def limited_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) x clamp(up, -limit, limit); a limit of 0 is none."""
    if limit <= 0:
        return F.silu(gate) * up
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


class MLP(nn.Module):
    """down(act(gate(x), up(x))): the dense FFN and the shared expert."""

    def __init__(self, hidden: int, width: int, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, by_row: bool = False) -> Tensor:  # [B, T, D]
        if reads_prompt(x):
            from dspark.kernels.prompt_rows import limited_swiglu_rows

            gate, up = products(x, (self.gate_proj, self.up_proj))
            inner = limited_swiglu_rows(gate, up, self.limit)
        else:
            inner = limited_swiglu(self.gate_proj(x), self.up_proj(x), self.limit)
        out: Tensor = self.down_proj(inner)
        return out


class Router(Float32Module):
    """Experts of a token, and what each weighs. All arithmetic is float32."""

    float32 = ("expert_bias",)
    expert_bias: Tensor

    def __init__(self, config: LingConfig) -> None:
        super().__init__()
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.chosen = config.num_experts_per_tok
        self.factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [R, D] -> [R, X] int64, [R, X] float32
        scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        biased = scores + self.expert_bias
        by_group = biased.view(len(x), self.groups, -1)
        # a group counts as the sum of its two best
        best = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
        groups = best.topk(self.kept_groups, -1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        allowed = allowed[:, :, None].expand_as(by_group).reshape(biased.shape)
        ids = biased.masked_fill(~allowed, float("-inf")).topk(self.chosen, -1).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor

    def prompt(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [R, D] -> [R, X] int16, [R, X] float32
        """`forward` by kernels, for many rows."""
        from dspark.kernels.router import route_rows

        if x.dtype == self.weight.dtype == torch.bfloat16 and x.is_cuda:
            # products of bfloat16 are exact in float32
            logits = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            logits = F.linear(x.float(), self.weight.float())
        return route_rows(
            logits, self.expert_bias, groups=self.groups, kept_groups=self.kept_groups,
            chosen=self.chosen, factor=self.factor,
        )  # fmt: skip

    def has_kernels(self, x: Tensor) -> bool:
        """Whether `prompt` takes these rows."""
        experts = len(self.weight)
        powers = not (experts & (experts - 1) or self.groups & (self.groups - 1))
        return reads_prompt(x) and powers and experts <= 2**15


class Experts(nn.Module):
    """Routed experts, stacked: `gate_up` [E, 2 I, D] (gate first), `down` [E, D, I]."""

    def __init__(self, config: LingConfig, limit: float, ranks: int) -> None:
        super().__init__()
        self.limit = limit
        width = config.moe_intermediate_size // ranks
        shape = (config.num_experts, 2 * width, config.hidden_size)
        self.gate_up = nn.Parameter(torch.zeros(shape))
        self.down = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size, width))

    def one(self, expert: int, x: Tensor) -> Tensor:  # [R, D] -> [R, D]
        """Output of a single expert."""
        gate, up = F.linear(x, self.gate_up[expert]).chunk(2, -1)
        return F.linear(limited_swiglu(gate, up, self.limit), self.down[expert])

    def by_row(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[R, D] -> [R, D] float32; a row's sum runs over its own experts in the router's order.

        Every active expert computes all rows, so its products have one shape whatever was routed.
        """
        active, places = torch.unique(ids, return_inverse=True)
        outputs = torch.stack([self.one(expert, x) for expert in active.tolist()])
        each = torch.arange(len(x), device=x.device)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for slot in range(ids.shape[1]):
            part = outputs[places[:, slot], each].float()
            total = total + weights[:, slot, None] * part
        return total

    def by_expert(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same for many rows: each expert computes the rows that chose it."""
        order = ids.flatten().argsort(stable=True)
        rows = x.index_select(0, order // ids.shape[1])
        counts = ids.flatten().bincount(minlength=len(self.down))
        if self.groupable():
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            inner = limited_swiglu(gate, up, self.limit)
            parts = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        else:
            pieces = torch.split(rows, counts.tolist())
            parts = torch.cat([self.one(expert, piece) for expert, piece in enumerate(pieces)])
        # back in the router's order: sums run as in `by_row`, whatever the device
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        if parts.is_cuda:
            from dspark.kernels.expert_sum import expert_sum

            return expert_sum(parts, places.view(ids.shape), weights)
        each = parts.index_select(0, places).view(*ids.shape, -1).float()
        return (each * weights[..., None]).sum(1)

    def prompt(
        self,
        x: Tensor,  # [R, D]
        ids: Tensor,  # [R, X] int16
        weights: Tensor,  # [R, X] float32
        shared: Tensor | None,  # [R, D], output of the shared expert
    ) -> Tensor:  # [R, D]
        """`by_expert` and the shared expert by kernels, if `groupable`; the host need not wait."""
        from dspark.kernels.expert_sum import expert_sum
        from dspark.kernels.prompt_rows import expert_rows, limited_swiglu_rows

        ordered, order = ids.flatten().sort(stable=True)
        rows, places = expert_rows(x, order, ids.shape[1])
        experts = torch.arange(len(self.down), dtype=ids.dtype, device=ids.device)
        ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
        gate, up = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        inner = limited_swiglu_rows(gate, up, self.limit)
        parts = F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        return expert_sum(parts, places, weights, shared).to(x.dtype)

    def groupable(self) -> bool:
        """Whether the library's grouped product takes these weights (its rows: 16 bytes)."""
        size = self.down.element_size()
        aligned = all(width * size % 16 == 0 for width in self.down.shape[1:])
        return aligned and self.down.dtype in (torch.float32, torch.bfloat16, torch.float16)


class MoE(nn.Module):
    """Routed experts plus the shared one, which is neither gated nor scaled."""

    def __init__(self, config: LingConfig, layer: int, ranks: int = 1, limits: bool = True) -> None:
        super().__init__()
        routed = config.expert_limit(layer) if limits else 0.0
        shared = config.shared_limit(layer) if limits else 0.0
        self.gate = Router(config)
        self.experts = Experts(config, routed, ranks)
        width = config.num_shared_experts * config.moe_shared_expert_intermediate_size // ranks
        self.shared_experts = MLP(config.hidden_size, width, shared) if width else None

    def forward(self, x: Tensor, by_row: bool = False) -> Tensor:  # [B, T, D] -> [B, T, D]
        flat = x.flatten(0, 1)
        if self.gate.has_kernels(flat) and self.experts.groupable():
            ids, weights = self.gate.prompt(flat)
            shared = None if self.shared_experts is None else self.shared_experts(flat)
            return self.experts.prompt(flat, ids, weights, shared).view_as(x)
        ids, weights = self.gate(flat)
        few = by_row and len(flat) <= MOST_ROWS
        experts = self.experts.by_row if few else self.experts.by_expert
        out = experts(flat, ids, weights).to(x.dtype).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)
