"""Top-k, top-p and min-p of whole rows of logits, as one number a row: the lowest that may win.

Each filter keeps the ids above a threshold, so nothing is sorted. A threshold is searched for on
the bits of the numbers, which are ordered like them: eight passes, each of which counts (or weighs)
what lies above fifteen thresholds and keeps a sixteenth of the interval. All programs of a row add
up the same partial counts in the same order, and so agree without another launch.

Symbols: R = 16 rows, V vocabulary, P parts of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.accept import Field, Real
from dspark.kernels.launch import ROWS, begin, flags

__all__ = ["FilterScratch", "filter_floor"]

_PASSES = 8
_WAYS = 16
_LIVE_ROWS = tl.constexpr(int(Field.LIVE_ROWS))
_TOP_K = tl.constexpr(int(Field.TOP_K))
_TEMPERATURE = tl.constexpr(int(Real.TEMPERATURE))
_TOP_P = tl.constexpr(int(Real.TOP_P))
_MIN_P = tl.constexpr(int(Real.MIN_P))
_LOWEST = tl.constexpr(-2139095041)  # key of -inf


class FilterScratch:
    """What the passes hand to each other."""

    def __init__(self, device: torch.device | str, parts: int = 16) -> None:
        self.peaks = torch.zeros(ROWS, parts, device=device)
        self.above = torch.zeros(2, ROWS, parts, _WAYS, device=device)
        """By turns: what each part has above each threshold; last: above the filter before."""
        self.bounds = torch.zeros(2, ROWS, 3, dtype=torch.int64, device=device)
        """By turns: the lowest and highest key that may be the threshold; the filter before's."""


@triton.jit
def _key(score):
    """int32 that is ordered like the float32; NaN is -inf."""
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _peak_kernel(
    logits, ints, reals, peaks, V, PART,
    P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    temperature = tl.load(reals + _TEMPERATURE)
    if (row >= tl.load(ints + _LIVE_ROWS)) | (temperature <= 0):
        return
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    end = tl.minimum((part + 1) * PART, V)
    for first in range(part * PART, end, BLOCK):
        v = first + tl.arange(0, BLOCK)
        score = tl.load(logits + row * V + v, mask=v < end, other=float("-inf")) / temperature
        best = tl.maximum(best, tl.where(score == score, score, float("-inf")))
    tl.store(peaks + row * P + part, tl.max(best, 0))


@triton.jit
def _narrow(total, low, high, target, WAYS: tl.constexpr):
    """Bounds behind a pass: up to the first threshold with less than ``target`` above it."""
    w = tl.arange(0, WAYS)
    step = (high - low + WAYS) // WAYS
    first = tl.min(tl.where((total < target) & (w < WAYS - 1), w, WAYS - 1), 0)
    below = low + first * step
    high = tl.minimum(high, tl.where(first == WAYS - 1, high, below + step - 1))
    return tl.minimum(below, high), high


@triton.jit
def _pass_kernel(
    logits, ints, reals, peaks, above, bounds, floors, V, PART, TURN,
    KIND: tl.constexpr, P: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    begin(PDL)
    temperature = tl.load(reals + _TEMPERATURE)
    live = row < tl.load(ints + _LIVE_ROWS)
    if live & (temperature <= 0) & (part == 0) & (KIND == 4):
        tl.store(floors + row, float("-inf"))
    if (temperature <= 0) | (not live):
        return
    p, w = tl.arange(0, P), tl.arange(0, WAYS)
    peak = tl.max(tl.load(peaks + row * P + p), 0)
    top_k, top_p = tl.load(ints + _TOP_K), tl.load(reals + _TOP_P)
    highest = _key(peak).to(tl.int64)
    lowest = tl.full((), _LOWEST, tl.int64)
    if KIND == 0:
        low, high, old = lowest, highest, lowest
    else:
        last = (TURN + 1) % 2
        place = (last * ROWS + row) * P + p[:, None]
        total = tl.sum(tl.load(above + place * WAYS + w[None, :]), 0)
        held = bounds + (last * ROWS + row) * 3
        low, high, old = tl.load(held), tl.load(held + 1), tl.load(held + 2)
        if KIND < 3:
            target = top_k.to(tl.float32)
        else:
            target = top_p * tl.sum(tl.where(w == WAYS - 1, total, 0.0), 0)
        low, high = _narrow(total, low, high, target, WAYS)
        if KIND == 2:
            # the count's search is over: where it ends the mass's begins
            old = tl.where((top_k > 0) & (top_k < V), low, lowest)
            low, high = old, highest
    if KIND == 4:
        bits = tl.where(top_p < 1, low, old).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        floor = bits.to(tl.float32, bitcast=True)
        min_p = tl.load(reals + _MIN_P)
        floor = tl.where(min_p > 0, tl.maximum(floor, peak + tl.log(min_p)), floor)
        if part == 0:
            tl.store(floors + row, floor)
        return
    if part == 0:
        mine = bounds + (TURN % 2 * ROWS + row) * 3
        tl.store(mine, low)
        tl.store(mine + 1, high)
        tl.store(mine + 2, old)
    step = (high - low + WAYS) // WAYS
    edge = tl.where(w == WAYS - 1, old - 1, low + (w + 1) * step - 1)
    sums = tl.zeros([WAYS], tl.float32)
    end = tl.minimum((part + 1) * PART, V)
    for first in range(part * PART, end, BLOCK):
        v = first + tl.arange(0, BLOCK)
        score = tl.load(logits + row * V + v, mask=v < end, other=float("-inf")) / temperature
        if KIND < 2:
            weight = tl.where(v < end, 1.0, 0.0)
        else:
            weight = tl.where(score == score, tl.exp(score - peak), 0.0)
        ahead = _key(score).to(tl.int64)[:, None] > edge[None, :]
        sums += tl.sum(tl.where(ahead, weight[:, None], 0.0), 0)
    tl.store(above + ((TURN % 2 * ROWS + row) * P + part) * WAYS + w, sums)


def filter_floor(
    logits: Tensor,  # [R, V] float32
    ints: Tensor,  # int32, by `accept.Field`
    reals: Tensor,  # float32, by `accept.Real`
    scratch: FilterScratch,
    floors: Tensor,  # [R] float32
    *,
    block: int = 256,
    pdl: bool | None = None,
) -> None:
    """The least logit / temperature of every live row that top-k, top-p and min-p leave.

    The filters of `decoding.sampling.filter_logits`, in its order: ids tied with the last one stay.
    At temperature 0 nothing is filtered. Eighteen launches.

    Raises:
        ValueError: a shape does not fit.
    """
    if len(logits) != ROWS or floors.shape != (ROWS,) or not logits.is_contiguous():
        raise ValueError(
            f"filter_floor wants contiguous logits [{ROWS}, V] and floors [{ROWS}], got "
            f"{tuple(logits.shape)} and {tuple(floors.shape)}"
        )
    size, parts = logits.shape[1], scratch.peaks.shape[1]
    grid, part = (parts, ROWS), triton.cdiv(size, parts)
    options = flags(logits, pdl)
    _peak_kernel[grid](
        logits, ints, reals, scratch.peaks, size, part, P=parts, BLOCK=1024, num_warps=4, **options
    )
    kinds = [0] + [1] * (_PASSES - 1) + [2] + [3] * (_PASSES - 1) + [4]
    for turn, kind in enumerate(kinds):
        _pass_kernel[grid](
            logits, ints, reals, scratch.peaks, scratch.above, scratch.bounds, floors, size, part,
            turn, KIND=kind, P=parts, WAYS=_WAYS, BLOCK=block, ROWS=ROWS, num_warps=4, **options,
        )  # fmt: skip
