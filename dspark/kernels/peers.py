"""Memory that the ranks of a step read from each other, and how one waits for the others.

Each rank has a heap of the same layout, which the others have mapped. In a room of the heap a
program writes what it has to say, tells every rank by a flag, waits for the flags of all, and reads
what they have written. Flags count: a program's n-th exchange waits for flags of at least n, so
that nothing is ever reset and a captured graph can be replayed. What is written goes to two places
by turns. A rank that writes to the first one again has seen all flags of the exchange in between,
and a rank sets that flag behind its own reads of the one before: a fast rank can not overwrite what
a slow one still reads.

A wait has an end: a rank that does not come is noted in `Peers.fault`, and from then on nobody
waits any more.

Symbols: N ranks, Z of them in this process (one, but for tests), P programs of a room.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "Peers",
    "Room",
    "await_all",
    "dawdle",
    "room_bytes",
    "simulated",
    "spoken",
    "tell_all",
    "turn_of",
]

_ALIGNED = 256
_INT32_MAX = (1 << 31) - 1
_LOOKS_PER_S = 1_000_000
"""Of a program that waits, on an H200. It counts looks since a clock is read by each thread for
itself."""


@dataclass(frozen=True)
class Room:
    """A part of every heap, for exchanges of one kind."""

    peers: "Peers"
    flags: int
    """Bytes before the flags [N, P] int32: of each rank's programs."""
    data: int
    """Bytes before what is said, [2, P, width] words of four bytes."""
    programs: int
    width: int
    turns: Tensor  # [Z, P] int32, exchanges that each program has behind it


class Peers:
    """This process's view of the heaps.

    Args:
        heaps: of all ranks in order, uint8 and of one size, as mapped here.
        first: the rank of this process, of several ranks the first.
        local: ranks of this process, which share its launches.

    Attributes:
        fault: [Z] int32, one more than the rank that did not come in time; 0: none.
        looks: [1] int32, how often a program looks for the flags of an exchange.

    Raises:
        ValueError: the number of ranks is no power of two.
    """

    def __init__(self, heaps: Sequence[Tensor], first: int = 0, local: int = 1) -> None:
        if len(heaps) & (len(heaps) - 1):
            raise ValueError(f"the number of ranks must be a power of two, got {len(heaps)}")
        device = heaps[first].device
        self.heaps, self.first, self.local = tuple(heaps), first, local
        self.bases = torch.tensor([one.data_ptr() for one in heaps], device=device)
        self.fault = torch.zeros(local, dtype=torch.int32, device=device)
        self.looks = torch.zeros(1, dtype=torch.int32, device=device)
        self.held_bytes = 0
        self.wait_at_most(2.0)

    @property
    def ranks(self) -> int:
        return len(self.heaps)

    def room(self, programs: int, width: int) -> Room:
        """A new room; every rank must ask for the same ones in the same order.

        Raises:
            ValueError: the heaps are too small.
        """
        flags = self.held_bytes
        data = flags + _aligned(4 * self.ranks * programs)
        end = data + _aligned(4 * 2 * programs * width)
        if end > len(self.heaps[0]):
            raise ValueError(
                f"a room of {programs} x {width} words needs heaps of {end} bytes, they have "
                f"{len(self.heaps[0])}"
            )
        self.held_bytes = end
        device = self.bases.device
        turns = torch.zeros(self.local, programs, dtype=torch.int32, device=device)
        return Room(self, flags, data, programs, width, turns)

    def wait_at_most(self, seconds: float) -> None:
        """How long exchanges that are launched from now on wait for the other ranks, about."""
        self.looks.fill_(int(min(seconds * _LOOKS_PER_S, _INT32_MAX)))


def room_bytes(ranks: int, programs: int, width: int) -> int:
    """Bytes of a heap that a room takes."""
    return _aligned(4 * ranks * programs) + _aligned(8 * programs * width)


def simulated(ranks: int, num_bytes: int, device: torch.device | str) -> Peers:
    """All ranks in this process, whose launches then do the work of each."""
    heaps = torch.zeros(ranks, _aligned(num_bytes), dtype=torch.uint8, device=device)
    return Peers(list(heaps), local=ranks)


@triton.jit
def turn_of(turns, program):
    """Number of this exchange; int32, and may wrap."""
    return tl.load(turns + program) + 1


@triton.jit
def spoken(bases, rank, data, turn, program, WIDTH: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where ``rank``'s program writes in this turn, int32 words."""
    words = (tl.load(bases + rank) + data).to(tl.pointer_type(tl.int32))
    words += ((turn & 1) * PROGRAMS + program).to(tl.int64) * WIDTH
    if WIDTH % 4 == 0:
        # what the compiler can not know of an address that it finds in memory
        words = tl.multiple_of(words, 16)
    return words


@triton.jit
def tell_all(
    bases, flags, turn, program, rank,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Set the flag of this program at every rank, behind all that the program has written."""
    theirs = (tl.load(bases + tl.arange(0, RANKS)) + flags).to(tl.pointer_type(tl.int32))
    theirs += rank * PROGRAMS + program
    # a thread's release below covers what the others have written before this
    tl.debug_barrier()
    tl.atomic_xchg(theirs, tl.full([RANKS], 0, tl.int32) + turn, sem="release", scope="sys")


@triton.jit
def _seen(flag):
    """The flag; what was written before it was set is visible to every thread behind this.

    Read by one thread for all, as an addition of nothing (which becomes a load): threads that each
    looked for themselves could part ways in a loop.
    """
    return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def dawdle(turn, program, rank, fault, MOST: tl.constexpr):
    """Look about up to ``MOST`` times, by a hash: as a rank that is late, for tests."""
    mixed = (turn * 0x2545F491) ^ (program * 0x1B873593) ^ (rank * 0x3C6EF372)
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * 0x7FEB352D
    for _ in range(((mixed >> 16) & 0xFFFF) % MOST):
        _seen(fault)


@triton.jit
def await_all(
    bases, flags, turn, program, rank, looks, fault,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Wait until every rank has told of this turn; or not, once one was late."""
    # one that was missed makes all that follows worthless: a step ends at once
    left = tl.where(_seen(fault) != 0, 0, tl.load(looks))
    mine = (tl.load(bases + rank) + flags).to(tl.pointer_type(tl.int32)) + program
    for peer in tl.static_range(RANKS):
        # the difference, since the count wraps
        behind = (_seen(mine + peer * PROGRAMS) - turn) < 0
        while behind & (left > 0):
            behind = (_seen(mine + peer * PROGRAMS) - turn) < 0
            left -= 1
        if behind:
            tl.atomic_cas(fault, 0, peer + 1, sem="relaxed")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
