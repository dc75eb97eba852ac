"""The layouts in which a draft is written, one for each family of readers.

The tensors have the same names in all of them; they differ in config.json and in whether copies of
the target's embedding and output head are in the file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dspark.draft import DSparkConfig
from dspark.export import speculators
from dspark.export.config_json import to_json

__all__ = ["FORMATS", "LAYOUTS", "Format", "Layout", "Origin", "unreadable", "write_config"]

Format = Literal["hf", "sglang", "vllm", "deepspec"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True)
class Layout:
    """Who reads it, and what it does with the two tables."""

    reader: str
    tables: bool
    """Whether an export writes the target's embedding and output head along."""
    needs_tables: bool = False
    needs_markov_head: bool = False
    only_vanilla: bool = False


LAYOUTS: dict[Format, Layout] = {
    "hf": Layout("all of the readers below", tables=True),
    "sglang": Layout("SGLang", tables=False, needs_markov_head=True),
    "vllm": Layout("vLLM", tables=True, needs_markov_head=True, only_vanilla=True),
    "deepspec": Layout("DeepSpec", tables=True, needs_tables=True),
}


@dataclass(frozen=True)
class Origin:
    """What config.json says beside the draft's shape."""

    family: str
    """`config_json.family_of` the draft."""
    verifier: str | None = None
    """Name of the target."""
    verifier_architectures: Sequence[str] = ()
    dtype: str = "bfloat16"


def unreadable(config: DSparkConfig, format: Format) -> str | None:
    """Why the engine that ``format`` is for cannot serve a draft of this shape; None if it can."""
    layout = LAYOUTS[format]
    if layout.needs_markov_head and config.markov_rank == 0:
        return f"{layout.reader} needs a Markov head, and markov_rank is 0"
    if layout.only_vanilla and config.markov_head_type != "vanilla":
        return (
            f"{layout.reader} reads vanilla Markov heads only, and markov_head_type is "
            f"{config.markov_head_type}"
        )
    last = (config.num_target_layers or 0) - 1
    if last in (config.target_layer_ids or ()):
        return (
            f"no engine exposes the target's last layer, and target_layer_ids ends in {last} "
            f"(num_target_layers {last + 1})"
        )
    return None


def write_config(config: DSparkConfig, format: Format, origin: Origin) -> dict[str, Any]:
    """The object for config.json."""
    full = to_json(config, architecture=origin.family, dtype=origin.dtype)
    if format == "hf":
        return full
    block = full.pop("dflash_config")
    if format == "deepspec":
        return full
    if format == "vllm":
        return speculators.nest(
            full,
            verifier=origin.verifier,
            verifier_architectures=origin.verifier_architectures,
        )
    grouped = config.num_key_value_heads != config.num_attention_heads
    version = full.pop("transformers_version")
    return {
        **full,
        "dflash_config": {**block, "attention_mode": "gqa" if grouped else "mha"},
        "transformers_version": version,
    }
