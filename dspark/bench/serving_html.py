"""A serving benchmark as one self-contained page, every figure with its definition."""

from collections.abc import Mapping, Sequence
from typing import Any

from dspark import html_page
from dspark.bench.definitions import DEFINITIONS, SYMBOLS
from dspark.bench.serving_compare import Comparison
from dspark.bench.serving_report import ServingReport, percentile, shown

__all__ = ["page"]

_STYLE = """
svg path { fill: none; stroke: var(--bar); stroke-width: 2; } svg line { stroke: var(--line); }
.wide { overflow-x: auto; }
"""


def page(
    report: ServingReport, facts: Mapping[str, Any], comparison: Comparison | None = None
) -> str:
    """HTML of ``report``; ``facts``: settings and environment of the run."""
    parts = _side(report)
    if comparison is not None:
        head = ("figure", "measured", "base", "difference (95%)", "times better (95%)")
        parts = [
            f"<h2>Against {html_page.text(comparison.base_name)}</h2>"
            f"<p>{html_page.text(comparison.verdict())}. {html_page.text(DEFINITIONS['compare'])}"
            "</p>" + html_page.table(head, comparison.rows()),
            *parts,
            "<h1>The base</h1>",
            *_side(comparison.base),
        ]
    parts.append(f"<p>{html_page.text(SYMBOLS)}</p>")
    parts.append("<h2>Run</h2>" + html_page.table((), [(k, _shown(v)) for k, v in facts.items()]))
    return html_page.page(f"dspark bench serving: {report.model}", parts, _STYLE)


def _side(report: ServingReport) -> list[str]:
    problem = report.above_ceiling
    served = f"{report.completed} requests, {report.output_tokens:,} tokens{report.caveat()}"
    parts = [f"<p>{served}{f', {report.failed} failed' if report.failed else ''}</p>"]
    if problem:
        parts.append(f'<p class="bad"><strong>{html_page.text(problem)}</strong></p>')
    rows = [
        (name, shown(value, unit), DEFINITIONS.get(name, ""))
        for name, value, unit in report.rows()
        if value is not None
    ]
    parts.append("<h2>Figures</h2>" + html_page.table(("figure", "value", "definition"), rows))
    if report.accept_histogram:
        counts = {str(n): count for n, count in enumerate(report.accept_histogram) if n}
        parts.append("<h2>Steps by tokens added</h2>" + html_page.bars("steps by tokens", counts))
    for title, by_slot in (
        ("Accept rate by slot, given the slots before", report.accept_rate),
        ("Survival by slot", report.survival),
    ):
        if by_slot:
            slots = {f"slot {k}": share for k, share in enumerate(by_slot)}
            parts.append(f"<h2>{title}</h2>" + html_page.bars(title, slots, ".1%"))
    tpots = [one["tpot_ms"] for one in report.requests if one.get("tpot_ms") is not None]
    if len(tpots) > 1:
        parts.append("<h2>TPOT of each request, sorted</h2>" + _curve("TPOT, ms", sorted(tpots)))
    return parts


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _curve(label: str, values: Sequence[float]) -> str:
    """Values from left to right over a zero line; the least, middle and greatest are written."""
    most = max(values) or 1.0
    points = [
        f"{60 + 520 * i / (len(values) - 1):.1f},{150 - 130 * value / most:.1f}"
        for i, value in enumerate(values)
    ]
    notes = "".join(
        f'<text x="54" y="{154 - 130 * value / most:.1f}" text-anchor="end">{value:.3g}</text>'
        for value in sorted({values[0], percentile(values, 0.5), values[-1]})
    )
    return (
        f'<svg role="img" aria-label="{html_page.text(label)}" width="600" height="160">'
        f'<line x1="60" y1="150" x2="580" y2="150"/><path d="M{" L".join(points)}"/>{notes}</svg>'
    )
