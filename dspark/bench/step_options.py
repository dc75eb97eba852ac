"""Options of `dspark bench step`, checked against the target before anything is filled.

This needs neither a GPU nor triton, so that a wrong option is told without either.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.bench.draft_shape import official_shape
from dspark.bench.roofline import check_dense
from dspark.bench.targets import read_target
from dspark.decoding import accept_schedule, nextn_proposals
from dspark.decoding.proposer import MAX_PROPOSALS, draft_limit
from dspark.draft import DSparkConfig
from dspark.errors import ConfigError
from dspark.export.config_json import from_json
from dspark.export.load import TargetShape, check_fit
from dspark.provenance import read_object
from dspark.serving.graph.weights import unsupported_draft, unsupported_shapes
from dspark.target.config import LingConfig
from dspark.target.families import DenseShape
from dspark.target.sizes import Routing

__all__ = [
    "OUTPUT",
    "TABLE",
    "Settled",
    "StepOptions",
    "check",
    "draft_on",
    "of_table",
    "settle",
]

OUTPUT = 1024
"""Tokens of a request, behind which the next one starts at the same context."""
TABLE = (("none", 1.0), ("nextn:5", 3.25), ("dspark", 6.6))
"""Drafts of the published comparison, with the accept lengths that are simulated for them."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is measured.

    Raises:
        ConfigError: a value is out of range.
    """

    config: Path
    """config.json of a target, or its directory."""
    ranks: int = 1
    draft: str = "dspark"
    """dspark, none, or nextn:N, the target's own NEXTN block with N proposals a step."""
    draft_config: Path | None = None
    """Of a draft; None: the official shape, scaled to the target."""
    block_size: int | None = None
    """Of the official shape; None: 8, or 7 for a dense target."""
    num_draft_tokens: int | None = None
    context: int = 8192
    routing: str = "independent"
    accept_length: float | None = None
    steps: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draft not in ("dspark", "none") and not self.nextn:
            raise ConfigError(
                f"draft must be dspark, none or nextn:N with N in 1..{MAX_PROPOSALS}, got "
                f"'{self.draft}'"
            )
        for name, low in (("ranks", 1), ("context", 1), ("steps", 10)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be >= {low}, got {getattr(self, name)}")
        if self.block_size is not None and not 1 <= self.block_size <= MAX_PROPOSALS + 1:
            raise ConfigError(
                f"block_size must lie in 1..{MAX_PROPOSALS + 1}, got {self.block_size}"
            )
        shaped = {"draft_config": self.draft_config, "block_size": self.block_size}
        for name, value in shaped.items():
            if value is not None and self.draft != "dspark":
                raise ConfigError(
                    f"{name} {value} is of a dspark draft, and the draft is '{self.draft}'"
                )
        if self.draft_config is not None and self.block_size is not None:
            raise ConfigError(
                f"block_size {self.block_size} and draft_config {self.draft_config} both say the "
                "draft's block: leave one out"
            )
        if self.draft == "none" and self.num_draft_tokens:
            raise ConfigError(f"tokens must be 1 without a draft, got {self.num_draft_tokens + 1}")
        if self.num_draft_tokens is not None and self.num_draft_tokens < 1 and draft_on(self):
            raise ConfigError(
                f"tokens must be >= 2 with a draft, the anchor and its proposals, got "
                f"{self.num_draft_tokens + 1}; one row is --draft none"
            )

    @property
    def nextn(self) -> int:
        """Proposals of the NEXTN block; 0: another draft, or none."""
        return nextn_proposals(self.draft) or 0


@dataclass(frozen=True)
class Settled:
    """What options come to for a target, known before anything is filled."""

    shape: DSparkConfig | None
    """Of the draft model."""
    proposals: int
    """Most of a step."""
    schedule: list[int]
    """Accepted proposals of each step in turn."""

    @classmethod
    def of(cls, options: StepOptions, config: LingConfig | DenseShape) -> "Settled":
        """Check the options against the target.

        Raises:
            ConfigError: a value does not fit it.
        """
        dense = isinstance(config, DenseShape)
        if dense:
            check_dense(options.ranks, options.routing)
        most = config.max_position_embeddings - OUTPUT - MAX_PROPOSALS - 1
        if options.context > most:
            raise ConfigError(
                f"context must be <= {most} ({OUTPUT} tokens of output follow, and the model has "
                f"{config.max_position_embeddings} positions), got {options.context}"
            )
        if not draft_on(options):
            if options.accept_length not in (None, 1):
                raise ConfigError(
                    f"accept length must be 1 without a draft, got {options.accept_length}"
                )
            _check_shapes(config, None, options.ranks)
            return cls(None, 0, [0])
        shape, block = None, options.nextn
        has_block = isinstance(config, LingConfig) and config.num_nextn_predict_layers
        if block and not has_block:
            raise ConfigError(
                f"draft is {options.draft}, but the target has no NEXTN block: "
                "num_nextn_predict_layers is 0"
            )
        if not block:
            path = options.draft_config
            raw: dict[str, Any] = (
                official_shape(config, options.block_size or (7 if dense else 8))
                if path is None
                else read_object(path, ConfigError)
            )
            where = str(path or "draft")
            shape = from_json(raw, where, target_layers=config.num_hidden_layers)
            check_fit(shape, TargetShape.of(config, str(options.config)), where)
            block = shape.block_size or 0
        _check_shapes(config, shape, options.ranks)
        wanted, most = options.num_draft_tokens, min(block, MAX_PROPOSALS)
        if wanted is not None and wanted > most:
            raise ConfigError(
                f"tokens must lie in 2..{most + 1} with a block of {block}, the anchor and its "
                f"proposals, got {wanted + 1}"
            )
        proposals = draft_limit(block, most if wanted is None else wanted)
        accept = (1 + proposals) / 2 if options.accept_length is None else options.accept_length
        return cls(shape, proposals, accept_schedule(accept, proposals))


def settle(options: StepOptions) -> tuple[LingConfig | DenseShape, Settled]:
    """The target's config, and what ``options`` come to for it.

    Raises:
        TargetError: there is no target.
        ConfigError: an option does not fit it.
    """
    config = read_target(options.config)
    return config, Settled.of(options, config)


def check(*options: StepOptions) -> None:
    """Settle each, and see whether the widest step can be routed as asked.

    Raises:
        TargetError, ConfigError: as `settle`.
    """
    found = [settle(one) for one in options]
    config = found[0][0]
    if isinstance(config, LingConfig):
        rows = 1 + max(settled.proposals for _, settled in found)
        Routing.parse(options[0].routing).check(config, rows)


def of_table(options: StepOptions) -> list[StepOptions]:
    """``options`` with the drafts of `TABLE` that the target has.

    The rows of a step are those of the DSpark draft.

    Raises:
        TargetError: there is no target.
        ConfigError: it has no kernels.
    """
    ling = isinstance(read_target(options.config), LingConfig)
    bare = replace(options, num_draft_tokens=None, draft_config=None, block_size=None)
    return [
        replace(options if draft == "dspark" else bare, draft=draft, accept_length=accept_length)
        for draft, accept_length in TABLE
        if ling or not draft.startswith("nextn")
    ]


def _check_shapes(config: LingConfig | DenseShape, draft: DSparkConfig | None, ranks: int) -> None:
    if isinstance(config, DenseShape):  # which itself was checked when it was read
        reason = unsupported_draft(draft) if draft is not None else None
    else:
        reason = unsupported_shapes(config, draft, ranks)
    if reason:
        raise ConfigError(f"the graph engine cannot run this: {reason}")


def draft_on(options: StepOptions) -> bool:
    """Whether there is a draft."""
    return options.draft != "none"
