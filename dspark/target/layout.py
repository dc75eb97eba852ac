"""Every tensor of a Ling-3.0 checkpoint: name, shape, dtype, and how ranks share it.

The one table behind the loader, the writer, synthetic checkpoints and `dspark inspect`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from dspark.target.config import LingConfig

__all__ = ["TensorSpec", "is_quantised", "tensors"]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as it stands in the file."""

    name: str
    shape: tuple[int, ...]
    part: str
    """Row of a size table: embedding, head, kda, mla, dense, expert, shared, router, norm, mtp."""
    split: int | None = None
    """Dimension that tensor-parallel ranks slice; None: every rank holds it whole."""
    float32: bool = False
    """Stored as float32; all others are bfloat16."""
    groups: int = 1
    """Equal blocks along ``split`` that are each sliced (nothing official needs more than 1)."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * (4 if self.float32 else 2)

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape on one of ``ranks``."""
        if self.split is None:
            return self.shape
        shape = list(self.shape)
        shape[self.split] //= ranks
        return tuple(shape)


def tensors(config: LingConfig, *, alike: bool = True) -> Iterator[TensorSpec]:
    """All tensors of the checkpoint, the NEXTN block's last.

    Without those that are ``alike``, the first routed expert of a layer stands for all: of the
    release's 63,783 tensors 930 are left, which is all that a count takes.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    yield TensorSpec("model.word_embeddings.weight", (vocab, hidden), "embedding", 0)
    yield TensorSpec("lm_head.weight", (vocab, hidden), "head", 0)
    yield TensorSpec("model.norm.weight", (hidden,), "norm")
    for layer in range(config.num_blocks):
        prefix = f"model.layers.{layer}."
        yield TensorSpec(prefix + "input_layernorm.weight", (hidden,), "norm")
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (hidden,), "norm")
        if config.is_mla(layer):
            yield from _mla(config, prefix + "attention.")
        else:
            yield from _kda(config, prefix + "attention.")
        if config.is_dense(layer):
            yield from _mlp(prefix + "mlp.", hidden, config.intermediate_size, "dense")
        else:
            yield from _moe(config, prefix + "mlp.", config.num_experts if alike else 1)
        if layer >= config.num_hidden_layers:
            for name in ("enorm", "hnorm", "final_layernorm"):
                yield TensorSpec(f"{prefix}{name}.weight", (hidden,), "norm")
            yield TensorSpec(prefix + "eh_proj.weight", (hidden, 2 * hidden), "mtp")


def _kda(config: LingConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    width = heads * config.head_dim
    for name in "qkvfg":
        yield TensorSpec(f"{prefix}{name}_proj.weight", (width, hidden), "kda", 0)
    yield TensorSpec(prefix + "b_proj.weight", (heads, hidden), "kda", 0)
    for name in "qkv":
        shape = (width, 1, config.short_conv_kernel_size)
        yield TensorSpec(f"{prefix}{name}_conv1d.weight", shape, "kda", 0)
    yield TensorSpec(prefix + "A_log", (heads,), "kda", 0, float32=True)
    yield TensorSpec(prefix + "dt_bias", (width,), "kda", 0, float32=True)
    yield TensorSpec(prefix + "o_norm.weight", (config.head_dim,), "kda")
    yield TensorSpec(prefix + "o_proj.weight", (hidden, width), "kda", 1)


def _mla(config: LingConfig, prefix: str) -> Iterator[TensorSpec]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    width = heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield TensorSpec(prefix + "q_proj.weight", (width, hidden), "mla", 0)
    else:
        yield TensorSpec(prefix + "q_a_proj.weight", (config.q_lora_rank, hidden), "mla")
        yield TensorSpec(prefix + "q_a_layernorm.weight", (config.q_lora_rank,), "mla")
        yield TensorSpec(prefix + "q_b_proj.weight", (width, config.q_lora_rank), "mla", 0)
    yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (config.latent_dim, hidden), "mla")
    yield TensorSpec(prefix + "kv_a_layernorm.weight", (rank,), "mla")
    both = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield TensorSpec(prefix + "kv_b_proj.weight", (both, rank), "mla", 0)
    yield TensorSpec(prefix + "g_proj.weight", (heads, hidden), "mla", 0)
    yield TensorSpec(prefix + "dense.weight", (hidden, heads * config.v_head_dim), "mla", 1)


def _mlp(prefix: str, hidden: int, width: int, part: str) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (width, hidden), part, 0)
    yield TensorSpec(prefix + "up_proj.weight", (width, hidden), part, 0)
    yield TensorSpec(prefix + "down_proj.weight", (hidden, width), part, 1)


def _moe(config: LingConfig, prefix: str, listed: int) -> Iterator[TensorSpec]:
    hidden, experts = config.hidden_size, config.num_experts
    yield TensorSpec(prefix + "gate.weight", (experts, hidden), "router")
    yield TensorSpec(prefix + "gate.expert_bias", (experts,), "router", float32=True)
    for expert in range(listed):
        width = config.moe_intermediate_size
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, width, "expert")
    if config.num_shared_experts:
        width = config.moe_shared_expert_intermediate_size * config.num_shared_experts
        yield from _mlp(prefix + "shared_experts.", hidden, width, "shared")


_QUANTISED = re.compile(
    r"\.mlp\.(experts\.\d+|shared_experts)\.(gate|up|down)_proj\.weight$"
    r"|\.mlp\.(gate|up|down)_proj\.weight$"
    r"|\.attention\.([qkvfo]_proj|dense)\.weight$"
    r"|\.eh_proj\.weight$"
)


def is_quantised(config: LingConfig, name: str) -> bool:
    """Is this tensor stored in fp8 blocks in the official fp8 checkpoint?

    `attention.g_proj` is, where it is KDA's output gate, and is not where it is MLA's head gate.
    """
    if name.endswith(".attention.g_proj.weight"):
        return not config.is_mla(int(name.split(".")[2]))
    return _QUANTISED.search(name) is not None
