"""Kimi Delta Attention as Ling-3.0 uses it: a matrix state a head, decayed per key channel.

Three equal forms of one recurrence: row by row (`recurrence`, the definition and the decode step,
with the state after every row), and in chunks (`chunked`, for prefill and training). Source: Kimi
Linear, arXiv 2510.26692, section 3, with Ling's bounded ("safe") gate.

Symbols: B batch, T rows, H heads (of this rank), K key size, V value size, W kernel of the short
convolutions, C chunk length. State [B, H, K, V] float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.target.config import LingConfig
from dspark.target.joined import products
from dspark.target.norm import Float32Module, RMSNorm
from dspark.target.state import Call, KDAState

__all__ = ["KDA", "chunked", "decay", "recurrence", "short_convolution"]

_CHUNK = {"cpu": 32, "cuda": 64}
"""Rows of a chunk: fewer cost less arithmetic, more cost less waiting for the one before."""
_BLOCK = 16
"""Rows over which decays of at least e^-5 each may be undone in float32."""
_EXPONENTS = (-60.0, 80.0)
"""Below, products are denormal numbers, which cost a CPU a hundred times the time of others."""
_SEGMENT = 4096
_EPS = 1e-6


def decay(
    raw: Tensor,  # [..., H, K], output of f_proj
    a_log: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H * K] float32
    lower_bound: float,
) -> Tensor:  # [..., H, K] float32
    """Logarithm of the decay of each key channel, in (``lower_bound``, 0)."""
    heads, size = raw.shape[-2:]
    shifted = raw.float() + dt_bias.view(heads, size)
    return lower_bound * torch.sigmoid(a_log.exp()[:, None] * shifted)


def short_convolution(
    inputs: Tensor,  # [B, W - 1 + T, X], the first W - 1 are those before the call
    weight: Tensor,  # [X, W]
) -> Tensor:  # [B, T, X] in the dtype of `inputs`
    """Causal depthwise convolution and SiLU, summed tap by tap so that a row stands for itself."""
    width = weight.shape[1]
    rows = inputs.shape[1] - width + 1
    taps = weight.float()
    total = inputs[:, :rows].float() * taps[:, 0]
    for tap in range(1, width):
        total = total + inputs[:, tap : tap + rows].float() * taps[:, tap]
    return F.silu(total).to(inputs.dtype)


def recurrence(
    query: Tensor,  # [B, T, H, K] float32, scaled
    key: Tensor,  # [B, T, H, K] float32
    value: Tensor,  # [B, T, H, V] float32
    log_decay: Tensor,  # [B, T, H, K] float32
    beta: Tensor,  # [B, T, H] float32
    state: Tensor,  # [B, H, K, V] float32
) -> tuple[Tensor, list[Tensor]]:  # [B, T, H, V]; T states, each after one row
    """The definition: decay, correct by what the key already recalls, read after the write.

    A row's numbers depend on the state before it and on nothing else in the call.
    """
    outputs, states = [], []
    for t in range(query.shape[1]):
        k = key[:, t, :, :, None]
        state = log_decay[:, t, :, :, None].exp() * state
        error = value[:, t] - (state * k).sum(-2)
        state = state + k * (beta[:, t, :, None] * error)[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
        states.append(state)
    return torch.stack(outputs, 1), states


def chunked(
    query: Tensor,  # [B, T, H, K] float32, scaled
    key: Tensor,  # [B, T, H, K] float32
    value: Tensor,  # [B, T, H, V] float32
    log_decay: Tensor,  # [B, T, H, K] float32, each in [-5, 0]
    beta: Tensor,  # [B, T, H] float32
    state: Tensor,  # [B, H, K, V] float32
) -> tuple[Tensor, Tensor]:  # [B, T, H, V], state after the last row
    """`recurrence` with C rows at a time: triangular solves inside, two products between chunks."""
    outputs = []
    for first in range(0, query.shape[1], _SEGMENT):
        rows = slice(first, first + _SEGMENT)
        out, state = _segment(
            query[:, rows], key[:, rows], value[:, rows], log_decay[:, rows], beta[:, rows], state
        )
        outputs.append(out)
    return torch.cat(outputs, 1), state


def _segment(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`chunked` for so many rows that what it holds meanwhile is bounded."""
    batch, rows, heads, _ = query.shape
    size = _CHUNK.get(query.device.type, _CHUNK["cuda"])
    short = -rows % size
    # padding rows write nothing (beta 0) and forget nothing (log decay 0)
    q, k, v, g, b = (  # each [B * H, chunks, C, K, V or 1]
        F.pad(x, (0, 0, 0, 0, 0, short))
        .view(batch, -1, size, heads, x.shape[-1])
        .permute(0, 3, 1, 2, 4)
        .flatten(0, 1)
        for x in (query, key, value, log_decay, beta[..., None])
    )
    # float64: differences of long sums are exponents
    total = g.double().cumsum(-2)
    inside, mixed = _pairs(q, k, total)
    since = _exp(total)  # decay since the start of the chunk
    ends = total[:, :, -1:]
    solved = torch.linalg.solve_triangular(
        b * inside, torch.cat([b * v, b * (k * since)], -1), upper=False, unitriangular=True
    )
    fresh, recalled = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    written = (k * _exp(ends - total)).transpose(-1, -2)
    kept = ends.float().exp().transpose(-1, -2)  # [B * H, chunks, K, 1]
    starts, updates = [], []
    held = state.flatten(0, 1)
    for new, old, keys, left in zip(
        fresh.unbind(1), recalled.unbind(1), written.unbind(1), kept.unbind(1), strict=True
    ):
        starts.append(held)
        updates.append(torch.baddbmm(new, old, held, alpha=-1))
        held = torch.baddbmm(left * held, keys, updates[-1])
    out = (q * since) @ torch.stack(starts, 1) + mixed @ torch.stack(updates, 1)
    out = out.flatten(1, 2).view(batch, heads, -1, v.shape[-1]).transpose(1, 2)
    return out[:, :rows], held.view(state.shape)


def _pairs(
    query: Tensor,  # [X, N, C, K]
    key: Tensor,  # [X, N, C, K]
    total: Tensor,  # [X, N, C, K] float64, log decay from the start of the chunk
) -> tuple[Tensor, Tensor]:  # [X, N, C, C] strictly lower, [X, N, C, C] lower
    """Products of key (query) i with key j, decayed from j to i.

    Rows of a block are decayed from its start on, columns up to there: within the block that is
    less than no decay, by at most e^75, and float32 holds e^88. Columns behind the block are
    clamped to stay finite, and cut off in the end.
    """
    blocks = total.view(*total.shape[:2], -1, _BLOCK, total.shape[-1])
    start = blocks[..., :1, :]
    late = (blocks - start).float()
    # from column j to the start of its own block, then to the start of block i
    apart = (start[:, :, :, None, :, :] - start[:, :, None]).float()  # [X, N, i, j, 1, K]
    early = key[:, :, None] * _exp((apart - late[:, :, None]).flatten(3, 4))  # [X, N, i, C, K]
    late = late.exp()
    rows = torch.cat([key.view(late.shape) * late, query.view(late.shape) * late], -2)
    inside, mixed = (rows @ early.transpose(-1, -2)).split(_BLOCK, dim=-2)  # type: ignore[no-untyped-call]
    lower = torch.ones(total.shape[2], total.shape[2], device=total.device).tril()
    return inside.flatten(2, 3) * lower.tril(-1), mixed.flatten(2, 3) * lower


def _exp(exponent: Tensor) -> Tensor:
    """In float32, never infinite and never close to the smallest number."""
    return exponent.float().clamp(*_EXPONENTS).exp()


class KDA(Float32Module):
    """The mixer of a KDA layer; the output is this rank's part of a sum over ranks."""

    float32 = ("A_log", "dt_bias")

    def __init__(self, config: LingConfig, layer: int, ranks: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads // ranks
        self.size = config.head_dim
        self.lower_bound = config.kda_lower_bound
        self.width = config.short_conv_kernel_size
        hidden, width = config.hidden_size, self.heads * self.size
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.f_proj = nn.Linear(hidden, width, bias=False)
        self.g_proj = nn.Linear(hidden, width, bias=False)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False)
        self.q_conv1d = nn.Conv1d(width, width, self.width, groups=width, bias=False)
        self.k_conv1d = nn.Conv1d(width, width, self.width, groups=width, bias=False)
        self.v_conv1d = nn.Conv1d(width, width, self.width, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.o_norm = RMSNorm(self.size, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden, bias=False)

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> KDAState:
        """Zeros: nothing has been read."""
        return KDAState(
            torch.zeros(batch, self.heads, self.size, self.size, device=device),
            torch.zeros(
                batch, self.width - 1, 3 * self.heads * self.size, device=device, dtype=dtype
            ),
        )

    def forward(self, x: Tensor, call: Call) -> Tensor:  # [B, T, D] -> [B, T, D]
        batch, rows, _ = x.shape
        held = call.kda.get(self.layer) or self.new_state(batch, x.device, x.dtype)
        if x.is_cuda and self._has_kernels(batch, call):
            read: Tensor = self.o_proj(self.prompt(x, held))
            return read
        projected = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        beta = torch.sigmoid(self.b_proj(x).float())
        log_decay = decay(
            self.f_proj(x).view(batch, rows, self.heads, self.size),
            self.A_log,
            self.dt_bias,
            self.lower_bound,
        )
        if call.valid is not None:
            # padding on the left: keys and values of 0 leave the state as it was
            projected = projected.masked_fill(~call.valid[:, :, None], 0)
        inputs = torch.cat([held.tail.to(x.dtype), projected], 1)
        weight = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        mixed = short_convolution(inputs, weight[:, 0])
        query, key, value = mixed.view(batch, rows, 3, self.heads, self.size).float().unbind(2)
        # the epsilon is added to the sum of squares, not to their mean
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + _EPS)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + _EPS)
        query = query * self.size**-0.5
        if call.by_row:
            real = slice(0, call.count)
            out, states = recurrence(
                query[:, real],
                key[:, real],
                value[:, real],
                log_decay[:, real],
                beta[:, real],
                held.state,
            )
            held.stage(states, inputs)
            out = F.pad(out, (0, 0, 0, 0, 0, rows - call.count))
        else:
            out, state = chunked(query, key, value, log_decay, beta, held.state)
            held.move(state, inputs)
        gate = self.g_proj(x).view(batch, rows, self.heads, self.size).float()
        gated = self.o_norm(out) * torch.sigmoid(gate)
        mixed_out: Tensor = self.o_proj(gated.flatten(2).to(x.dtype))
        return mixed_out

    def _has_kernels(self, batch: int, call: Call) -> bool:
        """They take one sequence without padding, and have no gradients."""
        from dspark.kernels.kda_prefill import supported

        whole = not call.by_row and batch == 1 and call.valid is None
        # compiled by Triton 3.6 for heads of 16, they read behind their shared memory
        fits = self.size >= 128 and supported(self.size, self.lower_bound)
        return whole and not torch.is_grad_enabled() and fits

    def prompt(self, x: Tensor, held: KDAState) -> Tensor:  # [1, T, D] -> [1, T, H K]
        """`forward` before `o_proj` by kernels, for one whole sequence; ``held`` moves on."""
        from dspark.kernels.kda_prefill import kda_prefill

        parts = (self.q_proj, self.k_proj, self.v_proj, self.f_proj, self.g_proj, self.b_proj)
        projected = products(x[0], parts)
        tail = held.tail.to(x.dtype)
        taps = [one.weight[:, 0] for one in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        out, state = kda_prefill(
            projected, tail=tail[0].contiguous(), taps=taps, a_log=self.A_log, dt_bias=self.dt_bias,
            norm=self.o_norm.weight, state=held.state[0].contiguous(),
            lower_bound=self.lower_bound, eps=self.o_norm.eps,
        )  # fmt: skip
        last = slice(1 - self.width, None)
        inputs = torch.cat([one[last] for one in projected[:3]], -1)
        held.move(state[None], torch.cat([tail, inputs[None]], 1))
        return out[None]
