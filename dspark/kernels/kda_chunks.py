"""KDA in chunks of 64 rows: `target.kda.chunked` between a prompt's inputs and its outputs.

Inside a chunk every row corrects what the rows before it have written: a unit lower triangular
system of 64 equations, inverted in blocks of 16. Between chunks runs one chain of products with the
state; what it leaves of every chunk lets the outputs of all chunks be computed side by side.

Decays are kept as sums from the start of a row's block on. What decays from one block to another is
a sum of negative numbers, so nothing is lost in differences; within a block (`kda_prefill`) rows
and columns are decayed from and to its middle, by at most e^40 for decays of e^-5 a row. Products
of float32 are three TF32 products on a GPU (`precision` "tf32x3"), exact to about 2^-21.

Symbols: T rows of a segment, padded to whole chunks, C = 64 rows of a chunk, B = 16 of a block,
N chunks, H heads (of this rank), K key size, V value size (equal to it).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BLOCK", "CHUNK", "Segment", "chain", "solve"]

CHUNK, BLOCK = 64, 16


@dataclass(frozen=True)
class Segment:
    """What the kernels of a segment hand to each other; float32 throughout."""

    query: Tensor  # [H, T, K], normed and scaled; behind `solve` decayed from the chunk's start
    key: Tensor  # [H, T, K], normed; behind `solve` decayed to the chunk's end
    value: Tensor  # [H, T, V]
    decays: Tensor  # [H, T, K], logarithms, summed from the start of the block, this row's included
    beta: Tensor  # [H, T]
    inverse: Tensor  # [H, T, C], row i of its chunk's inverse; blocks above the diagonal undefined
    mixed: Tensor  # [H, T, C], products of query i with keys of the chunk, likewise
    fresh: Tensor  # [H, T, V], what rows write to an empty state; behind `chain` what they do write
    recalled: Tensor  # [H, T, K], what of it the state at the chunk's start takes away
    kept: Tensor  # [H, N, K], decay of a whole chunk
    starts: Tensor  # [H, N, K, V], states before each chunk

    @classmethod
    def empty(cls, heads: int, rows: int, size: int, device: torch.device) -> "Segment":
        """Room for ``rows`` rows, a multiple of C; values are undefined."""
        chunks = rows // CHUNK

        def make(*shape: int) -> Tensor:
            return torch.empty(heads, *shape, device=device)

        return cls(
            query=make(rows, size),
            key=make(rows, size),
            value=make(rows, size),
            decays=make(rows, size),
            beta=make(rows),
            inverse=make(rows, CHUNK),
            mixed=make(rows, CHUNK),
            fresh=make(rows, size),
            recalled=make(rows, size),
            kept=make(chunks, size),
            starts=make(chunks, size, size),
        )


@triton.jit
def _product(left, right, total, PRECISION: tl.constexpr):
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def _pairs_kernel(
    query, key, decays, beta, inverse, mixed, padded,
    K: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(C == 4 * B)
    first = tl.program_id(1) * padded + tl.program_id(0) * C
    r = tl.arange(0, B)
    nothing = tl.zeros([B, B], tl.float32)
    a10, a20, a21, a30, a31, a32 = nothing, nothing, nothing, nothing, nothing, nothing
    m10, m20, m21, m30, m31, m32 = nothing, nothing, nothing, nothing, nothing, nothing
    for step in range(0, K, BK):
        k = step + tl.arange(0, BK)
        at = (first + r)[:, None] * K + k[None, :]
        last = (first + B - 1) * K + k
        end0, end1 = tl.load(decays + last), tl.load(decays + last + B * K)
        end2 = tl.load(decays + last + 2 * B * K)
        # columns decayed to the end of their block, rows from the start of theirs
        c0 = tl.load(key + at) * tl.exp(end0[None, :] - tl.load(decays + at))
        row = at + B * K
        total = tl.load(decays + row)
        keys, c1 = tl.load(key + row), tl.exp(end1[None, :] - total)
        late = tl.exp(total)
        c1 = keys * c1
        a10 = _product(keys * late, tl.trans(c0), a10, PRECISION)
        m10 = _product(tl.load(query + row) * late, tl.trans(c0), m10, PRECISION)
        # and on through the block in between
        c0 = c0 * tl.exp(end1)[None, :]
        row += B * K
        total = tl.load(decays + row)
        keys, c2 = tl.load(key + row), tl.exp(end2[None, :] - total)
        late = tl.exp(total)
        c2 = keys * c2
        keys, queries = keys * late, tl.load(query + row) * late
        a21 = _product(keys, tl.trans(c1), a21, PRECISION)
        m21 = _product(queries, tl.trans(c1), m21, PRECISION)
        a20 = _product(keys, tl.trans(c0), a20, PRECISION)
        m20 = _product(queries, tl.trans(c0), m20, PRECISION)
        c0 = c0 * tl.exp(end2)[None, :]
        c1 = c1 * tl.exp(end2)[None, :]
        row += B * K
        late = tl.exp(tl.load(decays + row))
        keys, queries = tl.load(key + row) * late, tl.load(query + row) * late
        a32 = _product(keys, tl.trans(c2), a32, PRECISION)
        m32 = _product(queries, tl.trans(c2), m32, PRECISION)
        a31 = _product(keys, tl.trans(c1), a31, PRECISION)
        m31 = _product(queries, tl.trans(c1), m31, PRECISION)
        a30 = _product(keys, tl.trans(c0), a30, PRECISION)
        m30 = _product(queries, tl.trans(c0), m30, PRECISION)
    place = (first + r)[:, None] * C + r[None, :]
    down: tl.constexpr = B * C
    tl.store(mixed + place + down, m10)
    tl.store(mixed + place + 2 * down, m20)
    tl.store(mixed + place + 2 * down + B, m21)
    tl.store(mixed + place + 3 * down, m30)
    tl.store(mixed + place + 3 * down + B, m31)
    tl.store(mixed + place + 3 * down + 2 * B, m32)
    b = tl.load(beta + first + B + r)[:, None]
    a10 = b * a10
    b = tl.load(beta + first + 2 * B + r)[:, None]
    a20, a21 = b * a20, b * a21
    b = tl.load(beta + first + 3 * B + r)[:, None]
    a30, a31, a32 = b * a30, b * a31, b * a32
    # blocks on the diagonal are inverted already
    place = inverse + place
    t00, t11 = tl.load(place), tl.load(place + down + B)
    t22, t33 = tl.load(place + 2 * (down + B)), tl.load(place + 3 * (down + B))
    t10 = -_product(_product(t11, a10, nothing, PRECISION), t00, nothing, PRECISION)
    t21 = -_product(_product(t22, a21, nothing, PRECISION), t11, nothing, PRECISION)
    t32 = -_product(_product(t33, a32, nothing, PRECISION), t22, nothing, PRECISION)
    t20 = _product(a21, t10, _product(a20, t00, nothing, PRECISION), PRECISION)
    t20 = -_product(t22, t20, nothing, PRECISION)
    t31 = _product(a32, t21, _product(a31, t11, nothing, PRECISION), PRECISION)
    t31 = -_product(t33, t31, nothing, PRECISION)
    t30 = _product(a31, t10, _product(a30, t00, nothing, PRECISION), PRECISION)
    t30 = -_product(t33, _product(a32, t20, t30, PRECISION), nothing, PRECISION)
    tl.store(place + down, t10)
    tl.store(place + 2 * down, t20)
    tl.store(place + 2 * down + B, t21)
    tl.store(place + 3 * down, t30)
    tl.store(place + 3 * down + B, t31)
    tl.store(place + 3 * down + 2 * B, t32)


@triton.jit
def _solve_kernel(
    query, key, value, decays, beta, inverse, fresh, recalled, kept, padded,
    K: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(2)
    first = head * padded + chunk * C
    r, k = tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    own = r // B
    at = (first + r)[:, None] * K + k[None, :]
    # decays of the whole blocks before and behind a row's own
    before, behind = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    total = tl.zeros([BK], tl.float32)
    for block in tl.static_range(C // B):
        end = tl.load(decays + (first + block * B + B - 1) * K + k)
        before += tl.where((own > block)[:, None], end[None, :], 0.0)
        behind += tl.where((own < block)[:, None], end[None, :], 0.0)
        total += end
    tl.store(kept + (head * (padded // C) + chunk) * K + k, tl.exp(total))
    since = tl.load(decays + at)
    end = tl.load(decays + (first + own * B + B - 1)[:, None] * K + k[None, :])
    left = tl.exp(end - since + behind)
    since = tl.exp(since + before)
    lower = (r // B)[None, :] <= own[:, None]
    solved = tl.load(inverse + (first + r)[:, None] * C + r[None, :], mask=lower, other=0.0)
    solved = solved * tl.load(beta + first + r)[None, :]
    nothing = tl.zeros([C, BK], tl.float32)
    tl.store(fresh + at, _product(solved, tl.load(value + at), nothing, PRECISION))
    keys = tl.load(key + at)
    tl.store(recalled + at, _product(solved, keys * since, nothing, PRECISION))
    tl.store(key + at, keys * left)
    tl.store(query + at, tl.load(query + at) * since)


@triton.jit
def _chain_kernel(
    key, fresh, recalled, kept, starts, state, last, chunks,
    K: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    r, k = tl.arange(0, C), tl.arange(0, PART)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    square = k[:, None] * K + v[None, :]
    # the state in halves, if it is large: a product has fewer operands in registers
    HALVES: tl.constexpr = PART < K
    held = tl.load(state + head * K * K + square)
    if HALVES:
        other = tl.load(state + head * K * K + PART * K + square)
    none, nothing = tl.zeros([C, BV], tl.float32), tl.zeros([PART, BV], tl.float32)
    for chunk in range(chunks):
        one = head * chunks + chunk
        row = one * C + r
        start = starts + one.to(tl.int64) * (K * K) + square
        tl.store(start, held)
        place = fresh + row[:, None] * K + v[None, :]
        wide = row[:, None] * K + k[None, :]
        taken = _product(tl.load(recalled + wide), held, none, PRECISION)
        if HALVES:
            tl.store(start + PART * K, other)
            taken = _product(tl.load(recalled + wide + PART), other, taken, PRECISION)
        update = tl.load(place) - taken
        tl.store(place, update)
        left = tl.load(kept + one * K + k)[:, None]
        written = tl.trans(tl.load(key + wide))
        held = held * left + _product(written, update, nothing, PRECISION)
        if HALVES:
            left = tl.load(kept + one * K + PART + k)[:, None]
            written = tl.trans(tl.load(key + wide + PART))
            other = other * left + _product(written, update, nothing, PRECISION)
    tl.store(last + head * K * K + square, held)
    if HALVES:
        tl.store(last + head * K * K + PART * K + square, other)


def solve(held: Segment, precision: str, block_k: int = 32, warps: int = 4) -> None:
    """From inputs and inverted diagonal blocks to what each chunk does to a state."""
    heads, padded, size = held.query.shape
    part = min(block_k, size)
    _pairs_kernel[(padded // CHUNK, heads)](
        held.query, held.key, held.decays, held.beta, held.inverse, held.mixed, padded,
        K=size, BK=part, B=BLOCK, C=CHUNK, PRECISION=precision, num_warps=2,
    )  # fmt: skip
    _solve_kernel[(padded // CHUNK, size // part, heads)](
        held.query, held.key, held.value, held.decays, held.beta, held.inverse, held.fresh,
        held.recalled, held.kept, padded,
        K=size, BK=part, B=BLOCK, C=CHUNK, PRECISION=precision, num_warps=warps,
    )  # fmt: skip


def chain(
    held: Segment,
    state: Tensor,  # [H, K, V]
    last: Tensor,  # [H, K, V], may be `state`
    precision: str,
    block_v: int = 16,
    warps: int = 4,
    stages: int = 2,
) -> None:
    """States before every chunk and, in ``last``, behind all of them."""
    heads, padded, size = held.query.shape
    _chain_kernel[(size // block_v, heads)](
        held.key, held.fresh, held.recalled, held.kept, held.starts, state, last, padded // CHUNK,
        K=size, PART=size // 2 if size > 64 else size, BV=block_v, C=CHUNK, PRECISION=precision,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
