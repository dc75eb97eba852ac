"""The noise that couples draft and target, inside a kernel: `decoding.sampling.gumbel`, bit by bit.

Integers are the same on every device; the two logarithms may differ in their last bit.
"""

import triton
import triton.language as tl

__all__ = ["gumbel", "noise_key"]


@triton.jit
def _mix(x):
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def noise_key(low, high, position):
    """Key of all draws at one position; ``low`` and ``high`` are the seed's int32 halves."""
    key = _mix(_mix(low ^ 0x3C6EF372) ^ high ^ 0x1B873593)
    return _mix(key + position * 0x2545F491)


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise of int32 ``ids``; float32."""
    bits = _mix(_mix(ids + key) ^ (key * 0x165667B1))
    fraction = (bits.to(tl.float32) + 2147483648.5) * 2.3283064365386963e-10
    fraction = tl.minimum(tl.maximum(fraction, 1.1641532182693481e-10), 0.999999940395355224609375)
    # log(1 - f) with the rounding of 1 - f undone, since small fractions are the large noises
    left = 1.0 - fraction
    exact = tl.where(left == 1.0, -fraction, tl.log(left) * (fraction / (1.0 - left)))
    return -tl.log(-exact)
