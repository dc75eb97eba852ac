"""What is meant by acceptance, once, for training, evaluation, benchmark and server.

Symbols: B batch, A anchors, K slots of a block.

- ``num_accepted``: drafted tokens that were kept in one verify round, 0..K.
- ``num_emitted``: tokens the round added to the output, the target's own token (bonus or
  correction) included. Normally ``num_accepted + 1``; a round cut by a stop id, a stop string or
  the token limit emits what stood before the cut, and only that counts.
- ``accept_length`` (tau): mean of ``num_emitted`` over rounds, pooled. The token that the prefill
  yields is no round. ``accepted_drafts`` is the mean of ``num_accepted``: the other convention.
- ``survival[k]``: share of the rounds that proposed slot k in which slots 0..k were all kept.
- ``accept_rate[k]``: share of the rounds that reached slot k (slots 0..k-1 kept) in which slot k
  was kept too: conditional.
- ``full_block_rate``: share of the rounds that proposed the last slot which kept all slots.
- ``verify_rate``: emitted / (proposed + rounds).

In training the same two names are the teacher-forced expectations from ``alpha``, the overlap
sum_v min(p(v), q(v)) of one slot (DSpark, arXiv 2607.05147, section on training metrics):
``accept_rate@k`` is the mean of alpha over supervised slots, ``survival@k`` the mean of
prod_{i<=k} alpha_i, ``accepted_drafts`` the mean over valid blocks of sum_k prod_{i<=k} alpha_i,
and ``tau`` that plus one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["AcceptStats", "expected_accepted", "macro_accept_length", "pooled", "survival"]


def survival(
    alpha: Tensor,  # [..., K] float in 0..1
    mask: Tensor,  # [..., K] bool, a contiguous supervised prefix
) -> Tensor:  # [..., K] float: prod_{i<=k} alpha_i, 0 on unsupervised slots
    """Chance that slots 0..k are all kept."""
    return torch.cumprod(alpha * mask, dim=-1)


def expected_accepted(
    alpha: Tensor,  # [..., K] float in 0..1
    mask: Tensor,  # [..., K] bool
) -> Tensor:  # [...] float in 0..K
    """Expected accepted drafts of each block, the bonus token not counted."""
    return survival(alpha, mask).sum(-1)


@dataclass
class AcceptStats:
    """Counts of verify rounds; everything published is computed from these."""

    block_size: int
    """Most tokens one round can propose (K)."""
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    """Rounds that proposed slot k, for each k."""
    reached_at: list[int] = field(default_factory=list)
    """Rounds that proposed slot k and kept slots 0..k-1, for each k."""
    kept_at: list[int] = field(default_factory=list)
    """Rounds that kept slots 0..k, for each k."""
    histogram: list[int] = field(default_factory=list)
    """Rounds by ``num_emitted``, index 0..K+1."""

    def __post_init__(self) -> None:
        self.proposed_at = self.proposed_at or [0] * self.block_size
        self.reached_at = self.reached_at or [0] * self.block_size
        self.kept_at = self.kept_at or [0] * self.block_size
        self.histogram = self.histogram or [0] * (self.block_size + 2)

    def add(self, *, num_proposed: int, num_accepted: int, num_emitted: int) -> None:
        """Count one round. ``num_accepted`` and ``num_emitted`` are those after any cut."""
        assert 0 <= num_accepted <= num_proposed <= self.block_size
        assert num_accepted <= num_emitted <= num_accepted + 1
        self.rounds += 1
        self.proposed += num_proposed
        self.accepted += num_accepted
        self.emitted += num_emitted
        for k in range(num_proposed):
            self.proposed_at[k] += 1
            self.reached_at[k] += num_accepted >= k
        for k in range(num_accepted):
            self.kept_at[k] += 1
        self.histogram[num_emitted] += 1

    def merge(self, other: "AcceptStats") -> None:
        """Add the counts of ``other`` (same block size)."""
        assert other.block_size == self.block_size
        self.rounds += other.rounds
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.emitted += other.emitted
        for name in ("proposed_at", "reached_at", "kept_at", "histogram"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])

    @property
    def accept_length(self) -> float:
        """Tokens a round emits on average, the target's own token included; 0 without rounds."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def accepted_drafts(self) -> float:
        """Drafted tokens a round keeps on average; 0 without rounds."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def survival(self) -> list[float]:
        return [k / p if p else 0.0 for k, p in zip(self.kept_at, self.proposed_at, strict=True)]

    @property
    def accept_rate(self) -> list[float]:
        return [k / r if r else 0.0 for k, r in zip(self.kept_at, self.reached_at, strict=True)]

    @property
    def full_block_rate(self) -> float:
        return self.survival[-1] if self.block_size else 0.0

    @property
    def verify_rate(self) -> float:
        rows = self.proposed + self.rounds
        return self.emitted / rows if rows else 0.0

    def summary(self) -> dict[str, Any]:
        """All figures by name, as reports and metrics carry them."""
        return {
            "accept_length": self.accept_length,
            "accepted_drafts": self.accepted_drafts,
            "verify_rate": self.verify_rate,
            "rounds": self.rounds,
            "emitted": self.emitted,
            "survival": self.survival,
            "accept_rate": self.accept_rate,
            "histogram": list(self.histogram),
        }


def pooled(stats: Iterable[AcceptStats], block_size: int) -> AcceptStats:
    """All rounds of several prompts together (micro mean)."""
    total = AcceptStats(block_size)
    for one in stats:
        total.merge(one)
    return total


def macro_accept_length(stats: Iterable[AcceptStats]) -> float:
    """Mean of the prompts' own accept lengths; prompts without a round are left out."""
    each = [one.accept_length for one in stats if one.rounds]
    return sum(each) / len(each) if each else 0.0
