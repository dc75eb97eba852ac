"""Between a NEXTN block's passes: what it reads, and the token that it proposes.

The block reads, side by side, the norm of a token's embedding and that of the hidden state before
it. `join_norms` makes both for the rows that the last step kept; behind each pass `pick_row` and
`take_token` choose the next proposal, which is what the next pass reads.

Symbols: R = 16 rows, D hidden, V vocabulary, P parts of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.accept import NONE, Field, Real, best_of_part
from dspark.kernels.launch import ROWS, begin, flags
from dspark.kernels.noise import noise_key
from dspark.kernels.reduce_norm import norm_row

__all__ = ["join_norms", "join_norms_reference", "pick_row", "take_token"]

_CURSOR = tl.constexpr(int(Field.CURSOR))
_ANCHOR = tl.constexpr(int(Field.ANCHOR))
_COUNT = tl.constexpr(int(Field.COUNT))
_LIMIT = tl.constexpr(int(Field.LIMIT))
_INJECT_COUNT = tl.constexpr(int(Field.INJECT_COUNT))
_SEED_LOW = tl.constexpr(int(Field.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Field.SEED_HIGH))
_DRAFT_CURSOR = tl.constexpr(int(Field.DRAFT_CURSOR))
_DRAFT_ROWS = tl.constexpr(int(Field.DRAFT_ROWS))
_TEMPERATURE = tl.constexpr(int(Real.TEMPERATURE))


def join_norms_reference(
    tokens: Tensor,  # [T] int64, the token behind each row
    table: Tensor,  # [V, D]
    hidden: Tensor,  # [T, D]
    embedded_weight: Tensor,  # [D]
    hidden_weight: Tensor,  # [D]
    eps: float,
) -> Tensor:  # [T, 2 D]
    """What `target.mtp` feeds to eh_proj."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    return torch.cat([norm(table[tokens], embedded_weight), norm(hidden, hidden_weight)], -1)


@triton.jit
def _join_kernel(
    ints, proposals, table, hidden, embedded_weight, hidden_weight, out,
    DEPTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, half = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BD)
    live = d < D
    begin(PDL)
    rows = tl.load(ints + _INJECT_COUNT)
    if (row == 0) & (half == 0):
        # without a row there is nothing to go on from
        tl.store(ints + _COUNT, tl.where(rows > 0, tl.minimum(tl.load(ints + _LIMIT), DEPTH), 0))
    if row >= rows:
        return
    here = out + row * (2 * D) + d
    if half == 0:
        # behind all rows but the last stands the proposal that was accepted there
        token = tl.load(ints + _ANCHOR)
        if row < rows - 1:
            token = tl.load(proposals + row)
        embedded = tl.load(table + token.to(tl.int64) * D + d, mask=live, other=0.0)
        norm_row(embedded, tl.load(embedded_weight + d, mask=live, other=0.0), here, live, D, EPS)
    else:
        state = tl.load(hidden + row * D + d, mask=live, other=0.0)
        norm_row(state, tl.load(hidden_weight + d, mask=live, other=0.0), here + D, live, D, EPS)


@triton.jit
def _pick_row_kernel(
    logits, ints, reals, values, ids, V, PART,
    ROWS_FIELD: tl.constexpr, SLOT: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    begin(PDL)
    rows = tl.load(ints + ROWS_FIELD)
    if rows <= 0:
        return
    position = tl.load(ints + _CURSOR) + SLOT + 1
    key = noise_key(tl.load(ints + _SEED_LOW), tl.load(ints + _SEED_HIGH), position)
    end = tl.minimum((part + 1) * PART, V)
    best, winner = best_of_part(
        logits + (rows - 1).to(tl.int64) * V, part * PART, end,
        tl.full([], float("-inf"), tl.float32), tl.load(reals + _TEMPERATURE), key, FIRST, BLOCK,
    )  # fmt: skip
    tl.store(values + part, best)
    tl.store(ids + part, winner)


@triton.jit
def _take_kernel(
    values, ids, proposals, ints, table, hidden, embedded_weight, hidden_weight, out,
    ROWS_FIELD: tl.constexpr, SLOT: tl.constexpr, P: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, P)
    d = tl.arange(0, BD)
    begin(PDL)
    rows, count = tl.load(ints + ROWS_FIELD), tl.load(ints + _COUNT)
    alive = tl.where((rows > 0) & (count > SLOT), 1, 0)
    # what an earlier round left says nothing
    scores = tl.load(values + p, mask=p < P * alive, other=float("-inf"))
    found = tl.load(ids + p, mask=p < P * alive, other=NONE)
    token = tl.min(tl.where(scores == tl.max(scores, 0), found, NONE), 0)
    taken = (alive > 0) & (token != NONE)
    count = tl.where(taken, count, tl.minimum(count, SLOT))
    more = taken & (count > SLOT + 1)
    if taken:
        tl.store(proposals + SLOT, token)
    tl.store(ints + _COUNT, count)
    tl.store(ints + _DRAFT_CURSOR, tl.load(ints + _CURSOR) + SLOT)
    tl.store(ints + _DRAFT_ROWS, tl.where(more, 1, 0))
    if more:
        live = d < D
        embedded = tl.load(table + token.to(tl.int64) * D + d, mask=live, other=0.0)
        norm_row(
            embedded, tl.load(embedded_weight + d, mask=live, other=0.0), out + d, live, D, EPS
        )
        state = tl.load(hidden + (rows - 1) * D + d, mask=live, other=0.0)
        norm_row(state, tl.load(hidden_weight + d, mask=live, other=0.0), out + D + d, live, D, EPS)


def join_norms(
    ints: Tensor,  # int32, by `Field`
    proposals: Tensor,  # [R] int32, of the last step
    table: Tensor,  # [V, D]
    hidden: Tensor,  # [R, D], the target's behind its final norm, of the last step's rows
    embedded_weight: Tensor,  # [D]
    hidden_weight: Tensor,  # [D]
    out: Tensor,  # [R, 2 D], embedding first
    *,
    depth: int,
    eps: float,
    warps: int = 8,
    pdl: bool | None = None,
) -> None:
    """`join_norms_reference` of the INJECT_COUNT rows that the last step kept.

    COUNT becomes the proposals of this step: LIMIT, at most ``depth``, and none without such a row.
    Rows that were not kept are not written.

    Raises:
        ValueError: a shape does not fit.
    """
    _check("join_norms", table, hidden, embedded_weight, hidden_weight, out)
    d = hidden.shape[1]
    _join_kernel[(ROWS, 2)](
        ints, proposals, table, hidden, embedded_weight, hidden_weight, out,
        DEPTH=depth, D=d, BD=triton.next_power_of_2(d), EPS=eps, num_warps=warps,
        **flags(out, pdl),
    )  # fmt: skip


def pick_row(
    logits: Tensor,  # [R, V] float32
    ints: Tensor,  # int32, by `Field`
    reals: Tensor,  # float32, by `Real`
    values: Tensor,  # [P] float32
    ids: Tensor,  # [P] int32, in the whole vocabulary
    *,
    slot: int,
    first: int = 0,
    block: int = 1024,
    pdl: bool | None = None,
) -> None:
    """The best token of each part of the vocabulary behind the last row, for proposal ``slot``.

    That is the last kept row for slot 0, and row 0 for the others. As `accept.pick_parts`, with the
    noise of the position that the proposal is for, but unfiltered. One rank of several has
    ``logits`` of its share of the vocabulary, which begins at id ``first``; noise and ids are those
    of the whole, so that the best of all ranks is what one alone would have picked.

    Raises:
        ValueError: a shape does not fit.
    """
    size, parts = logits.shape[1], len(values)
    if len(logits) != ROWS or values.shape != (parts,) or values.shape != ids.shape:
        raise ValueError(
            f"pick_row wants logits [{ROWS}, V], values and ids [P], got "
            f"{tuple(logits.shape)}, {tuple(values.shape)} and {tuple(ids.shape)}"
        )
    _pick_row_kernel[(parts,)](
        logits, ints, reals, values, ids, size, triton.cdiv(size, parts),
        ROWS_FIELD=_rows_field(slot), SLOT=slot, FIRST=first, BLOCK=block,
        num_warps=4, **flags(logits, pdl),
    )  # fmt: skip


def take_token(
    values: Tensor,  # [P] float32, from `pick_row`
    ids: Tensor,  # [P] int32
    proposals: Tensor,  # [R] int32
    ints: Tensor,  # int32, by `Field`
    table: Tensor,  # [V, D]
    hidden: Tensor,  # [R, D], the block's behind its final norm
    embedded_weight: Tensor,  # [D]
    hidden_weight: Tensor,  # [D]
    out: Tensor,  # [R, 2 D]
    *,
    slot: int,
    eps: float,
    warps: int = 8,
    pdl: bool | None = None,
) -> None:
    """The best of all parts becomes proposal ``slot``, and, with ``hidden``, row 0 of ``out``.

    DRAFT_ROWS tells whether there is another proposal to come, from that row at DRAFT_CURSOR.
    Logits without a number end the proposals (COUNT). What is behind COUNT is not written.

    Raises:
        ValueError: a shape does not fit.
    """
    _check("take_token", table, hidden, embedded_weight, hidden_weight, out)
    parts, d = len(values), hidden.shape[1]
    if values.shape != ids.shape or parts & (parts - 1) or proposals.shape != (ROWS,):
        raise ValueError(
            f"take_token wants values and ids [P] with P a power of two and proposals [{ROWS}], "
            f"got {tuple(values.shape)}, {tuple(ids.shape)} and {tuple(proposals.shape)}"
        )
    _take_kernel[(1,)](
        values, ids, proposals, ints, table, hidden, embedded_weight, hidden_weight, out,
        ROWS_FIELD=_rows_field(slot), SLOT=slot, P=parts, D=d, BD=triton.next_power_of_2(d),
        EPS=eps, num_warps=warps, **flags(out, pdl),
    )  # fmt: skip


def _rows_field(slot: int) -> int:
    """Where the number of rows stands behind whose last one proposal ``slot`` is."""
    return int(Field.DRAFT_ROWS if slot else Field.INJECT_COUNT)


def _check(
    name: str,
    table: Tensor,
    hidden: Tensor,
    embedded_weight: Tensor,
    hidden_weight: Tensor,
    out: Tensor,
) -> None:
    d = hidden.shape[1]
    weights = embedded_weight.shape == hidden_weight.shape == (d,)
    if not weights or len(hidden) != ROWS or out.shape != (ROWS, 2 * d) or table.shape[1] != d:
        raise ValueError(
            f"{name} wants a table [V, D], hidden [{ROWS}, D], weights [D] and out [{ROWS}, 2 D], "
            f"got {tuple(table.shape)}, {tuple(hidden.shape)}, {tuple(embedded_weight.shape)}, "
            f"{tuple(hidden_weight.shape)} and {tuple(out.shape)}"
        )
    if not all(one.is_contiguous() for one in (table, hidden, out)):
        raise ValueError(f"{name} wants contiguous tensors")
