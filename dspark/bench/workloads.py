"""What a serving benchmark sends: prompts with or without a template, or SGLang's `random`.

The random workload follows sglang's `benchmark/datasets/random.py`; see `definitions`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.bench.serving_client import Prompt
from dspark.corpus.messages import Message
from dspark.errors import ConfigError

__all__ = ["WORKLOADS", "RandomLengths", "Workload", "chat", "random_prompts", "texts"]

WORKLOADS = ("chat", "prompts", "random")


@dataclass(frozen=True)
class Workload:
    """Requests of a run, in order."""

    name: str
    prompts: list[Prompt]
    max_tokens: list[int]
    """Output limit of each request."""
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths of the random workload, by the names and defaults of SGLang's options.

    Raises:
        ConfigError: a length is below 1, or the ratio no share.
    """

    input_len: int = 1024
    output_len: int = 1024
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ConfigError(f"--random-{option} must be >= 1, got {getattr(self, name)}")
        if not 0.0 <= self.range_ratio <= 1.0:
            raise ConfigError(f"--random-range-ratio must lie in 0..1, got {self.range_ratio}")

    def draw(self, count: int, seed: int) -> tuple[list[int], list[int]]:
        """Ids of each prompt, tokens of each output."""
        generator = np.random.RandomState(seed)
        inputs, outputs = (
            generator.randint(max(int(full * self.range_ratio), 1), full + 1, size=count).tolist()
            for full in (self.input_len, self.output_len)
        )
        return inputs, outputs


def chat(prompts: Sequence[Sequence[Message]], max_tokens: int, *, ends: bool = True) -> Workload:
    """Each prompt by the chat template; ``ends`` False ignores EOS."""
    every: list[Prompt] = [list(one) for one in prompts]
    return Workload("chat", every, [max_tokens] * len(every), not ends)


def texts(prompts: Sequence[Sequence[Message]], max_tokens: int, *, ends: bool = True) -> Workload:
    """The text of each prompt's messages, without a template."""
    every: list[Prompt] = ["\n\n".join(str(m.get("content") or "") for m in one) for one in prompts]
    return Workload("prompts", every, [max_tokens] * len(every), not ends)


def random_prompts(
    prompts: Sequence[Sequence[Message]],
    tokenizer: Any,
    lengths: RandomLengths,
    *,
    count: int | None = None,
    seed: int = 1,
) -> Workload:
    """First user turns, tiled or cut to exactly the ids drawn; ``count``: None is one a text.

    Raises:
        ConfigError: no prompt has a token.
    """
    turns = [next((m["content"] for m in one if m["role"] == "user"), "") for one in prompts]
    random.Random(seed).shuffle(turns)
    ids = [one for turn in turns if (one := tokenizer.encode(turn))]
    if not ids:
        raise ConfigError("--workload random needs a prompt with at least one token")
    count = len(ids) if count is None else count
    inputs, outputs = lengths.draw(count, seed)
    every: list[Prompt] = [
        _tiled(ids[i % len(ids)], size, first=i // len(ids)) for i, size in enumerate(inputs)
    ]
    return Workload("random", every, outputs, True)


def _tiled(ids: list[int], size: int, first: int) -> list[int]:
    """``size`` ids; the repetition begins at ``first``, so that no two requests share a prefix."""
    first %= len(ids)
    turned = ids[first:] + ids[:first]
    return (turned * (size // len(turned) + 1))[:size]
