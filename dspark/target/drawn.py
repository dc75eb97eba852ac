"""Weights that no file holds: drawn from a seed where the model stays.

A checkpoint whose config.json has `synthetic_weights` is such a model: a directory of a few
kilobytes stands for 250 GB wherever only shapes matter, one GPU or several.

    "synthetic_weights": {"seed": 0, "expert_pool": 128}

`expert_pool`: routers choose among so many experts only, spread over their groups, so that the rows
of a step share experts as those of a text do; without it they choose among all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.target.config import LingConfig
from dspark.target.model import LingModel

__all__ = ["KEY", "Drawn", "draw", "fill_drawn", "keep_to_pool"]

KEY = "synthetic_weights"
_NEVER = 100.0
"""Less than this much an expert's bias is out of reach of any score."""


@dataclass(frozen=True)
class Drawn:
    """How the weights of a checkpoint without files come about."""

    seed: int
    expert_pool: int | None = None

    @classmethod
    def of(cls, config: LingConfig, where: str = "config.json") -> "Drawn | None":
        """What ``config`` asks for; None: its weights are in files.

        Raises:
            TargetError: the key is not understood, or the pool is too small or too large.
        """
        asked = config.raw.get(KEY)
        if asked is None:
            return None
        known = {"seed", "expert_pool"}
        if not isinstance(asked, Mapping) or not {"seed"} <= asked.keys() <= known:
            raise TargetError(
                f'{where}: {KEY} must be {{"seed": N}} or {{"seed": N, "expert_pool": M}}, got '
                f"{asked!r}"
            )
        seed, pool = asked["seed"], asked.get("expert_pool")
        for name, value in asked.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise TargetError(f"{where}: {KEY}.{name} must be an integer >= 0, got {value!r}")
        high = config.num_experts
        low = config.n_group * math.ceil(config.num_experts_per_tok / config.topk_group)
        if pool is not None and not low <= pool <= high:
            raise TargetError(
                f"{where}: {KEY}.expert_pool must lie in {low}..{high} ({config.topk_group} of "
                f"{config.n_group} groups are to hold {config.num_experts_per_tok}), got {pool}"
            )
        return cls(seed, pool)

    def to_json(self) -> dict[str, Any]:
        """As in config.json."""
        pool = {} if self.expert_pool is None else {"expert_pool": self.expert_pool}
        return {"seed": self.seed, **pool}


@torch.no_grad()
def fill_drawn(model: LingModel, device: torch.device | str, drawn: Drawn) -> LingModel:
    """Draw all values of a meta model on ``device``; no second copy.

    Ranks of one seed hold the same values in parts that are like each other: what they share is
    equal, and what they divide is one part again and again.
    """
    config = model.config
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(drawn.seed)
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        draw(values, name, config, generator)
        if drawn.expert_pool is not None and name.endswith("expert_bias"):
            keep_to_pool(values, config, drawn.expert_pool)
    return model.requires_grad_(False)


def keep_to_pool(bias: Tensor, config: LingConfig, pool: int) -> None:
    """Put all but ``pool`` experts, of each group alike, out of a router's reach; [E], in place."""
    groups = torch.arange(config.num_experts, device=bias.device).view(config.n_group, -1)
    bias -= _NEVER
    bias[groups.T.flatten()[:pool]] += _NEVER


def draw(values: Tensor, name: str, config: LingConfig, generator: torch.Generator) -> Tensor:
    """Decays lie all over their range and the router's bias is not zero: no branch idles."""
    if name.endswith("A_log"):
        return values.uniform_(1, 16, generator=generator).log_()
    if name.endswith("dt_bias"):
        return values.normal_(generator=generator)
    if name.endswith("expert_bias"):
        return values.normal_(0, 0.1, generator=generator)
    if "norm" in name.split(".")[-2]:
        return values.normal_(1, 0.1, generator=generator)
    return values.normal_(0, config.initializer_range, generator=generator)
