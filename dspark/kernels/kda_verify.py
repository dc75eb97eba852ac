"""One verify step of a KDA layer: convolutions, gates and the delta rule, row after row.

From the projections of up to 16 rows to each row's output, with the state kept behind every row, so
that a step that is taken back only moves a number: the next step starts from the state of the last
row that was accepted. The convolutions' inputs are kept in the same way, in two buffers by turns,
since programs of one head read the old inputs while others write the new ones.

The state lies as [V, K]: a program owns some value channels of one head, each warp whole rows of K,
so that a sum over K stays inside a warp. Source and definition: `target.kda`.

Symbols: R = 16 rows, T live rows, H heads (of this rank), K key size, V value size (equal to it),
W kernel of the short convolutions, S partial sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, check_shapes, flags

__all__ = ["KDASlots", "kda_verify"]


@dataclass(frozen=True)
class KDASlots:
    """What a layer keeps of one sequence. Slot 0 of a fresh sequence holds its state."""

    states: Tensor
    """[R + 1, H, V, K] float32; slot t + 1 is the state behind row t of the last step."""
    inputs: Tensor
    """[2, W - 1 + R, 3 H K], of the convolutions: W - 1 rows before the step, then its own."""

    @classmethod
    def empty(
        cls, heads: int, size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KDASlots":
        """Of a sequence of which nothing has been read."""
        return cls(
            torch.zeros(ROWS + 1, heads, size, size, device=device),
            torch.zeros(2, width - 1 + ROWS, 3 * heads * size, dtype=dtype, device=device),
        )


@triton.jit
def _rows_kernel(
    projected, conv, a_log, dt_bias, norm, inputs, rows, start_slot, live_rows, turn, LOWER,
    S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What does not depend on the state, one program a row and head."""
    t, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, K)
    WIDTH: tl.constexpr = H * K
    SIDE: tl.constexpr = (W - 1 + ROWS) * 3 * WIDTH
    dtype: tl.constexpr = inputs.dtype.element_ty
    tl.static_assert(W == 4)
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * K + k)
    scale = tl.load(norm + k).to(tl.float32)
    # older than the kernel before: the accepted rows of the last step, and its inputs
    slot, side = tl.load(start_slot), tl.load(turn) % 2
    old = inputs + side * SIDE + slot * 3 * WIDTH + head * K + k
    new = inputs + (1 - side) * SIDE + head * K + k
    qa, qb, qc = _before(old, t, 3 * WIDTH)
    ka, kb, kc = _before(old + WIDTH, t, 3 * WIDTH)
    va, vb, vc = _before(old + 2 * WIDTH, t, 3 * WIDTH)
    w = conv + (head * K + k) * W
    q0, q1, q2, q3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    w += WIDTH * W
    k0, k1, k2, k3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    w += WIDTH * W
    v0, v1, v2, v3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
    begin(PDL)
    if t == 0:
        # a step keeps at least one row: the first of these inputs is never asked for again
        tl.store(new + 3 * WIDTH, qb)
        tl.store(new + 6 * WIDTH, qc)
        tl.store(new + 4 * WIDTH, kb)
        tl.store(new + 7 * WIDTH, kc)
        tl.store(new + 5 * WIDTH, vb)
        tl.store(new + 8 * WIDTH, vc)
    if t >= tl.load(live_rows):
        return
    ROW: tl.constexpr = 5 * WIDTH + H  # q, k, v, f, g, b
    PART: tl.constexpr = ROWS * ROW
    here = projected + head * K + k
    q_raw, query = _convolved(here, t, qa, qb, qc, q0, q1, q2, q3, S, ROW, PART, dtype)
    here += WIDTH
    k_raw, key = _convolved(here, t, ka, kb, kc, k0, k1, k2, k3, S, ROW, PART, dtype)
    here += WIDTH
    v_raw, value = _convolved(here, t, va, vb, vc, v0, v1, v2, v3, S, ROW, PART, dtype)
    f = _whole(here + t * ROW + WIDTH, S, PART, dtype).to(tl.float32)
    z = _whole(here + t * ROW + 2 * WIDTH, S, PART, dtype).to(tl.float32)
    b = _whole(projected + t * ROW + 5 * WIDTH + head, S, PART, dtype).to(tl.float32)
    new += (W - 1 + t) * 3 * WIDTH
    tl.store(new, q_raw)
    tl.store(new + WIDTH, k_raw)
    tl.store(new + 2 * WIDTH, v_raw)
    out = rows + (t * H + head) * (6 * K)
    tl.store(out + k, query * tl.rsqrt(tl.sum(query * query) + 1e-6) * (1.0 / tl.sqrt(float(K))))
    tl.store(out + K + k, key * tl.rsqrt(tl.sum(key * key) + 1e-6))
    tl.store(out + 2 * K + k, tl.exp(LOWER * tl.sigmoid(rate * (f + bias))))
    tl.store(out + 3 * K + k, value)
    tl.store(out + 4 * K + k, scale * tl.sigmoid(z))
    tl.store(out + 5 * K, tl.sigmoid(b))


@triton.jit
def _before(old, t, STEP: tl.constexpr):
    """The three inputs before row t, as far as they stand before the step; else any."""
    first, second = (
        tl.load(old + tl.minimum(t, 2) * STEP),
        tl.load(old + tl.minimum(t + 1, 2) * STEP),
    )
    return first, second, tl.load(old + 2 * STEP)


@triton.jit
def _convolved(
    here, t, a, b, c, w0, w1, w2, w3,
    S: tl.constexpr, ROW: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Input of row t, and four taps and SiLU rounded like the activations."""
    a = tl.where(t >= 3, _whole(here + tl.maximum(t - 3, 0) * ROW, S, PART, dtype), a)
    b = tl.where(t >= 2, _whole(here + tl.maximum(t - 2, 0) * ROW, S, PART, dtype), b)
    c = tl.where(t >= 1, _whole(here + tl.maximum(t - 1, 0) * ROW, S, PART, dtype), c)
    d = _whole(here + t * ROW, S, PART, dtype)
    total = a.to(tl.float32) * w0.to(tl.float32) + b.to(tl.float32) * w1.to(tl.float32)
    total = total + c.to(tl.float32) * w2.to(tl.float32) + d.to(tl.float32) * w3.to(tl.float32)
    return d, (total * tl.sigmoid(total)).to(dtype).to(tl.float32)


@triton.jit
def _states_kernel(
    rows, states, out, squares, start_slot, live_rows,
    H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The recurrence, some value channels of a head a program."""
    head = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    k = tl.arange(0, K)[None, :]
    TILES: tl.constexpr = K // BV
    STEP: tl.constexpr = H * 6 * K
    # older than the kernel before, which has waited for them
    slot, count = tl.load(start_slot), tl.load(live_rows)
    place = head * K * K + v[:, None] * K + k
    state = tl.load(states + slot * (H * K * K) + place)  # [BV, K]
    begin(PDL)
    # the next rows are on their way while one is computed
    row = rows + head * (6 * K)
    q1, k1, d1, v1, g1, b1 = _row(row, k, v, K)
    q2, k2, d2, v2, g2, b2 = _row(row + STEP, k, v, K)
    for t in range(count):
        query, key, left, value, gate, beta = q1, k1, d1, v1, g1, b1
        q1, k1, d1, v1, g1, b1 = q2, k2, d2, v2, g2, b2
        q2, k2, d2, v2, g2, b2 = _row(row + tl.minimum(t + 2, ROWS - 1) * STEP, k, v, K)
        state = state * left
        error = value - tl.sum(state * key, 1)
        state = state + (beta * error)[:, None] * key
        read = tl.sum(state * query, 1)
        tl.store(out + (t * H + head) * K + v, read * gate)
        tl.store(squares + (t * H + head) * TILES + tl.program_id(0), tl.sum(read * read))
        tl.store(states + (t + 1) * (H * K * K) + place, state)


@triton.jit
def _row(row, k, v, K: tl.constexpr):
    """Query, key and decay [1, K], value and gate [BV], and beta."""
    query, key, left = tl.load(row + k), tl.load(row + K + k), tl.load(row + 2 * K + k)
    return (
        query,
        key,
        left,
        tl.load(row + 3 * K + v),
        tl.load(row + 4 * K + v),
        tl.load(row + 5 * K),
    )


@triton.jit
def _whole(part, S: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr):
    """Sum of partial products, rounded as a product of a library would be."""
    total = tl.load(part).to(tl.float32)
    for s in tl.static_range(1, S):
        total += tl.load(part + s * PART).to(tl.float32)
    return total.to(dtype)


def kda_verify(
    projected: Tensor,  # [S, R, 5 H K + H]: partial sums of q, k, v, f, g, b of every row
    conv: Tensor,  # [3 H K, W], of q, k and v
    a_log: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H K] float32
    norm: Tensor,  # [K], weight of the output's norm
    slots: KDASlots,
    out: Tensor,  # [R, H K] float32
    squares: Tensor,  # [R, H, K / block_v] float32
    rows: Tensor,  # [R, H, 6, K] float32, scratch
    *,
    start_slot: Tensor,  # [1] int32, accepted rows of the last step: the slot to start from
    live_rows: Tensor,  # [1] int32, T
    turn: Tensor,  # [1] int32, number of the step: which side of the inputs is the old one
    lower_bound: float,
    block_v: int = 4,
    warps: int = 1,
    pdl: bool | None = None,
) -> None:
    """`target.kda.recurrence` behind `short_convolution`, with ``slots`` moved on by T rows.

    ``out`` is gated and multiplied by the norm's weight; what the norm divides by follows from
    ``squares``, the sums of squares of each program's channels before that (`gated_gemm16`). Rows
    behind T are not written. Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape does not fit.
    """
    heads, size = a_log.shape[0], dt_bias.shape[0] // a_log.shape[0]
    width = heads * size
    check_shapes(
        "kda_verify",
        projected=(projected, (len(projected), ROWS, 5 * width + heads)),
        conv=(conv, (3 * width, 4)),
        states=(slots.states, (ROWS + 1, heads, size, size)),
        inputs=(slots.inputs, (2, 3 + ROWS, 3 * width)),
        norm=(norm, (size,)),
        out=(out, (ROWS, width)),
        squares=(squares, (ROWS, heads, size // block_v)),
        rows=(rows, (ROWS, heads, 6, size)),
    )
    options = flags(projected, pdl)
    _rows_kernel[(ROWS, heads)](
        projected, conv, a_log, dt_bias, norm, slots.inputs, rows, start_slot, live_rows, turn,
        lower_bound, S=len(projected), H=heads, K=size, W=4, ROWS=ROWS, num_warps=4, **options,
    )  # fmt: skip
    _states_kernel[(size // block_v, heads)](
        rows, slots.states, out, squares, start_slot, live_rows,
        H=heads, K=size, BV=block_v, ROWS=ROWS, num_warps=warps, **options,
    )  # fmt: skip
