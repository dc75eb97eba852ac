"""What can be told of a target whose weights are elsewhere: a server has them, this process not."""

from dataclasses import dataclass
from typing import Any

from dspark.config import TargetSettings
from dspark.errors import TargetError
from dspark.target import peek, resolve

__all__ = ["Remote", "describe"]


@dataclass(frozen=True)
class Remote:
    """The names of a `Target` that need no weights."""

    name: str
    revision: str | None
    vocab_size: int
    max_position_embeddings: int
    eos_ids: frozenset[int]

    def fingerprint(self) -> str | None:
        """None: nothing here has seen the weights."""
        return None


def describe(settings: TargetSettings) -> Remote:
    """Read the configs of ``settings.path``; loads no weights.

    Raises:
        TargetError: they cannot be found or read, or name no end-of-turn id.
    """
    from transformers import AutoConfig, GenerationConfig

    place = resolve(settings)
    config: Any = peek(settings)[0]
    if config is None:
        try:
            whole = AutoConfig.from_pretrained(place, revision=settings.revision)
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TargetError(f"cannot read target '{settings.path}': {first}") from error
        config = whole.get_text_config(decoder=True)
    try:
        generation = GenerationConfig.from_pretrained(place, revision=settings.revision)
        ends = _ids(generation.eos_token_id)
    except (OSError, ValueError, TypeError):  # a target need not have one
        ends = frozenset()
    ends |= _ids(config.eos_token_id)
    if not ends:
        raise TargetError(
            f"target '{settings.path}' names no eos_token_id in config.json or "
            "generation_config.json, so the end of an answer could not be told"
        )
    return Remote(
        name=settings.path,
        revision=settings.revision,
        vocab_size=int(config.vocab_size),
        max_position_embeddings=int(config.max_position_embeddings),
        eos_ids=ends,
    )


def _ids(value: int | list[int] | None) -> frozenset[int]:
    return frozenset(() if value is None else [value] if isinstance(value, int) else value)
