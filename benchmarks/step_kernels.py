"""Kernels of a decode step at true shapes, each cold in one captured graph, beside a library's.

    PYTHONPATH=. python benchmarks/step_kernels.py [--config FILE] [--ranks 4] [--tokens 9]

Weights are RANDOM and so is what is routed; only times are measured. A graph holds one call a
layer, every layer with weights of its own, more than the caches hold. Peers: cuBLAS for products,
FLA for KDA and FlashInfer for MLA where they are installed. Needs a GPU.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from ending import needs_gpu, run
from peers import fla_kda, flashinfer_mla
from torch import Tensor

from dspark import provenance
from dspark.bench.report import print_table
from dspark.kernels.experts import experts_down, experts_up
from dspark.kernels.gemm16 import gemm16
from dspark.kernels.kda_verify import KDASlots, kda_verify
from dspark.kernels.launch import ROWS
from dspark.kernels.mla_verify import mla_attend, mla_combine, mla_prepare
from dspark.kernels.read_stream import read_bandwidth
from dspark.kernels.reduce_norm import combine_norm, reduce_norm
from dspark.kernels.router import route
from dspark.kernels.tiles import Tile, tile_for
from dspark.serving.graph.tuning import Tuning
from dspark.target.config import LingConfig

_COLD = 400 << 20
"""Bytes of weights that a graph runs through: several times the L2 cache."""
_REPEATS = 50
_TUNING = Tuning()
_SHAPES = ((5128, 2560), (3072, 2560), (2560, 1024), (512, 2560), (39296, 2560))
"""(outputs, inputs) of one rank of four of Ling-3.0-flash."""


def timed(calls: list[Callable[[], object]]) -> float:
    """Microseconds a call: median over replays of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[_REPEATS // 2]


class Bench:
    """Rows of the table."""

    def __init__(self, config: LingConfig, ranks: int, tokens: int) -> None:
        self.config, self.ranks, self.tokens = config, ranks, tokens
        self.rows: list[dict[str, object]] = []

    def add(self, name: str, us: float, megabytes: float, peer: float | None = None) -> None:
        self.rows.append({"kernel": name, "us": us, "mb": megabytes, "peer_us": peer})

    def products(self) -> None:
        for n, k in _SHAPES:
            self.product(n, k, tile_for(n, k))

    def product(self, n: int, k: int, tile: Tile) -> None:
        x, weights = draw(ROWS, k), [draw(n, k) for _ in range(max(2, _COLD // (2 * n * k)))]
        out = torch.empty(tile.splits, ROWS, n, device="cuda")
        few, library = x[: self.tokens], draw(self.tokens, n)
        ours = timed([lambda w=w: gemm16(x, w, out, **tile.options()) for w in weights])
        peer = timed([lambda w=w: torch.mm(few, w.t(), out=library) for w in weights])
        self.add(f"gemm16 {n}x{k}", ours, 2 * n * k / 1e6, peer)

    def kda(self) -> None:
        config, layers = self.config, 35
        heads, size = config.num_attention_heads // self.ranks, config.head_dim
        width = heads * size
        slots = [KDASlots.empty(heads, size, 4, torch.bfloat16, "cuda") for _ in range(layers)]
        projected = [torch.randn(2, ROWS, 5 * width + heads, device="cuda") for _ in range(layers)]
        conv, a_log = draw(3 * width, 4), torch.rand(heads, device="cuda")
        bias, out = torch.randn(width, device="cuda") - 2, torch.empty(ROWS, width, device="cuda")
        block = _TUNING.kda_block_v
        norm, squares = draw(size), torch.empty(ROWS, heads, size // block, device="cuda")
        rows = torch.empty(ROWS, heads, 6, size, device="cuda")
        start, live, turn = (number(value) for value in (3, self.tokens, 0))
        us = timed(
            [
                lambda i=i: kda_verify(
                    projected[i], conv, a_log, bias, norm, slots[i], out, squares, rows,
                    start_slot=start, live_rows=live, turn=turn,
                    lower_bound=config.kda_lower_bound, block_v=block, warps=_TUNING.kda_warps,
                )
                for i in range(layers)
            ]
        )  # fmt: skip
        state = 4 * heads * size * size * (1 + self.tokens) / 1e6
        peer = fla_kda(heads, size, self.tokens, layers)
        self.add("kda_verify", us, state, peer and timed(peer))

    def mla(self, context: int) -> None:
        config, layers, tuning = self.config, 14, _TUNING
        heads, rank = config.num_attention_heads // self.ranks, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        capacity = -(-(context + ROWS) // 64) * 64
        latents = [draw(capacity, rank + rope) for _ in range(layers)]
        queries = torch.randn(4, ROWS, heads * (nope + rope), device="cuda")
        latent = torch.randn(4, ROWS, rank + rope, device="cuda")
        norm, kv_b = draw(rank), draw(heads * (nope + value), rank)
        inverse, query = torch.rand(rope // 2, device="cuda"), draw(ROWS, heads, rank + rope)
        lanes = tuning.mla_lanes
        total = torch.empty(lanes, ROWS, heads, rank, device="cuda")
        peaks, masses = (torch.empty(lanes, ROWS, heads, device="cuda") for _ in range(2))
        gates, mixed = torch.randn(4, ROWS, heads, device="cuda"), draw(ROWS, heads * value)
        cursor, live = number(context), number(self.tokens)
        scale = (nope + rope) ** -0.5

        def attend(i: int) -> None:
            mla_attend(
                query, latents[i], total, peaks, masses, cursor=cursor, live_rows=live,
                scale=scale, block=tuning.mla_block, stages=tuning.mla_stages,
                heads_per_tile=tuning.mla_heads, warps=tuning.mla_warps,
            )  # fmt: skip

        def whole(i: int) -> None:
            mla_prepare(
                queries, latent, norm, kv_b, inverse, latents[i], query, cursor=cursor,
                live_rows=live, eps=1e-6,
            )  # fmt: skip
            attend(i)
            mla_combine(
                total, peaks, masses, kv_b, gates, mixed, live_rows=live,
                lane_block=tuning.mla_lane_block, block=tuning.mla_value_block,
            )  # fmt: skip

        megabytes = 2 * (context + self.tokens) * (rank + rope) / 1e6
        us = timed([lambda i=i: whole(i) for i in range(layers)])
        peers = flashinfer_mla(latents, kv_b, heads, nope, self.tokens, context, scale)
        alone, around = map(timed, peers) if peers else (None, None)
        self.add(f"MLA verify, {context} positions", us, megabytes, around)
        us = timed([lambda i=i: attend(i) for i in range(layers)])
        self.add(f"mla_attend, {context} positions", us, megabytes, alone)

    def norms(self) -> None:
        hidden, chosen = self.config.hidden_size, self.config.num_experts_per_tok
        residual, weight = draw(ROWS, hidden), draw(hidden)
        out = torch.empty_like(residual)
        parts = torch.randn(2, ROWS, hidden, device="cuda")
        calls = [lambda: reduce_norm(parts, residual, weight, out, eps=1e-6, warps=32)] * 50
        self.add("reduce_norm", timed(calls), 0)
        each = draw(ROWS, chosen + 1, hidden)
        factors = torch.rand(ROWS, chosen + 1, device="cuda")
        calls = [
            lambda: combine_norm(each, factors, residual, weight, out, eps=1e-6, warps=32)
        ] * 50
        self.add("combine_norm", timed(calls), 0)
        experts = self.config.num_experts
        logits, bias = torch.randn(4, ROWS, experts, device="cuda"), draw(experts).float()
        ids, factors = no_route(chosen), torch.zeros(ROWS, chosen + 1, device="cuda")
        live = number(self.tokens)
        calls = [
            lambda: route(
                logits, bias, live, ids, factors, groups=self.config.n_group,
                kept_groups=self.config.topk_group, factor=self.config.routed_scaling_factor,
                warps=4,
            )
        ] * 50  # fmt: skip
        self.add("route", timed(calls), 0)

    def experts(self, distinct: int) -> None:
        config, layers = self.config, 6
        count, hidden = config.num_experts + 1, config.hidden_size
        inner = config.moe_intermediate_size // self.ranks
        chosen = config.num_experts_per_tok
        up = [draw(count, 2 * inner, hidden) for _ in range(layers)]
        down = [draw(count, hidden, inner) for _ in range(layers)]
        ids = [chosen_experts(config, self.tokens, distinct) for _ in range(layers)]
        x, between = draw(ROWS, hidden), draw(1 + ROWS * chosen, ROWS, inner)
        out = draw(ROWS, chosen + 1, hidden)

        def go_up(i: int) -> None:
            experts_up(x, up[i], ids[i], between, limit=7.0, shared_limit=0.0)

        def go_down(i: int) -> None:
            experts_down(between, down[i], ids[i], out)

        def both(i: int) -> None:
            go_up(i)
            go_down(i)

        megabytes = 2 * (distinct + 1) * inner * hidden / 1e6
        for name, call, matrices in (
            ("up", go_up, 2),
            ("down", go_down, 1),
            ("up + down", both, 3),
        ):
            us = timed([lambda i=i, call=call: call(i) for i in range(layers)])
            self.add(f"experts {name}, {distinct} + shared", us, matrices * megabytes)


def draw(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


def number(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32, device="cuda")


def no_route(chosen: int) -> Tensor:
    return torch.full((ROWS, chosen), -1, dtype=torch.int32, device="cuda")


def chosen_experts(config: LingConfig, tokens: int, distinct: int) -> Tensor:
    """``distinct`` experts in turn over the slots of ``tokens`` rows."""
    chosen = config.num_experts_per_tok
    pool = torch.randperm(config.num_experts)[:distinct]
    ids = no_route(chosen)
    turns = torch.arange(tokens * chosen) % distinct
    ids[:tokens] = pool[turns].view(tokens, chosen).int().cuda()
    return ids


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("configs/targets/ling-3.0-flash.json")
    parser.add_argument("--config", type=Path, default=default)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=9)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192])
    parser.add_argument("--experts", type=int, nargs="+", default=[44, 68])
    args = parser.parse_args()
    needs_gpu(Path(__file__).name)
    bench = Bench(LingConfig.from_file(args.config), args.ranks, args.tokens)
    bandwidth = read_bandwidth(torch.device("cuda"))
    bench.products()
    bench.kda()
    for context in args.contexts:
        bench.mla(context)
    bench.norms()
    for distinct in args.experts:
        bench.experts(distinct)
    table = [
        [
            row["kernel"],
            f"{row['us']:.2f}",
            f"{row['mb'] / row['us']:.2f}" if row["mb"] else "",  # type: ignore[operator]
            f"{row['peer_us']:.2f}" if row["peer_us"] else "",
            f"{row['peer_us'] / row['us']:.2f}" if row["peer_us"] else "",  # type: ignore[operator]
        ]
        for row in bench.rows
    ]
    title = f"{args.tokens} rows, rank of {args.ranks}, {torch.cuda.get_device_name()}"
    note = f"random weights; this device reads {bandwidth:.2f} TB/s"
    print_table(title, ["kernel", "us", "TB/s", "library us", "ratio"], table, note=note)
    commit = provenance.collect()["git_commit"]
    print(json.dumps({"read_tb_s": bandwidth, "commit": commit, "kernels": bench.rows}))


if __name__ == "__main__":
    run(main)
