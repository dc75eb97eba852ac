"""`nextn.pick_row` on one of several ranks, which has logits of its share of the vocabulary.

Noise and ids are those of the whole vocabulary, so that the best of all ranks (`exchange.choose`)
is what one rank alone would have picked.

Symbols: R = 16 rows, V a rank's share of the vocabulary, P parts of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.accept import Field, Real, best_of_part
from dspark.kernels.launch import ROWS, begin, flags
from dspark.kernels.noise import noise_key

__all__ = ["pick_row_of_share"]

_CURSOR = tl.constexpr(int(Field.CURSOR))
_SEED_LOW = tl.constexpr(int(Field.SEED_LOW))
_SEED_HIGH = tl.constexpr(int(Field.SEED_HIGH))
_TEMPERATURE = tl.constexpr(int(Real.TEMPERATURE))


@triton.jit
def _pick_row_of_share_kernel(
    logits, ints, reals, values, ids, V, PART, FIRST,
    ROWS_FIELD: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    begin(PDL)
    rows = tl.load(ints + ROWS_FIELD)
    if rows <= 0:
        return
    position = tl.load(ints + _CURSOR) + SLOT + 1
    key = noise_key(tl.load(ints + _SEED_LOW), tl.load(ints + _SEED_HIGH), position)
    end = tl.minimum((part + 1) * PART, V)
    best, winner = best_of_part(
        logits + (rows - 1).to(tl.int64) * V, part * PART, end,
        tl.full([], float("-inf"), tl.float32), tl.load(reals + _TEMPERATURE), key, FIRST, BLOCK,
    )  # fmt: skip
    tl.store(values + part, best)
    tl.store(ids + part, winner)


def pick_row_of_share(
    logits: Tensor,  # [R, V] float32
    ints: Tensor,  # int32, by `Field`
    reals: Tensor,  # float32, by `Real`
    values: Tensor,  # [P] float32
    ids: Tensor,  # [P] int32, in the whole vocabulary
    *,
    slot: int,
    first: int,
    block: int = 1024,
    pdl: bool | None = None,
) -> None:
    """The best token of each part of the share, as `nextn.pick_row`; ``first``: its lowest id.

    Raises:
        ValueError: a shape does not fit.
    """
    size, parts = logits.shape[1], len(values)
    if len(logits) != ROWS or values.shape != (parts,) or values.shape != ids.shape:
        raise ValueError(
            f"pick_row_of_share wants logits [{ROWS}, V], values and ids [P], got "
            f"{tuple(logits.shape)}, {tuple(values.shape)} and {tuple(ids.shape)}"
        )
    _pick_row_of_share_kernel[(parts,)](
        logits, ints, reals, values, ids, size, triton.cdiv(size, parts), first,
        ROWS_FIELD=int(Field.DRAFT_ROWS if slot else Field.INJECT_COUNT), SLOT=slot, BLOCK=block,
        num_warps=4, **flags(logits, pdl),
    )  # fmt: skip
