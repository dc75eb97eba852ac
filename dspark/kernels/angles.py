"""Cosine and sine of large angles, for rotary positions.

Triton may take the GPU's approximate functions, which are exact to 1e-6 on one turn and lose a
digit with every tenfold of the angle. Whole turns are therefore taken away first.
"""

import triton
import triton.language as tl

__all__ = ["cos_sin"]


@triton.jit
def cos_sin(angle):
    """Both of a float32 angle below 2^18 in radians."""
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    # two pi in three parts; turns times the first one is exact
    left = tl.fma(-turns, 6.28125, angle)
    left = tl.fma(-turns, 0.001934051513671875, left)
    left = tl.fma(-turns, 1.2556659146019622e-06, left)
    return tl.cos(left), tl.sin(left)
