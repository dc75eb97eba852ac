"""Exchanges between ranks, each checked to the bit beside the sum and norm of one process.

Symbols: R = 16 rows, D hidden, N ranks, Z of them in this process.
"""

import torch

from dspark.kernels.exchange import Stage, exchange_norm, own_sums
from dspark.kernels.launch import ROWS
from dspark.kernels.peers import Room
from dspark.kernels.reduce_norm import reduce_norm
from dspark.progress import Bar

__all__ = ["wrong_elements"]

_EPS = 1e-6
_INPUTS = 100
"""Rounds with inputs of their own, which is what a graph holds; then the same ones again."""
_WAIT = 50
"""Graphs that are queued before anybody waits for them."""


@torch.no_grad()
def wrong_elements(room: Room, rounds: int, *, skew: int = 0, shown: bool = False) -> int:
    """Of residuals and norms [Z, R, D], over at least so many ``rounds``: those of another value.

    ``room``: [R] programs of D words. ``skew``: as in `exchange_norm`. ``shown``: with a bar.
    """
    peers, d, held = room.peers, room.width, min(rounds, _INPUTS)
    device, ranks = peers.bases.device, peers.ranks
    local = (peers.local,) if peers.local > 1 else ()
    # every rank draws what all of them say
    generator = torch.Generator(device).manual_seed(0)
    parts = torch.randn(held, ranks, 2, ROWS, d, device=device, generator=generator)
    sums = torch.stack([torch.stack([own_sums(one, None) for one in each]) for each in parts])
    mine = parts if local else parts[:, peers.first].contiguous()
    weight = torch.randn(d, device=device, generator=generator).bfloat16()
    shared = torch.zeros(*local, ROWS, d, device=device, dtype=torch.bfloat16)
    alone = torch.zeros(ROWS, d, device=device, dtype=torch.bfloat16)
    out, normed = torch.empty_like(shared), torch.empty_like(alone)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    on_gpu = device.type == "cuda"
    # through the interpreter a program that waits would wait for ever
    stages: tuple[Stage, ...] = ("both",) if on_gpu else ("tell", "hear")

    def once() -> None:
        shared.zero_()
        alone.zero_()
        for part, total in zip(mine, sums, strict=True):
            for stage in stages:
                exchange_norm(
                    room, part, weight, out, eps=_EPS, residual=shared, skew=skew, stage=stage
                )
            reduce_norm(total, alone, weight, normed, eps=_EPS)
            wrong.add_((out != normed).sum()).add_((shared != alone).sum())

    once()
    graph = None
    if on_gpu:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
    left = -(-rounds // held) - 1
    with Bar(f"rounds, up to {skew} looks late", rounds, shown=shown) as bar:
        bar.advance(held)
        for number in range(1, left + 1):
            if graph is None:
                once()
            else:
                graph.replay()
                if number % _WAIT == 0:
                    torch.cuda.synchronize(device)
            bar.advance(held)
    return int(wrong)
