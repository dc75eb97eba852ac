"""How a measurement is shown to people, and the facts about the machine that go with it.

Commands print their report as JSON in their last line; that is the command's, not this module's.
"""

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark import provenance

__all__ = ["environment", "print_table"]


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
