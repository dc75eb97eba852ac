"""Limits of a server; each one holds for every request, whatever the client asks for."""

import math
from dataclasses import dataclass

from dspark.errors import ConfigError

__all__ = ["ENGINES", "EXCHANGES", "RANKS", "ServeSettings"]

ENGINES = ("auto", "reference", "graph")
EXCHANGES = ("peers", "nccl")
RANKS = (1, 2, 4, 8)
"""A rank's flags and its part of the draft's shortlist need powers of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a server decodes and what it refuses.

    Raises:
        ConfigError: a value is out of range.
    """

    engine: str = "auto"
    """reference: plain PyTorch; graph: one captured GPU graph a step, or an error where it cannot
    run; auto: graph where it can."""
    tp: int = 1
    """Tensor-parallel ranks, a process and a GPU each; for Ling-3.0."""
    exchange: str = "peers"
    """How ranks on GPUs add up their parts. peers: each reads the memory of the others; nccl: by
    that library, which is slower and needs no such access."""
    context: int | None = None
    """Positions of a prompt and its output together; None: the target's, and on the graph engine,
    which allocates them, at most 32768."""
    num_draft_tokens: int | None = None
    """Proposals verified a step; None takes what `decoding.draft_limit` finds best."""
    confidence_threshold: float = 0.0
    """Stop proposing where the draft's own confidence falls below this (0..1; 0 never stops)."""
    simulate_accept_length: float | None = None
    """Accept so many tokens a step on average (bonus included), whatever the draft proposes: for
    weights that mean nothing. None: proposals are judged."""
    default_max_tokens: int = 512
    """Output limit of a request that names none (less where the context ends first)."""
    max_output_tokens: int = 8192
    """Most tokens one request may ask for."""
    prefix_cache_bytes: int = 1 << 30
    """What prefill left of prompts, kept for those that begin alike; 0: every prompt is read
    whole. The output is the same."""
    max_queue: int = 32
    """Requests that may wait while one is decoded; a further one gets a 429."""
    deadline_s: float = 600.0
    """From the arrival of a request to its last token; then it is ended as it stands."""
    step_timeout_s: float = 120.0
    """A step that takes longer hangs, and so does the reading of a prompt that takes longer for
    each piece it is read in: /health fails, and an engine process is given up."""
    load_timeout_s: float = 3600.0
    """How long an engine process may take until it can decode."""
    drain_s: float = 30.0
    """After SIGTERM, how long running and waiting requests may take to finish."""
    keepalive_s: float = 15.0
    """A stream of OpenAI's routes that was silent for this long gets a comment; 0: never."""
    max_body_bytes: int = 4 << 20
    """Largest request body."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"serve.engine must be {', '.join(ENGINES)}, got '{self.engine}'")
        if self.tp not in RANKS:
            raise ConfigError(f"serve.tp must be one of {RANKS}, got {self.tp}")
        if self.exchange not in EXCHANGES:
            known = ", ".join(EXCHANGES)
            raise ConfigError(f"serve.exchange must be {known}, got '{self.exchange}'")
        if self.exchange != "peers" and self.tp == 1:
            raise ConfigError(
                f"serve.exchange is {self.exchange}, and serve.tp 1 has nothing to exchange: "
                "leave it out"
            )
        if self.context is not None and self.context < 2:
            raise ConfigError(f"serve.context must be >= 2, got {self.context}")
        for name in ("default_max_tokens", "max_output_tokens", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"serve.{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_queue", "prefix_cache_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"serve.{name} must be >= 0, got {getattr(self, name)}")
        for name in ("deadline_s", "step_timeout_s", "load_timeout_s", "drain_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"serve.{name} must be a number of seconds > 0, got {value}")
        if not (math.isfinite(self.keepalive_s) and self.keepalive_s >= 0):
            raise ConfigError(
                f"serve.keepalive_s must be a number of seconds >= 0, got {self.keepalive_s}"
            )
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ConfigError(
                f"serve.confidence_threshold must be in 0..1, got {self.confidence_threshold}"
            )
        simulated = self.simulate_accept_length
        if simulated is not None and not (math.isfinite(simulated) and simulated >= 1):
            raise ConfigError(
                "serve.simulate_accept_length must be >= 1, the target's own token, got "
                f"{simulated}"
            )
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise ConfigError(
                f"serve.num_draft_tokens must be >= 1 (leave the draft out to decode without one), "
                f"got {self.num_draft_tokens}"
            )
