"""The sums behind every sublayer of a step, over the ranks that share it.

With one rank, or with one of several alone (which a benchmark runs), a sum is the rank's own.

Symbols: R = 16 rows, D hidden, S partial sums.
"""

from torch import Tensor

from dspark.kernels.reduce_norm import combine_norm, parts_norm, reduce_norm
from dspark.serving.graph.arena import Arena

__all__ = ["add_experts", "add_norm", "norm_sum"]


def add_norm(
    arena: Arena, parts: Tensor, weight: Tensor, *, eps: float, tap: Tensor | None = None
) -> None:
    """``parts`` [S, R, D] of all ranks and the residual, and the norm of that."""
    warps = arena.tuning.norm_warps
    if arena.exchange is None:
        reduce_norm(
            parts, arena.residual, weight, arena.normed, eps=eps, tap=tap, warps=warps
        )  # fmt: skip
        return
    arena.exchange.norm(
        parts, weight, arena.normed, eps=eps, residual=arena.residual, tap=tap, warps=warps
    )


def add_experts(arena: Arena, weight: Tensor, *, eps: float, tap: Tensor | None) -> None:
    """`add_norm` of the experts' outputs, `arena.each` by `arena.factors`."""
    warps = arena.tuning.combine_warps
    if arena.exchange is None:
        combine_norm(
            arena.each, arena.factors, arena.residual, weight, arena.normed, eps=eps, tap=tap,
            warps=warps,
        )  # fmt: skip
        return
    arena.exchange.norm(
        arena.each, weight, arena.normed, eps=eps, residual=arena.residual, factors=arena.factors,
        tap=tap, warps=warps,
    )  # fmt: skip


def norm_sum(arena: Arena, parts: Tensor, weight: Tensor, *, eps: float) -> None:
    """The norm of the sum alone."""
    if arena.exchange is None:
        parts_norm(parts, weight, arena.normed, eps=eps)
        return
    arena.exchange.norm(parts, weight, arena.normed, eps=eps)
