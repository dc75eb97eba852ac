"""Tiles of the weight-streaming products: measured for known shapes, a rule for the others.

A rule must not depend on the number of live rows: the order of sums would, and with it the output.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["Tile", "gate_up_tile", "tile_for"]


@dataclass(frozen=True)
class Tile:
    """Parameters of `gemm16` for one shape."""

    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 3
    splits: int = 1
    """Parts of K, of which each gives a partial sum."""
    prefetch: int = 0

    def options(self) -> dict[str, Any]:
        """Keywords of `gemm16`."""
        return {
            "block_n": self.block_n,
            "block_k": self.block_k,
            "warps": self.warps,
            "stages": self.stages,
            "prefetch": self.prefetch,
        }


_MEASURED = {
    # (outputs, inputs), one rank of four of Ling-3.0-flash, on an H200
    (5128, 2560): Tile(64, 128, 4, 4, 4),
    (3072, 2560): Tile(64, 128, 4, 3, 4),
    (2560, 1536): Tile(64, 128, 4, 3, 6),
    (2560, 1024): Tile(64, 128, 4, 3, 2, 2),
    (512, 2560): Tile(32, 512, 4, 1, 5),
    (39296, 2560): Tile(64, 128, 4, 3),
    # whole on one GPU: SmolLM2-135M, Qwen3-8B and Qwen3-4B
    (3072, 576): Tile(64, 64, 4, 3, 9),
    (960, 576): Tile(32, 64, 4, 3, 9),
    (576, 576): Tile(32, 64, 4, 3, 9),
    (576, 1536): Tile(32, 128, 4, 3, 12),
    (49152, 576): Tile(128, 64, 8, 5, 1),
    (4096, 4096): Tile(64, 256, 4, 3, 4),
    (4096, 12288): Tile(64, 256, 4, 3, 4),
    (151936, 4096): Tile(128, 128, 4, 3, 1),
    (6144, 2560): Tile(64, 128, 4, 4, 4),
    (2560, 4096): Tile(64, 128, 4, 4, 8),
    (2560, 9728): Tile(32, 128, 4, 4, 4),
}
_WANTED = 264
"""Programs that keep the memory of a large GPU busy: two a multiprocessor."""
_GATE_UP: dict[tuple[int, int], Tile] = {
    # (inner width, inputs)
    (12288, 4096): Tile(32, 128, 2, 4),
    (9728, 2560): Tile(32, 128, 2, 3),
}


def tile_for(n: int, k: int) -> Tile:
    """Tile of a product with ``n`` outputs and ``k`` inputs.

    Raises:
        ValueError: ``k`` is no multiple of 16.
    """
    if k % 16:
        raise ValueError(f"a product needs a multiple of 16 inputs, got {k}")
    if (n, k) in _MEASURED:
        return _MEASURED[n, k]
    block_k = next(size for size in (128, 64, 32, 16) if k % size == 0)
    block_n = 128 if n >= 64 * _WANTED else 32
    tiles = -(-n // block_n)
    divisors = [s for s in range(1, 9) if k // block_k % s == 0]
    splits = next((s for s in divisors if s * tiles >= _WANTED), divisors[-1])
    return Tile(block_n, block_k, splits=splits)


def gate_up_tile(inner: int, k: int) -> Tile:
    """Tile of `gate_up16` with ``inner`` outputs and ``k`` inputs."""
    if (inner, k) in _GATE_UP:
        return _GATE_UP[inner, k]
    return Tile(32 if inner >= 32 * _WANTED else 16, min(128, k & -k), stages=4)
