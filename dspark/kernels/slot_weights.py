"""From the distances of a chunk's slots to the loss and its derivative by each distance.

What `losses.slots.numerators` and its backward pass do in some hundred small operations, of which a
GPU would wait for each: one lane a block, slots one after the other. With alpha_k the overlap of
slot k, and products that end with the block's supervised slots,

    reach_k = prod_{i<k} alpha_i,   continuation_k = 1 + alpha_{k+1} · continuation_{k+1}

weigh L_acc; D-PACE's weights are the same two over the smoothed alpha, with k in the product. The
other forms of L_acc (`losses.accept_length`) are again the two, by other chances.

Symbols: n blocks, K slots, M = n·K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import check_shapes
from dspark.kernels.objective import SUMS

__all__ = ["DISTANCES", "FORMS", "slot_weights"]

DISTANCES = ("l1", "lk_hybrid", "nla")
FORMS = ("expected", "path", "path_exact", "chain")
_LANES = 32


@triton.jit
def _overlap(l1):
    """Alpha, and minus its derivative by ``l1``: none where rounding took it out of 0..1."""
    alpha = 1 - l1 / 2
    slope = tl.where((alpha >= 0) & (alpha <= 1), 0.5, 0.0)
    return tl.minimum(tl.maximum(alpha, 0.0), 1.0), slope


@triton.jit
def _ratio(sums, rows, place, inside):
    """min(1, q / p) of the label, and whether it is below 1, where it has a slope."""
    ce = tl.load(sums + place, mask=inside, other=0.0)
    gap = tl.load(sums + 11 * rows + place, mask=inside, other=0.0) - ce
    return tl.exp(tl.minimum(gap, 0.0)), (gap < 0).to(tl.float32)


@triton.jit
def _slot_weights(
    sums, mask, scales, out, shares, n, by_decay, smoothing, sharpness, floor, focal,
    SURVIVAL: tl.constexpr, DISTANCE: tl.constexpr, FORM: tl.constexpr, FOCAL: tl.constexpr,
    K: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = block < n
    rows = n * K
    by_ce, by_l1, by_accept = tl.load(scales), tl.load(scales + 1), tl.load(scales + 2)

    # from the last slot on: continuations, kept in ``out`` until the way back
    later = tl.full([LANES], 0.0 if FORM == 2 else 1.0, tl.float32)
    later_weight = tl.full([LANES], 1.0, tl.float32)
    for step in tl.static_range(K):
        place = block * K + (K - 1 - step)
        tl.store(out + place, later, mask=inside)
        tl.store(out + rows + place, later_weight, mask=inside)
        live = tl.load(mask + place, mask=inside, other=0).to(tl.float32)
        accept, _ = _overlap(tl.load(sums + 2 * rows + place, mask=inside, other=0.0))
        alpha, _ = _overlap(tl.load(sums + rows + place, mask=inside, other=0.0))
        if FORM == 2:
            ratio, _ = _ratio(sums, rows, place, inside)
            later = (accept + ratio * later) * live
        elif FORM == 3:
            later = 1 + tl.exp(-tl.load(sums + place, mask=inside, other=0.0)) * live * later
        else:
            later = 1 + accept * live * later
        later_weight = 1 + ((1 - smoothing) * alpha + smoothing) * live * later_weight
    tl.debug_barrier()

    reach = tl.full([LANES], 1.0, tl.float32)
    survived = tl.full([LANES], 1.0, tl.float32)
    unbroken = tl.full([LANES], 1.0, tl.float32)
    share = tl.zeros([LANES], tl.float32)
    for slot in tl.static_range(K):
        place = block * K + slot
        live = tl.load(mask + place, mask=inside, other=0).to(tl.float32)
        ce = tl.load(sums + place, mask=inside, other=0.0)
        l1 = tl.load(sums + rows + place, mask=inside, other=0.0)
        alpha, slope = _overlap(l1)
        accept, accept_slope = _overlap(tl.load(sums + 2 * rows + place, mask=inside, other=0.0))
        value = reach * tl.load(out + place, mask=inside, other=0.0) * live
        by_label = tl.zeros([LANES], tl.float32)
        if FORM == 0:
            reach *= accept * live
        elif FORM == 1:
            ratio, _ = _ratio(sums, rows, place, inside)
            reach *= ratio * live
        elif FORM == 2:
            ratio, below = _ratio(sums, rows, place, inside)
            by_label = value * ratio * below
            value = reach * live
            reach *= ratio * live
        else:
            chance = tl.exp(-ce)
            by_label = value * chance
            value = tl.zeros([LANES], tl.float32)
            reach *= chance * live
        if FOCAL:
            peak = tl.load(sums + 8 * rows + place, mask=inside, other=0.0)
            error = (ce > peak).to(tl.float32) * live
            by_label += focal * error * unbroken
            unbroken *= 1 - error
        if SURVIVAL:
            survived *= ((1 - smoothing) * alpha + smoothing) * live
            weight = survived * tl.load(out + rows + place, mask=inside, other=0.0)
        else:
            weight = tl.exp(-slot * by_decay) * live

        by_kl = tl.zeros([LANES], tl.float32)
        if DISTANCE == 0:
            distance = l1
            by_distance = weight
        elif DISTANCE == 1:
            kl = tl.load(sums + 3 * rows + place, mask=inside, other=0.0)
            blend = tl.exp(-sharpness * alpha)
            distance = 2 * (blend * kl + (1 - blend) * (1 - alpha))
            by_distance = weight * 2 * (1 - blend) * slope
            by_kl = weight * 2 * blend
        else:
            above = tl.maximum(alpha, floor)
            distance = -2 * tl.log(above)
            by_distance = tl.where(alpha >= floor, weight * 2 / above * slope, 0.0)
        tl.store(out + place, by_ce * weight + by_accept * by_label, mask=inside)
        tl.store(out + rows + place, by_l1 * by_distance, mask=inside)
        tl.store(out + 2 * rows + place, by_accept * value * accept_slope, mask=inside)
        tl.store(out + 3 * rows + place, by_l1 * by_kl, mask=inside)
        share += weight * (by_ce * ce + by_l1 * distance)
        share += by_accept * (value * (1 - accept) + by_label * ce)
    tl.store(shares + block, share, mask=inside)


def slot_weights(
    sums: Tensor,  # [SUMS, M] float32, by `objective.slot_sums`
    mask: Tensor,  # [n, K] bool, a contiguous supervised prefix of each block
    scales: Tensor,  # [3] float32, derivative of the loss by the sums of ce, l1, accept_length
    out: Tensor,  # [4, M] float32, written: derivative of the loss by each distance
    shares: Tensor,  # [n] float32, written: each block's share of the loss
    *,
    distance: str,
    form: str,
    focal: float,
    decay: float,
    smoothing: float | None,
    sharpness: float,
    floor: float,
) -> None:
    """`losses.slots.numerators` of whole blocks, weighed, and its gradient.

    ``form`` and ``focal`` are L_acc's. ``smoothing``: of ``slot_weights: survival``; None is
    exponential by ``decay``. ``sharpness`` and ``floor`` are those of the distances lk_hybrid and
    nla.

    Raises:
        ValueError: a shape does not fit, or there is no such distance or form.
    """
    blocks, slots = mask.shape
    if distance not in DISTANCES:
        raise ValueError(f"slot_weights knows {', '.join(DISTANCES)}, got '{distance}'")
    if form not in FORMS:
        raise ValueError(f"slot_weights knows {', '.join(FORMS)}, got '{form}'")
    rows = blocks * slots
    check_shapes(
        "slot_weights",
        sums=(sums, (SUMS, rows)),
        mask=(mask, (blocks, slots)),
        scales=(scales, (3,)),
        out=(out, (4, rows)),
        shares=(shares, (blocks,)),
    )
    if rows == 0:
        return
    _slot_weights[(triton.cdiv(blocks, _LANES),)](
        sums, mask.view(torch.uint8), scales, out, shares, blocks, 1 / decay, smoothing or 0.0,
        sharpness, floor, focal, SURVIVAL=smoothing is not None, DISTANCE=DISTANCES.index(distance),
        FORM=FORMS.index(form), FOCAL=focal > 0, K=slots, LANES=_LANES, num_warps=1,
    )  # fmt: skip
