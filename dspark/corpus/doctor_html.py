"""The doctor's report as one page that needs nothing else: no script, no font, no address.

Whatever stands in a data file is text here, never markup.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dspark.corpus.doctor_report import DoctorReport
from dspark.corpus.doctor_tables import histogram, share
from dspark.errors import ConfigError

__all__ = ["check_place", "page"]

_BEGIN = b"<!doctype html>"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #ccc; --bar: #4a7bb5;
  --good: #1a7f37; --bad: #b3261e; --warn: #7a5b00; --on: #c9efd0; --cut: #fbe3a6; --dim: #666; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #161616; --line: #444;
  --bar: #7aa7dc; --good: #63d17f; --bad: #ff8a80; --warn: #e8c45a; --on: #1f5130; --cut: #5e4a12;
  --dim: #9a9a9a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { border: 1px solid var(--line); padding: .2rem .6rem;
  text-align: left; vertical-align: top; } td.n { text-align: right; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line);
  padding: .6rem; color: var(--dim); max-height: 30rem; overflow-y: auto; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.supervised { background: var(--on); color: var(--ink); }
.cut { background: var(--cut); color: var(--ink); text-decoration: line-through; }
svg text { fill: var(--ink); font-size: 12px; } svg rect { fill: var(--bar); }
"""


def check_place(path: Path) -> None:
    """Refuse to write a page over anything but a page: `--html A B` would replace the rows of A.

    Raises:
        ConfigError: names ``path``.
    """
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            begin = file.read(len(_BEGIN))
        if begin in (b"", _BEGIN):
            return
    raise ConfigError(
        f"--html {path} is there already and is no page of `dspark doctor`; give another name "
        "such as report.html"
    )


def page(report: DoctorReport, sources: list[str]) -> str:
    """HTML of ``report``; ``sources`` are what was asked for."""
    parts = [
        f'<p class="{"good" if report.ok else "bad"}"><strong>{_text(report.verdict)}</strong></p>',
        _items("Warnings", report.warnings, "warn"),
        "<h2>Figures</h2>" + _table((), report.facts()),
        "<h2>Tokens a row</h2>" + _bars(histogram(report.lengths)),
        _languages(report),
        _settings(report),
        _categories(report),
        _reasons(report),
        _previews(report),
    ]
    title = _text(f"dspark doctor: {', '.join(sources)}")
    return (
        f'{_BEGIN.decode()}\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    """Escaped, and without what cannot be written or shown."""
    shown = str(value).encode("utf-8", "replace").decode()
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", shown))


def _items(title: str, lines: list[str], kind: str) -> str:
    inside = "".join(f'<li class="{kind}">{_text(line)}</li>' for line in lines)
    return f"<h2>{title}</h2><ul>{inside}</ul>" if lines else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "<tr>" + "".join(f"<th>{_text(name)}</th>" for name in head) + "</tr>" if head else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f"<table>{top}{body}</table>"


def _bars(bins: dict[str, int]) -> str:
    """A histogram as inline SVG: a bar a bin, its count behind it."""
    most = max(bins.values(), default=0)
    drawn = "".join(
        f'<text x="70" y="{20 * i + 14}" text-anchor="end">{_text(name)}</text>'
        f'<rect x="80" y="{20 * i + 2}" width="{max(1, round(400 * count / most))}" height="15"/>'
        f'<text x="{86 + max(1, round(400 * count / most))}" y="{20 * i + 14}">{count:,}</text>'
        for i, (name, count) in enumerate(bins.items())
    )
    size = f'width="600" height="{20 * len(bins) + 4}"'
    return f'<svg role="img" aria-label="rows by length" {size}>{drawn}</svg>'


def _languages(report: DoctorReport) -> str:
    rows = [
        (name, f"{tally.rows:,}", f"{share(tally.rows, report.rejects.accepted):.1%}",
         f"{share(tally.supervised, report.supervised):.1%}")
        for name, tally in report.by_rows(report.languages)
    ]  # fmt: skip
    head = ("language", "rows", "of the rows", "of the supervised tokens")
    return "<h2>Languages</h2>" + _table(head, rows) if rows else ""


def _settings(report: DoctorReport) -> str:
    rows = [
        (name, f"{tally.rows:,}", f"{tally.supervised:,}",
         f"{share(tally.stopped, tally.rows):.1%}")
        for name, tally in report.by_rows(report.settings)
    ]  # fmt: skip
    head = ("sampled at", "rows", "supervised tokens", "stopped by length")
    return "<h2>Sampling settings</h2>" + _table(head, rows) if rows else ""


def _categories(report: DoctorReport) -> str:
    rows = [
        (name, f"{read:,}", f"{rejected:,}") for name, (read, rejected) in report.categories.items()
    ]
    return "<h2>Categories</h2>" + _table(("category", "rows", "rejected"), rows) if rows else ""


def _reasons(report: DoctorReport) -> str:
    rows = [
        (str(reason), f"{count:,}", "\n".join(report.rejects.places[reason]))
        for reason, count in report.rejects.counts.most_common()
    ]
    head = ("reason", "rows", "the first of them")
    return "<h2>Rejected rows</h2>" + _table(head, rows) if rows else ""


def _previews(report: DoctorReport) -> str:
    if not report.previews:
        return ""
    shown = "".join(
        "<pre>"
        + "".join(f'<span class="{state}">{_text(piece)}</span>' for piece, state in one)
        + "</pre>"
        for one in report.previews
    )
    return (
        '<h2>Rows</h2><p><span class="supervised">supervised</span>, not supervised, '
        f'<span class="cut">cut at {report.max_length:,} tokens</span></p>{shown}'
    )
