"""KDA in chunks of 64 rows: `target.kda.chunked` between a prompt's inputs and its outputs.

Inside a chunk every row corrects what the rows before it have written: a unit lower triangular
system of 64 equations, inverted in blocks of 16. Between chunks runs one chain of products with the
state; what it leaves of every chunk lets the outputs of all chunks be computed side by side.

Decays are kept as sums from the start of a row's block on. What decays from one block to another is
a sum of negative numbers, so nothing is lost in differences; within a block rows and columns are
decayed from and to its middle, by at most e^40 for decays of e^-5 a row. Products of float32 are
three TF32 products on a GPU (`precision` "tf32x3"), exact to about 2^-21.

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
def _product(left, right, PRECISION: tl.constexpr):
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _rows_of(query, key, decays, beta, first, K: tl.constexpr, B: tl.constexpr):
    """Keys and queries of a block decayed from its middle, betas [B], decay to the middle [K]."""
    k = tl.arange(0, K)
    row = first + tl.arange(0, B)
    at = row[:, None] * K + k[None, :]
    middle = tl.load(decays + (first + B // 2) * K + k)
    late = tl.exp(tl.load(decays + at) - middle[None, :])
    return (
        tl.load(key + at) * late, tl.load(query + at) * late, tl.load(beta + row), middle
    )  # fmt: skip


@triton.jit
def _cross(
    keys, queries, beta, between, key, decays, mixed, first, ROW: tl.constexpr,
    COLUMN: tl.constexpr, K: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Block (ROW, COLUMN < ROW) of the system; that of the queries is stored.

    ``between`` [K]: decay from the end of the column's block to the middle of the row's.
    """
    k, r = tl.arange(0, K), tl.arange(0, B)
    at = (first + COLUMN * B + r)[:, None] * K + k[None, :]
    end = tl.load(decays + (first + COLUMN * B + B - 1) * K + k)
    early = tl.load(key + at) * tl.exp((end + between)[None, :] - tl.load(decays + at))
    early = tl.trans(early)
    place = (first + ROW * B + r)[:, None] * C + COLUMN * B + r[None, :]
    tl.store(mixed + place, _product(queries, early, PRECISION))
    return beta[:, None] * _product(keys, early, PRECISION)


@triton.jit
def _pairs_kernel(
    query, key, decays, beta, inverse, mixed, padded,
    K: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tl.static_assert(C == 4 * B)
    first = tl.program_id(1) * padded + tl.program_id(0) * C
    k, r = tl.arange(0, K), tl.arange(0, B)
    end1 = tl.load(decays + (first + 2 * B - 1) * K + k)
    end2 = tl.load(decays + (first + 3 * B - 1) * K + k)
    keys, queries, b, middle = _rows_of(query, key, decays, beta, first + B, K, B)
    a10 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 1, 0, K, B, C, PRECISION
    )  # fmt: skip
    keys, queries, b, middle = _rows_of(query, key, decays, beta, first + 2 * B, K, B)
    a21 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 2, 1, K, B, C, PRECISION
    )  # fmt: skip
    middle += end1
    a20 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 2, 0, K, B, C, PRECISION
    )  # fmt: skip
    keys, queries, b, middle = _rows_of(query, key, decays, beta, first + 3 * B, K, B)
    a32 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 3, 2, K, B, C, PRECISION
    )  # fmt: skip
    middle += end2
    a31 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 3, 1, K, B, C, PRECISION
    )  # fmt: skip
    middle += end1
    a30 = _cross(
        keys, queries, b, middle, key, decays, mixed, first, 3, 0, K, B, C, PRECISION
    )  # fmt: skip
    # blocks on the diagonal are inverted already
    place = inverse + (first + r)[:, None] * C + r[None, :]
    down: tl.constexpr = B * C
    t00, t11 = tl.load(place), tl.load(place + down + B)
    t22, t33 = tl.load(place + 2 * (down + B)), tl.load(place + 3 * (down + B))
    t10 = -_product(_product(t11, a10, PRECISION), t00, PRECISION)
    t21 = -_product(_product(t22, a21, PRECISION), t11, PRECISION)
    t32 = -_product(_product(t33, a32, PRECISION), t22, PRECISION)
    t20 = _product(a20, t00, PRECISION) + _product(a21, t10, PRECISION)
    t20 = -_product(t22, t20, PRECISION)
    t31 = _product(a31, t11, PRECISION) + _product(a32, t21, PRECISION)
    t31 = -_product(t33, t31, PRECISION)
    t30 = _product(a30, t00, PRECISION) + _product(a31, t10, PRECISION)
    t30 = -_product(t33, t30 + _product(a32, t20, PRECISION), PRECISION)
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
    tl.store(fresh + at, _product(solved, tl.load(value + at), PRECISION))
    keys = tl.load(key + at)
    tl.store(recalled + at, _product(solved, keys * since, PRECISION))
    tl.store(key + at, keys * left)
    tl.store(query + at, tl.load(query + at) * since)


@triton.jit
def _chain_kernel(
    key, fresh, recalled, kept, starts, state, last, chunks,
    K: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    r, k = tl.arange(0, C), tl.arange(0, K)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    square = k[:, None] * K + v[None, :]
    held = tl.load(state + head * K * K + square)
    for chunk in range(chunks):
        one = head * chunks + chunk
        row = one * C + r
        tl.store(starts + one.to(tl.int64) * (K * K) + square, held)
        place = fresh + row[:, None] * K + v[None, :]
        wide = row[:, None] * K + k[None, :]
        update = tl.load(place) - _product(tl.load(recalled + wide), held, PRECISION)
        tl.store(place, update)
        written = tl.trans(tl.load(key + wide))
        held = held * tl.load(kept + one * K + k)[:, None]
        held += _product(written, update, PRECISION)
    tl.store(last + head * K * K + square, held)


def solve(held: Segment, precision: str, block_k: int = 64, warps: int = 4) -> None:
    """From inputs and inverted diagonal blocks to what each chunk does to a state."""
    heads, padded, size = held.query.shape
    _pairs_kernel[(padded // CHUNK, heads)](
        held.query, held.key, held.decays, held.beta, held.inverse, held.mixed, padded,
        K=size, B=BLOCK, C=CHUNK, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    part = min(block_k, size)
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
        K=size, BV=block_v, C=CHUNK, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
