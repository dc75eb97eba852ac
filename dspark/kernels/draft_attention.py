"""Attention of a draft's block: committed rows into the cache, block rows over it and themselves.

Projections come as partial sums over splits of their K; they are added in order, rounded like the
activations, normed and rotated where they are used. Lanes share the context in chunks at fixed
places, so that a slot is added up in one order whatever the other slots hold.

Symbols: R = 16 rows, S partial sums, L layers, H query heads, J key/value heads, N head size,
G lanes, P positions a cache has room for.
"""

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, added, begin, check_shapes, dot, flags
from dspark.kernels.rotated import head_scales, turned_head

__all__ = ["draft_append", "draft_attend", "draft_combine", "draft_rotate"]


@triton.jit
def _append_kernel(
    projected, norm_weights, inverse, keys, values, base, count, capacity, EPS, AMPLITUDE,
    S: tl.constexpr, L: tl.constexpr, J: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    BR: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(0) // J, tl.program_id(0) % J
    rows = tl.program_id(1) * BR + tl.arange(0, BR)
    n = tl.arange(0, NP)
    WIDTH: tl.constexpr = L * 2 * J * N
    own, partner, rate, other = head_scales(norm_weights + layer * N, inverse, n, N, True)
    begin(PDL)
    first, live_rows = tl.load(base), tl.load(count)
    if tl.program_id(1) * BR >= live_rows:
        return
    positions = first + rows
    # a row too many must not run into the next head
    kept = ((rows < live_rows) & (positions < capacity))[:, None] & (n[None, :] < N)
    dtype: tl.constexpr = keys.dtype.element_ty
    row = rows * WIDTH + (layer * 2 * J + head) * N
    key = turned_head(
        projected, row, own, partner, rate, other, positions, n, EPS, AMPLITUDE,
        S, ROWS * WIDTH, N, True, dtype,
    )  # fmt: skip
    place = row[:, None] + J * N + n[None, :]
    value = added(projected, place, ROWS * WIDTH, n[None, :] < N, S, dtype)
    start = tl.program_id(0).to(tl.int64) * capacity
    place = (start + positions[:, None]) * N + n[None, :]
    tl.store(keys + place, key, mask=kept)
    tl.store(values + place, value.to(dtype), mask=kept)


@triton.jit
def _look(query, key, value, seen, peak, mass, mixed, SCALE, WIDE: tl.constexpr):
    """Take [positions, N] keys and values into the running softmax of [R, N] queries."""
    ROWS: tl.constexpr = query.shape[0]
    scores = tl.zeros([ROWS, key.shape[0]], tl.float32)
    scores = dot(query, tl.trans(key), scores, WIDE) * SCALE
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp(scores - new[:, None])
    kept = tl.exp(peak - new)
    mixed = dot(weights.to(value.dtype), value, mixed * kept[:, None], WIDE)
    return new, mass * kept + tl.sum(weights, 1), mixed


@triton.jit
def _rotate_kernel(
    projected, q_norm, k_norm, inverse, block, context, EPS, AMPLITUDE,
    S: tl.constexpr, H: tl.constexpr, J: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    BR: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    rows = tl.program_id(1) * BR + tl.arange(0, BR)
    n = tl.arange(0, NP)
    WIDTH: tl.constexpr = (H + 2 * J) * N
    own, partner, rate, other = head_scales(q_norm if head < H else k_norm, inverse, n, N, True)
    begin(PDL)
    dtype: tl.constexpr = block.dtype.element_ty
    row = rows * WIDTH + head * N
    place = (head * ROWS + rows)[:, None] * N + n[None, :]
    if head < H + J:
        new = turned_head(
            projected, row, own, partner, rate, other, tl.load(context) + rows, n, EPS,
            AMPLITUDE,
            S, ROWS * WIDTH, N, True, dtype,
        )  # fmt: skip
    else:
        new = added(
            projected, row[:, None] + n[None, :], ROWS * WIDTH, n[None, :] < N, S, dtype
        ).to(dtype)
    tl.store(block + place, new, mask=n[None, :] < N)


@triton.jit
def _attend_kernel(
    block, keys, values, total, peaks, masses, context, capacity, SCALE,
    H: tl.constexpr, J: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // J)
    rows = tl.arange(0, ROWS)
    n = tl.arange(0, NP)
    begin(PDL)
    length = tl.load(context)
    place = (lane * ROWS + rows) * H + head
    live = rows < SLOTS
    if (lane > 0) & (lane * CHUNK >= length):
        tl.store(peaks + place, tl.full([ROWS], float("-inf"), tl.float32), mask=live)
        tl.store(masses + place, tl.zeros([ROWS], tl.float32), mask=live)
        return
    tile = rows[:, None] * N + n[None, :]
    inner = n[None, :] < N
    query = tl.load(block + head * ROWS * N + tile, mask=inner, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, NP], tl.float32)
    if lane == 0:
        mine = block + (H + group) * ROWS * N + tile
        key = tl.load(mine, mask=inner, other=0.0)
        value = tl.load(mine + J * ROWS * N, mask=live[:, None] & inner, other=0.0)
        peak, mass, mixed = _look(query, key, value, live, peak, mass, mixed, SCALE, WIDE)
    start = group.to(tl.int64) * capacity * N
    c = tl.arange(0, CHUNK)
    inside = c[:, None] * N + n[None, :]
    for first in range(lane * CHUNK, length, tl.num_programs(0) * CHUNK):
        seen = first + c < length
        mask = seen[:, None] & inner
        here = start + first * N
        key = tl.load(keys + here + inside, mask=mask, other=0.0)
        value = tl.load(values + here + inside, mask=mask, other=0.0)
        peak, mass, mixed = _look(query, key, value, seen, peak, mass, mixed, SCALE, WIDE)
    tl.store(peaks + place, peak, mask=live)
    tl.store(masses + place, mass, mask=live)
    mask = live[:, None] & inner
    tl.store(total + place[:, None] * N + n[None, :], mixed, mask=mask)


@triton.jit
def _combine_kernel(
    total, peaks, masses, out,
    G: tl.constexpr, GP: tl.constexpr, H: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    SLOTS: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, NP)
    live = n < N
    target = out + (row * H + head) * N + n
    begin(PDL)
    if row >= SLOTS:
        tl.store(target, tl.zeros([NP], out.dtype.element_ty), mask=live)
        return
    at = row * H + head
    g = tl.arange(0, GP)
    heights = tl.load(peaks + g * (ROWS * H) + at, mask=g < G, other=float("-inf"))
    peak = tl.max(heights, 0)
    parts = tl.load(masses + g * (ROWS * H) + at, mask=g < G, other=0.0)
    mass = tl.sum(parts * tl.exp(heights - peak), 0)
    mixed = tl.zeros([NP], tl.float32)
    for first in tl.static_range(0, GP, BG):
        g = first + tl.arange(0, BG)
        height = tl.load(peaks + g * (ROWS * H) + at, mask=g < G, other=float("-inf"))
        # lanes that had nothing to look at have written no total
        mask = (height > float("-inf"))[:, None] & live[None, :]
        place = (g * (ROWS * H) + at).to(tl.int64)[:, None] * N + n[None, :]
        lanes = tl.load(total + place, mask=mask, other=0.0)
        mixed += tl.sum(lanes * tl.exp(height - peak)[:, None], 0)
    tl.store(target, (mixed / mass).to(out.dtype.element_ty), mask=live)


def draft_append(
    projected: Tensor,  # [S, R, L 2 J N] float32: of each layer all keys, then all values
    norm_weights: Tensor,  # [L, N], of the keys
    inverse: Tensor,  # [N / 2] float32, frequencies of RoPE
    keys: Tensor,  # [L, J, P, N]
    values: Tensor,  # [L, J, P, N]
    *,
    base: Tensor,  # [1] int32, position of row 0
    count: Tensor,  # [1] int32, live rows
    eps: float,
    amplitude: float = 1.0,
    block_rows: int = 4,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """`DSparkDraftModel.extend` behind the products: the live rows' keys and values of all layers.

    Rows behind ``count``, or behind the cache's end, are not written. Nothing is allocated and
    nothing waited for.

    Raises:
        ValueError: a shape does not fit.
    """
    layers, heads, capacity, size = keys.shape
    check_shapes(
        "draft_append",
        projected=(projected, (len(projected), ROWS, layers * 2 * heads * size)),
        norm_weights=(norm_weights, (layers, size)),
        inverse=(inverse, (size // 2,)),
        keys=(keys, keys.shape),
        values=(values, keys.shape),
    )
    if size % 2 or ROWS % block_rows:
        raise ValueError(
            f"draft_append wants an even head size and block_rows that divide {ROWS}, got {size} "
            f"and {block_rows}"
        )
    _append_kernel[(layers * heads, ROWS // block_rows)](
        projected, norm_weights, inverse, keys, values, base, count, capacity, eps,
        amplitude,
        S=len(projected), L=layers, J=heads, N=size, NP=triton.next_power_of_2(size),
        BR=block_rows, ROWS=ROWS, num_warps=warps, **flags(projected, pdl),
    )  # fmt: skip


def draft_rotate(
    projected: Tensor,  # [S, R, (H + 2 J) N] float32: query heads, key heads, value heads
    q_norm: Tensor,  # [N]
    k_norm: Tensor,  # [N]
    inverse: Tensor,  # [N / 2] float32
    block: Tensor,  # [H + 2 J, R, N], of the caches' dtype
    *,
    context: Tensor,  # [1] int32; slot k stands at context + k
    groups: int,  # J
    eps: float,
    amplitude: float = 1.0,
    block_rows: int = 4,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """Queries, keys and values of a block as `draft_attend` reads them: normed and rotated.

    Raises:
        ValueError: a shape does not fit.
    """
    every, _, size = block.shape
    check_shapes(
        "draft_rotate",
        projected=(projected, (len(projected), ROWS, every * size)),
        q_norm=(q_norm, (size,)),
        k_norm=(k_norm, (size,)),
        inverse=(inverse, (size // 2,)),
        block=(block, (every, ROWS, size)),
    )
    heads = every - 2 * groups
    if size % 2 or ROWS % block_rows or heads < 1:
        raise ValueError(
            f"draft_rotate wants an even head size, block_rows that divide {ROWS} and query heads "
            f"beside 2 x {groups} others, got {size}, {block_rows} and {every} heads"
        )
    _rotate_kernel[(every, ROWS // block_rows)](
        projected, q_norm, k_norm, inverse, block, context, eps, amplitude,
        S=len(projected), H=heads, J=groups, N=size, NP=triton.next_power_of_2(size),
        BR=block_rows, ROWS=ROWS, num_warps=warps, **flags(projected, pdl),
    )  # fmt: skip


def draft_attend(
    block: Tensor,  # [H + 2 J, R, N], from `draft_rotate`
    keys: Tensor,  # [J, P, N], of one layer
    values: Tensor,  # [J, P, N]
    total: Tensor,  # [G, R, H, N] float32, weighted values of a lane, not divided by its mass
    peaks: Tensor,  # [G, R, H] float32, the lane's largest score
    masses: Tensor,  # [G, R, H] float32, sum of exp(score - peak)
    *,
    context: Tensor,  # [1] int32, positions in the cache; slot k stands at context + k
    slots: int,
    scale: float,
    chunk: int = 128,
    warps: int = 4,
    stages: int = 2,
    pdl: bool | None = None,
) -> None:
    """`DraftAttention` of a block between its projections, from `draft_rotate` to `draft_combine`.

    Every slot sees the context and all slots. Lane g of G takes chunks g, g + G, … of the context,
    lane 0 the block as well; a lane without a chunk writes peak -inf, mass 0 and no total. Rows
    behind the slots are not written. Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape does not fit, or the slots are none or too many.
    """
    (groups, _, size), (lanes, _, heads, _) = keys.shape, total.shape
    check_shapes(
        "draft_attend",
        block=(block, (heads + 2 * groups, ROWS, size)),
        keys=(keys, keys.shape),
        values=(values, keys.shape),
        total=(total, (lanes, ROWS, heads, size)),
        peaks=(peaks, (lanes, ROWS, heads)),
        masses=(masses, (lanes, ROWS, heads)),
    )
    if heads % groups or not 1 <= slots <= ROWS:
        raise ValueError(
            f"draft_attend wants query heads a multiple of the {groups} key heads and 1..{ROWS} "
            f"slots, got {heads} and {slots}"
        )
    _attend_kernel[(lanes, heads)](
        block, keys, values, total, peaks, masses, context, keys.shape[1], scale,
        H=heads, J=groups, N=size, NP=max(16, triton.next_power_of_2(size)),
        SLOTS=slots, CHUNK=chunk, ROWS=ROWS, num_warps=warps, num_stages=stages,
        **flags(block, pdl),
    )  # fmt: skip


def draft_combine(
    total: Tensor,  # [G, R, H, N] float32
    peaks: Tensor,  # [G, R, H] float32
    masses: Tensor,  # [G, R, H] float32
    out: Tensor,  # [R, H N]
    *,
    slots: int,
    block_lanes: int = 16,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """Lanes of `draft_attend` to attention outputs; zeros in the rows behind the slots.

    Raises:
        ValueError: a shape does not fit.
    """
    lanes, _, heads, size = total.shape
    check_shapes(
        "draft_combine",
        total=(total, (lanes, ROWS, heads, size)),
        peaks=(peaks, (lanes, ROWS, heads)),
        masses=(masses, (lanes, ROWS, heads)),
        out=(out, (ROWS, heads * size)),
    )
    padded = triton.next_power_of_2(lanes)
    _combine_kernel[(ROWS, heads)](
        total, peaks, masses, out,
        G=lanes, GP=padded, H=heads, N=size, NP=triton.next_power_of_2(size), SLOTS=slots,
        BG=min(padded, block_lanes), ROWS=ROWS, num_warps=warps, **flags(total, pdl),
    )  # fmt: skip
