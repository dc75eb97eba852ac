"""Time of the exchange behind a sublayer, beside the library's all-reduce and norm.

With as many GPUs as ranks each rank is a process of its own, and NCCL's all-reduce with the same
residual and norm behind it is measured in the same run. So is what a step's embedding takes from a
whole table on every rank, and from shares of it with one exchange more. With one GPU all ranks are
simulated in one process: programs, flags and waits are the same, but nothing crosses a link, and
NCCL cannot run.

Symbols: R = 16 rows, D hidden, N ranks.
"""

import math
import multiprocessing
import statistics
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.bench.collective_options import CollectiveOptions
from dspark.bench.exchange_rounds import wrong_elements
from dspark.bench.report import environment, print_table
from dspark.errors import RunError
from dspark.kernels.exchange import exchange_norm
from dspark.kernels.launch import ROWS
from dspark.kernels.peers import Peers, Room, room_bytes, simulated
from dspark.kernels.reduce_norm import parts_norm, reduce_norm
from dspark.serving.ranks.board import Board, Topic
from dspark.serving.ranks.group import map_heap, share_heap, without_multicast
from dspark.serving.ranks.seat import check_gpus

__all__ = ["measure", "print_report"]

_EPS = 1e-6
_IN_A_GRAPH = 100
_WARM = 5
_LOAD_S = 300.0
_ROUND_S = 1e-3
"""More than a round that is checked takes."""


def measure(options: CollectiveOptions) -> dict[str, Any]:
    """Microseconds of one exchange, medians over graphs of a hundred of them.

    Raises:
        ConfigError: several GPUs, which are none for ranks.
        RunError: a rank failed, or a sum was not that of one process.
    """
    whole = torch.cuda.device_count() >= options.ranks
    if whole:
        check_gpus(options.ranks)
        found = _in_processes(options)
    else:
        found = _simulated(options)
    for one in found["exchange"]:
        if one["wrong"]:
            raise RunError(
                f"{one['wrong']} elements in {one['rounds']} rounds with ranks up to {one['skew']} "
                "looks late are not those of one process"
            )
    return {
        "schema": "dspark.bench.collectives/1",
        "rows": ROWS,
        **asdict(options),
        "simulated": not whole,
        **found,
        "environment": environment(),
    }


def print_report(report: dict[str, Any]) -> None:
    """For people."""
    rows = []
    for one in report["exchange"]:
        name = f"exchange, ranks up to {one['skew']} looks late" if one["skew"] else "exchange"
        if one["rounds"]:
            name += f"; {one['rounds']:,} rounds right to the bit"
        rows.append([name, f"{one['median_us']:.2f}", f"{one['p90_us']:.2f}"])
    for name in ("nccl", "alone"):
        if (one := report[name]) is not None:
            told = {"nccl": "NCCL all-reduce, then residual and norm", "alone": "residual and norm"}
            rows.append([told[name], f"{one['median_us']:.2f}", f"{one['p90_us']:.2f}"])
    for name, one in report["embedding"].items():
        told = {"whole": "table on every rank", "shared": "shared table and an exchange"}
        size = f"embedding, {told[name]}: {one['bytes'] / 1e6:,.0f} MB a rank"
        rows.append([size, f"{one['median_us']:.2f}", f"{one['p90_us']:.2f}"])
    kind = "SIMULATED on one GPU" if report["simulated"] else "a GPU each"
    print_table(
        f"{report['ranks']} ranks ({kind}), {ROWS} x {report['hidden']} bfloat16",
        ["", "median us", "p90 us"], rows,
    )  # fmt: skip


def _simulated(options: CollectiveOptions) -> dict[str, Any]:
    device = torch.device("cuda")
    peers = simulated(options.ranks, room_bytes(options.ranks, ROWS, options.hidden), device)
    return {**_by_exchange(options, peers), "nccl": None, "alone": _alone(options, device)}


def _in_processes(options: CollectiveOptions) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    board = Board(options.ranks)
    limit_s = 2 * _LOAD_S + _ROUND_S * options.rounds * len(options.skew)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        ranks = [
            context.Process(target=_rank, args=(rank, options, board.name, meeting, said))
            for rank in range(options.ranks)
        ]
        for one in ranks:
            one.start()
        try:
            found = [said.get(timeout=limit_s) for _ in ranks]
        except Empty:
            raise RunError(f"not all ranks were measured within {limit_s:g} s") from None
        finally:
            for one in ranks:
                one.join(10)
                one.kill()
            board.close(last=True)
    broken = [text for _, text in found if isinstance(text, str)]
    if broken:
        raise RunError(f"a rank failed: {broken[0]}")
    report: dict[str, Any] = dict(found)[0]
    for index, one in enumerate(report["exchange"]):
        one["wrong"] = sum(other["exchange"][index]["wrong"] for _, other in found)
    return report


def _rank(rank: int, options: CollectiveOptions, name: str, meeting: str, said: Any) -> None:
    try:
        said.put((rank, _of_rank(rank, options, Board(options.ranks, name), meeting)))
    except BaseException:
        said.put((rank, traceback.format_exc()))


def _of_rank(rank: int, options: CollectiveOptions, board: Board, meeting: str) -> dict[str, Any]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    size = room_bytes(options.ranks, ROWS, options.hidden)
    mine = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    board.say(rank, Topic.JOIN, share_heap(mine))
    shared = board.all_said(Topic.JOIN, _LOAD_S)
    heaps = [mine if one == rank else map_heap(h, device) for one, h in enumerate(shared)]
    peers = Peers(heaps, rank)
    without_multicast()
    dist.init_process_group(
        "nccl", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks,
        device_id=device,
    )  # fmt: skip
    found = {**_by_exchange(options, peers), "nccl": _nccl(options, device)}
    found["alone"] = _alone(options, device)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _by_exchange(options: CollectiveOptions, peers: Peers) -> dict[str, Any]:
    room = peers.room(ROWS, options.hidden)
    found: dict[str, Any] = {"exchange": _exchanges(options, room)}
    found["embedding"] = {
        "whole": _embedding(options, room, 1),
        "shared": _embedding(options, room, peers.ranks),
    }
    if int(peers.fault[0]):
        raise RunError(f"rank {int(peers.fault[0]) - 1} did not come to an exchange")
    return found


def _exchanges(options: CollectiveOptions, room: Room) -> list[dict[str, Any]]:
    peers = room.peers
    device, local = peers.bases.device, (peers.local,) if peers.local > 1 else ()
    parts = torch.randn(*local, 2, ROWS, options.hidden, device=device)
    residual, weight = _inputs(options, device, local)
    out = torch.empty_like(residual)
    peers.wait_at_most(_LOAD_S)
    found = []
    for skew in options.skew:

        def once(skew: int = skew) -> None:
            exchange_norm(room, parts, weight, out, eps=_EPS, residual=residual, skew=skew)

        time, wrong = _timed(once, options.repeats), 0
        if options.rounds:
            shown = peers.first == 0
            wrong = wrong_elements(room, options.rounds, skew=skew, shown=shown)
        found.append({"skew": skew, **time, "rounds": options.rounds, "wrong": wrong})
    return found


def _embedding(options: CollectiveOptions, room: Room, ranks: int) -> dict[str, Any]:
    """A step's rows and their norm, of a table that ``ranks`` share: with several, an exchange."""
    peers, hidden = room.peers, options.hidden
    device, size = peers.bases.device, -(-options.vocabulary // ranks)
    local = (peers.local,) if ranks > 1 and peers.local > 1 else ()
    # the row behind a share is zero: where another rank has the token
    table = torch.zeros(size + (ranks > 1), hidden, device=device, dtype=torch.bfloat16)
    ids = torch.randint(len(table), (math.prod(local) * ROWS,), device=device)
    rows = torch.empty(*local, 1, ROWS, hidden, device=device, dtype=torch.bfloat16)
    out, weight = torch.empty_like(rows[..., 0, :, :]), torch.ones_like(table[0])

    def once() -> None:
        torch.index_select(table, 0, ids, out=rows.view(-1, hidden))
        if ranks == 1:
            parts_norm(rows, weight, out, eps=_EPS)
        else:
            exchange_norm(room, rows, weight, out, eps=_EPS)

    return {"bytes": size * hidden * table.element_size(), **_timed(once, options.repeats)}


def _nccl(options: CollectiveOptions, device: torch.device) -> dict[str, Any]:
    residual, weight = _inputs(options, device, ())
    part, out = torch.randn_like(residual), torch.empty_like(residual)

    def once() -> None:
        dist.all_reduce(part)
        reduce_norm(part[None], residual, weight, out, eps=_EPS)

    return _timed(once, options.repeats)


def _alone(options: CollectiveOptions, device: torch.device) -> dict[str, Any]:
    residual, weight = _inputs(options, device, ())
    parts, out = torch.randn(2, *residual.shape, device=device), torch.empty_like(residual)
    return _timed(
        lambda: reduce_norm(parts, residual, weight, out, eps=_EPS), options.repeats
    )  # fmt: skip


def _inputs(
    options: CollectiveOptions, device: torch.device, local: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    residual = torch.zeros(*local, ROWS, options.hidden, device=device, dtype=torch.bfloat16)
    return residual, torch.ones(options.hidden, device=device, dtype=torch.bfloat16)


def _timed(once: Callable[[], None], repeats: int) -> dict[str, float]:
    """Of one call in a graph of many."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_IN_A_GRAPH):
            once()
    took = []
    for number in range(_WARM + repeats):
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if number >= _WARM:
            took.append(1000 * begin.elapsed_time(end) / _IN_A_GRAPH)
    cuts = statistics.quantiles(took, n=10) if len(took) > 1 else took * 9
    return {"median_us": statistics.median(took), "p90_us": cuts[8]}
