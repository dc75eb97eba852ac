"""The objective of the draft: its definition, and the form that fits in memory.

`eager` is the definition; `chunked` computes the same without holding vocabulary-wide tensors of
more than one chunk. Both give `Sums`, which add over chunks, forward passes and ranks. `one_pass`
is `chunked` on a GPU, by kernels.
"""

from dspark.losses.chunked import objective_chunked
from dspark.losses.eager import objective
from dspark.losses.sums import Sums, denominators

__all__ = ["Sums", "denominators", "objective", "objective_chunked"]
