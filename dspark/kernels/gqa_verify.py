"""One verify step of a grouped-query attention layer, in three launches: prepare, attend, combine.

`gqa_prepare` norms and rotates, and appends the keys and values of the live rows behind the cursor,
so that a step that is taken back only moves the cursor. `gqa_attend` reads the cache once for all
rows and all query heads of a group: lanes take fixed chunks of absolute positions by turns, and a
chunk that a row may not see changes nothing in it. `gqa_combine` adds the lanes in a fixed order.
Definition: the attention of transformers' Llama and Qwen3; one difference: probabilities are
rounded to the model's dtype before they multiply the values (their sum is not).

Symbols: R = 16 rows, T live rows, H query heads, J key/value heads, N head size, S partial sums,
C chunk of positions, G lanes, P positions a cache has room for.
"""

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, added, begin, check_shapes, dot, flags
from dspark.kernels.rotated import head_scales, turned_head

__all__ = ["gqa_attend", "gqa_combine", "gqa_prepare"]

_LOG2E = 1.4426950408889634
_MOST_HEADS = 8
"""Query heads of a tile: 128 rows of a product, whose sums still fit the registers."""


@triton.jit
def _prepare_kernel(
    projected, q_norm, k_norm, inverse, query, keys, values, cursor, live_rows, capacity, EPS,
    AMPLITUDE,
    S: tl.constexpr, H: tl.constexpr, J: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    NORM: tl.constexpr, BR: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    rows = tl.program_id(1) * BR + tl.arange(0, BR)
    n = tl.arange(0, NP)
    WIDTH: tl.constexpr = (H + 2 * J) * N
    own, partner, rate, other = head_scales(q_norm if head < H else k_norm, inverse, n, N, NORM)
    begin(PDL)
    live = tl.load(live_rows)
    if tl.program_id(1) * BR >= live:
        return
    dtype: tl.constexpr = query.dtype.element_ty
    positions = tl.load(cursor) + rows
    row = rows * WIDTH + head * N
    if head < H + J:
        new = turned_head(
            projected, row, own, partner, rate, other, positions, n, EPS, AMPLITUDE,
            S, ROWS * WIDTH, N, NORM, dtype,
        )  # fmt: skip
    else:
        new = added(
            projected, row[:, None] + n[None, :], ROWS * WIDTH, n[None, :] < N, S, dtype
        ).to(dtype)
    mask = (rows < live)[:, None] & (n[None, :] < N)
    if head < H:
        tl.store(query + (head * ROWS + rows)[:, None] * N + n[None, :], new, mask=mask)
    else:
        # a row too many must not run into the next head
        mask = mask & (positions < capacity)[:, None]
        cache = keys if head < H + J else values
        group = (head - H) % J
        place = (group.to(tl.int64) * capacity + positions)[:, None] * N + n[None, :]
        tl.store(cache + place, new, mask=mask)


@triton.jit
def _attend_kernel(
    query, keys, values, total, peaks, masses, cursor, live_rows, capacity, SCALE, G,
    H: tl.constexpr, J: tl.constexpr, HT: tl.constexpr, TILES: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    lane, group = tl.program_id(0), tl.program_id(1) // TILES
    start, live = tl.load(cursor), tl.load(live_rows)
    end = tl.where(live > 0, start + live, 0)
    # rows of the tile's first head, then of the second, ...
    m, n, c = tl.arange(0, HT * ROWS), tl.arange(0, NP), tl.arange(0, C)
    row, within = m % ROWS, tl.program_id(1) % TILES * HT + m // ROWS
    head = group * (H // J) + within
    alive = (within < H // J) & (row < live)
    inner = n[None, :] < N
    sees = start + row  # the last position
    best = tl.full([HT * ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([HT * ROWS], tl.float32)
    mixed = tl.zeros([HT * ROWS, NP], tl.float32)
    first = group.to(tl.int64) * capacity * N
    begin(PDL)
    q = tl.load(
        query + (head * ROWS + row)[:, None] * N + n[None, :],
        mask=alive[:, None] & inner, other=0.0,
    )  # fmt: skip
    for chunk in range(lane, (end + C - 1) // C, G):
        position = chunk * C + c
        here = first + position[:, None].to(tl.int64) * N + n[None, :]
        held = (position < end)[:, None] & inner  # memory behind it may hold anything
        key = tl.load(keys + here, mask=held, other=0.0)
        value = tl.load(values + here, mask=held, other=0.0)
        scores = dot(q, tl.trans(key), tl.zeros([HT * ROWS, C], tl.float32), WIDE) * SCALE
        scores = tl.where(position[None, :] > sees[:, None], float("-inf"), scores)
        new = tl.maximum(best, tl.max(scores, 1))
        # a row that has seen nothing yet: keep the exponent away from inf - inf
        base = tl.where(new == float("-inf"), 0.0, new)
        again = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        mass = mass * again + tl.sum(weights, 1)
        mixed = dot(weights.to(value.dtype), value, mixed * again[:, None], WIDE)
        best = new
    place = (lane * ROWS + row) * H + head
    tl.store(peaks + place, best, mask=alive)
    tl.store(masses + place, mass, mask=alive)
    written = (alive & (best != float("-inf")))[:, None] & inner
    tl.store(total + place.to(tl.int64)[:, None] * N + n[None, :], mixed, mask=written)


@triton.jit
def _combine_kernel(
    total, peaks, masses, out, live_rows, G,
    H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, GP: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    n, every = tl.arange(0, NP), tl.arange(0, GP)
    begin(PDL)
    if row >= tl.load(live_rows):
        return
    places = (every * ROWS + row) * H + head
    tops = tl.load(peaks + places, mask=every < G, other=float("-inf"))
    top = tl.max(tops, 0)
    mass = tl.sum(tl.exp2(tops - top) * tl.load(masses + places, mask=every < G, other=0.0), 0)
    sums = tl.zeros([BG, NP], tl.float32)
    for first in range(0, G, BG):
        lane = first + tl.arange(0, BG)
        place = (lane * ROWS + row) * H + head
        peak = tl.load(peaks + place, mask=lane < G, other=float("-inf"))
        # a lane that has seen nothing has written nothing
        some = (peak != float("-inf"))[:, None] & (n[None, :] < N)
        part = tl.load(total + place.to(tl.int64)[:, None] * N + n[None, :], mask=some, other=0.0)
        sums += part * tl.exp2(peak - top)[:, None]
    mixed = (tl.sum(sums, 0) / mass).to(out.dtype.element_ty)
    tl.store(out + (row * H + head) * N + n, mixed, mask=n < N)


def gqa_prepare(
    projected: Tensor,  # [S, R, (H + 2 J) N] float32 partial sums: queries, keys, values
    q_norm: Tensor | None,  # [N]; None: queries and keys are not normed
    k_norm: Tensor | None,  # [N]
    inverse: Tensor,  # [N / 2] float32, angle of each pair at position 1
    query: Tensor,  # [H, R, N], of the caches' dtype
    keys: Tensor,  # [J, P, N], of one layer
    values: Tensor,  # [J, P, N]
    *,
    cursor: Tensor,  # [1] int32, position of row 0
    live_rows: Tensor,  # [1] int32, T
    eps: float = 0.0,
    amplitude: float = 1.0,
    block_rows: int = 4,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """Queries as `gqa_attend` reads them, and the live rows' keys and values behind the cursor.

    Parts are added in order and rounded to the dtype of ``query`` before anything else. Rows behind
    T, or behind the cache's end, are not written. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape or a dtype does not fit, or one norm of two is missing.
    """
    heads, _, size = query.shape
    groups, capacity, _ = keys.shape
    norms = [one for one in (q_norm, k_norm) if one is not None]
    check_shapes(
        "gqa_prepare",
        projected=(projected, (len(projected), ROWS, (heads + 2 * groups) * size)),
        inverse=(inverse, (size // 2,)),
        query=(query, (heads, ROWS, size)),
        keys=(keys, (groups, capacity, size)),
        values=(values, keys.shape),
        **{f"norm {place}": (one, (size,)) for place, one in enumerate(norms)},
    )
    if len(norms) == 1 or size % 2 or ROWS % block_rows:
        raise ValueError(
            f"gqa_prepare wants both norms or none, an even head size and block_rows that divide "
            f"{ROWS}, got {len(norms)} norms, {size} and {block_rows}"
        )
    _same_dtype("gqa_prepare", query, keys, values, *norms)
    # without norms their places are not read
    own, partner = norms or (query, query)
    _prepare_kernel[(heads + 2 * groups, ROWS // block_rows)](
        projected, own, partner, inverse, query, keys, values, cursor, live_rows, capacity, eps,
        amplitude,
        S=len(projected), H=heads, J=groups, N=size, NP=triton.next_power_of_2(size),
        NORM=bool(norms), BR=block_rows, ROWS=ROWS, num_warps=warps, **flags(query, pdl),
    )  # fmt: skip


def gqa_attend(
    query: Tensor,  # [H, R, N], from `gqa_prepare`
    keys: Tensor,  # [J, P, N] of the same dtype; unused memory may hold anything
    values: Tensor,  # [J, P, N]
    total: Tensor,  # [G, R, H, N] float32, weighted values that are not yet divided
    peaks: Tensor,  # [G, R, H] float32, highest scores in units of log 2
    masses: Tensor,  # [G, R, H] float32
    *,
    cursor: Tensor,  # [1] int32, position of row 0
    live_rows: Tensor,  # [1] int32, T
    scale: float,
    chunk: int = 64,
    warps: int = 4,
    stages: int = 2,
    pdl: bool | None = None,
) -> None:
    """Attention of row t over positions 0 to cursor + t, in G parts: lane g has chunks g, g + G...

    A lane in which a row sees nothing gets a peak of -inf, a mass of 0 and no total; rows behind T
    are not written. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape or a dtype does not fit, or ``chunk`` is no power of two from 16 on.
    """
    (groups, capacity, size), (lanes, _, heads, _) = keys.shape, total.shape
    check_shapes(
        "gqa_attend",
        query=(query, (heads, ROWS, size)),
        keys=(keys, keys.shape),
        values=(values, keys.shape),
        total=(total, (lanes, ROWS, heads, size)),
        peaks=(peaks, (lanes, ROWS, heads)),
        masses=(masses, (lanes, ROWS, heads)),
    )
    if heads % groups or chunk < 16 or chunk & (chunk - 1):
        raise ValueError(
            f"gqa_attend wants query heads a multiple of the {groups} key heads and a chunk that "
            f"is a power of two from 16 on, got {heads} and {chunk}"
        )
    _same_dtype("gqa_attend", query, keys, values)
    tile = min(_MOST_HEADS, triton.next_power_of_2(heads // groups))
    tiles = triton.cdiv(heads // groups, tile)
    _attend_kernel[(lanes, groups * tiles)](
        query, keys, values, total, peaks, masses, cursor, live_rows, capacity, scale * _LOG2E,
        lanes,
        H=heads, J=groups, HT=tile, TILES=tiles, N=size, NP=max(16, triton.next_power_of_2(size)),
        C=chunk, ROWS=ROWS, num_warps=warps, num_stages=stages, **flags(query, pdl),
    )  # fmt: skip


def gqa_combine(
    total: Tensor,  # [G, R, H, N] float32, from `gqa_attend`, like the next two
    peaks: Tensor,  # [G, R, H] float32
    masses: Tensor,  # [G, R, H] float32
    out: Tensor,  # [R, H N]
    *,
    live_rows: Tensor,  # [1] int32, T
    block_lanes: int = 16,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """The lanes' sum, divided. Rows behind T are not written. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape does not fit.
    """
    lanes, _, heads, size = total.shape
    check_shapes(
        "gqa_combine",
        total=(total, (lanes, ROWS, heads, size)),
        peaks=(peaks, (lanes, ROWS, heads)),
        masses=(masses, (lanes, ROWS, heads)),
        out=(out, (ROWS, heads * size)),
    )
    padded = triton.next_power_of_2(lanes)
    _combine_kernel[(ROWS, heads)](
        total, peaks, masses, out, live_rows, lanes,
        H=heads, N=size, NP=triton.next_power_of_2(size), GP=padded, BG=min(padded, block_lanes),
        ROWS=ROWS, num_warps=warps, **flags(out, pdl),
    )  # fmt: skip


def _same_dtype(name: str, like: Tensor, *others: Tensor) -> None:
    dtypes = [one.dtype for one in (like, *others)]
    if len(set(dtypes)) > 1:
        raise ValueError(f"{name} wants one dtype for norms, queries and caches, got {dtypes}")
