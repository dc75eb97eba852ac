"""What a server must know of the model that its engine decodes, wherever that engine runs."""

import math
from dataclasses import dataclass, field
from typing import Any

from dspark.decoding import SamplingParams
from dspark.errors import ConfigError
from dspark.target import Target
from dspark.target.base import PREFILL_ROWS
from dspark.target.drawn import KEY

__all__ = ["ModelCard", "card_of"]

_NO_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Facts of a target, its draft and the engine over them; no tensors."""

    name: str
    vocab_size: int
    max_position_embeddings: int
    context: int
    """Positions that the engine has room for, prompt and output together."""
    eos_ids: frozenset[int] = frozenset()
    device: str = "cpu"
    dtype: str = "float32"
    sampling: dict[str, Any] = field(default_factory=_NO_SAMPLING.copy)
    """What a request gets that asks for nothing."""
    engine: str = "reference"
    """reference or graph."""
    algorithm: str | None = None
    """DSPARK or NEXTN, which drafts; None without a draft."""
    num_draft_tokens: int = 0
    """Proposals a step at most; 0 without a draft."""
    most_stops: int | None = None
    """Ids that may end an output, the model's own among them; None: any number."""
    logprobs: bool = True
    """Whether commits can have them."""
    prefill_rows: int = PREFILL_ROWS["cpu"]
    """Positions of a prompt that are read together."""
    prefix_cache_bytes: int = 0
    """For prompts that begin like earlier ones; 0: each is read whole."""
    synthetic_weights: bool = False
    """Drawn, not read from files: what the model says means nothing."""

    def prefill_steps(self, prompt_tokens: int) -> int:
        """How many pieces a prompt is read in."""
        return max(1, math.ceil(prompt_tokens / self.prefill_rows))


def card_of(target: Target, **engine: Any) -> ModelCard:
    """Of a loaded target; ``engine``: the fields that say what is decoded with.

    Raises:
        ConfigError: the model's own defaults of sampling cannot be run.
    """
    positions = int(target.max_position_embeddings)
    context = engine.pop("context", None) or positions
    return ModelCard(
        name=target.name,
        vocab_size=int(target.vocab_size),
        max_position_embeddings=positions,
        context=min(positions, context),
        eos_ids=target.eos_ids,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        synthetic_weights=KEY in getattr(target.config, "raw", {}),
        sampling=_sampling_defaults(target),
        prefill_rows=target.prefill_rows,
        **engine,
    )


def _sampling_defaults(target: Target) -> dict[str, Any]:
    """What the model's own generation config asks for, else OpenAI's temperature 1 and no cuts.

    Only values that the model's author wrote down count: the class default of top_k in
    transformers is 50, which nobody asked for.

    Raises:
        ConfigError: a value is no number, or out of range.
    """
    config = getattr(target.model, "generation_config", None)
    written = config.to_diff_dict() if config is not None else {}
    chosen: dict[str, Any] = {
        name: value if written.get(name) is None else written[name]
        for name, value in _NO_SAMPLING.items()
    }
    where = f"generation_config.json of target '{target.name}'"
    for name, value in chosen.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{where}: {name} must be {kind}, got {value!r}")
    try:
        SamplingParams(**chosen)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return chosen
