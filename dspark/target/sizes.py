"""What a Ling-3.0 target weighs: parameters, bytes a rank holds, bytes a verify step must read.

Nothing is loaded; everything follows from the config through `dspark.target.layout`. Bytes are
those of bf16 weights (float32 where the checkpoint has it) and float32 KDA states. MB is 1e6 bytes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from dspark.errors import ConfigError
from dspark.target.config import LingConfig
from dspark.target.layout import TensorSpec, tensors
from dspark.target.model import check_ranks

__all__ = ["Routing", "StepBytes", "parameter_counts", "rank_bytes", "step_bytes"]


@dataclass(frozen=True)
class Routing:
    """How many experts of a layer T tokens touch together.

    ``overlap``: the share of a token's experts that earlier tokens of the window have touched
    already; the others are new ones. ``count``: so many, whatever T is. Neither: every token
    chooses independently.
    """

    overlap: float | None = None
    count: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Routing":
        """`independent` (or `uniform`), `overlap:SHARE` with a share in 0..1, or `experts:N`.

        Raises:
            ConfigError: anything else.
        """
        kind, _, given = text.partition(":")
        if kind in ("uniform", "independent") and not given:
            return cls()
        try:
            value = float(given)
        except ValueError:
            value = -1.0
        if kind == "overlap" and 0 <= value <= 1:
            return cls(overlap=value)
        if kind == "experts" and 1 <= value < float("inf"):
            return cls(count=value)
        raise ConfigError(
            f"routing must be independent, overlap:SHARE (0..1) or experts:N (N >= 1), got '{text}'"
        )

    @property
    def independent(self) -> bool:
        return self.overlap is None and self.count is None

    def check(self, config: LingConfig, tokens: int) -> None:
        """Can so many rows meet on as many experts as was asked for?

        Raises:
            ConfigError: names the least and the most.
        """
        each = config.num_experts_per_tok
        most = min(config.num_experts, each * tokens)
        if self.count is not None and not each <= self.count <= most:
            raise ConfigError(
                f"routing experts:N must lie in {each}..{most} for {tokens} rows with {each} "
                f"experts each, got {self.count:g}"
            )

    def experts(self, config: LingConfig, tokens: float) -> float:
        """Expected distinct experts of one layer."""
        each, total = config.num_experts_per_tok, config.num_experts
        if self.count is not None:
            return min(float(total), self.count)
        if self.overlap is None:
            return total * (1 - float((1 - each / total) ** tokens))
        return min(float(total), each + (1 - self.overlap) * each * (tokens - 1))


def parameter_counts(config: LingConfig) -> dict[str, int]:
    """Parameters and tensors of the checkpoint, and how they divide."""
    main, nextn = Counter[str](), 0
    count = float32 = 0
    for spec, times in _counted(config):
        size = times * spec.size
        count += times
        float32 += size if spec.float32 else 0
        if _nextn(config, spec):
            nextn += size
        else:
            main[spec.part] += size
    whole = sum(main.values())
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    idle = (config.num_experts - config.num_experts_per_tok) / config.num_experts
    return {
        "parameters": whole + nextn,
        "tensors": count,
        "float32_values": float32,
        "checkpoint_bytes": 2 * (whole + nextn) + 2 * float32,
        "main_parameters": whole,
        "nextn_parameters": nextn,
        "active_parameters": whole - main["embedding"] - round(main["expert"] * idle),
        "kda_layers": sum(not config.is_mla(i) for i in range(config.num_hidden_layers)),
        "mla_layers": sum(config.is_mla(i) for i in range(config.num_hidden_layers)),
        "moe_layers": moe_layers,
    }


def rank_bytes(config: LingConfig, ranks: int) -> dict[str, int]:
    """Bytes of weights one of ``ranks`` holds, by part, and of the state of one sequence.

    Raises:
        TargetError: a width does not divide by ``ranks``.
    """
    check_ranks(config, ranks)
    parts, nextn = Counter[str](), 0
    for spec, times in _counted(config):
        size = times * prod(spec.local_shape(ranks)) * (4 if spec.float32 else 2)
        if _nextn(config, spec):
            nextn += size
        else:
            parts[spec.part] += size
    state = _state(config, ranks)
    return {
        **parts,
        "main_model": sum(parts.values()),
        "nextn": nextn,
        "kda_state": state["state"],
        "convolution_tails": state["tails"],
        "latent_per_token": state["latent"],
    }


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of one verify step of one sequence on one rank."""

    verify_tokens: int
    experts_per_layer: float
    fixed_weights: float
    """All that is read whatever was routed: projections, shared experts, routers, head."""
    routed_experts: float
    kda_state: float
    """Read once and written once."""
    convolution_tails: float
    """Read and written."""
    latent_cache: float
    """Read at ``context`` tokens."""
    state_per_row: float
    """More, if the state after every row is written for a later choice."""
    replay_records: float
    """Instead, if the inputs of each row are kept and folded in later."""

    @property
    def weights(self) -> float:
        return self.fixed_weights + self.routed_experts

    @property
    def total(self) -> float:
        """Weights, state, tails and latents; without either way of rolling back."""
        return self.weights + self.kda_state + self.convolution_tails + self.latent_cache

    def floor_us(self, terabytes_per_s: float) -> float:
        """Microseconds to read ``total`` at this bandwidth."""
        return self.total / terabytes_per_s / 1e6


def step_bytes(
    config: LingConfig, ranks: int, tokens: int, routing: Routing, context: int = 8192
) -> StepBytes:
    """The table of a verify step of ``tokens`` rows behind ``context`` tokens.

    Raises:
        ConfigError: fewer than one token.
        TargetError: a width does not divide by ``ranks``.
    """
    if tokens < 1 or context < 0:
        raise ConfigError(
            f"verify tokens must be >= 1 and context >= 0, got {tokens} and {context}"
        )
    held: Mapping[str, int] = rank_bytes(config, ranks)
    layers = config.num_hidden_layers - config.first_k_dense_replace
    one = held.get("expert", 0) / max(1, config.num_experts * layers)
    experts = routing.experts(config, tokens)
    unread = held["embedding"] + held.get("expert", 0)
    kda = sum(not config.is_mla(i) for i in range(config.num_hidden_layers))
    heads = config.num_attention_heads // ranks
    # key and value bf16, log decay float32 per channel, beta float32
    record = kda * heads * (config.head_dim * (2 + 2 + 4) + 4)
    return StepBytes(
        verify_tokens=tokens,
        experts_per_layer=experts,
        fixed_weights=held["main_model"] - unread,
        routed_experts=experts * layers * one,
        kda_state=2 * held["kda_state"],
        convolution_tails=2 * held["convolution_tails"],
        latent_cache=held["latent_per_token"] * context,
        state_per_row=tokens * held["kda_state"],
        replay_records=tokens * record,
    )


def _state(config: LingConfig, ranks: int) -> dict[str, int]:
    mla = sum(config.is_mla(i) for i in range(config.num_hidden_layers))
    kda = config.num_hidden_layers - mla
    heads, size = config.num_attention_heads // ranks, config.head_dim
    tail = (config.short_conv_kernel_size - 1) * 3 * heads * size
    return {
        "state": kda * heads * size * size * 4,
        "tails": kda * tail * 2,
        # every rank holds the latents of all heads
        "latent": mla * config.latent_dim * 2,
    }


def _counted(config: LingConfig) -> Iterator[tuple[TensorSpec, int]]:
    """Tensors that differ, and how many there are of each."""
    for spec in tensors(config, alike=False):
        yield spec, config.num_experts if spec.part == "expert" else 1


def _nextn(config: LingConfig, spec: TensorSpec) -> bool:
    parts = spec.name.split(".")
    return parts[1] == "layers" and int(parts[2]) >= config.num_hidden_layers
