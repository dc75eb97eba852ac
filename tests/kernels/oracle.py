"""Proposals that are known beforehand, in the place of a draft, and what a step makes of them."""

from collections.abc import Sequence

import torch

from dspark.decoding import DecodeParams
from dspark.kernels.accept import Field
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep


class Oracle:
    """Proposes what it was told, at the positions it was told: a draft as good as one likes.

    ``step``: without a draft; it verifies up to ``limit`` proposals from now on.
    """

    def __init__(self, step: GraphStep, limit: int) -> None:
        step.limit, step.target_body.most_rows = limit, limit + 1
        self.step = step
        self.table = torch.zeros(2048, dtype=torch.int32, device=step.device)
        self.slots = torch.arange(16, device=step.device)
        self.generator = torch.Generator().manual_seed(limit)
        step.propose = self  # type: ignore[method-assign]

    def tell(self, tokens: Sequence[int], wrong: float = 0.0) -> None:
        """Propose ``tokens``, a share ``wrong`` of them mistaken."""
        known = torch.tensor(list(tokens), dtype=torch.int32)
        noise = torch.rand(len(known), generator=self.generator) < wrong
        self.table[: len(known)] = torch.where(noise, known ^ 1, known).to(self.table.device)

    def __call__(self) -> None:
        arena = self.step.arena
        at = arena.of(Field.CURSOR).long() + 1 + self.slots
        arena.proposals.copy_(self.table[at])
        arena.of(Field.COUNT).copy_(arena.of(Field.LIMIT))


def outputs(
    step: GraphStep, ids: Sequence[int], params: DecodeParams
) -> tuple[list[int], list[int]]:
    """Tokens, and how many proposals each step kept."""
    commits = list(GraphDecoder(step).stream(ids, params))
    assert commits[-1].finish_reason is not None
    return [one for c in commits for one in c.token_ids], [c.num_accepted for c in commits[1:]]
