"""A Ling-3.0 model as it is trained: the weights and numbers of `target.model`, in few launches.

`LingModel` itself has gradients, but its recurrence runs in a loop over chunks and its experts in
one over experts. Here a GPU runs the recurrence in flash-linear-attention's kernel, all experts run
as two products over all rows (a row's unchosen experts weigh 0: right for a handful of small ones,
wrong for hundreds), and what lies between is made of functions that `torch.compile` takes once for
all layers. On a CPU the recurrence is `target.kda.chunked`.

Whole sequences without padding; a document that follows another in a row sees it.

Symbols: B batch, T rows, R = B T, D hidden, H heads, K head size, E experts, I inner width, X
channels of the convolutions, W their taps, L layers with experts, V vocabulary.
"""

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.target.kda import KDA, chunked, decay, short_convolution
from dspark.target.mla import MLA
from dspark.target.model import Layer, LingModel
from dspark.target.moe import MLP, MoE, Router, limited_swiglu
from dspark.target.mtp import nextn_block
from dspark.target.norm import rms_norm
from dspark.target.state import Call

__all__ = ["Recurrence", "TrainingForward", "balance", "initialise", "recurrence_for"]

log = logging.getLogger(__name__)

Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Query (scaled), key, value, log decay [B, T, H, K] and beta [B, T, H] -> [B, T, H, K] float32."""

_EPS = 1e-6
_TOLERANCE = 0.03
"""Of the largest value: three times what rounding inputs to bfloat16 costs."""


def plain_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """`target.kda.chunked` from an empty state."""
    empty = q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        return chunked(q, k, v, g, beta, empty)[0]


def recurrence_for(device: torch.device, size: int, heads: int) -> tuple[Recurrence, str]:
    """The fastest one that gives the right numbers here, and its name."""
    if device.type != "cuda":
        return plain_recurrence, "plain"
    try:
        from fla.ops.kda import chunk_kda
    except ImportError as error:
        log.warning("the recurrence runs in plain PyTorch, several times slower: %s", error)
        return plain_recurrence, "plain"

    def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = (one.bfloat16() for one in (q, k, v))
        out, _ = chunk_kda(q, k, v, g, beta, scale=1.0, safe_gate=True, disable_recompute=True)
        wide: Tensor = out.float()
        return wide

    try:
        wrong = _difference(fused, device, size, heads)
    except Exception as error:  # a compiler of kernels raises whatever it likes
        log.warning("the recurrence runs in plain PyTorch, several times slower: %s", error)
        return plain_recurrence, "plain"
    if not wrong <= _TOLERANCE:
        log.warning("the recurrence runs in plain PyTorch: the kernel is off by %.2g here", wrong)
        return plain_recurrence, "plain"
    return fused, "flash-linear-attention"


def _difference(other: Recurrence, device: torch.device, size: int, heads: int) -> float:
    """Largest difference of outputs and gradients, relative to the largest value of each."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, 192, heads, *shape, device=device, generator=generator)

    q, k = F.normalize(draw(size), dim=-1) * size**-0.5, F.normalize(draw(size), dim=-1)
    inputs = [q, k, draw(size), -5 * torch.sigmoid(2 * draw(size) - 2), torch.sigmoid(draw())]
    weight = draw(size)
    found = []
    for run in (plain_recurrence, other):
        leaves = [one.clone().requires_grad_() for one in inputs]
        out = run(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4])
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    return max(
        float((mine - theirs).abs().max() / mine.abs().max())
        for mine, theirs in zip(*found, strict=True)
    )


class TrainingForward:
    """Runs ``model`` over rows of token ids.

    Args:
        recurrence: None: `plain_recurrence`.
        compiled: pass everything but recurrence and MLA to `torch.compile`.
        dropout: of what mixers and FFNs add, while `training` is set.
    """

    def __init__(
        self,
        model: LingModel,
        *,
        recurrence: Recurrence | None = None,
        compiled: bool = False,
        dropout: float = 0.0,
    ) -> None:
        self.model = model
        self.recurrence = recurrence or plain_recurrence
        self.training = True
        device = model.lm_head.weight.device
        # tensors, since another number would be compiled again
        self._kept = {
            True: torch.tensor(1 - dropout, device=device) if dropout else None,
            False: torch.tensor(1.0, device=device) if dropout else None,
        }
        wrap: Callable[..., Callable[..., Tensor]] = (
            (lambda f: torch.compile(f, dynamic=False)) if compiled else lambda f: f
        )
        self._kda_inputs: Callable[..., tuple[Tensor, ...]] = wrap(_kda_inputs)  # type: ignore[assignment]
        self._kda_output = wrap(_kda_output)
        self._add = wrap(_add)
        self._dense = wrap(_dense)
        self._experts: Callable[..., tuple[Tensor, Tensor]] = wrap(_experts)  # type: ignore[assignment]
        self._loss = wrap(_loss)

    def losses(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cross entropy of the head and of the NEXTN block (0 without one), and `balance`'s counts.

        Both [B, T + 2]; row t of the block sees token t + 1 and is taught token t + 2. A label of
        -100 is not taught.
        """
        hidden, guess, counts = self.hidden(rows[:, :-2], rows[:, 1:-1])
        head = self.model.lm_head.weight
        main = self._loss(hidden, head, labels[:, 1:-1])
        second = main.new_zeros(()) if guess is None else self._loss(guess, head, labels[:, 2:])
        return main, second, counts

    def hidden(self, ids: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """[B, T] -> hidden states behind the final norm, the NEXTN block's, rows by expert [L, E].

        The head turns both into logits.
        """
        model = self.model
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        counts: list[Tensor] = []
        h = model.embed(ids)
        for layer in model.layers:
            h = self._layer(layer, h, positions, counts)
        hidden = _norm(model.model.norm, h)
        guess = None
        if model.has_nextn:
            block = nextn_block(model)
            pair = [_norm(block.enorm, model.embed(next_ids)), _norm(block.hnorm, hidden)]
            joined = block.eh_proj(torch.cat(pair, -1)).to(h.dtype)
            guess = _norm(block.final_layernorm, self._layer(block, joined, positions, counts))
        return hidden, guess, torch.stack(counts)

    def _layer(self, layer: Layer, h: Tensor, positions: Tensor, counts: list[Tensor]) -> Tensor:
        norm, kept = layer.input_layernorm, self._kept[self.training]
        if isinstance(layer.attention, MLA):
            mixed = layer.attention(_norm(norm, h), Call(positions=positions))
        else:
            mixed = self._kda(layer.attention, h, norm.weight, norm.eps)
        h = self._add(h, mixed, kept)
        norm, ffn = layer.post_attention_layernorm, layer.mlp
        if isinstance(ffn, MLP):
            parts = (ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight)
            return self._dense(h, norm.weight, norm.eps, *parts, kept)
        h, rows = self._experts(h, norm.weight, norm.eps, *_expert_weights(ffn), kept)
        counts.append(rows)
        return h

    def _kda(self, mixer: KDA, h: Tensor, norm: Tensor, eps: float) -> Tensor:
        parts = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.f_proj, mixer.g_proj)
        taps = (mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d)
        q, k, v, g, beta, gate = self._kda_inputs(
            h, norm, eps, [one.weight for one in parts], mixer.b_proj.weight,
            [one.weight for one in taps], mixer.A_log, mixer.dt_bias, mixer.lower_bound, mixer.size,
        )  # fmt: skip
        out = self.recurrence(q, k, v, g, beta)
        return self._kda_output(
            out, gate, mixer.o_norm.weight, mixer.o_norm.eps, mixer.o_proj.weight, h.dtype
        )


def _norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    """Not the module itself, which takes inference kernels where there are no gradients."""
    out: Tensor = rms_norm(x, norm.weight, norm.eps)  # type: ignore[arg-type]
    return out


def _add(h: Tensor, part: Tensor, kept: Tensor | None) -> Tensor:
    if kept is not None:
        part = part * (torch.rand_like(part, dtype=torch.float32) < kept) / kept
    return h + part.to(h.dtype)


def _kda_inputs(
    h: Tensor,  # [B, T, D]
    norm: Tensor,
    eps: float,
    into: Sequence[Tensor],  # q, k, v, f, g, each [H K, D]
    write: Tensor,  # [H, D]
    taps: Sequence[Tensor],  # q, k, v, each [H K, 1, W]
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    size: int,
) -> tuple[Tensor, ...]:
    x = rms_norm(h, norm, eps)
    width = into[0].shape[0]
    wide = F.linear(x, torch.cat(list(into)))
    weight = torch.cat(list(taps))[:, 0]
    before = F.pad(wide[..., : 3 * width], (0, 0, weight.shape[1] - 1, 0))
    split = (*h.shape[:2], -1, width // size, size)
    query, key, value = short_convolution(before, weight).view(split).float().unbind(2)
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + _EPS) * size**-0.5
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + _EPS)
    raw, gate = wide[..., 3 * width :].reshape(split).unbind(2)
    log_decay = decay(raw, a_log, dt_bias, lower_bound)
    beta = torch.sigmoid(F.linear(x, write).float())
    return query, key, value.contiguous(), log_decay, beta, gate


def _kda_output(
    out: Tensor,  # [B, T, H, K] float32
    gate: Tensor,  # [B, T, H, K]
    norm: Tensor,
    eps: float,
    back: Tensor,  # [D, H K]
    dtype: torch.dtype,
) -> Tensor:
    gated = rms_norm(out, norm, eps) * torch.sigmoid(gate.float())
    return F.linear(gated.flatten(2).to(dtype), back)


def _dense(
    h: Tensor, norm: Tensor, eps: float, gate: Tensor, up: Tensor, down: Tensor, kept: Tensor | None
) -> Tensor:
    x = rms_norm(h, norm, eps)
    return _add(h, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), kept)


def _expert_weights(moe: MoE) -> tuple[object, ...]:
    shared = moe.shared_experts
    assert shared is not None, "a Ling-3.0 model to be trained has a shared expert"
    parts = (shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
    return (
        moe.gate, moe.experts.gate_up, moe.experts.down, float(moe.experts.limit), *parts,
        float(shared.limit),
    )  # fmt: skip


def _experts(
    h: Tensor,  # [B, T, D]
    norm: Tensor,
    eps: float,
    router: Router,
    gate_up: Tensor,  # [E, 2 I, D]
    down: Tensor,  # [E, D, I]
    limit: float,
    shared_gate: Tensor,
    shared_up: Tensor,
    shared_down: Tensor,
    shared_limit: float,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x = rms_norm(h, norm, eps).flatten(0, 1)
    with torch.autocast(x.device.type, enabled=False):
        ids, weights = router(x)
    share = weights.new_zeros(len(x), len(down)).scatter(1, ids, weights)  # [R, E]
    wide = F.linear(x, gate_up.flatten(0, 1)).view(len(x), len(down), -1)
    gate, up = wide.chunk(2, -1)  # [R, E, I]
    inner = (limited_swiglu(gate, up, limit) * share[..., None]).flatten(1)
    own = limited_swiglu(F.linear(x, shared_gate), F.linear(x, shared_up), shared_limit)
    # the sum over experts is part of the product
    back = torch.cat([down.transpose(0, 1).flatten(1), shared_down], 1)
    out = F.linear(torch.cat([inner.to(own.dtype), own], 1), back)
    return _add(h, out.view_as(h), kept), (share > 0).sum(0)


def _loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, head).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten())


@torch.no_grad()
def balance(model: LingModel, counts: Tensor, rate: float) -> None:
    """Move each expert's bias by ``rate`` towards an even load: no loss is needed for it.

    ``counts`` [L, E] are those of `TrainingForward.losses`. Source: arXiv 2408.15664, algorithm 1.
    """
    routers = [layer.mlp.gate for layer in model.model.layers if isinstance(layer.mlp, MoE)]
    load = counts.float()
    moves = rate * torch.sign(load.mean(1, keepdim=True) - load)
    for router, move in zip(routers, moves, strict=True):
        router.expert_bias += move


@torch.no_grad()
def initialise(model: LingModel, seed: int) -> None:
    """Fresh weights: every layer adds nothing at first, and forgets at all speeds."""
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        kind = name.split(".")[-2]
        if "norm" in kind:
            weight.fill_(1)
        elif name.endswith("A_log"):
            weight.zero_()
        elif name.endswith("dt_bias"):
            # half-lives from 1.4 to 1,400 tokens where the input says nothing
            exponent = torch.rand(weight.shape, device=device, generator=generator) * 3 - 3.3
            weight.copy_(torch.logit(10**exponent / 5))
        elif kind in ("o_proj", "dense", "down_proj") or name.endswith("experts.down"):
            weight.zero_()
        elif kind == "word_embeddings":
            weight.normal_(0, 0.1, generator=generator)
        else:
            scale = weight[0].numel() if "conv1d" in name else weight.shape[-1]
            weight.normal_(0, 0.5 * scale**-0.5, generator=generator)
    for layer in model.model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate.expert_bias.zero_()
