"""The end of a step: the target's token of every row, the proposals it confirms, the new state.

Everything a next step needs is written here, so that the host need not know it: the graph is
launched again before the host has read what this step gave. The record of the step goes to a ring.

Symbols: R = 16 rows, T live rows, V vocabulary, P parts of it, Q records of the ring.
"""

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, flags
from dspark.kernels.noise import gumbel, noise_key

__all__ = ["NONE", "RECORD", "RING", "STOP_IDS", "Done", "Field", "Real", "Record", "accept",
           "best_of_part", "pick_parts"]  # fmt: skip

STOP_IDS = 8
RING = 64
"""Records of the ring: far more than steps are ever queued."""
RECORD = 32
"""int32 numbers of a record."""


class Field(IntEnum):
    """Places of the integer state, int32."""

    CURSOR = 0
    """Tokens committed; the anchor stands at this position."""
    ANCHOR = 1
    START_SLOT = 2
    """Rows that the last step kept: where KDA layers go on."""
    TURN = 3
    LIVE_ROWS = 4
    COUNT = 5
    """Proposals of this step."""
    LIMIT = 6
    """Most proposals of the next step."""
    NUM_DRAFT = 7
    LEFT = 8
    """Tokens that may still be emitted."""
    DONE = 9
    SERIAL = 10
    REQUEST = 11
    INJECT_BASE = 12
    INJECT_COUNT = 13
    """Rows of taps that the draft has not read, and the position of their first."""
    TOP_K = 14
    SEED_LOW = 15
    SEED_HIGH = 16
    SIMULATED = 17
    """Length of the schedule of accepted proposals; 0: they are counted, not simulated."""
    NUM_STOPS = 18
    DRAFT_CURSOR = 19
    """Position of the row that a draft reads which proposes one token after the other."""
    DRAFT_ROWS = 20
    """1 while such a draft goes on, 0 behind its last proposal."""
    STOPS = 21


class Real(IntEnum):
    """Places of the float32 state."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    THRESHOLD = 3


class Done(IntEnum):
    """Why nothing more is emitted."""

    NO = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    NOT_A_NUMBER = 4
    LOST = 5
    """Another rank did not come; the record has one more than its number."""


class Record(IntEnum):
    """Places of a record; emitted tokens from IDS on."""

    SERIAL = 0
    REQUEST = 1
    EMITTED = 2
    ACCEPTED = 3
    PROPOSED = 4
    DONE = 5
    CLOCK_LOW = 6
    CLOCK_HIGH = 7
    IDS = 8
    CURSOR = 24
    FAULT = 25
    CHECK = 31


NONE = tl.constexpr(2147483647)
"""The id where no score is a number."""
_CURSOR = tl.constexpr(int(Field.CURSOR))
_ANCHOR = tl.constexpr(int(Field.ANCHOR))
_START_SLOT = tl.constexpr(int(Field.START_SLOT))
_TURN = tl.constexpr(int(Field.TURN))
_LIVE_ROWS = tl.constexpr(int(Field.LIVE_ROWS))
_COUNT = tl.constexpr(int(Field.COUNT))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_NUM_DRAFT = tl.constexpr(int(Field.NUM_DRAFT))
_LEFT = tl.constexpr(int(Field.LEFT))
_DONE = tl.constexpr(int(Field.DONE))
_SERIAL = tl.constexpr(int(Field.SERIAL))
_REQUEST = tl.constexpr(int(Field.REQUEST))
_INJECT_BASE = tl.constexpr(int(Field.INJECT_BASE))
_INJECT_COUNT = tl.constexpr(int(Field.INJECT_COUNT))
_SEED_LOW = tl.constexpr(int(Field.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Field.SEED_HIGH))
_SIMULATED = tl.constexpr(int(Field.SIMULATED))
_NUM_STOPS = tl.constexpr(int(Field.NUM_STOPS))
_STOPS = tl.constexpr(int(Field.STOPS))
_TEMPERATURE = tl.constexpr(int(Real.TEMPERATURE))
_STOP, _LENGTH = tl.constexpr(int(Done.STOP)), tl.constexpr(int(Done.LENGTH))
_ABORT, _BROKEN = tl.constexpr(int(Done.ABORT)), tl.constexpr(int(Done.NOT_A_NUMBER))
_LOST = tl.constexpr(int(Done.LOST))
_IDS = tl.constexpr(int(Record.IDS))
_CHECK = tl.constexpr(int(Record.CHECK))


@triton.jit
def best_of_part(logits, first, end, floor, temperature, key, before, BLOCK: tl.constexpr):
    """Best score of ``logits`` ``first``..``end`` - 1, and the lowest id that has it.

    The first of ``logits`` is id ``before``. At temperature 0 the logit, above it the scaled logit,
    from ``floor`` on, and the noise.
    """
    best, winner = float("-inf"), NONE
    for start in range(first, end, BLOCK):
        v = start + tl.arange(0, BLOCK)
        raw = tl.load(logits + v, mask=v < end, other=float("-inf"))
        score = raw
        if temperature > 0:
            score = raw / temperature
            score = tl.where(score >= floor, score + gumbel(key, before + v), float("-inf"))
        score = tl.where(score == score, score, float("-inf"))
        peak = tl.max(score, 0)
        place = tl.min(tl.where(score == peak, before + v, NONE), 0)
        # ids rise from piece to piece: of equal scores the first one stays
        winner = tl.where(peak > best, place, winner)
        best = tl.maximum(peak, best)
    return best, winner


@triton.jit
def _pick_kernel(
    logits, floors, ints, reals, values, ids, V, PART, FIRST,
    P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    if row >= tl.load(ints + _LIVE_ROWS):
        return
    temperature = tl.load(reals + _TEMPERATURE)
    floor = tl.load(floors + row)
    position = tl.load(ints + _CURSOR) + row + 1
    key = noise_key(tl.load(ints + _SEED_LOW), tl.load(ints + _SEED_HIGH), position)
    end = tl.minimum((part + 1) * PART, V)
    best, winner = best_of_part(
        logits + row * V, part * PART, end, floor, temperature, key, FIRST, BLOCK
    )
    tl.store(values + row * P + part, best)
    tl.store(ids + row * P + part, winner)


@triton.jit
def _accept_kernel(
    values, ids, proposals, ints, mailbox, schedule, ring, faults,
    P: tl.constexpr, ROWS: tl.constexpr, Q: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, ROWS)
    p = tl.arange(0, P)
    begin(PDL)
    rows, count = tl.load(ints + _LIVE_ROWS), tl.load(ints + _COUNT)
    live = r < rows
    scores = tl.load(values + r[:, None] * P + p[None, :], mask=live[:, None], other=0.0)
    found = tl.load(ids + r[:, None] * P + p[None, :], mask=live[:, None], other=0)
    choice = tl.min(tl.where(scores == tl.max(scores, 1)[:, None], found, NONE), 1)
    proposed = tl.load(proposals + r)
    agreed = (proposed == choice) & (r < count)
    accepted = tl.min(tl.where(agreed, ROWS, r), 0)
    serial, length = tl.load(ints + _SERIAL), tl.load(ints + _SIMULATED)
    if length > 0:
        accepted = tl.minimum(tl.load(schedule + serial % length), count)
    left, done = tl.load(ints + _LEFT), tl.load(ints + _DONE)
    emitted = tl.where(rows > 0, tl.minimum(accepted + 1, left), 0)
    # stops: the first id of the output that is one ends it
    stop = r >= ROWS
    stops = tl.load(ints + _NUM_STOPS)
    for i in range(stops):
        stop = stop | (choice == tl.load(ints + _STOPS + i))
    stop = stop & (r < emitted)
    first = tl.min(tl.where(stop, r, ROWS), 0)
    broken = tl.max(tl.where(live & (choice == NONE), 1, 0), 0)
    ended = tl.where(first < ROWS, _STOP, tl.where(left <= emitted, _LENGTH, 0))
    emitted = tl.minimum(emitted, first + 1)
    ended = tl.where(broken > 0, _BROKEN, ended)
    emitted = tl.where(broken > 0, 0, emitted)
    fault = 0
    if RANKS:
        fault = tl.load(faults)
        ended = tl.where(fault > 0, _LOST, ended)
        emitted = tl.where(fault > 0, 0, emitted)
    request = tl.load(ints + _REQUEST)
    ended = tl.where((ended == 0) & (tl.load(mailbox) == request), _ABORT, ended)
    done = tl.where(done != 0, done, ended)
    accepted = tl.minimum(accepted, emitted)

    cursor = tl.load(ints + _CURSOR)
    tl.store(ints + _SERIAL, serial + 1)
    tl.store(ints + _DONE, done)
    if emitted > 0:
        tl.store(ints + _INJECT_BASE, cursor)
        tl.store(ints + _CURSOR, cursor + emitted)
        tl.store(ints + _ANCHOR, tl.sum(tl.where(r == emitted - 1, choice, 0), 0))
        tl.store(ints + _START_SLOT, emitted)
        tl.store(ints + _TURN, tl.load(ints + _TURN) + 1)
    tl.store(ints + _INJECT_COUNT, emitted)
    left -= emitted
    tl.store(ints + _LEFT, left)
    limit = tl.minimum(tl.load(ints + _NUM_DRAFT), left - 1)
    tl.store(ints + _LIMIT, tl.where(done != 0, 0, tl.maximum(limit, 0)))

    low, high = 0, 0
    if not WIDE:
        clock = tl.extra.cuda.globaltimer()
        low, high = clock.to(tl.int32), (clock >> 32).to(tl.int32)
    w = tl.arange(0, SIZE)
    picked = tl.where(r < emitted, choice, -1)
    spread = tl.sum(tl.where(w[:, None] == _IDS + r[None, :], picked[None, :], 0), 1)
    record = tl.where(w == 0, serial, spread)
    record = tl.where(w == 1, request, record)
    record = tl.where(w == 2, emitted, record)
    record = tl.where(w == 3, accepted, record)
    record = tl.where(w == 4, tl.where(rows > 0, count, 0), record)
    record = tl.where(w == 5, done, record)
    record = tl.where(w == 6, low, record)
    record = tl.where(w == 7, high, record)
    record = tl.where(w == 24, cursor, record)
    record = tl.where(w == 25, fault, record)
    record = tl.where(w == _CHECK, tl.sum(record, 0) ^ 0x5EED, record)
    tl.store(ring + serial % Q * SIZE + w, record)


def pick_parts(
    logits: Tensor,  # [R, V] float32
    floors: Tensor,  # [R] float32, below which a scaled logit is filtered out
    ints: Tensor,  # int32, by `Field`
    reals: Tensor,  # float32, by `Real`
    values: Tensor,  # [R, P] float32
    ids: Tensor,  # [R, P] int32
    *,
    first: int = 0,
    block: int = 1024,
    pdl: bool | None = None,
) -> None:
    """The best token of each of P parts of the vocabulary, for every live row.

    ``first``: the id that the first logit belongs to, where a rank has a part of the vocabulary.

    At temperature 0 by logit, above it by scaled logit and noise: `decoding.sampling.pick`. Ties go
    to the lowest id; NaN never wins.

    Raises:
        ValueError: a shape does not fit.
    """
    size, parts = logits.shape[1], values.shape[1]
    if len(logits) != ROWS or values.shape != ids.shape or len(values) != ROWS:
        raise ValueError(
            f"pick_parts wants logits [{ROWS}, V], values and ids [{ROWS}, P], got "
            f"{tuple(logits.shape)}, {tuple(values.shape)} and {tuple(ids.shape)}"
        )
    _pick_kernel[(parts, ROWS)](
        logits, floors, ints, reals, values, ids, size, triton.cdiv(size, parts), first,
        P=parts, BLOCK=block, num_warps=4, **flags(logits, pdl),
    )  # fmt: skip


def accept(
    values: Tensor,  # [R, P] float32, from `pick_parts`
    ids: Tensor,  # [R, P] int32
    proposals: Tensor,  # [R] int32
    ints: Tensor,  # int32, by `Field`; moved on to the next step
    mailbox: Tensor,  # [1] int32, a request to end
    schedule: Tensor,  # int32, accepted proposals of simulated steps
    ring: Tensor,  # [Q, 32] int32
    *,
    fault: Tensor | None = None,  # [1] int32, of `Peers`
    pdl: bool | None = None,
) -> None:
    """Commit what the target confirms, and write this step's record (`Record`).

    Raises:
        ValueError: a shape does not fit.
    """
    parts = values.shape[1]
    if values.shape != ids.shape or parts & (parts - 1) or ring.shape[1] != RECORD:
        raise ValueError(
            f"accept wants values and ids [{ROWS}, P] with P a power of two and a ring "
            f"[Q, {RECORD}], got {tuple(values.shape)}, {tuple(ids.shape)}, {tuple(ring.shape)}"
        )
    _accept_kernel[(1,)](
        values, ids, proposals, ints, mailbox, schedule, ring,
        mailbox if fault is None else fault,
        P=parts, ROWS=ROWS, Q=len(ring), SIZE=RECORD, RANKS=fault is not None, num_warps=4,
        **flags(values, pdl),
    )  # fmt: skip
