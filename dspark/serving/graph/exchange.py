"""The rooms of a step's exchanges on one of several ranks.

Symbols: R = 16 rows, D hidden, N ranks, V vocabulary, K slots, C candidates of a slot.
"""

import torch
from torch import Tensor

from dspark.kernels.exchange import (
    CHOICE_WORDS,
    add_ranks,
    choose,
    exchange_norm,
    gather,
)
from dspark.kernels.launch import ROWS
from dspark.kernels.peers import Peers
from dspark.serving.engine import EngineLost

__all__ = [
    "SHORTLIST_EACH",
    "SHORTLIST_PARTS",
    "Exchange",
    "PromptSum",
    "candidates_of",
    "lost_rank",
]

SHORTLIST_PARTS = 16
SHORTLIST_EACH = 8
_LOGITS_WIDTH = 1024
"""Words of a program that gathers logits."""
_SUM_PROGRAMS, _SUM_WIDTH = 256, 4096
"""Programs of a prompt's sum, and words of each: all of them run at once."""
_STEP_S = 2.0
_PROMPT_S = 60.0
_COMPILE_S = 900.0
"""How long a rank is waited for: in a step, while prompts are read, and while kernels are made."""


class Exchange:
    """This rank's rooms for one step.

    Attributes:
        share: ids of the vocabulary that a rank has.
        first: the lowest of this rank.
        candidates: of a slot, on this rank.
    """

    def __init__(self, peers: Peers, hidden: int, share: int, slots: int) -> None:
        self.peers, self.share, self.first = peers, share, peers.first * share
        self.candidates, self.slots = candidates_of(peers.ranks), slots
        self._sums = peers.room(ROWS, hidden)
        self._choice = peers.room(ROWS, CHOICE_WORDS)
        self._shortlist = peers.room(2 * slots, self.candidates) if slots else None
        self._logits = peers.room(ROWS * -(-share // _LOGITS_WIDTH), _LOGITS_WIDTH)
        self._meeting = peers.room(1, 4)
        self._mark = torch.zeros(1, 4, dtype=torch.int32, device=peers.bases.device)
        self._marks = self._mark.repeat(1, peers.ranks)

    def norm(
        self,
        parts: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        eps: float,
        residual: Tensor | None = None,
        factors: Tensor | None = None,
        tap: Tensor | None = None,
        warps: int = 8,
    ) -> None:
        """`exchange_norm` in this step's room."""
        exchange_norm(
            self._sums, parts, weight, out, eps=eps, residual=residual, factors=factors, tap=tap,
            warps=warps,
        )  # fmt: skip

    def shortlist(self, mine: Tensor, whole: Tensor) -> None:
        """Values and ids [2, K, C / N] of all ranks, into [2, K, C]."""
        assert self._shortlist is not None
        gather(self._shortlist, mine.flatten(0, 1), whole.flatten(0, 1))

    def logits(self, mine: Tensor, whole: Tensor) -> None:
        """[R, V / N] of all ranks, into [R, V]."""
        gather(self._logits, mine, whole)

    def choose(
        self, values: Tensor, ids: Tensor, mailbox: Tensor, best: Tensor, best_ids: Tensor
    ) -> None:
        """Each rank's best of each row [R, N], and rank 0's mailbox."""
        choose(self._choice, values, ids, mailbox, best, best_ids)

    def in_steps(self) -> None:
        """From here on ranks wait as long as a step may take another one."""
        self.peers.wait_at_most(_STEP_S)

    def in_prompts(self) -> None:
        """The same of what reads a prompt."""
        self.peers.wait_at_most(_PROMPT_S)

    def in_compiling(self) -> None:
        """The same of what compiles kernels and captures them."""
        self.peers.wait_at_most(_COMPILE_S)

    def meet(self) -> None:
        """Wait until every rank has come here.

        Raises:
            EngineLost: one has not.
        """
        gather(self._meeting, self._mark, self._marks)
        self.check()

    def check(self) -> None:
        """Wait for the device, and see whether every rank has come to every exchange so far.

        Raises:
            EngineLost: one has not.
        """
        if missing := int(self.peers.fault[0]):
            raise EngineLost(lost_rank(missing - 1))


class PromptSum:
    """Sums of what reads a prompt: the `Reduce` of a rank's model."""

    def __init__(self, peers: Peers) -> None:
        self._room = peers.room(_SUM_PROGRAMS, _SUM_WIDTH)

    def __call__(self, part: Tensor) -> Tensor:
        out = torch.empty_like(part, memory_format=torch.contiguous_format)
        add_ranks(self._room, part, out)
        return out


def lost_rank(rank: int) -> str:
    """What to say of a rank that an exchange waited for in vain."""
    return f"rank {rank} did not come to an exchange in time; its log says why, if it is there"


def candidates_of(ranks: int) -> int:
    """Of a slot, on each rank."""
    return SHORTLIST_PARTS // ranks * SHORTLIST_EACH
