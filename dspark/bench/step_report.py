"""The tables of `dspark bench step`: times, floor, breakdown, ablation, memory."""

from typing import Any

import torch

from dspark.bench.ablations import ABLATIONS, OF_LING
from dspark.bench.report import environment, print_table
from dspark.bench.step import StepBench, exchange_us
from dspark.bench.step_options import StepOptions, check, of_table
from dspark.kernels.read_stream import read_bandwidth
from dspark.target.config import LingConfig

__all__ = ["compare", "measure", "print_comparison", "print_report"]

_UNCOUNTED = ("embedding", "norms", "proposals", "accept")
"""Components that read next to nothing: time without a floor."""


def measure(options: StepOptions, *, ablate: bool = False) -> dict[str, Any]:
    """Run the step and everything beside it.

    Raises:
        ConfigError: no GPU, or an option that does not fit the target.
        RunError: a step gave no result.
    """
    check(options)
    bench = StepBench(options)
    bandwidth = read_bandwidth(bench.device)
    floor = bench.floor(bandwidth)
    bench.step.capture()
    times = bench.run()
    parts = {
        name: {"us": bench.component(name), "floor_us": floor.us_of(name)}
        for name in (*floor.parts, *_UNCOUNTED)
    }
    summary = times.summary()
    draft = bench.step.draft
    report: dict[str, Any] = {
        "target": str(options.config),
        "weights": "synthetic",
        "acceptance": "simulated",
        "ranks": options.ranks,
        "exchanges_left_out": bench.exchanges,
        "draft": options.draft,
        "rows": bench.rows,
        "block_size": draft.block_size if draft else options.nextn or None,
        "context": options.context,
        "routing": options.routing,
        "distinct_experts": bench.experts,
        "expert_pool": bench.expert_pool,
        "read_tb_s": bandwidth,
        "floor_us": floor.us,
        "floor_mb": floor.total / 1e6,
        **summary,
        "ratio": summary["step_us_p50"] / floor.us,
        "step_us_p50_with_exchanges": summary["step_us_p50"] + exchange_us(bench.exchanges),
        "components": parts,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "environment": environment(),
    }
    if ablate:
        names = [
            name
            for name in ABLATIONS
            if isinstance(bench.config, LingConfig) or name not in OF_LING
        ]
        report["ablation"] = {name: bench.ablate(name).summary() for name in names}
    return report


def compare(options: StepOptions) -> dict[str, Any]:
    """Plain decoding, NEXTN and DSpark over one set of weights; ``options`` say the rest.

    Raises:
        ConfigError: no GPU, or an option that does not fit the target.
        RunError: a step gave no result.
    """
    rows: list[dict[str, Any]] = []
    bench, bandwidth = None, 0.0
    every = of_table(options)
    check(*every)
    for mine in every:
        bench = StepBench(mine, bench, with_nextn=True)
        bandwidth = bandwidth or read_bandwidth(bench.device)
        floor = bench.floor(bandwidth)
        bench.step.capture()
        summary = bench.run().summary()
        rows.append(
            {
                "draft": mine.draft,
                "rows": bench.rows,
                "distinct_experts": bench.experts,
                "expert_pool": bench.expert_pool,
                "exchanges_left_out": bench.exchanges,
                "floor_us": floor.us,
                **summary,
                "ratio": summary["step_us_p50"] / floor.us,
                "step_us_p50_with_exchanges": summary["step_us_p50"] + exchange_us(bench.exchanges),
            }
        )
    return {
        "target": str(options.config),
        "weights": "synthetic",
        "acceptance": "simulated",
        "ranks": options.ranks,
        "context": options.context,
        "routing": options.routing,
        "read_tb_s": bandwidth,
        "drafts": rows,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "environment": environment(),
    }


def print_comparison(report: dict[str, Any]) -> None:
    """To the terminal."""
    table = [
        [
            row["draft"],
            f"{row['rows']}",
            f"{row['distinct_experts']:.1f}",
            f"{row['accept_length']:.2f}",
            f"{row['step_us_p50']:,.0f}",
            f"{row['tpot_us']:,.0f}",
            f"{row['floor_us']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['exchanges_left_out']}",
        ]
        for row in report["drafts"]
    ]
    gpu = ", ".join(report["environment"]["gpus"])
    print_table(
        f"decode step by draft, context {report['context']}, routing {report['routing']}, {gpu}",
        ["draft", "rows", "experts a layer", "accept length", "step p50 us", "TPOT us", "floor us",
         "p50 / floor", "exchanges left out"],
        table,
        note=f"SYNTHETIC weights, SIMULATED acceptance, one rank of {report['ranks']}; reads "
        f"{report['read_tb_s']:.2f} TB/s",
    )  # fmt: skip


def print_report(report: dict[str, Any]) -> None:
    """To the terminal."""
    tokens = f"{report['rows']} rows, context {report['context']}, routing {report['routing']}"
    rows = [
        ["step p50 / p90 / p99 (us)",
         " / ".join(f"{report[f'step_us_{p}']:,.0f}" for p in ("p50", "p90", "p99"))],
        ["floor (us)", f"{report['floor_us']:,.0f}"],
        ["p50 / floor", f"{report['ratio']:.2f}"],
        ["distinct experts a layer", f"{report['distinct_experts']:.1f}"],
        ["host p50 / p99 (us a step)",
         f"{report['host_us_p50']:,.0f} / {report['host_us_p99']:,.0f}"],
        ["enqueued before the last ended", f"{report['enqueued_ahead']:.1%}"],
        ["accept length (SIMULATED)", f"{report['accept_length']:.2f}"],
        ["TPOT (us)", f"{report['tpot_us']:,.0f}"],
        ["memory (GB)", f"{report['memory_gb']:.1f}"],
    ]  # fmt: skip
    if report["exchanges_left_out"]:
        rows.insert(
            3,
            [
                f"p50 + {report['exchanges_left_out']} exchanges of 6 us, ASSUMED",
                f"{report['step_us_p50_with_exchanges']:,.0f}",
            ],
        )
    gpu = ", ".join(report["environment"]["gpus"])
    note = f"SYNTHETIC weights, one rank of {report['ranks']}; reads {report['read_tb_s']:.2f} TB/s"
    print_table(f"decode step, {tokens}, {gpu}", ["", ""], rows, note=note)
    total = sum(one["us"] for one in report["components"].values())
    table = [
        [name, f"{one['us']:,.1f}", f"{one['floor_us']:,.1f}" if one["floor_us"] else ""]
        for name, one in report["components"].items()
    ]
    table.append(["sum", f"{total:,.1f}", f"{report['floor_us']:,.1f}"])
    print_table(
        "components, each alone in a graph", ["", "us", "floor us"], table,
        note="alone, a component overlaps with nothing, and small weights may stay in the cache",
    )  # fmt: skip
    if "ablation" in report:
        base = report["step_us_p50"]
        table = [["all on", f"{base:,.0f}", "", ""]]
        for name, one in report["ablation"].items():
            p50 = one["step_us_p50"]
            table.append([f"without {name}", f"{p50:,.0f}", f"{p50 - base:+,.0f}", ABLATIONS[name]])
        print_table("ablation", ["", "step p50 us", "", "what happens instead"], table)
