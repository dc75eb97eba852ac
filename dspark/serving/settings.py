"""Limits of a server; each one holds for every request, whatever the client asks for."""

import math
from dataclasses import dataclass

from dspark.errors import ConfigError

__all__ = ["ServeSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """How a server decodes and what it refuses.

    Raises:
        ConfigError: a value is out of range.
    """

    num_draft_tokens: int | None = None
    """Proposals verified a step; None takes what `decoding.draft_limit` finds best."""
    confidence_threshold: float = 0.0
    """Stop proposing where the draft's own confidence falls below this (0..1; 0 never stops)."""
    default_max_tokens: int = 512
    """Output limit of a request that names none (less where the context ends first)."""
    max_output_tokens: int = 8192
    """Most tokens one request may ask for."""
    max_queue: int = 32
    """Requests that may wait while one is decoded; a further one gets a 429."""
    deadline_s: float = 600.0
    """From the arrival of a request to its last token; then it is ended as it stands."""
    stale_after_s: float = 60.0
    """/health fails when the worker has made no progress for this long."""
    drain_s: float = 30.0
    """After SIGTERM, how long running and waiting requests may take to finish."""
    max_body_bytes: int = 4 << 20
    """Largest request body."""

    def __post_init__(self) -> None:
        for name in ("default_max_tokens", "max_output_tokens", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"serve.{name} must be >= 1, got {getattr(self, name)}")
        if self.max_queue < 0:
            raise ConfigError(f"serve.max_queue must be >= 0, got {self.max_queue}")
        for name in ("deadline_s", "stale_after_s", "drain_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"serve.{name} must be a number of seconds > 0, got {value}")
        if not 0.0 <= self.confidence_threshold <= 1.0:
            raise ConfigError(
                f"serve.confidence_threshold must be in 0..1, got {self.confidence_threshold}"
            )
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1:
            raise ConfigError(
                f"serve.num_draft_tokens must be >= 1 (leave the draft out to decode without one), "
                f"got {self.num_draft_tokens}"
            )
