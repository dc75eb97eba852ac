"""The exchanges of a step by a library's collectives, where GPUs do not read each other's memory.

Everything is gathered and then added in the order of the ranks, as `kernels.exchange` does it: in a
library's own sums the order may depend on the place of a row. It takes two or three launches where
that takes one, and nobody sees a rank that does not come but the server, by its signs of life.

Symbols: R = 16 rows, D hidden, N ranks, V vocabulary, K slots, C candidates of a slot, W words.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.kernels.accept import NONE
from dspark.kernels.exchange import CHOICE_WORDS
from dspark.kernels.launch import ROWS
from dspark.kernels.reduce_norm import parts_norm, reduce_norm
from dspark.serving.graph.exchange import candidates_of

__all__ = ["Gathered", "Library"]


@dataclass(frozen=True)
class Library:
    """The process group in the place of `kernels.peers.Peers`."""

    ranks: int
    first: int
    """The rank of this process."""
    fault: Tensor  # [1] int32, always 0: nobody is missed here


class Gathered:
    """As `exchange.Exchange`."""

    def __init__(self, peers: Library, hidden: int, share: int, slots: int) -> None:
        self.peers, self.share, self.first = peers, share, peers.first * share
        self.candidates, self.slots = candidates_of(peers.ranks), slots
        like = peers.fault
        self._sum = like.new_zeros(ROWS, hidden, dtype=torch.float32)
        self._sums = like.new_zeros(peers.ranks, ROWS, hidden, dtype=torch.float32)
        self._choice = like.new_zeros(ROWS, CHOICE_WORDS)
        self._choices = like.new_zeros(peers.ranks, ROWS, CHOICE_WORDS)
        self._shortlist = like.new_zeros(peers.ranks, 2 * slots, self.candidates)
        self._logits = like.new_zeros(peers.ranks, ROWS, share, dtype=torch.float32)

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
        """As `kernels.exchange.exchange_norm`."""
        if factors is None:
            torch.sum(parts, 0, dtype=torch.float32, out=self._sum)
        else:
            torch.sum(parts.float() * factors[..., None], 1, out=self._sum)
        _gather(self._sum, self._sums)
        # behind a kernel of the library nothing can begin before it ends
        if residual is None:
            parts_norm(self._sums, weight, out, eps=eps, pdl=False)
            return
        reduce_norm(
            self._sums, residual, weight, out, eps=eps, tap=tap, warps=warps, pdl=False
        )  # fmt: skip

    def shortlist(self, mine: Tensor, whole: Tensor) -> None:
        """Values and ids [2, K, C / N] of all ranks, into [2, K, C]."""
        _words(mine.flatten(0, 1), self._shortlist, whole.flatten(0, 1))

    def logits(self, mine: Tensor, whole: Tensor) -> None:
        """[R, V / N] of all ranks, into [R, V]."""
        _words(mine, self._logits, whole)

    def choose(
        self, values: Tensor, ids: Tensor, mailbox: Tensor, best: Tensor, best_ids: Tensor
    ) -> None:
        """As `kernels.exchange.choose`."""
        most = values.amax(1, keepdim=True)
        self._choice[:, :1] = most.view(torch.int32)
        self._choice[:, 1] = ids.masked_fill(values != most, int(NONE.value)).amin(1)
        self._choice[:, 2] = mailbox
        _gather(self._choice, self._choices)
        best.copy_(self._choices[:, :, 0].view(torch.float32).T)
        best_ids.copy_(self._choices[:, :, 1].T)
        mailbox.copy_(self._choices[0, 0, 2:3])

    def in_steps(self) -> None:
        """A library's wait has no end that a step could set."""

    in_prompts = in_compiling = check = in_steps

    def meet(self) -> None:
        """Wait until every rank has come here."""
        dist.barrier()


def _gather(mine: Tensor, every: Tensor) -> None:
    dist.all_gather_into_tensor(every.flatten(0, 1), mine.contiguous())


def _words(mine: Tensor, every: Tensor, whole: Tensor) -> None:
    """Of each row the words of all ranks, behind one another."""
    _gather(mine, every)
    ranks, rows, words = every.shape
    whole.view(rows, ranks, words).copy_(every.transpose(0, 1))
