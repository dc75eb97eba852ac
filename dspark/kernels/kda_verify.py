"""One verify step of a KDA layer: convolutions, gates and the delta rule, row after row.

From the projections of up to 16 rows to each row's output, with the state kept behind every row, so
that a step that is taken back only moves a number: the next step starts from the state of the last
row that was accepted. The convolutions' inputs are kept in the same way, in two buffers by turns,
since programs read the old inputs while others write the new ones.

Two launches: what does not depend on the state, for all rows side by side, and then the rows in
turn. The state lies as [V, K]: a program owns some value channels of one head, each warp whole rows
of K, so that a sum over K stays inside a warp. Source and definition: `target.kda`.

Symbols: R = 16 rows, T live rows, H heads (of this rank), K key size, V value size (equal to it),
W kernel of the short convolutions, S partial sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, fetch, flags, pieces

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
def _prepare_kernel(
    projected, conv, a_log, dt_bias, norm, inputs, prepared, start_slot, live_rows, turn, LOWER,
    S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Whatever a row and head need that does not depend on the state."""
    t, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, K)
    WIDTH: tl.constexpr = H * K
    ROW: tl.constexpr = 5 * WIDTH + H  # q, k, v, f, g, b
    PART: tl.constexpr = ROWS * ROW
    dtype: tl.constexpr = inputs.dtype.element_ty
    at = head * K + k
    rate = tl.exp(tl.load(a_log + head))
    bias, scale = tl.load(dt_bias + at), tl.load(norm + k).to(tl.float32)
    begin(PDL)
    slot, count, side = tl.load(start_slot), tl.load(live_rows), tl.load(turn) % 2
    if t >= count:
        return
    # the inputs that stand before this step, and where those of this step go
    SIDE: tl.constexpr = (W - 1 + ROWS) * 3 * WIDTH
    old = inputs + side * SIDE + slot * 3 * WIDTH
    new = inputs + (1 - side) * SIDE
    row = projected + t * ROW
    for part in tl.static_range(3):
        column = part * WIDTH + at
        total = tl.zeros([K], tl.float32)
        for tap in tl.static_range(W):
            # rows before the step come from the one before it
            source = t - (W - 1) + tap
            here = projected + source * ROW + column
            raw = _whole(here, k < tl.where(source >= 0, K, 0), S, PART, dtype)
            before = old + (source + W - 1) * 3 * WIDTH + column
            raw += tl.load(before, mask=k < tl.where(source < 0, K, 0), other=0.0)
            total += raw.to(tl.float32) * tl.load(conv + column * W + tap).to(tl.float32)
            if tap == W - 1:
                tl.store(new + (W - 1 + t) * 3 * WIDTH + column, raw)
            elif tap > 0:
                # a step keeps at least one row: the first input is never asked for again
                tl.store(new + tap * 3 * WIDTH + column, raw, mask=k < tl.where(t == 0, K, 0))
        mixed = (total * tl.sigmoid(total)).to(dtype).to(tl.float32)
        if part < 2:
            mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed) + 1e-6)
        if part == 0:
            mixed = mixed * (1.0 / tl.sqrt(float(K)))
        tl.store(prepared + t * ROW + column, mixed)
    f = _whole(row + 3 * WIDTH + at, k < K, S, PART, dtype).to(tl.float32)
    tl.store(prepared + t * ROW + 3 * WIDTH + at, tl.exp(LOWER * tl.sigmoid(rate * (f + bias))))
    z = _whole(row + 4 * WIDTH + at, k < K, S, PART, dtype).to(tl.float32)
    tl.store(prepared + t * ROW + 4 * WIDTH + at, scale * tl.sigmoid(z))
    b = _whole(row + 5 * WIDTH + head, head < H, S, PART, dtype).to(tl.float32)
    tl.store(prepared + t * ROW + 5 * WIDTH + head, tl.sigmoid(b))


@triton.jit
def _kda_kernel(
    prepared, states, out, squares, start_slot, live_rows, ahead,
    PIECES: tl.constexpr, EACH: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    v = tl.program_id(0) * BV + tl.arange(0, BV)
    k = tl.arange(0, K)
    WIDTH: tl.constexpr = H * K
    ROW: tl.constexpr = 5 * WIDTH + H  # query, key, value, decay, gate, beta
    TILES: tl.constexpr = K // BV
    qc, vc = head * K + k, head * K + v
    # older than the kernel before, which has waited for them
    slot, count = tl.load(start_slot), tl.load(live_rows)
    place = head * K * K + v[:, None] * K + k[None, :]
    state = tl.load(states + slot * (H * K * K) + place)  # [BV, K]
    begin(PDL)
    fetch(ahead, head * TILES + tl.program_id(0), H * TILES, PIECES, EACH, WIDE)
    # a row is on its way while the one before it is computed
    qn, kn = tl.load(prepared + qc), tl.load(prepared + WIDTH + qc)
    vn, gn = tl.load(prepared + 2 * WIDTH + vc), tl.load(prepared + 3 * WIDTH + qc)
    zn, bn = tl.load(prepared + 4 * WIDTH + vc), tl.load(prepared + 5 * WIDTH + head)
    for t in range(count):
        query, key, value, left, gate, beta = qn, kn, vn, gn, zn, bn
        row = prepared + tl.minimum(t + 1, ROWS - 1) * ROW
        qn, kn = tl.load(row + qc), tl.load(row + WIDTH + qc)
        vn, gn = tl.load(row + 2 * WIDTH + vc), tl.load(row + 3 * WIDTH + qc)
        zn, bn = tl.load(row + 4 * WIDTH + vc), tl.load(row + 5 * WIDTH + head)
        state = state * left[None, :]
        error = value - tl.sum(state * key[None, :], 1)
        state = state + (beta * error)[:, None] * key[None, :]
        read = tl.sum(state * query[None, :], 1)
        tl.store(out + t * WIDTH + vc, read * gate)
        tl.store(squares + (t * H + head) * TILES + tl.program_id(0), tl.sum(read * read))
        tl.store(states + (t + 1) * (H * K * K) + place, state)


@triton.jit
def _whole(part, mask, S: tl.constexpr, PART: tl.constexpr, dtype: tl.constexpr):
    """Sum of partial products, rounded as a product of a library would be."""
    total = tl.load(part, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, S):
        total += tl.load(part + s * PART, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


def kda_verify(
    projected: Tensor,  # [S, R, 5 H K + H]: partial sums of q, k, v, f, g, b of every row
    conv: Tensor,  # [3 H K, W], of q, k and v
    a_log: Tensor,  # [H] float32
    dt_bias: Tensor,  # [H K] float32
    norm: Tensor,  # [K], weight of the output's norm
    slots: KDASlots,
    prepared: Tensor,  # [R, 5 H K + H] float32, scratch
    out: Tensor,  # [R, H K] float32
    squares: Tensor,  # [R, H, K / block_v] float32
    *,
    start_slot: Tensor,  # [1] int32, accepted rows of the last step: the slot to start from
    live_rows: Tensor,  # [1] int32, T
    turn: Tensor,  # [1] int32, number of the step: which side of the inputs is the old one
    lower_bound: float,
    block_v: int = 8,
    warps: int = 4,
    ahead: Tensor | None = None,  # weights that the next kernels read
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
    shapes = {
        "projected": (projected, (len(projected), ROWS, 5 * width + heads)),
        "conv": (conv, (3 * width, 4)),
        "states": (slots.states, (ROWS + 1, heads, size, size)),
        "inputs": (slots.inputs, (2, 3 + ROWS, 3 * width)),
        "norm": (norm, (size,)),
        "prepared": (prepared, (ROWS, 5 * width + heads)),
        "out": (out, (ROWS, width)),
        "squares": (squares, (ROWS, heads, size // block_v)),
    }
    for name, (one, shape) in shapes.items():
        if one.shape != shape or not one.is_contiguous():
            raise ValueError(f"kda_verify wants contiguous {name} {shape}, got {tuple(one.shape)}")
    options = flags(slots.inputs, pdl)
    _prepare_kernel[(ROWS, heads)](
        projected, conv, a_log, dt_bias, norm, slots.inputs, prepared, start_slot, live_rows, turn,
        lower_bound, S=len(projected), H=heads, K=size, W=4, ROWS=ROWS, num_warps=1, **options,
    )  # fmt: skip
    count, each = pieces(ahead, heads * size // block_v)
    _kda_kernel[(size // block_v, heads)](
        prepared, slots.states, out, squares, start_slot, live_rows,
        out if ahead is None else ahead, PIECES=count, EACH=each, H=heads, K=size, BV=block_v,
        ROWS=ROWS, num_warps=warps, **options,
    )  # fmt: skip
