"""The weights of a step as its kernels read them.

Matrices that read the same input lie one behind the other. The target's own modules, which read
the prompt, become views of them, so that no weight is held twice, and a second step over the same
model finds the same views; the draft, which is small, is copied.

Symbols: D hidden, H heads (of this rank), K key size, N unrotated and P rotated size of a query,
L latent rank, E experts, I inner width, J key/value heads, X head size of a draft or dense decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.draft.layers import DraftLayer
from dspark.target import HFTarget, LingTarget
from dspark.target.config import LingConfig
from dspark.target.families import ROTATIONS, DenseShape, unsupported_dense
from dspark.target.joined import in_a_row
from dspark.target.kda import KDA
from dspark.target.mla import MLA
from dspark.target.model import Layer, LingModel
from dspark.target.moe import MLP, MoE
from dspark.target.mtp import nextn_block

__all__ = ["DenseFFN", "DraftLayerWeights", "DraftWeights", "ExpertFFN", "GQAMixer", "KDAMixer",
           "LayerWeights", "MLAMixer", "NextNWeights", "TargetWeights", "joined_rows",
           "unsupported", "unsupported_draft", "unsupported_shapes"]  # fmt: skip


@dataclass(frozen=True)
class KDAMixer:
    """Matrices of `target.kda`."""

    into: Tensor  # [5 H K + H, D]: q, k, v, f, g, b
    conv: Tensor  # [3 H K, W]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H K]
    norm: Tensor  # [K]
    out: Tensor  # [D, H K]
    heads: int
    size: int


@dataclass(frozen=True)
class MLAMixer:
    """Matrices of `target.mla`."""

    into: Tensor  # [Q + L + P + H, D]: query (or its low rank), latent and shared key, gate
    query_norm: Tensor | None  # [A], with a low-rank query
    query: Tensor | None  # [H (N + P), A]
    latent_norm: Tensor  # [L]
    kv_b: Tensor  # [H (N + V), L]
    out: Tensor  # [D, H V]
    inverse: Tensor  # [P / 2], frequencies
    amplitude: float
    scale: float
    heads: int
    value: int


@dataclass(frozen=True)
class GQAMixer:
    """Matrices of a dense decoder's attention."""

    into: Tensor  # [(H + 2 J) X, D]: q, k, v
    q_norm: Tensor | None  # [X], with k_norm or neither
    k_norm: Tensor | None  # [X]
    out: Tensor  # [D, H X]
    inverse: Tensor  # [X / 2], frequencies
    amplitude: float
    scale: float
    heads: int
    groups: int
    size: int


@dataclass(frozen=True)
class DenseFFN:
    """Matrices of `target.moe.MLP`, or of a dense decoder."""

    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]
    fused: bool = False
    """Gate, up and SwiGLU in one launch, not a split product and another."""


@dataclass(frozen=True)
class ExpertFFN:
    """Matrices of `target.moe.MoE`; the shared expert is the last one."""

    router: Tensor  # [E, D]
    bias: Tensor  # [E]
    gate_up: Tensor  # [E + 1, 2 I, D]
    down: Tensor  # [E + 1, D, I]
    limit: float
    shared_limit: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer of the target."""

    norm: Tensor  # [D]
    mixer: KDAMixer | MLAMixer | GQAMixer
    ffn_norm: Tensor  # [D]
    ffn: DenseFFN | ExpertFFN

    @classmethod
    def of(cls, layer: Layer) -> "LayerWeights":
        """Views of ``layer``, whose parameters move unless they lie as they should."""
        mixer, ffn = layer.attention, layer.mlp
        made = cls(
            norm=layer.input_layernorm.weight.data,
            mixer=_kda(mixer) if isinstance(mixer, KDA) else _mla(mixer),
            ffn_norm=layer.post_attention_layernorm.weight.data,
            ffn=_experts(ffn) if isinstance(ffn, MoE) else _dense(ffn),
        )
        if made.norm.is_cuda:
            # the stacks have other sizes than what they replace, which the allocator would keep
            torch.cuda.empty_cache()
        return made


@dataclass(frozen=True)
class TargetWeights:
    """A whole target, or one rank's part of it."""

    config: LingConfig | DenseShape
    embedding: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V (of this rank), D]

    @property
    def ling(self) -> LingConfig:
        """The config, where a layer is one of Ling-3.0."""
        assert isinstance(self.config, LingConfig)
        return self.config

    @classmethod
    def of(cls, model: LingModel, embedding: Tensor | None = None) -> "TargetWeights":
        """Views of ``model``, whose parameters move; ``embedding``: the whole table, of a rank."""
        return cls(
            config=model.config,
            embedding=model.model.word_embeddings.weight.data if embedding is None else embedding,
            layers=tuple(LayerWeights.of(layer) for layer in model.layers),
            norm=model.model.norm.weight.data,
            head=model.lm_head.weight.data,
        )


@dataclass(frozen=True)
class NextNWeights:
    """The NEXTN block, or one rank's part of it."""

    enorm: Tensor  # [D], of the embedding
    hnorm: Tensor  # [D], of the hidden state
    eh_proj: Tensor  # [D, 2 D]
    layer: LayerWeights
    norm: Tensor  # [D], behind the block

    @classmethod
    def of(cls, model: LingModel) -> "NextNWeights":
        """Views, as in `TargetWeights`.

        Raises:
            TargetError: the model has no such block.
        """
        block = nextn_block(model)
        return cls(
            enorm=block.enorm.weight.data,
            hnorm=block.hnorm.weight.data,
            eh_proj=block.eh_proj.weight.data,
            layer=LayerWeights.of(block),
            norm=block.final_layernorm.weight.data,
        )


def unsupported(target: LingTarget | HFTarget, draft: DSparkDraftModel | None) -> str | None:
    """Why the kernels cannot run these models; None if they can."""
    config = draft.config if draft is not None else None
    if isinstance(target, LingTarget):
        return unsupported_shapes(target.config, config, target.model.ranks)
    reason = unsupported_dense(target.config)
    return reason or (unsupported_draft(config) if config is not None else None)


def unsupported_shapes(
    config: LingConfig, draft: DSparkConfig | None, ranks: int = 1
) -> str | None:
    """The same before anything is loaded."""
    shared = config.num_shared_experts * config.moe_shared_expert_intermediate_size
    if shared != config.moe_intermediate_size:
        return f"the shared expert is {shared} wide, the others {config.moe_intermediate_size}"
    if config.num_experts & (config.num_experts - 1) or config.n_group & (config.n_group - 1):
        return f"{config.num_experts} experts in {config.n_group} groups are no powers of two"
    if config.q_lora_rank is not None and config.q_lora_rank % 16:
        return f"the low-rank query of {config.q_lora_rank} is no multiple of 16"
    inner = (config.moe_intermediate_size // ranks, config.intermediate_size // ranks)
    value = config.num_attention_heads // ranks * config.v_head_dim
    for size in (config.hidden_size, *inner, value):
        if size % 16:
            return f"a width of {size} is no multiple of 16"
    if config.short_conv_kernel_size != 4:
        return f"convolutions have {config.short_conv_kernel_size} taps instead of 4"
    if config.head_dim & (config.head_dim - 1) or config.head_dim < 16:
        return f"the head size {config.head_dim} is no power of two from 16 on"
    return unsupported_draft(draft, ranks) if draft is not None else None


def unsupported_draft(draft: DSparkConfig, ranks: int = 1) -> str | None:
    """Why the kernels cannot run this draft, beside whichever target."""
    kind = draft.markov_head_type
    if draft.markov_rank and kind != "vanilla":
        return f"the draft's Markov head is '{kind}', only vanilla has a kernel"
    if (draft.block_size or 0) > 16:
        return f"the draft's block of {draft.block_size} exceeds 16 rows"
    rope = (draft.rope_parameters or {}).get("rope_type", "default")
    if rope not in ROTATIONS:
        return f"the draft's rope scaling '{rope}' is none of {', '.join(ROTATIONS)}"
    return _unsupported_widths(draft, ranks)


def _unsupported_widths(draft: DSparkConfig, ranks: int) -> str | None:
    """What of a draft's widths cannot be shared, or is no whole number of tiles."""
    heads, inner = draft.num_attention_heads, draft.intermediate_size
    shared = {
        "num_attention_heads": heads,
        "num_key_value_heads": draft.num_key_value_heads or heads,
        "intermediate_size": inner,
    }
    for name, size in shared.items():
        if size % ranks:
            return f"the draft's {name} {size} cannot be shared by {ranks} ranks"
    if draft.head_dim % 2:
        return f"the draft's head size {draft.head_dim} is odd"
    taps = len(draft.target_layer_ids or ()) * draft.hidden_size
    for size in (heads * draft.head_dim, inner, taps):
        if size % (16 * ranks):
            return f"a width of {size // ranks} of the draft is no multiple of 16"
    return None


@dataclass(frozen=True)
class DraftLayerWeights:
    """One layer of the draft (of this rank)."""

    norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 J) X, D], X the head size
    q_norm: Tensor  # [X]
    k_norm: Tensor  # [X]
    out: Tensor  # [D, H X]
    ffn_norm: Tensor  # [D]
    gate_up: Tensor  # [2 I, D]
    down: Tensor  # [D, I]


@dataclass(frozen=True)
class DraftWeights:
    """A draft, or one rank's part of it."""

    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    heads: int
    groups: int
    size: int
    eps: float
    inverse: Tensor  # [X / 2], frequencies of the rotation
    amplitude: float
    """Factor of the rotation, which YaRN asks for."""
    fc: Tensor  # [D, F D (this rank's inputs)]
    context_norm: Tensor  # [D]
    context: Tensor  # [layers * 2 J X, D]: per layer keys, then values
    context_k_norms: Tensor  # [layers, X]
    layers: tuple[DraftLayerWeights, ...]
    norm: Tensor  # [D]
    markov: tuple[Tensor, Tensor] | None  # W1 and W2 [V, r]
    confidence: tuple[Tensor, Tensor, Tensor] | None  # [D (+ r)], [1], temperatures [K]; float32

    @classmethod
    def of(cls, draft: DSparkDraftModel, ranks: int = 1, rank: int = 0) -> "DraftWeights":
        """Copies; heads, inner widths and the inputs of `fc` are shared by ``ranks``."""
        config = draft.config
        held = [layer for layer in draft.layers if isinstance(layer, DraftLayer)]
        attention = held[0].self_attn
        heads, groups, size = (
            attention.heads // ranks, attention.groups // ranks, attention.size,
        )  # fmt: skip

        def rows(linear: nn.Linear) -> Tensor:
            return linear.weight.data.chunk(ranks)[rank]

        def columns(linear: nn.Linear) -> Tensor:
            return linear.weight.data.chunk(ranks, 1)[rank].contiguous()

        layers, context = [], []
        for layer in held:
            one = layer.self_attn
            layers.append(
                DraftLayerWeights(
                    norm=layer.input_layernorm.weight.data,
                    qkv=torch.cat([rows(one.q_proj), rows(one.k_proj), rows(one.v_proj)]),
                    q_norm=one.q_norm.weight.data,
                    k_norm=one.k_norm.weight.data,
                    out=columns(one.o_proj),
                    ffn_norm=layer.post_attention_layernorm.weight.data,
                    gate_up=torch.cat([rows(layer.mlp.gate_proj), rows(layer.mlp.up_proj)]),
                    down=columns(layer.mlp.down_proj),
                )
            )
            context += [rows(one.k_proj), rows(one.v_proj)]
        assert config.block_size is not None
        assert config.mask_token_id is not None
        head, confidence = draft.markov_head, draft.confidence_head
        return cls(
            layer_ids=draft.layer_ids,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            heads=heads,
            groups=groups,
            size=size,
            eps=config.rms_norm_eps,
            inverse=draft.rotary_emb.inv_freq.float(),  # type: ignore[operator, union-attr]
            amplitude=float(draft.rotary_emb.attention_scaling),  # type: ignore[arg-type]
            fc=columns(draft.fc),
            context_norm=draft.hidden_norm.weight.data,
            context=torch.cat(context),
            context_k_norms=torch.stack([layer.k_norm for layer in layers]),
            layers=tuple(layers),
            norm=draft.norm.weight.data,
            markov=(head.markov_w1.weight.data, head.markov_w2.weight.data) if head else None,
            confidence=(
                (
                    confidence.proj.weight.data[0].float(),
                    confidence.proj.bias.data.float(),
                    confidence.proj.bias.new_tensor(
                        config.sts_temperatures or [1.0] * config.block_size, dtype=torch.float32
                    ),
                )
                if confidence
                else None
            ),
        )


def joined_rows(linears: Sequence[nn.Module]) -> Tensor:
    """One matrix of all of them, of which their weights become rows."""
    weights: list[nn.Parameter] = [linear.weight for linear in linears]  # type: ignore[misc]
    rows = sum(len(weight) for weight in weights)
    if (held := in_a_row([weight.data for weight in weights])) is not None:
        return held.view(rows, *weights[0].shape[1:])
    whole = torch.cat([weight.data for weight in weights])
    parts = torch.split(whole, [len(one) for one in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part
    return whole


def _kda(mixer: KDA) -> KDAMixer:
    parts = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.f_proj, mixer.g_proj, mixer.b_proj)
    conv = joined_rows([mixer.q_conv1d, mixer.k_conv1d, mixer.v_conv1d])
    return KDAMixer(
        into=joined_rows(parts),
        conv=conv.view(len(conv), -1),
        a_log=mixer.A_log.data,
        dt_bias=mixer.dt_bias.data,
        norm=mixer.o_norm.weight.data,
        out=mixer.o_proj.weight.data,
        heads=mixer.heads,
        size=mixer.size,
    )


def _mla(mixer: MLA) -> MLAMixer:
    low = mixer.low_rank_query
    first = mixer.q_a_proj if low else mixer.q_proj
    return MLAMixer(
        into=joined_rows([first, mixer.kv_a_proj_with_mqa, mixer.g_proj]),
        query_norm=mixer.q_a_layernorm.weight.data if low else None,
        query=mixer.q_b_proj.weight.data if low else None,
        latent_norm=mixer.kv_a_layernorm.weight.data,
        kv_b=mixer.kv_b_proj.weight.data,
        out=mixer.dense.weight.data,
        inverse=mixer._rotary.inverse.to(mixer.dense.weight.device),
        amplitude=mixer._rotary.amplitude,
        scale=mixer.scale,
        heads=mixer.heads,
        value=mixer.value,
    )


def _dense(ffn: MLP) -> DenseFFN:
    return DenseFFN(joined_rows([ffn.gate_proj, ffn.up_proj]), ffn.down_proj.weight.data)


def _experts(ffn: MoE) -> ExpertFFN:
    experts, shared = ffn.experts, ffn.shared_experts
    assert shared is not None
    gate_up = _stack(experts.gate_up, [shared.gate_proj.weight, shared.up_proj.weight])
    down = _stack(experts.down, [shared.down_proj.weight])
    return ExpertFFN(
        router=ffn.gate.weight.data,
        bias=ffn.gate.expert_bias,
        gate_up=gate_up,
        down=down,
        limit=experts.limit,
        shared_limit=shared.limit,
    )


def _stack(routed: Tensor, shared: Sequence[Tensor]) -> Tensor:
    """One stack of the routed experts and, behind them, the matrices of the shared one."""
    shape = (len(routed) + 1, *routed.shape[1:])
    if (held := in_a_row([routed.data, *(one.data for one in shared)])) is not None:
        return held.view(shape)
    stack = torch.empty(shape, dtype=routed.dtype, device=routed.device)
    stack[:-1] = routed.data
    routed.data = stack[:-1]
    for one, place in zip(
        shared, torch.split(stack[-1], [len(one) for one in shared]), strict=True
    ):
        place.copy_(one.data)
        one.data = place
    return stack
