"""Choices of the step's launches that only time depends on, as measured on an H200."""

from dataclasses import dataclass

__all__ = ["Tuning"]


@dataclass(frozen=True)
class Tuning:
    """Tiles, warps and lanes.

    Lanes and parts decide in which order sums run: they are the same whatever a step holds.
    """

    norm_warps: int = 32
    combine_warps: int = 32
    kda_block_v: int = 2
    kda_warps: int = 1
    out_block_n: int = 128
    out_parts: int = 8
    out_warps: int = 4
    route_warps: int = 4
    up_block_n: int = 32
    up_block_k: int = 128
    up_warps: int = 2
    up_stages: int = 3
    down_block_n: int = 64
    down_block_k: int = 64
    down_warps: int = 4
    down_stages: int = 3
    mla_lanes: int = 66
    mla_block: int = 128
    mla_stages: int = 1
    mla_heads: int = 4
    mla_warps: int = 8
    mla_lane_block: int = 16
    mla_value_block: int = 128
    mla_combine_warps: int = 8
    gqa_lanes: int = 16
    gqa_chunk: int = 128
    gqa_warps: int = 4
    gqa_stages: int = 3
    draft_lanes: int = 32
    draft_chunk: int = 64

    def lanes_for(self, capacity: int, size: int) -> tuple[int, int, int]:
        """Lanes, chunk and stages of grouped-query attention; ``size``: of a head.

        Small heads take half the chunk, and no cache has more lanes than chunks.
        """
        narrow = size <= 64 and self.gqa_chunk > 64
        chunk = 64 if narrow else self.gqa_chunk
        return min(self.gqa_lanes, -(-capacity // chunk)), chunk, 2 if narrow else self.gqa_stages
