"""What benchmarks/tp4.py has measured so far, as one object and as a table for people.

PYTHONPATH=. python benchmarks/tp4_report.py outputs/tp4
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ending import run

from dspark.errors import DataError

PUBLISHED_MS = {"none": 3.33, "nextn:5": 1.53, "block16": 0.78}
"""ms a token on four B200 with real weights, by the draft of the row."""
FLASH = "ling-3.0-flash.json"
GOALS_MS = {5.29: 0.68, 6.6: 0.55}
"""TPOT by accept length on four H200."""


def report(out: Path) -> dict[str, Any]:
    """Rows in order, and what was measured beside them, from the files in ``out``."""
    found: dict[str, Any] = {"rows": []}
    for name in ("step", "collectives"):
        if (out / f"{name}.json").is_file():
            found[name] = json.loads((out / f"{name}.json").read_text())
    paths = sorted(out.glob("row-*.json"), key=lambda one: int(one.stem.removeprefix("row-")))
    found["rows"] = [json.loads(path.read_text()) for path in paths]
    return found


def exchange_us(found: dict[str, Any]) -> float | None:
    """Of one sum with its norm, no rank late."""
    rows = (found.get("collectives") or {}).get("exchange") or []
    return next((float(one["median_us"]) for one in rows if one["skew"] == 0), None)


def table(found: dict[str, Any]) -> str:
    """Markdown. Everything that is made up is called so in the same line."""
    lines = [
        "One stream, weights DRAWN at random, acceptance SIMULATED; times are real.",
        "",
        "| draft | accept length (SIMULATED) | mean TPOT ms | median | output tok/s | peak "
        "| step ms p50 / p90 / p99 | ceiling tok/s | mean TTFT ms | published ms, real weights |",
        "|" + "---|" * 10,
    ]
    for row in found["rows"]:
        step = row.get("step_ms") or {}
        shown = " / ".join(f"{step[name]:.2f}" for name in ("p50", "p90", "p99") if name in step)
        length = row["accept_length"] or 1.0
        flash = Path(row["config"]).name == FLASH
        goal = GOALS_MS.get(row["asked_accept_length"])
        beside = f" (goal {goal})" if goal and flash else ""
        published = PUBLISHED_MS.get(row["draft"], "") if flash else ""
        lines.append(
            f"| {row['draft']} | {length:.2f} | {row['mean_tpot_ms']:.3f}{beside} "
            f"| {row['median_tpot_ms']:.3f} | {row['output_throughput']:.0f} "
            f"| {row['peak_throughput']:.0f} | {shown} | {row['ceiling'] or 0:.0f} "
            f"| {row['mean_ttft_ms']:.0f} | {published} |"
        )
    step = found.get("step")
    if step:
        lines += [
            "",
            f"A rank of {step['ranks']} alone: step p50 {step['step_us_p50']:,.0f} us, floor "
            f"{step['floor_us']:,.0f} us ({step['distinct_experts']:.1f} experts a layer), host "
            f"{step['host_us_p50']:.0f} us a step, enqueued ahead in "
            f"{100 * step['enqueued_ahead']:.1f}% of the steps.",
        ]
        each, served = exchange_us(found), [r for r in found["rows"] if r["draft"] == "block8"]
        if each is not None and served:
            whole = 1000 * served[-1]["step_ms"]["p50"]
            total = each * step["exchanges_left_out"]
            nccl = found["collectives"].get("nccl")
            beside = f" NCCL takes {nccl['median_us']:.2f} us for one." if nccl else ""
            lines.append(
                f"Its {step['exchanges_left_out']} exchanges left out, {each:.2f} us each, make "
                f"{total:,.0f} us, {100 * total / whole:.0f}% of a served step of block 8.{beside}"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    found = report(args.out)
    if not found["rows"]:
        raise DataError(f"{args.out} holds no row-N.json; benchmarks/tp4.py writes them")
    print(table(found), end="")


if __name__ == "__main__":
    run(main)
