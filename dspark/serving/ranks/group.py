"""How ranks of a service add up their parts: over memory they map of each other, NCCL, or gloo.

Every rank adds in the order of the ranks, so that all have the same bits, and so that a row's do
not depend on how many rows there are, as they may where a library chooses the order.
"""

import inspect
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.serving.engine import EngineLost
from dspark.serving.ranks.board import Board, Topic
from dspark.serving.ranks.seat import Seat
from dspark.target.model import Reduce

__all__ = ["Group", "join", "map_heap", "share_heap", "sum_in_order", "without_multicast"]


@dataclass(frozen=True)
class Group:
    """What a rank's model needs of the others.

    Attributes:
        reduce: sums over the ranks, while a prompt is read and on a CPU.
        peers: memory of all ranks' GPUs (`kernels.peers.Peers`), or what reaches them without
            (`graph.gathered.Library`); None on a CPU.
        context: the smallest that any rank has room for.
    """

    reduce: Reduce
    peers: Any
    context: int | None


def join(
    seat: Seat,
    board: Board,
    device: torch.device,
    heap_bytes: int,
    context: int | None,
    *,
    library: bool = False,
) -> Group:
    """Meet all other ranks, and share ``heap_bytes`` of each GPU; or not, with ``library``.

    Raises:
        RunError: one did not come in time.
    """
    if device.type != "cuda" or library:
        context = _least(seat, board, {"context": context})[1]
        return Group(_gathered(seat.ranks), _meet(seat, device), context)
    # only here: the kernels need a package that a CPU does without
    from dspark.kernels.peers import Peers
    from dspark.serving.graph.exchange import PromptSum

    torch.cuda.set_device(device)
    mine = torch.zeros(heap_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    said, context = _least(seat, board, {"context": context, "heap": share_heap(mine)})
    heaps = [
        mine if rank == seat.rank else map_heap(one["heap"], device)
        for rank, one in enumerate(said)
    ]
    peers = Peers(heaps, seat.rank)
    return Group(PromptSum(peers), peers, context)


def _meet(seat: Seat, device: torch.device) -> Any:
    """By a library; `Group.peers`."""
    on_gpu = device.type == "cuda"
    without_multicast()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{seat.meeting}", rank=seat.rank,
        world_size=seat.ranks, timeout=timedelta(seconds=seat.timeout_s),
        device_id=device if on_gpu else None,
    )  # fmt: skip
    if not on_gpu:
        return None
    from dspark.serving.graph.gathered import Library

    torch.cuda.set_device(device)
    return Library(seat.ranks, seat.rank, torch.zeros(1, dtype=torch.int32, device=device))


def without_multicast() -> None:
    """NCCL shall not multicast over NVLink, which not every machine lends to all its users."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Rank by rank in float32, and rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for one in parts:
        total += one
    return total.to(parts[0].dtype)


def share_heap(heap: Tensor) -> bytes:
    """What another process needs to map ``heap``, which must stay, and nothing be writing to it."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps(reduce_tensor(heap))  # type: ignore[no-untyped-call]


def map_heap(shared: bytes, device: torch.device) -> Tensor:
    """The heap of another process, as ``device`` reads and writes it.

    The mapping is opened from ``device``, wherever the memory lies: that is what gives its kernels
    access.
    """
    rebuild: Callable[..., Tensor]
    rebuild, args = pickle.loads(shared)
    bound = inspect.signature(rebuild).bind(*args)
    bound.arguments["storage_device"] = device.index
    # all was written when the handle was made, and an event is of the device it was made on
    bound.arguments["event_sync_required"] = False
    return rebuild(*bound.args, **bound.kwargs)


def _gathered(ranks: int) -> Reduce:
    def reduce(part: Tensor) -> Tensor:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(ranks)]
        try:
            dist.all_gather(parts, part)
        except RuntimeError as error:
            raise EngineLost(f"another rank broke off: {error}") from error
        return sum_in_order(parts)

    return reduce


def _least(
    seat: Seat, board: Board, mine: dict[str, Any]
) -> tuple[list[dict[str, Any]], int | None]:
    """What all ranks say, and the smallest context among it."""
    board.say(seat.rank, Topic.JOIN, pickle.dumps(mine))
    said = [pickle.loads(one) for one in board.all_said(Topic.JOIN, seat.timeout_s)]
    contexts = [one["context"] for one in said if one["context"] is not None]
    return said, min(contexts, default=None)
