"""Targets whose step is measured: their numbers from a config.json, and models without a file."""

from pathlib import Path

import torch

from dspark.errors import ConfigError, TargetError
from dspark.provenance import read_object
from dspark.target import HFTarget
from dspark.target.config import LingConfig, is_ling
from dspark.target.families import DenseShape, unsupported_dense

__all__ = ["dense_target", "read_target", "target_config"]

_SPREAD = 0.02
"""Of random weights, as transformers begins a training with."""


def target_config(name: str) -> Path:
    """A config.json by path, or by the name of one that the repository carries.

    Raises:
        ConfigError: it is neither.
    """
    if Path(name).exists():
        return Path(name)
    shipped = Path(__file__).parents[2] / "configs" / "targets"
    file = shipped / f"{name}.json"
    if file.is_file():
        return file
    known = ", ".join(sorted(one.stem for one in shipped.glob("*.json"))) or "none found"
    raise ConfigError(f"target '{name}' is neither a config.json nor a shipped one ({known})")


def read_target(path: Path) -> LingConfig | DenseShape:
    """Of a config.json or its directory.

    Raises:
        TargetError: there is none, or it is not understood.
        ConfigError: it is of a decoder that has no kernels.
    """
    file = path / "config.json" if path.is_dir() else path
    raw = read_object(file, TargetError)
    if is_ling(raw) or raw.get("model_type") == "bailing_hybrid":
        return LingConfig.from_file(path)
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**raw).get_text_config(decoder=True)
    except (ValueError, KeyError, TypeError, ImportError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        said = said.partition(" Should contain one of")[0]
        raise TargetError(f"{file} is of no model that is known here: {said}") from None
    if reason := unsupported_dense(config):
        raise ConfigError(f"the graph engine cannot run {file}: {reason}")
    return DenseShape.of(config)


@torch.no_grad()
def dense_target(shape: DenseShape, device: torch.device | str, *, seed: int = 0) -> HFTarget:
    """A bf16 model of ``shape``, random and filled where it stays; on "meta" without values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dspark.target.attention import ATTENTION_NAME

    config = AutoConfig.for_model(
        shape.model_type,
        **{
            name: getattr(shape, name)
            for name in (
                "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
                "rms_norm_eps", "tie_word_embeddings",
            )
        },
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
    if str(device) != "meta":
        model = model.to_empty(device=device)
        model.tie_weights()
        decoder = model.get_decoder()
        # no weights, hence left empty by to_empty
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
        generator = torch.Generator(device).manual_seed(seed)
        for name, values in model.named_parameters():
            mean, spread = (1.0, 0.1) if "norm" in name else (0.0, _SPREAD)
            values.normal_(mean, spread, generator=generator)
    return HFTarget(model, "synthetic")
