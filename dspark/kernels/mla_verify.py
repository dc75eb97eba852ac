"""One verify step of a gated MLA layer, in three launches: prepare, attend, combine.

`mla_prepare` moves the key product to the query, rotates, and appends the latents of the live rows
behind the cursor, so that a step that is taken back only moves the cursor. `mla_attend` reads the
cache once for several heads and all rows: lanes take fixed chunks of absolute positions by turns,
and a chunk that a row may not see changes nothing in it. `mla_combine` adds the lanes in a fixed
order, rebuilds the value and gates it. Source and definition: `target.mla`; one difference:
probabilities are rounded to the model's dtype before they multiply the latents (their sum is not).

Symbols: R = 16 rows, T live rows, H heads (of this rank), N unrotated and P rotated size of a
query, L latent rank, V value size, S partial sums, C chunk of positions, G lanes.
"""

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.angles import cos_sin
from dspark.kernels.launch import ROWS, added, begin, dot, flags

__all__ = ["mla_attend", "mla_combine", "mla_prepare"]

_LOG2E = 1.4426950408889634


@triton.jit
def _absorb(
    queries, kv_b, out, live_rows, q_part, q_row, head, tile,
    S: tl.constexpr, H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, P: tl.constexpr,
    V: tl.constexpr, L: tl.constexpr, BL: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Columns of the latent query of one head: [R, N] @ [N, BL]."""
    rows = tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, NP)
    column = tile * BL + tl.arange(0, BL)[None, :]
    weight = tl.load(
        kv_b + (head * (N + V) + n[:, None]).to(tl.int64) * L + column,
        mask=(n[:, None] < N) & (column < L), other=0.0, eviction_policy="evict_first",
    )  # fmt: skip
    begin(PDL)
    dtype: tl.constexpr = out.dtype.element_ty
    place = rows * q_row + head * (N + P) + n[None, :]
    still = added(queries, place, q_part, n[None, :] < N, S, dtype).to(dtype)
    total = dot(still, weight, tl.zeros([ROWS, BL], tl.float32), WIDE)
    mask = (rows < tl.load(live_rows)) & (column < L)
    tl.store(out + (rows * H + head) * (L + P) + column, total.to(dtype), mask=mask)


@triton.jit
def _turn(parts, place, stride, mask, angle, out, AMPLITUDE, S: tl.constexpr):
    """Sum, rotate and store the pairs that start at ``place``; ``out`` points at their places."""
    dtype: tl.constexpr = out.dtype.element_ty
    even = added(parts, place, stride, mask, S, dtype)
    odd = added(parts, place + 1, stride, mask, S, dtype)
    cos, sin = cos_sin(angle)
    cos, sin = cos * AMPLITUDE, sin * AMPLITUDE
    tl.store(out, (even * cos - odd * sin).to(dtype), mask=mask)
    tl.store(out + 1, (even * sin + odd * cos).to(dtype), mask=mask)


@triton.jit
def _turn_queries(
    queries, inverse, out, cursor, live_rows, q_part, q_row, head, AMPLITUDE,
    S: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    L: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rotated part of one head's queries."""
    rows = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, PP)[None, :]
    rate = tl.load(inverse + j, mask=2 * j < P, other=0.0)
    begin(PDL)
    mask = (rows < tl.load(live_rows)) & (2 * j < P)
    angle = (tl.load(cursor) + rows).to(tl.float32) * rate
    _turn(
        queries, rows * q_row + head * (N + P) + N + 2 * j, q_part, mask, angle,
        out + (rows * H + head) * (L + P) + L + 2 * j, AMPLITUDE, S,
    )  # fmt: skip


@triton.jit
def _append(
    latent, norm_weight, inverse, latents, cursor, live_rows, l_part, l_row, row, AMPLITUDE,
    S: tl.constexpr, EPS: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, L: tl.constexpr,
    LP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of the cache: normed latent and rotated key."""
    dtype: tl.constexpr = latents.dtype.element_ty
    column = tl.arange(0, LP)
    j = tl.arange(0, PP)
    weight = tl.load(norm_weight + column, mask=column < L, other=0.0).to(tl.float32)
    rate = tl.load(inverse + j, mask=2 * j < P, other=0.0)
    begin(PDL)
    live = tl.where(row < tl.load(live_rows), 1, 0)
    position = tl.load(cursor) + row
    here = latents + position.to(tl.int64) * (L + P)
    mask = column < L * live
    wide = added(latent, row * l_row + column, l_part, mask, S, dtype)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / L + EPS)).to(dtype)
    tl.store(here + column, (normed.to(tl.float32) * weight).to(dtype), mask=mask)
    _turn(
        latent, row * l_row + L + 2 * j, l_part, 2 * j < P * live,
        position.to(tl.float32) * rate, here + L + 2 * j, AMPLITUDE, S,
    )  # fmt: skip


@triton.jit
def _prepare_kernel(
    queries, latent, norm_weight, kv_b, inverse, latents, out, cursor, live_rows,
    q_part, q_row, l_part, l_row, AMPLITUDE,
    S1: tl.constexpr, S2: tl.constexpr, EPS: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    NP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LP: tl.constexpr, BL: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (L + BL - 1) // BL
    program = tl.program_id(0)
    if program < H * TILES:
        _absorb(
            queries, kv_b, out, live_rows, q_part, q_row, program // TILES, program % TILES,
            S1, H, N, NP, P, V, L, BL, ROWS, PDL, WIDE,
        )  # fmt: skip
    elif program < H * TILES + H:
        _turn_queries(
            queries, inverse, out, cursor, live_rows, q_part, q_row, program - H * TILES, AMPLITUDE,
            S1, H, N, P, PP, L, ROWS, PDL,
        )  # fmt: skip
    else:
        _append(
            latent, norm_weight, inverse, latents, cursor, live_rows, l_part, l_row,
            program - H * TILES - H, AMPLITUDE, S2, EPS, P, PP, L, LP, PDL,
        )  # fmt: skip


@triton.jit
def _queries(
    query, live, tile,
    H: tl.constexpr, HT: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Latent and rotated queries of a tile: rows of its first head, then of the second, ..."""
    m, column, turned = tl.arange(0, HT * ROWS), tl.arange(0, LP), tl.arange(0, PP)
    row, head = m % ROWS, tile * HT + m // ROWS
    alive = ((head < H) & (row < live))[:, None]
    first = query + (row * H + head)[:, None] * (L + P)
    q = tl.load(first + column[None, :], mask=alive & (column[None, :] < L), other=0.0)
    q_turned = tl.load(first + L + turned[None, :], mask=alive & (turned[None, :] < P), other=0.0)
    return q, q_turned


@triton.jit
def _scores(
    q, q_turned, keys, keys_turned, position, sees, once, SCALE,
    BC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores of a block of positions; -inf where a row does not see one.

    Each product has a loop of one turn around it (``once``, which the compiler does not know).
    Where the product with the values follows from the scores in one block of code, Triton 3.6
    lets every warp group compute all columns of the scores.
    """
    scores = tl.zeros([q.shape[0], BC], tl.float32)
    for _ in range(once):
        scores = dot(q, tl.trans(keys), scores, WIDE)
    for _ in range(once):
        scores = dot(q_turned, tl.trans(keys_turned), scores, WIDE)
    hidden = (position + tl.arange(0, BC))[None, :] > sees[:, None]
    return tl.where(hidden, float("-inf"), scores * SCALE)


@triton.jit
def _attend_kernel(
    query, latents, total, peaks, masses, cursor, live_rows, SCALE, G,
    H: tl.constexpr, HT: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, P: tl.constexpr,
    PP: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    ROW: tl.constexpr = L + P
    BLOCKS: tl.constexpr = C // BC
    lane, tile = tl.program_id(0), tl.program_id(1)
    start, live = tl.load(cursor), tl.load(live_rows)
    end = tl.where(live > 0, start + live, 0)
    m, column, turned = tl.arange(0, HT * ROWS), tl.arange(0, LP), tl.arange(0, PP)
    n = tl.arange(0, BC)
    sees = start + m % ROWS  # the last position
    best = tl.full([HT * ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([HT * ROWS], tl.float32)
    mixed = tl.zeros([HT * ROWS, LP], tl.float32)
    mine = tl.maximum((end + C - 1) // C - lane + G - 1, 0) // G  # chunks
    once = tl.minimum(live, 1)
    begin(PDL)
    q, q_turned = _queries(query, live, tile, H, HT, L, LP, P, PP, ROWS)
    for block in range(mine * BLOCKS):
        position = (lane + block // BLOCKS * G) * C + block % BLOCKS * BC
        here = latents + position.to(tl.int64) * ROW + n[:, None] * ROW
        held = (position + n < end)[:, None]  # memory behind it may hold anything
        keys_turned = tl.load(
            here + L + turned[None, :], mask=held & (turned[None, :] < P), other=0.0
        )
        keys = tl.load(here + column[None, :], mask=held & (column[None, :] < L), other=0.0)
        scores = _scores(q, q_turned, keys, keys_turned, position, sees, once, SCALE, BC, WIDE)
        new = tl.maximum(best, tl.max(scores, 1))
        # a row that has seen nothing yet: keep the exponent away from inf - inf
        base = tl.where(new == float("-inf"), 0.0, new)
        again = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        mass = mass * again + tl.sum(weights, 1)
        mixed = dot(weights.to(keys.dtype), keys, mixed * again[:, None], WIDE)
        best = new
    # computed anew: kept in registers since the queries, they would spill
    row, head = m % ROWS, tile * HT + m // ROWS
    alive = (head < H) & (row < tl.load(live_rows))
    place = (lane * ROWS + row) * H + head
    tl.store(peaks + place, best, mask=alive)
    tl.store(masses + place, mass, mask=alive)
    written = (alive & (best != float("-inf")))[:, None] & (column[None, :] < L)
    tl.store(total + place.to(tl.int64)[:, None] * L + column[None, :], mixed, mask=written)


@triton.jit
def _combine_kernel(
    total, peaks, masses, kv_b, gates, out, live_rows, g_part, g_row, G,
    S: tl.constexpr, H: tl.constexpr, N: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    LP: tl.constexpr, GP: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    column, v = tl.arange(0, LP), tl.arange(0, BV)
    weight = kv_b + (head * (N + V) + N).to(tl.int64) * L
    kept = (v[:, None] < V) & (column[None, :] < L)
    ahead = tl.load(weight + v[:, None] * L + column[None, :], mask=kept, other=0.0)
    begin(PDL)
    if row >= tl.load(live_rows):
        return
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.sigmoid(added(gates, row * g_row + head, g_part, head < H, S, dtype))
    every = tl.arange(0, GP)
    places = (every * ROWS + row) * H + head
    tops = tl.load(peaks + places, mask=every < G, other=float("-inf"))
    top = tl.max(tops, 0)
    mass = tl.sum(tl.exp2(tops - top) * tl.load(masses + places, mask=every < G, other=0.0), 0)
    sums = tl.zeros([BG, LP], tl.float32)
    for first in range(0, G, BG):
        lane = first + tl.arange(0, BG)
        place = (lane * ROWS + row) * H + head
        peak = tl.load(peaks + place, mask=lane < G, other=float("-inf"))
        # a lane that has seen nothing has written nothing
        some = (peak != float("-inf"))[:, None] & (column[None, :] < L)
        part = tl.load(
            total + place.to(tl.int64)[:, None] * L + column[None, :], mask=some, other=0.0
        )
        sums += part * tl.exp2(peak - top)[:, None]
    latent = (tl.sum(sums, 0) / mass).to(dtype).to(tl.float32)
    for first in tl.static_range(0, V, BV):
        if first > 0:
            kept = (first + v[:, None] < V) & (column[None, :] < L)
            ahead = tl.load(
                weight + (first + v[:, None]) * L + column[None, :], mask=kept, other=0.0
            )
        value = tl.sum(ahead.to(tl.float32) * latent[None, :], 1).to(dtype).to(tl.float32)
        place = (row * H + head) * V + first + v
        tl.store(out + place, (value * gate).to(dtype), mask=first + v < V)


def mla_prepare(
    queries: Tensor,  # [S1, R, H (N + P)] float32 partial sums, or of out's dtype with S1 = 1
    latent: Tensor,  # [S2, R, L + P], likewise
    norm_weight: Tensor,  # [L]
    kv_b: Tensor,  # [H (N + V), L], of out's dtype
    inverse: Tensor,  # [P / 2] float32, angle of each pair at position 1
    latents: Tensor,  # [capacity, L + P] of out's dtype, the cache
    out: Tensor,  # [R, H, L + P], the query over latents
    *,
    cursor: Tensor,  # [1] int32, position of row 0
    live_rows: Tensor,  # [1] int32, T
    eps: float,
    amplitude: float = 1.0,
    block: int = 32,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """Queries as `mla_attend` reads them, and the live rows' latents at ``cursor`` and behind it.

    Parts are added in order and rounded to the dtype of ``out`` before anything else; parts and
    rows may have strides. Rows behind T are not written. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape, a stride or a dtype does not fit.
    """
    heads, rank = out.shape[1], kv_b.shape[1]
    turned = out.shape[2] - rank
    still = queries.shape[2] // heads - turned
    value = kv_b.shape[0] // heads - still
    fits = (
        queries.shape[1:] == (ROWS, heads * (still + turned))
        and latent.shape[1:] == (ROWS, rank + turned)
        and kv_b.shape == (heads * (still + value), rank)
        and latents.shape[1:] == (rank + turned,)
        and out.shape == (ROWS, heads, rank + turned)
    )
    if not fits or min(still, turned, value) < 1 or turned % 2:
        raise ValueError(
            f"mla_prepare wants queries [S, {ROWS}, H (N + P)], latent [S, {ROWS}, L + P], kv_b "
            f"[H (N + V), L], latents [capacity, L + P] and out [{ROWS}, H, L + P], got "
            f"{tuple(queries.shape)}, {tuple(latent.shape)}, {tuple(kv_b.shape)}, "
            f"{tuple(latents.shape)} and {tuple(out.shape)}"
        )
    if norm_weight.shape != (rank,) or inverse.shape != (turned // 2,):
        raise ValueError(
            f"mla_prepare wants norm_weight [{rank}] and inverse [{turned // 2}], got "
            f"{tuple(norm_weight.shape)} and {tuple(inverse.shape)}"
        )
    whole = all(one.is_contiguous() for one in (norm_weight, kv_b, inverse, latents, out))
    if not whole or queries.stride(2) != 1 or latent.stride(2) != 1:
        raise ValueError(
            "mla_prepare wants contiguous tensors, and a last stride of 1 for queries and latent"
        )
    _same_dtype("mla_prepare", out, latents, kv_b)
    _prepare_kernel[(heads * triton.cdiv(rank, block) + heads + ROWS,)](
        queries, latent, norm_weight, kv_b, inverse, latents, out, cursor, live_rows,
        queries.stride(0), queries.stride(1), latent.stride(0), latent.stride(1), amplitude,
        S1=queries.shape[0], S2=latent.shape[0], EPS=eps, H=heads,
        N=still, NP=_padded(still), P=turned, PP=triton.next_power_of_2(turned // 2),
        V=value, L=rank, LP=triton.next_power_of_2(rank), BL=block,
        ROWS=ROWS, num_warps=warps, **flags(out, pdl),
    )  # fmt: skip


def mla_attend(
    query: Tensor,  # [R, H, L + P], from `mla_prepare`
    latents: Tensor,  # [capacity, L + P] of the same dtype; unused memory may hold anything
    total: Tensor,  # [G, R, H, L] float32, sums of latents that are not yet divided
    peaks: Tensor,  # [G, R, H] float32, highest scores in units of log 2
    masses: Tensor,  # [G, R, H] float32
    *,
    cursor: Tensor,  # [1] int32, position of row 0
    live_rows: Tensor,  # [1] int32, T
    scale: float,
    chunk: int = 128,
    block: int = 128,
    heads_per_tile: int = 4,
    warps: int = 8,
    stages: int = 1,
    pdl: bool | None = None,
) -> None:
    """Attention of row t over positions 0 to cursor + t, in G parts: lane g has chunks g, g + G...

    A chunk is read in pieces of ``block`` positions. A lane in which a row sees nothing gets a peak
    of -inf, a mass of 0 and no total; rows behind T are not written. Nothing is allocated or waited
    for.

    Raises:
        ValueError: a shape or a dtype does not fit, or a tile's size is none.
    """
    (lanes, _, heads, rank), turned = total.shape, query.shape[2] - total.shape[3]
    fits = query.shape[:2] == (ROWS, heads) and latents.shape[1:] == query.shape[2:]
    parts = total.shape[1] == ROWS and peaks.shape == masses.shape == total.shape[:3]
    if not fits or not parts or turned < 1:
        raise ValueError(
            f"mla_attend wants query [{ROWS}, H, L + P], latents [capacity, L + P], total "
            f"[G, {ROWS}, H, L], peaks and masses [G, {ROWS}, H], got {tuple(query.shape)}, "
            f"{tuple(latents.shape)}, {tuple(total.shape)}, {tuple(peaks.shape)} and "
            f"{tuple(masses.shape)}"
        )
    if not all(one.is_contiguous() for one in (query, latents, total, peaks, masses)):
        raise ValueError("mla_attend wants contiguous tensors")
    if chunk % block or any(one < 1 or one & (one - 1) for one in (block, heads_per_tile)):
        raise ValueError(
            "mla_attend wants chunk a multiple of block, and block and heads_per_tile powers of "
            f"two, got {chunk}, {block} and {heads_per_tile}"
        )
    _same_dtype("mla_attend", query, latents)
    _attend_kernel[(lanes, triton.cdiv(heads, heads_per_tile))](
        query, latents, total, peaks, masses, cursor, live_rows, scale * _LOG2E, lanes,
        H=heads, HT=heads_per_tile, L=rank, LP=_padded(rank), P=turned, PP=_padded(turned),
        C=chunk, BC=block,
        ROWS=ROWS, num_warps=warps, num_stages=stages, **flags(query, pdl),
    )  # fmt: skip


def mla_combine(
    total: Tensor,  # [G, R, H, L] float32, from `mla_attend`, like the next two
    peaks: Tensor,  # [G, R, H] float32
    masses: Tensor,  # [G, R, H] float32
    kv_b: Tensor,  # [H (N + V), L], of out's dtype
    gates: Tensor,  # [S, R, H] float32 partial sums, or of out's dtype with S = 1
    out: Tensor,  # [R, H V]
    *,
    live_rows: Tensor,  # [1] int32, T
    block: int = 32,
    lane_block: int = 16,
    warps: int = 8,
    pdl: bool | None = None,
) -> None:
    """The lanes' sum, divided, times the value product and the sigmoid of the gate.

    Each of the three is rounded to the dtype of ``out`` where the layer rounds it. Rows behind T
    are not written. Nothing is allocated or waited for.

    Raises:
        ValueError: a shape, a stride or a dtype does not fit.
    """
    lanes, rows, heads, rank = total.shape
    value = out.shape[1] // heads
    still = kv_b.shape[0] // heads - value
    fits = kv_b.shape == (heads * (still + value), rank) and out.shape == (ROWS, heads * value)
    parts = rows == ROWS and peaks.shape == masses.shape == total.shape[:3]
    if not fits or not parts or gates.shape[1:] != (ROWS, heads) or still < 1:
        raise ValueError(
            f"mla_combine wants total [G, {ROWS}, H, L], peaks and masses [G, {ROWS}, H], kv_b "
            f"[H (N + V), L], gates [S, {ROWS}, H] and out [{ROWS}, H V], got "
            f"{tuple(total.shape)}, {tuple(peaks.shape)}, {tuple(masses.shape)}, "
            f"{tuple(kv_b.shape)}, {tuple(gates.shape)} and {tuple(out.shape)}"
        )
    whole = all(one.is_contiguous() for one in (total, peaks, masses, kv_b, out))
    if not whole or gates.stride(2) != 1:
        raise ValueError("mla_combine wants contiguous tensors, and a last stride of 1 for gates")
    _same_dtype("mla_combine", out, kv_b)
    _combine_kernel[(ROWS, heads)](
        total, peaks, masses, kv_b, gates, out, live_rows, gates.stride(0), gates.stride(1), lanes,
        S=gates.shape[0], H=heads, N=still, V=value, L=rank, LP=triton.next_power_of_2(rank),
        GP=triton.next_power_of_2(lanes), BG=lane_block, BV=block,
        ROWS=ROWS, num_warps=warps, **flags(out, pdl),
    )  # fmt: skip


def _padded(size: int) -> int:
    """To what a product of tiles takes."""
    return max(ROWS, int(triton.next_power_of_2(size)))


def _same_dtype(name: str, like: Tensor, *others: Tensor) -> None:
    dtypes = [one.dtype for one in (like, *others)]
    if len(set(dtypes)) > 1:
        raise ValueError(f"{name} wants one dtype for weights, query and cache, got {dtypes}")
