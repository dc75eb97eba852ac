"""From the draft head's logits to proposals: a shortlist, the biases of all its pairs, the chain.

The token before a slot is one of the candidates of the slot before (or the anchor), so the Markov
biases and confidences of every pair are computed at once, and the serial part only looks them up.

Symbols: R = 16 rows, K slots, C candidates of a slot, V vocabulary, r Markov rank, D hidden.
"""

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.launch import ROWS, begin, check_shapes, dot, flags
from dspark.kernels.noise import gumbel, noise_key

__all__ = ["best_place", "chain", "filtered", "pair_bias", "shortlist"]


@triton.jit
def _shortlist_kernel(
    logits, values, ids, V, SIZE, FIRST,
    C: tl.constexpr, EACH: tl.constexpr, EP: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BV)
    v = part * SIZE + i
    begin(PDL)
    inside = (i < SIZE) & (v < V)
    left = tl.load(logits + row.to(tl.int64) * V + v, mask=inside, other=float("-inf"))
    e = tl.arange(0, EP)
    found = tl.zeros([EP], tl.int32)
    scores = tl.full([EP], float("-inf"), tl.float32)
    for place in tl.static_range(EACH):
        score, at = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        scores = tl.where(e == place, score, scores)
        found = tl.where(e == place, FIRST + part * SIZE + at, found)
        left = tl.where(i == at, float("-inf"), left)
    target = row * C + part * EACH + e
    tl.store(values + target, scores, mask=e < EACH)
    tl.store(ids + target, tl.where(scores > float("-inf"), found, 0), mask=e < EACH)


@triton.jit
def _pair_kernel(
    ids, anchor, w1, w2, hidden, conf_weight, conf_bias, temperatures, bias, confidence,
    C: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    MARKOV: tl.constexpr, CONFIDENCE: tl.constexpr, JOINT: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    k = tl.arange(0, BK)
    d = tl.arange(0, DP)
    # one column of programs has the confidences
    asked = tl.where(tl.program_id(2) == 0, 1, 0)
    if CONFIDENCE:
        scale = tl.load(conf_weight + d, mask=d < D * asked, other=0.0).to(tl.float32)
    begin(PDL)
    sure = tl.zeros([BP], tl.float32)
    if MARKOV:
        before = tl.load(ids + tl.maximum(slot - 1, 0) * C + p, mask=p < C, other=0)
        before = tl.where(slot == 0, tl.load(anchor).to(tl.int32), before)
        here = tl.load(ids + slot * C + c, mask=c < C, other=0)
        from_rows = w1 + before.to(tl.int64)[:, None] * RANK + k[None, :]
        to_rows = w2 + here.to(tl.int64)[None, :] * RANK + k[:, None]
        total = tl.zeros([BP, BC], tl.float32)
        for first in tl.static_range(0, RANK, BK):
            inside = first + k < RANK
            left = tl.load(from_rows + first, mask=inside[None, :], other=0.0)
            right = tl.load(to_rows + first, mask=inside[:, None], other=0.0)
            total = dot(left, right, total, WIDE)
            if JOINT:
                tail = first + k < RANK * asked
                tail = tl.load(conf_weight + D + first + k, mask=tail, other=0.0)
                sure += tl.sum(left.to(tl.float32) * tail.to(tl.float32)[None, :], 1)
        # as a product in the weights' dtype would be
        rounded = total.to(w2.dtype.element_ty).to(tl.float32)
        place = (slot * C + p[:, None]) * C + c[None, :]
        tl.store(bias + place, rounded, mask=(p[:, None] < C) & (c[None, :] < C))
    if CONFIDENCE:
        x = tl.load(hidden + slot * D + d, mask=d < D * asked, other=0.0).to(tl.float32)
        sure += tl.sum(x * scale, 0) + tl.load(conf_bias).to(tl.float32)
        sure = tl.div_rn(sure, tl.load(temperatures + slot))
        tl.store(confidence + slot * C + p, sure, mask=p < C * asked)


@triton.jit
def filtered(scores, top_k, top_p, min_p):
    """``scores`` [C] with -inf where `decoding.sampling.filter_logits` has it.

    An id's rank is the number of scores above its own, so that ties stay or go together. No limit:
    ``top_k`` <= 0, ``top_p`` 1, ``min_p`` 0.
    """
    C: tl.constexpr = scores.shape[0]
    top_k = tl.where(top_k <= 0, C, top_k)
    top_p = tl.where(top_p >= 1.0, float("inf"), top_p)
    if (top_k < C) | (top_p < 1.0):
        # top-k leaves every score that is above one of those it leaves: ranks serve twice
        above = tl.reshape(scores, [1, C]) > tl.reshape(scores, [C, 1])
        ranks = tl.sum(above.to(tl.int32), 1)
        scores = tl.where(ranks < top_k, scores, float("-inf"))
        mass = tl.exp(scores - tl.max(scores, 0))
        mass = mass / tl.sum(mass, 0)
        before = tl.sum(tl.where(above, tl.reshape(mass, [1, C]), 0.0), 1)
        scores = tl.where(before < top_p, scores, float("-inf"))
    if min_p > 0.0:
        mass = tl.exp(scores - tl.max(scores, 0))
        mass = mass / tl.sum(mass, 0)
        scores = tl.where(mass < tl.max(mass, 0) * min_p, float("-inf"), scores)
    return scores


@triton.jit
def best_place(scores, ids):
    """Place and score of the largest of ``scores`` [C]; of equal ones, the lowest id's."""
    C: tl.constexpr = scores.shape[0]
    score = tl.max(scores, 0)
    tied = scores == score
    lowest = tl.min(tl.where(tied, ids, 0x7FFFFFFF), 0)
    places = tl.where(tied & (ids == lowest), tl.arange(0, C), C)
    return tl.minimum(tl.min(places, 0), C - 1), score


@triton.jit
def _chain_kernel(
    values, ids, bias, confidence, proposals, count,
    position, limit, threshold, temperature, top_p, top_k, min_p, seed_low, seed_high,
    C: tl.constexpr, SLOTS: tl.constexpr, MARKOV: tl.constexpr, CONFIDENCE: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, C)
    begin(PDL)
    most = tl.minimum(tl.load(limit), SLOTS)
    start, floor, heat = tl.load(position), tl.load(threshold), tl.load(temperature)
    p, k, m = tl.load(top_p), tl.load(top_k), tl.load(min_p)
    low, high = tl.load(seed_low), tl.load(seed_high)
    place = tl.full([], 0, tl.int32)
    slot = tl.full([], 0, tl.int32)
    while slot < most:
        scores = tl.load(values + slot * C + c)
        candidates = tl.load(ids + slot * C + c)
        go = tl.full([], 1, tl.int1)
        if MARKOV:
            scores += tl.load(bias + (slot * C + place) * C + c)
        if CONFIDENCE:
            sure = tl.sigmoid(tl.load(confidence + slot * C + place))
            go = (floor <= 0.0) | (sure >= floor)
        if heat > 0.0:
            noise = gumbel(noise_key(low, high, start + slot + 1), candidates)
            scores = filtered(tl.div_rn(scores, heat), k, p, m) + noise
        place, score = best_place(scores, candidates)
        go = go & (score > float("-inf"))
        chosen = tl.sum(tl.where(c == place, candidates, 0), 0)
        tl.store(proposals + slot, chosen, mask=go)
        most = tl.where(go, most, slot)
        slot += 1
    tl.store(count, tl.maximum(most, 0))


def shortlist(
    logits: Tensor,  # [R, V] float32, row k of slot k
    values: Tensor,  # [K, C] float32, C = parts x per_part
    ids: Tensor,  # [K, C] int32
    *,
    slots: int,
    first: int = 0,
    per_part: int = 8,
    parts: int = 16,
    warps: int = 8,
    pdl: bool | None = None,
) -> None:
    """The ``per_part`` best of each of ``parts`` equal runs of the vocabulary, by falling logit.

    ``first``: the id that the first logit belongs to, where a rank has a part of the vocabulary.
    Of equal logits the lower ids come first. Places that a run cannot fill have value -inf and id
    0. Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape does not fit, or C is no power of two.
    """
    rows, vocabulary = logits.shape
    wide = parts * per_part
    if rows != ROWS or not logits.is_contiguous() or wide & (wide - 1) or not 1 <= slots <= ROWS:
        raise ValueError(
            f"shortlist wants contiguous logits [{ROWS}, V], 1..{ROWS} slots and parts x per_part "
            f"a power of two, got {tuple(logits.shape)}, {slots} and {parts} x {per_part}"
        )
    check_shapes("shortlist", values=(values, (slots, wide)), ids=(ids, (slots, wide)))
    size = triton.cdiv(vocabulary, parts)
    _shortlist_kernel[(parts, slots)](
        logits, values, ids, vocabulary, size, first,
        C=wide, EACH=per_part, EP=triton.next_power_of_2(per_part),
        BV=triton.next_power_of_2(size), num_warps=warps, **flags(logits, pdl),
    )  # fmt: skip


def pair_bias(
    ids: Tensor,  # [K, C] int32
    anchor: Tensor,  # [1] integer, the token before slot 0
    w1: Tensor | None,  # [V, r]; None: no Markov head
    w2: Tensor | None,  # [V, r]
    hidden: Tensor,  # [R, D], row k of slot k
    conf_weight: Tensor | None,  # [D], or [D + r] with the Markov embedding; None: no head
    conf_bias: Tensor | None,  # [1]
    temperatures: Tensor | None,  # [K] float32, a slot's logit is divided by its own
    bias: Tensor,  # [K, C, C] float32, by previous candidate and candidate
    confidence: Tensor,  # [K, C] float32, by previous candidate
    *,
    slots: int,
    block_previous: int = 32,
    block_candidates: int = 64,
    block_rank: int = 128,
    warps: int = 4,
    stages: int = 2,
    pdl: bool | None = None,
) -> None:
    """`MarkovHead.bias` (vanilla) and `ConfidenceHead` behind every possible previous token.

    All previous candidates of slot 0 are the anchor. What there is no head for is not written.
    Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape does not fit, or a head is given in part.
    """
    wide, width = ids.shape[1], hidden.shape[1]
    rank = 0 if w1 is None else w1.shape[1]
    head = [one is None for one in (conf_weight, conf_bias, temperatures)]
    if (w1 is None) != (w2 is None) or any(head) != all(head):
        raise ValueError(
            "pair_bias wants both Markov matrices or none, and of the confidence head weight, bias "
            "and temperatures or none"
        )
    joint = conf_weight is not None and w1 is not None and len(conf_weight) > width
    check_shapes(
        "pair_bias", ids=(ids, (slots, wide)), hidden=(hidden, (ROWS, width)),
        bias=(bias, (slots, wide, wide)), confidence=(confidence, (slots, wide)),
    )  # fmt: skip
    if w1 is not None and w2 is not None:
        check_shapes("pair_bias", w1=(w1, (len(w1), rank)), w2=(w2, w1.shape))
    if conf_weight is not None and temperatures is not None:
        check_shapes(
            "pair_bias", conf_weight=(conf_weight, (width + (rank if joint else 0),)),
            temperatures=(temperatures, (slots,)),
        )  # fmt: skip
    if w1 is None and conf_weight is None:
        return
    previous, columns = (min(block, max(16, wide)) for block in (block_previous, block_candidates))
    tiles = 1 if w1 is None else triton.cdiv(wide, columns)
    _pair_kernel[(slots, triton.cdiv(wide, previous), tiles)](
        ids, anchor, w1, w2, hidden, conf_weight, conf_bias, temperatures, bias, confidence,
        C=wide, D=width, DP=triton.next_power_of_2(width), RANK=rank, BP=previous, BC=columns,
        BK=min(block_rank, max(16, triton.next_power_of_2(rank))) if rank else 16,
        MARKOV=w1 is not None, CONFIDENCE=conf_weight is not None, JOINT=joint,
        num_warps=warps, num_stages=stages, **flags(hidden, pdl),
    )  # fmt: skip


def chain(
    values: Tensor,  # [K, C] float32, -inf where there is no candidate
    ids: Tensor,  # [K, C] int32
    bias: Tensor | None,  # [K, C, C] float32; None: no Markov head
    confidence: Tensor | None,  # [K, C] float32; None: no confidence head
    proposals: Tensor,  # [R] int32
    count: Tensor,  # [1] int32, how many there are
    *,
    position: Tensor,  # [1] int32, of the anchor
    limit: Tensor,  # [1] int32, proposals at most
    threshold: Tensor,  # [1] float32, least confidence of a proposal; 0: none
    temperature: Tensor,  # [1] float32; 0: arg max
    top_p: Tensor,  # [1] float32
    top_k: Tensor,  # [1] int32
    min_p: Tensor,  # [1] float32
    seed_low: Tensor,  # [1] int32
    seed_high: Tensor,  # [1] int32
    slots: int,
    warps: int = 4,
    pdl: bool | None = None,
) -> None:
    """The proposals behind `shortlist` and `pair_bias`; of equal logits the lowest id wins.

    Rows behind the proposals are not written. Nothing is allocated and nothing waited for.

    Raises:
        ValueError: a shape does not fit, or C is no power of two.
    """
    wide = ids.shape[1]
    if wide & (wide - 1) or not 1 <= slots <= ROWS:
        raise ValueError(
            f"chain wants a power of two of candidates and 1..{ROWS} slots, got {wide} and {slots}"
        )
    check_shapes(
        "chain", values=(values, (slots, wide)), ids=(ids, (slots, wide)),
        proposals=(proposals, (ROWS,)), count=(count, (1,)),
    )  # fmt: skip
    if bias is not None:
        check_shapes("chain", bias=(bias, (slots, wide, wide)))
    if confidence is not None:
        check_shapes("chain", confidence=(confidence, (slots, wide)))
    _chain_kernel[(1,)](
        values, ids, bias, confidence, proposals, count,
        position, limit, threshold, temperature, top_p, top_k, min_p, seed_low, seed_high,
        C=wide, SLOTS=slots, MARKOV=bias is not None, CONFIDENCE=confidence is not None,
        num_warps=warps, **flags(values, pdl),
    )  # fmt: skip
