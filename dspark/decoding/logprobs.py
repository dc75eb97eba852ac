"""How likely the target found the tokens that were chosen, and which were likelier.

From the logits themselves: temperature and filters change what is drawn, not these figures. Each
row is reduced alone, so that they do not depend on how many rows a step has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MAX_TOP_LOGPROBS", "Logprob", "logprobs_of"]

MAX_TOP_LOGPROBS = 20
_LEAST = -9999.0
"""Instead of minus infinity, which JSON cannot write; OpenAI has the same."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token of an output."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest ids at this place, in order; ties by id."""


def logprobs_of(
    logits: Tensor,  # [T, V]
    token_ids: list[int],  # T
    top: int,
) -> list[Logprob]:
    """One entry a token, with ``top`` alternatives."""
    entries = []
    for row, token_id in zip(logits, token_ids, strict=True):
        scores = row.float().log_softmax(-1)
        best = torch.topk(scores, min(top, len(scores)))
        pairs = zip(best.indices.tolist(), map(_finite, best.values.tolist()), strict=True)
        ranked = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        entries.append(Logprob(token_id, _finite(float(scores[token_id])), ranked))
    return entries


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST
