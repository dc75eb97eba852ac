"""Shape of a Ling-3.0 target (`BailingMoeV3ForCausalLM`): config.json, checked, and what follows.

The keys are the checkpoint's own. Many more stand in a released config.json; those that neither
the official modeling code nor a serving engine reads are kept for writing it back and ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from dspark.errors import TargetError, nearest
from dspark.provenance import read_object

__all__ = ["ARCHITECTURE", "FP8_BLOCK", "LingConfig", "is_ling"]

ARCHITECTURE = "BailingMoeV3ForCausalLM"
"""The only name to dispatch on: `model_type: bailing_hybrid` also stands in Ling-2.6 configs."""

FP8_BLOCK = [128, 128]
"""Rows and columns of a block that shares a scale: of the official fp8 checkpoints."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "layer_group_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "max_position_embeddings",
)
# Every tensor of every layer is listed by name before anything is loaded.
_MOST = {"num_hidden_layers": 1 << 10, "num_nextn_predict_layers": 1 << 4, "num_experts": 1 << 13}
_MOST_SIZE = 1 << 31
# What these say is built in; another value would need other arithmetic.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "score_function": ("sigmoid",),
    "scoring_func": ("sigmoid",),
    "gated_attention_proj_granularity_type": ("head_wise",),
    "no_kda_lora": (True,),
    "kda_safe_gate": (True,),
    "norm_topk_prob": (True,),
    "moe_router_enable_expert_bias": (True,),
    "tie_word_embeddings": (False,),
    "use_bias": (False,),
    "use_qkv_bias": (False,),
    "mtp_use_kda": (False,),
    "rope_interleave": (True,),
}

_YARN = (
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    "partial_rotary_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
)


@dataclass(frozen=True, kw_only=True)
class LingConfig:
    """Read `from_dict` or `from_file`; names are those of config.json.

    Symbols used beside it: D hidden, H heads, N head size, E experts, V vocabulary.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Inner width of the dense FFN only."""
    num_hidden_layers: int
    """Without the NEXTN block."""
    num_attention_heads: int
    head_dim: int
    """Key and value size of a KDA head."""
    layer_group_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    max_position_embeddings: int
    moe_shared_expert_intermediate_size: int
    num_shared_experts: int = 1
    q_lora_rank: int | None = None
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 6_000_000.0
    rope_scaling: Mapping[str, Any] | None = None
    """YaRN, only by an override: {rope_type: yarn, factor, original_max_position_embeddings}."""
    short_conv_kernel_size: int = 4
    kda_lower_bound: float = -5.0
    expert_swiglu_limit_list: tuple[float, ...] | None = None
    """A limit a layer, 0 for none; the NEXTN block has none."""
    share_expert_swiglu_limit_list: tuple[float, ...] | None = None
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it was read, for writing it back."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "LingConfig":
        """Check ``raw`` and build the config.

        Raises:
            TargetError: another architecture, a key missing, or a value that is not supported.
        """
        if not is_ling(raw):
            raise TargetError(
                f"{where}: architectures is {raw.get('architectures')}, wanted ['{ARCHITECTURE}']"
                + _lookalike(raw)
            )
        missing = [name for name in _REQUIRED if raw.get(name) is None]
        if missing:
            raise TargetError(f"{where}: missing {', '.join(missing)}")
        for name, allowed in _FIXED.items():
            if name in raw and raw[name] not in allowed:
                raise TargetError(
                    f"{where}: {name} is {raw[name]!r}; only {allowed[0]!r} is supported"
                )
        names = {one.name for one in fields(cls)} - {"raw"}
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        values.setdefault(
            "moe_shared_expert_intermediate_size",
            raw["moe_intermediate_size"],
        )
        rope = raw.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise TargetError(f"{where}: rope_parameters must be an object, got {rope!r}")
        if rope.get("rope_theta") is not None:
            values.setdefault("rope_theta", rope["rope_theta"])
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            if name in values:
                values[name] = _limits(values[name], f"{where}: {name}")
        if isinstance(values.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        config = cls(**values, raw=dict(raw))
        config._check(where)
        return config

    @classmethod
    def from_file(cls, path: Path, overrides: Mapping[str, Any] | None = None) -> "LingConfig":
        """Read a config.json, or that of a directory.

        ``overrides`` (`target.config_overrides`) replace its top-level keys (`rope_scaling`).

        Raises:
            TargetError: it cannot be read, or as `from_dict`.
        """
        path = path / "config.json" if path.is_dir() else path
        raw = read_object(path, TargetError)
        known = {one.name for one in fields(cls)} - {"raw"}
        for name in overrides or {}:
            if name not in known:
                raise TargetError(
                    f"target.config_overrides: '{name}' is not a key of a Ling-3.0 config"
                    + nearest(name, known)
                )
        where = f"{path} under target.config_overrides {dict(overrides)}" if overrides else path
        return cls.from_dict({**raw, **(overrides or {})}, str(where))

    def _check(self, where: str) -> None:
        for name in (*_REQUIRED, "short_conv_kernel_size", "n_group", "topk_group"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TargetError(f"{where}: {name} must be a whole number >= 1, got {value!r}")
        for name in ("first_k_dense_replace", "num_nextn_predict_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise TargetError(f"{where}: {name} must be a whole number >= 0, got {value!r}")
        rank = self.q_lora_rank
        if rank is not None and (type(rank) is not int or rank < 1):
            raise TargetError(
                f"{where}: q_lora_rank must be a whole number >= 1 or null, got {rank!r}"
            )
        for name in ("moe_shared_expert_intermediate_size", "num_shared_experts"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise TargetError(f"{where}: {name} must be a whole number >= 0, got {value!r}")
        for name in (*_REQUIRED, *_MOST):
            value, most = getattr(self, name), _MOST.get(name, _MOST_SIZE)
            if value > most:
                raise TargetError(f"{where}: {name} must be at most {most}, got {value}")
        self._check_unused(where)
        heads = self.raw.get("num_key_value_heads", self.num_attention_heads)
        if heads != self.num_attention_heads:
            raise TargetError(
                f"{where}: num_key_value_heads {heads} must equal "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.qk_rope_head_dim % 2:
            raise TargetError(f"{where}: qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        if self.num_experts % self.n_group:
            raise TargetError(
                f"{where}: num_experts {self.num_experts} must be a multiple of "
                f"n_group {self.n_group}"
            )
        reach = self.topk_group * self.num_experts // self.n_group
        if self.topk_group > self.n_group or self.num_experts_per_tok > reach:
            raise TargetError(
                f"{where}: num_experts_per_tok {self.num_experts_per_tok} of topk_group "
                f"{self.topk_group} x {self.num_experts // self.n_group} experts cannot be chosen"
            )
        for name in ("rms_norm_eps", "rope_theta", "routed_scaling_factor", "initializer_range"):
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise TargetError(f"{where}: {name} must be a number above 0, got {value!r}")
        bound = self.kda_lower_bound
        if not _is_number(bound) or not bound < 0:
            raise TargetError(f"{where}: kda_lower_bound must be a number below 0, got {bound!r}")
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            limits = getattr(self, name)
            if limits is not None and len(limits) != self.num_hidden_layers:
                raise TargetError(
                    f"{where}: {name} has {len(limits)} entries for {self.num_hidden_layers} layers"
                )
        scaling: Any = self.rope_scaling
        if scaling is not None:
            kind = (
                scaling.get("rope_type") or scaling.get("type")
                if isinstance(scaling, Mapping)
                else None
            )
            if kind != "yarn" or not scaling.get("factor"):
                raise TargetError(
                    f"{where}: rope_scaling must be YaRN with a factor, got {scaling}"
                )
            for name in set(scaling) - {"rope_type", "type"}:
                if name not in _YARN:
                    hint = nearest(name, _YARN, "rope_scaling.")
                    raise TargetError(f"{where}: rope_scaling.{name} is not known{hint}")
                value = scaling[name]
                if value is not None and (not _is_number(value) or not value > 0):
                    raise TargetError(
                        f"{where}: rope_scaling.{name} must be a number above 0, got {value!r}"
                    )

    def _check_unused(self, where: str) -> None:
        """Keys that others read, or that only repeat another one: a wrong one is a wrong file."""
        size = self.raw.get("qk_head_dim")
        if size is not None and size != self.qk_head_dim:
            raise TargetError(
                f"{where}: qk_head_dim must be qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.qk_head_dim}, got {size!r}"
            )
        share = self.raw.get("partial_rotary_factor")
        if share is not None and (not _is_number(share) or not 0 < share <= 1):
            raise TargetError(
                f"{where}: partial_rotary_factor must be a number in (0, 1], got {share!r}"
            )
        for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
            self.check_ids(where, name, getattr(self, name))
        fp8 = self.raw.get("quantization_config")
        if fp8 is not None and (
            not isinstance(fp8, Mapping)
            or fp8.get("quant_method") != "fp8"
            or fp8.get("weight_block_size", FP8_BLOCK) != FP8_BLOCK
        ):
            raise TargetError(
                f"{where}: quantization_config must be quant_method fp8 with weight_block_size "
                f"{FP8_BLOCK}, got {fp8!r}"
            )

    def check_ids(self, where: str, name: str, value: Any) -> None:
        """`eos_token_id` may be a list, others one id; None is none.

        Raises:
            TargetError: not an id of the vocabulary.
        """
        several = name == "eos_token_id" and isinstance(value, tuple | list)
        for one in value if several else () if value is None else (value,):
            if type(one) is not int or not 0 <= one < self.vocab_size:
                raise TargetError(
                    f"{where}: {name} must be an id in 0..{self.vocab_size - 1}"
                    f"{' or a list of such' if name == 'eos_token_id' else ''}, got {one!r}"
                )

    @property
    def is_fp8(self) -> bool:
        """Does the checkpoint hold fp8 blocks with scales?"""
        return self.raw.get("quantization_config") is not None

    @property
    def qk_head_dim(self) -> int:
        """Query and key size of an MLA head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads

    @property
    def latent_dim(self) -> int:
        """Values an MLA layer caches for a token: latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """RoPE of a draft for this target: the same base, all dimensions of its heads."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @property
    def num_blocks(self) -> int:
        """Layers in the checkpoint, the NEXTN block among them."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_mla(self, layer: int) -> bool:
        """The last layer of each group, every layer of a ragged tail, and the NEXTN block."""
        size = self.layer_group_size
        return (layer + 1) % size == 0 or layer >= self.num_hidden_layers // size * size

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's FFN is one SwiGLU instead of experts."""
        return layer < self.first_k_dense_replace

    def expert_limit(self, layer: int) -> float:
        """SwiGLU limit of the routed experts; 0 is none."""
        return _entry(self.expert_swiglu_limit_list, layer)

    def shared_limit(self, layer: int) -> float:
        """SwiGLU limit of the shared expert; 0 is none."""
        return _entry(self.share_expert_swiglu_limit_list, layer)


def is_ling(raw: Mapping[str, Any]) -> bool:
    """Does a config.json describe a Ling-3.0 model? Judged by ``architectures[0]`` alone."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] == ARCHITECTURE


def _entry(limits: tuple[float, ...] | None, layer: int) -> float:
    return limits[layer] if limits is not None and layer < len(limits) else 0.0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _limits(values: Any, name: str) -> tuple[float, ...]:
    """A limit a layer; null means none, as a 0 does."""
    if not isinstance(values, list | tuple):
        raise TargetError(f"{name} must be a list with a number for each layer, got {values!r}")
    limits = tuple(0.0 if limit is None else limit for limit in values)
    for limit in limits:
        if not _is_number(limit) or limit < 0:
            raise TargetError(f"{name} must hold numbers >= 0, got {limit!r}")
    return limits


def _lookalike(raw: Mapping[str, Any]) -> str:
    if raw.get("model_type") == "bailing_hybrid":
        return "; model_type bailing_hybrid alone also names Ling-2.6, which has other layers"
    return ""
