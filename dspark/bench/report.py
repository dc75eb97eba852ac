"""How a measurement is shown to people, and the facts about the machine that go with it.

Commands print their report as JSON in their last line; that is the command's, not this module's.
"""

import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark import provenance

__all__ = ["environment", "print_comparison", "print_evaluation", "print_table"]


def environment() -> dict[str, Any]:
    """Facts that a figure is worthless without: hardware, versions, commit, date, command."""
    facts = provenance.collect()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "torch_threads": torch.get_num_threads(),
        "gpus": gpus,
        "python": facts["python"],
        "packages": facts["packages"],
        "dspark": facts["dspark"],
        "git_commit": facts["git_commit"],
        "git_dirty": facts["git_dirty"],
        "command": facts["command"],
        "time": facts["time"],
    }


def _cores() -> int:
    """Cores this process may run on, which a container often limits."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    note: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Print a table; the first column is left-aligned, numbers get three decimals, None is a dash.

    ``file`` is stderr when not given, so that stdout stays for JSON.
    """
    stream = sys.stderr if file is None else file
    table = Table(caption=note)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    # a pipe or a log has no width: cut columns there would lose figures
    width = None if stream.isatty() else 160
    console = Console(file=stream, width=width)
    # a table's own title is wrapped to its width, which breaks paths, and [x] in it is markup
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def print_evaluation(report: Mapping[str, Any], *, file: TextIO | None = None) -> None:
    """Show what `EvalReport.summary` holds, on stdout unless told otherwise."""
    stream = sys.stdout if file is None else file
    rows = [(name, figures) for name, figures in report["sets"].items()]
    if len(rows) > 1:
        rows.append(("all, pooled", report))
    settings, rejects = report["settings"], report["rejects"]["rejected"]
    note = (
        f"temperature {settings['temperature']:g}, max_new_tokens {settings['max_new_tokens']}, "
        f"at most {settings['num_draft_tokens']} of {settings['block_size']} proposals a round; "
        f"{rejects} prompts left out. accept length counts the target's own token, accepted "
        "drafts do not; plain is the same loop without the draft."
    )
    print_table("Real decoding", _COLUMNS, [_row(*row) for row in rows], note=note, file=stream)
    slots = enumerate(zip(report["survival"], report["accept_rate"], strict=True))
    print_table(
        "By slot, pooled",
        ("slot", "survival", "accept rate given the slots before"),
        [(slot, *rates) for slot, rates in slots],
        file=stream,
    )
    if found := report.get("confidence"):
        rows = [
            (f"{key}, {of}", *((one or {}).get(of, {}).get(key) for one in found.values()))
            for of in ("survival", "slot")
            for key in ("ece", "auroc", "brier")
        ]
        columns = ("confidence", "as the head has it", "with sts_temperatures")
        print_table("Confidence, pooled", columns, rows, file=stream)
    counts = ", ".join(f"{n}: {rounds}" for n, rounds in enumerate(report["histogram"]) if rounds)
    print(f"rounds by tokens they added: {counts or 'none'}", file=stream)
    for mode, one in report["lossless_checks"].items():
        print(f"{mode}: {_verdict(one)}", file=stream)


def print_comparison(
    reports: Mapping[str, Mapping[str, Any]], *, file: TextIO | None = None
) -> None:
    """Show `EvalReport.summary` of several drafts of one run by their names, and plain decoding."""
    stream = sys.stdout if file is None else file
    report = next(iter(reports.values()))
    parts = list(report["sets"])
    rows: list[list[Any]] = []
    for part in parts if len(parts) == 1 else [*parts, None]:
        name = part or "all, pooled"
        for draft, one in reports.items():
            figures = one if part is None else one["sets"][part]
            counts = [figures[key] for key in ("num_prompts", "num_tokens")]
            lengths = [figures["accept_length"], _interval(figures), figures["accepted_drafts"]]
            times = [figures[key] for key in ("tpot_ms", "speedup")]
            rows.append([name, draft, *counts, *lengths, *times, figures["lossless"]])
        plain = [1.0, None, 0.0, figures["tpot_ms_plain"], 1.0, None]
        rows.append([name, "plain", *counts, *plain])
    settings = report["settings"]
    note = (
        f"temperature {settings['temperature']:g}, max_new_tokens {settings['max_new_tokens']}, "
        + ", ".join(
            f"at most {one['settings']['num_draft_tokens']} proposals a round of {draft}"
            for draft, one in reports.items()
        )
        + f"; {report['rejects']['rejected']} prompts left out. accept length counts the target's "
        "own token, accepted drafts do not; plain is the same loop without a draft."
    )
    print_table("Real decoding of the same prompts", _COMPARED, rows, note=note, file=stream)
    for draft, one in reports.items():
        for mode, found in one["lossless_checks"].items():
            print(f"{draft}, {mode}: {_verdict(found)}", file=stream)


_COMPARED = (
    "set",
    "draft",
    "prompts",
    "tokens",
    "accept length",
    "95% interval",
    "accepted drafts",
    "TPOT ms",
    "speed-up",
    "same output",
)
_COLUMNS = (
    "set",
    "prompts",
    "tokens",
    "rounds",
    "accept length",
    "95% interval",
    "macro",
    "accepted drafts",
    "TPOT ms",
    "plain ms",
    "speed-up",
    "same output",
)


def _row(name: str, figures: Mapping[str, Any]) -> list[Any]:
    first = [name, *(figures[key] for key in ("num_prompts", "num_tokens", "rounds"))]
    lengths = [figures["accept_length"], _interval(figures), figures["accept_length_macro"]]
    times = [figures[key] for key in ("tpot_ms", "tpot_ms_plain", "speedup")]
    return [*first, *lengths, figures["accepted_drafts"], *times, figures["lossless"]]


def _interval(figures: Mapping[str, Any]) -> str | None:
    low_high = figures["interval"]
    return f"{low_high[0]:.3f}..{low_high[1]:.3f}" if low_high else None


def _verdict(comparison: Mapping[str, Any]) -> str:
    size = f"{comparison['num_prompts']} prompts, {comparison['num_tokens']} tokens"
    if comparison["equal"]:
        return f"identical output with and without the draft over {size}"
    if not comparison["differences"]:
        return "nothing was compared"
    first = comparison["differences"][0]
    return (
        f"OUTPUT DIFFERS in {len(comparison['differences'])} of {size}; first: prompt "
        f"{first['prompt']}, new token {first['position']}: {first['with_draft']} with the draft, "
        f"{first['without']} without"
    )
