"""Between two sublayers of a step that several ranks share: `reduce_norm` with the ranks' sums.

Each rank has a part of a sublayer's output. It writes the sum of its own partial products where the
others read it, waits for theirs (`dspark.kernels.peers`), and adds all of them in the order of the
ranks, so that residual and norm are the same to the bit on every rank. One program a row. Words of
any meaning are exchanged by `gather`, and the ranks' best tokens by `choose`.

Every launch does the work of the Z ranks of this process, which is one rank but for tests; with
several, tensors have a dimension [Z] in front. ``stage`` does half of an exchange: the interpreter
runs one program after the other, and one that waits would wait for ever.

Symbols: R = 16 rows, D hidden, S partial sums, X experts a token, N ranks, V vocabulary, P parts of
a rank's share of it.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.accept import NONE
from dspark.kernels.launch import ROWS, begin, flags
from dspark.kernels.peers import Peers, Room, await_all, dawdle, spoken, tell_all, turn_of
from dspark.kernels.reduce_norm import finish_row, norm_row

__all__ = [
    "CHOICE_WORDS",
    "Stage",
    "add_ranks",
    "choose",
    "exchange_norm",
    "exchange_norm_reference",
    "gather",
    "own_sums",
]

Stage = Literal["tell", "hear", "both"]
CHOICE_WORDS = 4
"""A rank's words about a row in `choose`: best score, its id, the mailbox, and one unused."""


def own_sums(parts: Tensor, factors: Tensor | None) -> Tensor:
    """What a rank tells, [R, D] float32: of ``parts`` [S, R, D], or [R, X, D] by ``factors``."""
    return parts.float().sum(0) if factors is None else (parts.float() * factors[..., None]).sum(1)


def exchange_norm_reference(
    sums: Tensor,  # [N, R, D] float32, what each rank tells
    residual: Tensor | None,  # [R, D], the same on every rank
    weight: Tensor,  # [D]
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [R, D]
    """New residual (the sum alone, where there is none) and its RMSNorm, on every rank."""
    total = torch.zeros_like(sums[0])
    for one in sums:
        total = total + one
    new = total.to(weight.dtype) if residual is None else residual + total.to(residual.dtype)
    wide = new.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return new, wide.to(new.dtype) * weight


@triton.jit
def _exchange_norm_kernel(
    parts, factors, residual, weight, out, tap, tap_row, part_row, part_stride,
    bases, flags, data, turns, looks, fault, first, per_rank,
    S: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, TAP: tl.constexpr,
    EXPERTS: tl.constexpr, KEEP: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    TELL: tl.constexpr, HEAR: tl.constexpr, SKEW: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    live = d < D
    row, local = tl.program_id(0), tl.program_id(1)
    rank = first + local
    parts += local.to(tl.int64) * per_rank
    place = (local * ROWS + row) * D + d
    scale = tl.load(weight + d, mask=live, other=0.0)
    # older than the kernel before, which has waited for it
    old = tl.load(residual + place, mask=live, other=0.0)
    begin(PDL)
    turn = turn_of(turns, local * ROWS + row)
    if SKEW > 0:
        dawdle(turn, row, rank, fault + local, SKEW)
    if TELL:
        total = tl.zeros([BD], tl.float32)
        for part in tl.static_range(S):
            piece = tl.load(
                parts + part * part_stride + row * part_row + d, mask=live, other=0.0
            ).to(tl.float32)
            if EXPERTS:
                piece *= tl.load(factors + (local * ROWS + row) * S + part)
            total += piece
        mine = spoken(bases, rank, data, turn, row, D, ROWS)
        tl.store(mine + d, total.to(tl.int32, bitcast=True), mask=live)
        tell_all(bases, flags, turn, row, rank, RANKS, ROWS)
    if HEAR:
        await_all(bases, flags, turn, row, rank, looks, fault + local, RANKS, ROWS)
        total = tl.zeros([BD], tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = spoken(bases, peer, data, turn, row, D, ROWS)
            words = tl.load(theirs + d, mask=live, other=0, volatile=True)
            total += words.to(tl.float32, bitcast=True)
        if KEEP:
            finish_row(
                total, old, scale, residual, out, tap, local * ROWS + row, tap_row, d, live,
                D, EPS, TAP,
            )  # fmt: skip
        else:
            norm_row(total.to(out.dtype.element_ty), scale, out + place, live, D, EPS)
        tl.store(turns + local * ROWS + row, turn)


@triton.jit
def _gather_kernel(
    x, out, bases, flags, data, turns, looks, fault, first, W,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    TELL: tl.constexpr, HEAR: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    chunk, row, local = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    program = row * tl.num_programs(0) + chunk
    rank = first + local
    w = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = w < W
    place = tl.arange(0, BLOCK)
    begin(PDL)
    turn = turn_of(turns, local * PROGRAMS + program)
    line = (local * tl.num_programs(1) + row).to(tl.int64)
    if TELL:
        mine = spoken(bases, rank, data, turn, program, BLOCK, PROGRAMS)
        tl.store(mine + place, tl.load(x + line * W + w, mask=inside, other=0), mask=inside)
        tell_all(bases, flags, turn, program, rank, RANKS, PROGRAMS)
    if HEAR:
        await_all(bases, flags, turn, program, rank, looks, fault + local, RANKS, PROGRAMS)
        for peer in tl.static_range(RANKS):
            theirs = spoken(bases, peer, data, turn, program, BLOCK, PROGRAMS)
            words = tl.load(theirs + place, mask=inside, other=0, volatile=True)
            tl.store(out + (line * RANKS + peer) * W + w, words, mask=inside)
        tl.store(turns + local * PROGRAMS + program, turn)


@triton.jit
def _choose_kernel(
    values, ids, mailbox, out_values, out_ids, bases, flags, data, turns, looks, fault, first,
    P: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    TELL: tl.constexpr, HEAR: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, local = tl.program_id(0), tl.program_id(1)
    rank = first + local
    p, w = tl.arange(0, P), tl.arange(0, WORDS)
    begin(PDL)
    turn = turn_of(turns, local * ROWS + row)
    line = local * ROWS + row
    if TELL:
        scores = tl.load(values + line * P + p)
        found = tl.load(ids + line * P + p)
        best = tl.max(scores, 0)
        winner = tl.min(tl.where(scores == best, found, NONE), 0)
        said = tl.where(w == 0, best.to(tl.int32, bitcast=True), winner)
        said = tl.where(w == 2, tl.load(mailbox + local), said)
        tl.store(spoken(bases, rank, data, turn, row, WORDS, ROWS) + w, said)
        tell_all(bases, flags, turn, row, rank, RANKS, ROWS)
    if HEAR:
        await_all(bases, flags, turn, row, rank, looks, fault + local, RANKS, ROWS)
        for peer in tl.static_range(RANKS):
            words = tl.load(spoken(bases, peer, data, turn, row, WORDS, ROWS) + w, volatile=True)
            score = tl.sum(tl.where(w == 0, words, 0), 0).to(tl.float32, bitcast=True)
            tl.store(out_values + line * RANKS + peer, score)
            tl.store(out_ids + line * RANKS + peer, tl.sum(tl.where(w == 1, words, 0), 0))
        box = tl.load(spoken(bases, 0, data, turn, row, WORDS, ROWS) + 2, volatile=True)
        tl.store(mailbox + local, box, mask=row == 0)
        tl.store(turns + line, turn)


@triton.jit
def _typed(words, dtype: tl.constexpr):
    """A place of words as one of numbers; it is aligned like the place of `add_ranks`."""
    return tl.multiple_of(words.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _add_kernel(
    x, out, bases, flags, data, turns, looks, fault, first, N,
    RANKS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    TELL: tl.constexpr, HEAR: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program, local = tl.program_id(0), tl.program_id(1)
    rank = first + local
    i = tl.arange(0, BLOCK)
    n = program.to(tl.int64) * BLOCK + i
    inside = n < N
    dtype = x.dtype.element_ty
    begin(PDL)
    turn = turn_of(turns, local * PROGRAMS + program)
    if TELL:
        mine = spoken(bases, rank, data, turn, program, WORDS, PROGRAMS)
        piece = tl.load(x + local.to(tl.int64) * N + n, mask=inside, other=0.0)
        tl.store(_typed(mine, dtype) + i, piece, mask=inside)
        tell_all(bases, flags, turn, program, rank, RANKS, PROGRAMS)
    if HEAR:
        await_all(bases, flags, turn, program, rank, looks, fault + local, RANKS, PROGRAMS)
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = spoken(bases, peer, data, turn, program, WORDS, PROGRAMS)
            total += tl.load(_typed(theirs, dtype) + i, mask=inside, other=0.0, volatile=True).to(
                tl.float32
            )
        tl.store(out + local.to(tl.int64) * N + n, total.to(dtype), mask=inside)
        tl.store(turns + local * PROGRAMS + program, turn)


def exchange_norm(
    room: Room,  # [R] programs of D words
    parts: Tensor,  # [Z, S, R, D], or [Z, R, X, D] with ``factors``; float32 or that of `out`
    weight: Tensor,  # [D]
    out: Tensor,  # [Z, R, D]
    *,
    eps: float,
    residual: Tensor | None = None,  # [Z, R, D], updated in place; None: the sum has none
    factors: Tensor | None = None,  # [Z, R, X] float32
    tap: Tensor | None = None,  # [Z, R, D], a copy of the new residual; rows may have a stride
    warps: int = 8,
    pdl: bool | None = None,
    stage: Stage = "both",
    skew: int = 0,
) -> None:
    """`exchange_norm_reference` of the `own_sums` of all ranks; nothing is allocated.

    With one rank in this process tensors are without [Z]. Rows of a sum without residual may have
    strides, as in `parts_norm`. ``skew``: every program is late, by up to so many looks.

    Raises:
        ValueError: a shape does not fit.
    """
    peers, (rows, d) = room.peers, out.shape[-2:]
    local = () if peers.local == 1 else (peers.local,)
    held = parts.shape[-3 if factors is None else -2]
    wanted = (*local, held, rows, d) if factors is None else (*local, rows, held, d)
    one = out if tap is None else tap
    if (
        rows != ROWS
        or parts.shape != wanted
        or parts.stride(-1) != 1
        or not out.shape == one.shape == (out if residual is None else residual).shape
        or out.shape != (*local, rows, d)
        or (factors is not None and factors.shape != (*local, rows, held))
        or (tap is not None and residual is None)
        or (local and tap is not None and tap.stride(0) != rows * tap.stride(1))
        or weight.shape != (d,)
        or (room.programs, room.width) != (ROWS, d)
    ):
        raise ValueError(
            f"exchange_norm wants parts [S, {ROWS}, D] or factors [{ROWS}, X] and parts "
            f"[{ROWS}, X, D], residual, out and tap [{ROWS}, D], weight [D] and a room of "
            f"{ROWS} x D words, got {tuple(parts.shape)}, {tuple(out.shape)}, "
            f"{tuple(weight.shape)} and {room.programs} x {room.width}"
        )
    experts = factors is not None
    row_axis, part_axis = (-3, -2) if experts else (-2, -3)
    _exchange_norm_kernel[(ROWS, peers.local)](
        parts, parts if factors is None else factors, out if residual is None else residual,
        weight, out, one, one.stride(-2) if tap is not None else 0, parts.stride(row_axis),
        parts.stride(part_axis), *_of(room), parts.stride(0) if local else 0,
        S=held, D=d, BD=triton.next_power_of_2(d), EPS=eps, TAP=tap is not None, EXPERTS=experts,
        KEEP=residual is not None, RANKS=peers.ranks, ROWS=ROWS, SKEW=skew,
        num_warps=warps, **_staged(stage), **flags(out, pdl),
    )  # fmt: skip


def gather(
    room: Room,
    x: Tensor,  # [Z, rows, W] of four bytes
    out: Tensor,  # [Z, rows, N W], of the same dtype: rank by rank
    *,
    pdl: bool | None = None,
    stage: Stage = "both",
) -> None:
    """Every rank's words, behind one another in the order of the ranks; nothing is allocated.

    With one rank in this process tensors are without [Z]. The room has a program for every row and
    every `Room.width` words of it.

    Raises:
        ValueError: a shape does not fit.
    """
    peers, (rows, width) = room.peers, x.shape[-2:]
    local = () if peers.local == 1 else (peers.local,)
    chunks = triton.cdiv(width, room.width)
    fits = x.dtype == out.dtype and x.element_size() == 4 and room.programs == chunks * rows
    whole = (*local, rows, peers.ranks * width)
    if not fits or x.shape != (*local, rows, width) or out.shape != whole:
        raise ValueError(
            f"gather wants x [rows, W] and out [rows, {peers.ranks} W] of four bytes and a program "
            f"for every {room.width} words, got {tuple(x.shape)} {x.dtype}, {tuple(out.shape)} "
            f"{out.dtype} and {room.programs} programs"
        )
    if not (x.is_contiguous() and out.is_contiguous()) or room.width & (room.width - 1):
        raise ValueError(f"gather wants contiguous tensors and a power of two, got {room.width}")
    _gather_kernel[(chunks, rows, peers.local)](
        x.view(torch.int32), out.view(torch.int32), *_of(room), width,
        RANKS=peers.ranks, PROGRAMS=room.programs, BLOCK=room.width, num_warps=4,
        **_staged(stage), **flags(x, pdl),
    )  # fmt: skip


def choose(
    room: Room,  # [R] programs of `CHOICE_WORDS`
    values: Tensor,  # [Z, R, P] float32, from `pick_parts`
    ids: Tensor,  # [Z, R, P] int32, in the whole vocabulary
    mailbox: Tensor,  # [Z] int32, becomes rank 0's
    out_values: Tensor,  # [Z, R, N] float32
    out_ids: Tensor,  # [Z, R, N] int32
    *,
    pdl: bool | None = None,
    stage: Stage = "both",
) -> None:
    """Each rank's best token of each row, lowest id first, for `accept` to choose among.

    What the host of rank 0 has put into its mailbox goes to all: they end a request together.
    With one rank in this process tensors are without [Z]. Nothing is allocated.

    Raises:
        ValueError: a shape does not fit.
    """
    peers, parts = room.peers, values.shape[-1]
    local = () if peers.local == 1 else (peers.local,)
    if (
        not values.shape == ids.shape == (*local, ROWS, parts)
        or not out_values.shape == out_ids.shape == (*local, ROWS, peers.ranks)
        or mailbox.shape != (peers.local,)
        or parts & (parts - 1)
        or (room.programs, room.width) != (ROWS, CHOICE_WORDS)
    ):
        raise ValueError(
            f"choose wants values and ids [{ROWS}, P] with P a power of two, results "
            f"[{ROWS}, {peers.ranks}] and a room of {ROWS} x {CHOICE_WORDS} words, got "
            f"{tuple(values.shape)}, {tuple(ids.shape)}, {tuple(out_values.shape)}, "
            f"{tuple(out_ids.shape)} and {room.programs} x {room.width}"
        )
    _choose_kernel[(ROWS, peers.local)](
        values, ids, mailbox, out_values, out_ids, *_of(room),
        P=parts, RANKS=peers.ranks, ROWS=ROWS, WORDS=CHOICE_WORDS, num_warps=1,
        **_staged(stage), **flags(values, pdl),
    )  # fmt: skip


def add_ranks(
    room: Room,
    x: Tensor,  # [Z, ...] float32 or bfloat16
    out: Tensor,  # like x
    *,
    stage: Stage = "both",
) -> None:
    """Sum over ranks of any number of elements, in the order of the ranks and in float32.

    For prompts: in as many launches as the room needs. With one rank in this process tensors are
    without [Z]; with several they must fit one launch.

    Raises:
        ValueError: shapes differ, or do not fit.
    """
    peers = room.peers
    if room.width % 4:
        raise ValueError(f"add_ranks wants a room of a multiple of 4 words, got {room.width}")
    if x.shape != out.shape or x.dtype != out.dtype or not out.is_contiguous():
        raise ValueError(f"add_ranks wants an out like x, got {tuple(out.shape)} {out.dtype}")
    flat, total = x.reshape(peers.local, -1), out.view(peers.local, -1)
    block = 4 * room.width // x.element_size()
    most = block * room.programs
    if peers.local > 1 and flat.shape[1] > most:
        raise ValueError(f"{peers.local} ranks of a process add {most} at once, not {x[0].numel()}")
    for piece, into in zip(flat.split(most, 1), total.split(most, 1), strict=True):
        _add_kernel[(triton.cdiv(piece.shape[1], block), peers.local)](
            piece, into, *_of(room), piece.shape[1],
            RANKS=peers.ranks, PROGRAMS=room.programs, BLOCK=block, WORDS=room.width, num_warps=8,
            **_staged(stage), **flags(x),
        )  # fmt: skip


def _of(room: Room) -> tuple[Tensor | int, ...]:
    peers: Peers = room.peers
    return (
        peers.bases, room.flags, room.data, room.turns, peers.looks, peers.fault, peers.first,
    )  # fmt: skip


def _staged(stage: Stage) -> dict[str, bool]:
    return {"TELL": stage != "hear", "HEAR": stage != "tell"}
