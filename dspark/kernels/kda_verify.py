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
def _kda_kernel(
    projected, conv, a_log, dt_bias, norm, states, inputs, out, squares, start_slot, live_rows,
    turn, LOWER,
    S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    k = tl.arange(0, K)
    WIDTH: tl.constexpr = H * K
    ROW: tl.constexpr = 5 * WIDTH + H  # q, k, v, f, g, b
    qc, kc, vc = head * K + k, WIDTH + head * K + k, 2 * WIDTH + head * K + v
    tl.static_assert(W == 4)
    q0, q1 = tl.load(conv + qc * W), tl.load(conv + qc * W + 1)
    q2, q3 = tl.load(conv + qc * W + 2), tl.load(conv + qc * W + 3)
    k0, k1 = tl.load(conv + kc * W), tl.load(conv + kc * W + 1)
    k2, k3 = tl.load(conv + kc * W + 2), tl.load(conv + kc * W + 3)
    v0, v1 = tl.load(conv + vc * W), tl.load(conv + vc * W + 1)
    v2, v3 = tl.load(conv + vc * W + 2), tl.load(conv + vc * W + 3)
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * K + k)
    scale = tl.load(norm + v).to(tl.float32)
    begin(PDL)
    TILES: tl.constexpr = K // BV
    slot, count, side = tl.load(start_slot), tl.load(live_rows), tl.load(turn) % 2
    # the inputs that stand before this step, and where those of this step go
    SIDE: tl.constexpr = (W - 1 + ROWS) * 3 * WIDTH
    old = inputs + side * SIDE + slot * 3 * WIDTH
    new = inputs + (1 - side) * SIDE
    qa, qb = tl.load(old + qc), tl.load(old + 3 * WIDTH + qc)
    ka, kb = tl.load(old + kc), tl.load(old + 3 * WIDTH + kc)
    va, vb = tl.load(old + vc), tl.load(old + 3 * WIDTH + vc)
    qx, kx, vx = (
        tl.load(old + 6 * WIDTH + qc), tl.load(old + 6 * WIDTH + kc), tl.load(old + 6 * WIDTH + vc)
    )  # fmt: skip
    # a step keeps at least one row: the first of these inputs is never asked for again
    if tl.program_id(0) == 0:
        tl.store(new + 3 * WIDTH + qc, qb)
        tl.store(new + 6 * WIDTH + qc, qx)
        tl.store(new + 3 * WIDTH + kc, kb)
        tl.store(new + 6 * WIDTH + kc, kx)
    tl.store(new + 3 * WIDTH + vc, vb)
    tl.store(new + 6 * WIDTH + vc, vx)
    new += (W - 1) * 3 * WIDTH
    place = head * K * K + v[:, None] * K + k[None, :]
    state = tl.load(states + slot * (H * K * K) + place)  # [BV, K]
    # row 0 is on its way while nothing else is left to do; later ones while a row is computed
    PART: tl.constexpr = ROWS * ROW
    dtype: tl.constexpr = inputs.dtype.element_ty
    fc, bc = 3 * WIDTH + head * K + k, 5 * WIDTH + head
    zc = 4 * WIDTH + head * K + v
    qn, kn = _whole(projected + qc, S, PART, dtype), _whole(projected + kc, S, PART, dtype)
    vn, fn = _whole(projected + vc, S, PART, dtype), _whole(projected + fc, S, PART, dtype)
    bn, zn = _whole(projected + bc, S, PART, dtype), _whole(projected + zc, S, PART, dtype)
    for t in range(count):
        q_raw, k_raw, v_raw, f, b, z = qn, kn, vn, fn, bn, zn
        row = projected + tl.minimum(t + 1, ROWS - 1) * ROW
        qn, kn = _whole(row + qc, S, PART, dtype), _whole(row + kc, S, PART, dtype)
        vn, fn = _whole(row + vc, S, PART, dtype), _whole(row + fc, S, PART, dtype)
        bn, zn = _whole(row + bc, S, PART, dtype), _whole(row + zc, S, PART, dtype)
        here = new + t * 3 * WIDTH
        if tl.program_id(0) == 0:
            tl.store(here + qc, q_raw)
            tl.store(here + kc, k_raw)
        tl.store(here + vc, v_raw)
        query = _taps(qa, qb, qx, q_raw, q0, q1, q2, q3, dtype)
        key = _taps(ka, kb, kx, k_raw, k0, k1, k2, k3, dtype)
        value = _taps(va, vb, vx, v_raw, v0, v1, v2, v3, dtype)
        qa, qb, qx, ka, kb, kx, va, vb, vx = qb, qx, q_raw, kb, kx, k_raw, vb, vx, v_raw
        query = query * tl.rsqrt(tl.sum(query * query) + 1e-6) * (1.0 / tl.sqrt(float(K)))
        key = key * tl.rsqrt(tl.sum(key * key) + 1e-6)
        left = tl.exp(LOWER * tl.sigmoid(rate * (f.to(tl.float32) + bias)))
        beta = tl.sigmoid(b.to(tl.float32))
        state = state * left[None, :]
        error = value - tl.sum(state * key[None, :], 1)
        state = state + (beta * error)[:, None] * key[None, :]
        read = tl.sum(state * query[None, :], 1)
        gated = read * scale * tl.sigmoid(z.to(tl.float32))
        tl.store(out + t * WIDTH + head * K + v, gated)
        tl.store(squares + (t * H + head) * TILES + tl.program_id(0), tl.sum(read * read))
        tl.store(states + (t + 1) * (H * K * K) + place, state)


@triton.jit
def _whole(part, S: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr):
    """Sum of partial products, rounded as a product of a library would be."""
    total = tl.load(part).to(tl.float32)
    for s in tl.static_range(1, S):
        total += tl.load(part + s * PART).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _taps(a, b, c, d, w0, w1, w2, w3, dtype: tl.constexpr):
    """Four taps and SiLU, rounded like the activations."""
    total = a.to(tl.float32) * w0.to(tl.float32) + b.to(tl.float32) * w1.to(tl.float32)
    total = total + c.to(tl.float32) * w2.to(tl.float32) + d.to(tl.float32) * w3.to(tl.float32)
    return (total * tl.sigmoid(total)).to(dtype).to(tl.float32)


def kda_verify(
    projected: Tensor,  # [S, R, 5 H K + H]: partial sums of q, k, v, f, g, b of every row
    conv: Tensor,  # [3 H K, W], of q, k and v
    a_log: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H K] float32
    norm: Tensor,  # [K], weight of the output's norm
    slots: KDASlots,
    out: Tensor,  # [R, H K] float32
    squares: Tensor,  # [R, H, K / block_v] float32
    *,
    start_slot: Tensor,  # [1] int32, accepted rows of the last step: the slot to start from
    live_rows: Tensor,  # [1] int32, T
    turn: Tensor,  # [1] int32, number of the step: which side of the inputs is the old one
    lower_bound: float,
    block_v: int = 8,
    warps: int = 4,
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
    )
    _kda_kernel[(size // block_v, heads)](
        projected, conv, a_log, dt_bias, norm, slots.states, slots.inputs, out, squares,
        start_slot, live_rows, turn, lower_bound,
        S=len(projected), H=heads, K=size, BV=block_v, W=4, ROWS=ROWS, num_warps=warps,
        **flags(projected, pdl),
    )  # fmt: skip
