"""What the draft's objective needs of two rows of logits, and its gradient by one of them.

`slot_sums` reads the logits of a slot twice, once for the logarithms of the three softmaxes' sums
and once for the distances and for what the softmax's derivative needs beside them:

    a = sum_v q(v) · sign(q(v) - p(v))

so that `to_gradient_`, once the slots' coefficients c are known, writes in place of Z

    d/dZ = q · (c_ce + c_kl + c_l1 · (sign(q - p) - a) + c_s · (sign(q - s) - a_s))
           - c_kl · p - c_ce · onehot

reading each logit once more. Nothing of the vocabulary's size exists beside the logits. Signs are
those of the logarithms, the same in both kernels. A row that is not live is not read: its sums
and its gradient are 0. Parts of a row have fixed edges and are summed in a fixed order, so a row's
figures never depend on its neighbours.

Here kernels of a library stand before and behind, and launches do not overlap (no PDL).

Symbols: M rows (slots), V vocabulary; Z, P logits of draft and target; q, p, s the softmaxes of Z,
P and P / accept temperature.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import check_shapes

__all__ = ["SPLITS", "SUMS", "slot_sums", "to_gradient_"]

SUMS = 12
"""Figures of a row: ce, l1, accept_l1, kl; a and a_s; the largest of Z and of P; the logarithms of
the three sums behind it, since two subtractions keep the digits that one of a large sum loses
(the first, -log of the largest q, is `SlotDistances.peak` too); target_ce."""

SPLITS = 8
"""Most parts of a row, each a program's, so that few rows fill a GPU too."""


@triton.jit
def _online(x, most, total, scale):
    """One more element a lane: running maximum, sum of exp((x - maximum) · scale)."""
    # of the two exponentials of the usual update one is always 1
    step = tl.exp(-tl.abs(x - most) * scale)
    return tl.where(x > most, total * step + 1.0, total + step)


@triton.jit
def _sign(one, other):
    return (one > other).to(tl.float32) - (one < other).to(tl.float32)


@triton.jit
def _tops(
    draft, target, live, tops, rows, V, part, by_temperature,
    SHARP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    if tl.load(live + row) == 0:
        return
    start = row.to(tl.int64) * V
    lane = tl.arange(0, BLOCK)
    # finite, so that a lane without an element gives 0 and not NaN
    most_q = tl.full([BLOCK], -1e38, tl.float32)
    most_p = tl.full([BLOCK], -1e38, tl.float32)
    total_q = tl.zeros([BLOCK], tl.float32)
    total_p = tl.zeros([BLOCK], tl.float32)
    total_s = tl.zeros([BLOCK], tl.float32)
    for first in range(split * part, tl.minimum(split * part + part, V), BLOCK):
        inside = first + lane < V
        place = start + first + lane
        z = tl.load(draft + place, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(target + place, mask=inside, other=-float("inf")).to(tl.float32)
        total_q = _online(z, most_q, total_q, 1.0)
        most_q = tl.maximum(most_q, z)
        total_p = _online(t, most_p, total_p, 1.0)
        if SHARP:
            total_s = _online(t, most_p, total_s, by_temperature)
        most_p = tl.maximum(most_p, t)
    top_q, top_p = tl.max(most_q, 0), tl.max(most_p, 0)
    out = tops + split * 5 * rows + row
    tl.store(out, top_q)
    tl.store(out + rows, top_p)
    tl.store(out + 2 * rows, tl.sum(total_q * tl.exp(most_q - top_q), 0))
    tl.store(out + 3 * rows, tl.sum(total_p * tl.exp(most_p - top_p), 0))
    if SHARP:
        tl.store(out + 4 * rows, tl.sum(total_s * tl.exp((most_p - top_p) * by_temperature), 0))


@triton.jit
def _distances(
    draft, target, labels, live, tops, parts, out, rows, V, part, by_temperature,
    SHARP: tl.constexpr, KL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    mine = parts + split * 5 * rows + row
    if tl.load(live + row) == 0:
        for name in tl.static_range(5):
            tl.store(mine + name * rows, 0.0)
        for name in tl.static_range(12):
            tl.store(out + name * rows + row, 0.0)
        return
    each = tops + tl.arange(0, SPLITS) * 5 * rows + row
    most_q, most_p = tl.load(each), tl.load(each + rows)
    top_q, top_p = tl.max(most_q, 0), tl.max(most_p, 0)
    log_q = tl.log(tl.sum(tl.load(each + 2 * rows) * tl.exp(most_q - top_q), 0))
    log_p = tl.log(tl.sum(tl.load(each + 3 * rows) * tl.exp(most_p - top_p), 0))
    log_s = log_p
    if SHARP:
        total_s = tl.load(each + 4 * rows) * tl.exp((most_p - top_p) * by_temperature)
        log_s = tl.log(tl.sum(total_s, 0))

    start = row.to(tl.int64) * V
    lane = tl.arange(0, BLOCK)
    l1 = tl.zeros([BLOCK], tl.float32)
    signed = tl.zeros([BLOCK], tl.float32)
    l1_s = tl.zeros([BLOCK], tl.float32)
    signed_s = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    for first in range(split * part, tl.minimum(split * part + part, V), BLOCK):
        inside = first + lane < V
        place = start + first + lane
        z = tl.load(draft + place, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(target + place, mask=inside, other=-float("inf")).to(tl.float32)
        z = z - top_q - log_q
        t = t - top_p
        q = tl.exp(z)
        p = tl.exp(t - log_p)
        l1 += tl.abs(q - p)
        signed += q * _sign(z, t - log_p)
        if SHARP:
            sharp = t * by_temperature - log_s
            l1_s += tl.abs(q - tl.exp(sharp))
            signed_s += q * _sign(z, sharp)
        if KL:
            kl += tl.where(p > 0, p * (t - log_p - z), 0.0)
    total, inner = tl.sum(l1, 0), tl.sum(signed, 0)
    tl.store(mine, total)
    tl.store(mine + rows, tl.sum(l1_s, 0) if SHARP else total)
    tl.store(mine + 2 * rows, tl.sum(kl, 0))
    tl.store(mine + 3 * rows, inner)
    tl.store(mine + 4 * rows, tl.sum(signed_s, 0) if SHARP else inner)
    if split == 0:
        place = start + tl.load(labels + row)
        label = tl.load(draft + place).to(tl.float32)
        target_label = tl.load(target + place).to(tl.float32)
        tl.store(out + row, log_q - (label - top_q))
        tl.store(out + 6 * rows + row, top_q)
        tl.store(out + 7 * rows + row, top_p)
        tl.store(out + 8 * rows + row, log_q)
        tl.store(out + 9 * rows + row, log_p)
        tl.store(out + 10 * rows + row, log_s)
        tl.store(out + 11 * rows + row, log_s - (target_label - top_p) * by_temperature)


@triton.jit
def _to_gradient(
    draft, target, labels, live, sums, by, rows, V, by_temperature,
    SHARP: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < V
    place = row.to(tl.int64) * V + lane
    if tl.load(live + row) == 0:
        tl.store(draft + place, tl.zeros([BLOCK], draft.dtype.element_ty), mask=inside)
        return
    by_ce = tl.load(by + row)
    by_l1 = tl.load(by + rows + row)
    by_s = tl.load(by + 2 * rows + row)
    if not SHARP:
        by_l1 += by_s
    log_p = tl.load(sums + 9 * rows + row)
    z = tl.load(draft + place, mask=inside, other=0.0).to(tl.float32)
    t = tl.load(target + place, mask=inside, other=0.0).to(tl.float32)
    z = z - tl.load(sums + 6 * rows + row) - tl.load(sums + 8 * rows + row)
    t = t - tl.load(sums + 7 * rows + row)
    factor = by_ce + by_l1 * (_sign(z, t - log_p) - tl.load(sums + 4 * rows + row))
    if SHARP:
        sharp = t * by_temperature - tl.load(sums + 10 * rows + row)
        factor += by_s * (_sign(z, sharp) - tl.load(sums + 5 * rows + row))
    if KL:
        by_kl = tl.load(by + 3 * rows + row)
        gradient = tl.exp(z) * (factor + by_kl) - by_kl * tl.exp(t - log_p)
    else:
        gradient = tl.exp(z) * factor
    gradient -= tl.where(lane == tl.load(labels + row), by_ce, 0.0)
    tl.store(draft + place, gradient.to(draft.dtype.element_ty), mask=inside)


def slot_sums(
    draft_logits: Tensor,  # [M, V]
    target_logits: Tensor,  # [M, V]
    labels: Tensor,  # [M] int64
    live: Tensor,  # [M] bool
    scratch: Tensor,  # [2, SPLITS, 5, M] float32
    out: Tensor,  # [SUMS, M] float32, written
    *,
    accept_temperature: float,
    with_kl: bool,
    block: int = 1024,
    warps: int = 8,
) -> None:
    """The distances of `eager.slot_distances` and what `to_gradient_` needs; KL only if asked.

    Raises:
        ValueError: a shape does not fit.
    """
    rows, vocabulary = _checked("slot_sums", draft_logits, target_logits, labels, live)
    check_shapes("slot_sums", scratch=(scratch, (2, SPLITS, 5, rows)), out=(out, (SUMS, rows)))
    if rows == 0:
        return
    tops, parts = scratch.unbind()
    splits = min(SPLITS, triton.next_power_of_2(triton.cdiv(vocabulary, block)))
    part = triton.cdiv(triton.cdiv(vocabulary, splits), block) * block
    live, sharp = live.view(torch.uint8), accept_temperature != 1
    _tops[(rows, splits)](
        draft_logits, target_logits, live, tops, rows, vocabulary, part, 1 / accept_temperature,
        SHARP=sharp, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    _distances[(rows, splits)](
        draft_logits, target_logits, labels, live, tops, parts, out, rows, vocabulary, part,
        1 / accept_temperature, SHARP=sharp, KL=with_kl, SPLITS=splits, BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    torch.sum(parts[:splits], 0, out=out[1:6])


def to_gradient_(
    draft_logits: Tensor,  # [M, V], the gradient by them afterwards
    target_logits: Tensor,  # [M, V]
    labels: Tensor,  # [M] int64
    live: Tensor,  # [M] bool
    sums: Tensor,  # [SUMS, M] float32, by `slot_sums` of the same
    coefficients: Tensor,  # [4, M] float32: derivative by ce, l1, accept_l1, kl
    *,
    accept_temperature: float,
    with_kl: bool,
    block: int = 1024,
    warps: int = 4,
) -> None:
    """Gradient of sum(coefficients · distances) by the draft's logits, in their place.

    Raises:
        ValueError: a shape does not fit.
    """
    rows, vocabulary = _checked("to_gradient_", draft_logits, target_logits, labels, live)
    check_shapes("to_gradient_", sums=(sums, (SUMS, rows)), coefficients=(coefficients, (4, rows)))
    if rows == 0:
        return
    _to_gradient[(rows, triton.cdiv(vocabulary, block))](
        draft_logits, target_logits, labels, live.view(torch.uint8), sums, coefficients, rows,
        vocabulary, 1 / accept_temperature, SHARP=accept_temperature != 1, KL=with_kl,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip


def _checked(
    kernel: str, draft_logits: Tensor, target_logits: Tensor, labels: Tensor, live: Tensor
) -> tuple[int, int]:
    shape = draft_logits.shape
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"{kernel} wants draft_logits [M, V], got {tuple(shape)}")
    rows, vocabulary = shape
    check_shapes(
        kernel,
        draft_logits=(draft_logits, shape),
        target_logits=(target_logits, shape),
        labels=(labels, (rows,)),
        live=(live, (rows,)),
    )
    return rows, vocabulary
