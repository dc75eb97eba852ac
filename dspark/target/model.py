"""Ling-3.0 as plain modules, named as in the checkpoint; one rank of N or the whole.

Weights are stacked and sliced by `dspark.target.weights`. With more than one rank a layer's mixer
and FFN give parts of a sum; `reduce` (a sum over ranks) completes them.

Symbols: B batch, T rows, D hidden, V vocabulary, F tapped layers.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from dspark.errors import TargetError
from dspark.target.config import LingConfig
from dspark.target.kda import KDA
from dspark.target.mla import MLA
from dspark.target.moe import MLP, MoE
from dspark.target.norm import RMSNorm
from dspark.target.placement import on_device, spread
from dspark.target.state import Call, LingCache

__all__ = ["Layer", "LingModel", "Reduce"]

Reduce = Callable[[Tensor], Tensor]
"""Sum over ranks of tensors of one shape."""


class Layer(nn.Module):
    """h + mixer(norm(h)), then h + FFN(norm(h))."""

    def __init__(self, config: LingConfig, layer: int, ranks: int, limits: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        mixer = MLA if config.is_mla(layer) else KDA
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.attention: MLA | KDA = mixer(config, layer, ranks)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.mlp: MLP | MoE = (
            MLP(hidden, config.intermediate_size // ranks)
            if config.is_dense(layer)
            else MoE(config, layer, ranks, limits)
        )

    def forward(self, h: Tensor, call: Call, reduce: Reduce) -> Tensor:  # [B, T, D]
        mixed = reduce(self.attention(self.input_layernorm(h), call))
        h, x = self.post_attention_layernorm.added(h, mixed)
        out: Tensor = h + reduce(self.mlp(x, call.by_row))
        return out


class NextN(Layer):
    """The NEXTN block (`dspark.target.mtp`): an MLA layer with experts and its own way in."""

    def __init__(self, config: LingConfig, layer: int, ranks: int) -> None:
        super().__init__(config, layer, ranks, limits=False)
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.final_layernorm = RMSNorm(hidden, config.rms_norm_eps)


class _Decoder(nn.Module):
    def __init__(
        self, config: LingConfig, ranks: int, nextn: bool, limits: bool, whole_embedding: bool
    ) -> None:
        super().__init__()
        rows = config.vocab_size if whole_embedding else config.vocab_size // ranks
        self.word_embeddings = nn.Embedding(rows, config.hidden_size)
        layers: list[Layer] = [
            Layer(config, layer, ranks, limits) for layer in range(config.num_hidden_layers)
        ]
        if nextn:
            layers += [
                NextN(config, layer, ranks)
                for layer in range(config.num_hidden_layers, config.num_blocks)
            ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LingModel(nn.Module):
    """The decoder and its head.

    Args:
        ranks, rank: tensor-parallel ranks, and which of them this is.
        reduce: sum over ranks; needed with more than one.
        whole_embedding: every rank holds the whole table, and looks rows up by itself.
        nextn: also build the NEXTN block.
        swiglu_limits: False leaves the limits out, as the official modeling code does.

    Raises:
        TargetError: a width does not divide by ``ranks``.
    """

    def __init__(
        self,
        config: LingConfig,
        *,
        ranks: int = 1,
        rank: int = 0,
        reduce: Reduce | None = None,
        whole_embedding: bool = False,
        nextn: bool = False,
        swiglu_limits: bool = True,
    ) -> None:
        super().__init__()
        check_ranks(config, ranks)
        self.config = config
        self.ranks, self.rank = ranks, rank
        self.reduce: Reduce = reduce or (lambda part: part)
        self.model = _Decoder(config, ranks, nextn, swiglu_limits, whole_embedding)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // ranks, bias=False)
        self.placement: tuple[torch.device, ...] = ()
        """Device of each layer, where they are on several; embedding, norm and head are on the
        first."""

    def to_devices(self, devices: Sequence[torch.device]) -> None:
        """Make room for the weights of a meta model; over several, runs of layers of like size."""
        first = devices[0]
        if len(devices) == 1:
            self.to_empty(device=first)
            return
        self.placement = spread(
            self.layers, devices, before=[self.model.word_embeddings, self.lm_head]
        )
        for layer, device in zip(self.layers, self.placement, strict=True):
            layer.to_empty(device=device)
        for part in (self.model.word_embeddings, self.model.norm, self.lm_head):
            part.to_empty(device=first)
        for block in self.model.layers[self.config.num_hidden_layers :]:
            block.to_empty(device=first)

    @property
    def has_nextn(self) -> bool:
        return len(self.model.layers) > self.config.num_hidden_layers

    @property
    def unread(self) -> tuple[str, ...]:
        """Prefixes of what `forward` does not run: the NEXTN block, if there is one."""
        every = range(self.config.num_hidden_layers, len(self.model.layers))
        return tuple(f"model.layers.{index}." for index in every)

    @property
    def layers(self) -> Sequence[Layer]:
        """Decoder layers without the NEXTN block."""
        layers: Sequence[Layer] = self.model.layers[: self.config.num_hidden_layers]  # type: ignore[assignment]
        return layers

    def new_cache(
        self, layer_ids: tuple[int, ...], batch: int, device: torch.device, dtype: torch.dtype
    ) -> LingCache:
        """Empty state of ``batch`` sequences."""
        kda, latents = {}, {}
        for index, layer in enumerate(self.layers):
            place = self.placement[index] if self.placement else device
            if isinstance(layer.attention, KDA):
                kda[index] = layer.attention.new_state(batch, place, dtype)
            else:
                latents[index] = layer.attention.new_state(batch, place)
        return LingCache(layer_ids, kda, latents)

    def embed(self, input_ids: Tensor) -> Tensor:  # [...] int64 -> [..., D]
        """Rows of the embedding table, which ranks may share by vocabulary."""
        table = self.model.word_embeddings
        if table.num_embeddings == self.config.vocab_size:
            out: Tensor = table(input_ids)
            return out
        local = input_ids - self.rank * table.num_embeddings
        mine = (local >= 0) & (local < table.num_embeddings)
        rows = table(local.clamp(0, table.num_embeddings - 1)) * mine[..., None]
        return self.reduce(rows)

    def forward(
        self,
        input_ids: Tensor,  # [B, T] int64
        call: Call,
        layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden states behind the final norm [B, T, D], and the outputs of ``layer_ids``."""
        taps = {}
        h = self.embed(input_ids)
        first = h.device
        for index, layer in enumerate(self.layers):
            if self.placement:
                h, call = h.to(self.placement[index]), call.to(self.placement[index])
            with on_device(h.device) if self.placement else nullcontext():
                h = layer(h, call, self.reduce)
            if index in layer_ids:
                taps[index] = h
        return self.model.norm(h.to(first)), taps

    def logits(self, hidden: Tensor) -> Tensor:  # [..., D] -> [..., V]
        """The head; with several ranks every rank gets the whole vocabulary."""
        part: Tensor = self.lm_head(hidden)
        if self.ranks == 1:
            return part
        whole = part.new_zeros(*part.shape[:-1], self.config.vocab_size)
        first = self.rank * part.shape[-1]
        whole[..., first : first + part.shape[-1]] = part
        return self.reduce(whole)


def check_ranks(config: LingConfig, ranks: int) -> None:
    """Everything that ranks share must divide.

    Raises:
        TargetError: a width is not a multiple of ``ranks``.
    """
    if ranks < 1:
        raise TargetError(f"the number of ranks must be >= 1, got {ranks}")
    shared = config.num_shared_experts * config.moe_shared_expert_intermediate_size
    for name, value in (
        ("num_attention_heads", config.num_attention_heads),
        ("moe_intermediate_size", config.moe_intermediate_size),
        ("intermediate_size", config.intermediate_size),
        ("the shared experts' width", shared),
        ("vocab_size", config.vocab_size),
    ):
        if value % ranks:
            raise TargetError(f"{name} {value} cannot be shared by {ranks} ranks")
