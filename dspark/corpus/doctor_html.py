"""The doctor's report as one page."""

from pathlib import Path

from dspark import html_page
from dspark.corpus.doctor_report import DoctorReport
from dspark.corpus.doctor_tables import histogram, share
from dspark.errors import ConfigError

__all__ = ["check_place", "page"]

_TITLE = "dspark doctor: "
_BEGIN = html_page.begin(_TITLE).encode()
_STYLE = """
.supervised { background: var(--on); color: var(--ink); }
.cut { background: var(--cut); color: var(--ink); text-decoration: line-through; }
"""


def check_place(path: Path) -> None:
    """Refuse to write over anything but such a page: `--html A B` would replace the rows of A.

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
    verdict = html_page.text(report.verdict)
    parts = [
        f'<p class="{"good" if report.ok else "bad"}"><strong>{verdict}</strong></p>',
        _items("Warnings", report.warnings, "warn"),
        "<h2>Figures</h2>" + html_page.table((), report.facts()),
        "<h2>Tokens a row</h2>" + html_page.bars("rows by length", histogram(report.lengths)),
        _languages(report),
        _settings(report),
        _categories(report),
        _reasons(report),
        _previews(report),
    ]
    return html_page.page(f"{_TITLE}{', '.join(sources)}", parts, _STYLE)


def _items(title: str, lines: list[str], kind: str) -> str:
    inside = "".join(f'<li class="{kind}">{html_page.text(line)}</li>' for line in lines)
    return f"<h2>{title}</h2><ul>{inside}</ul>" if lines else ""


def _languages(report: DoctorReport) -> str:
    rows = [
        (name, f"{tally.rows:,}", f"{share(tally.rows, report.rejects.accepted):.1%}",
         f"{share(tally.supervised, report.supervised):.1%}")
        for name, tally in report.by_rows(report.languages)
    ]  # fmt: skip
    head = ("language", "rows", "of the rows", "of the supervised tokens")
    return "<h2>Languages</h2>" + html_page.table(head, rows) if rows else ""


def _settings(report: DoctorReport) -> str:
    rows = [
        (name, f"{tally.rows:,}", f"{tally.supervised:,}",
         f"{share(tally.stopped, tally.rows):.1%}")
        for name, tally in report.by_rows(report.settings)
    ]  # fmt: skip
    head = ("sampled at", "rows", "supervised tokens", "stopped by length")
    return "<h2>Sampling settings</h2>" + html_page.table(head, rows) if rows else ""


def _categories(report: DoctorReport) -> str:
    rows = [
        (name, f"{read:,}", f"{rejected:,}") for name, (read, rejected) in report.categories.items()
    ]
    return (
        "<h2>Categories</h2>" + html_page.table(("category", "rows", "rejected"), rows)
        if rows
        else ""
    )


def _reasons(report: DoctorReport) -> str:
    rows = [
        (str(reason), f"{count:,}", "\n".join(report.rejects.places[reason]))
        for reason, count in report.rejects.counts.most_common()
    ]
    head = ("reason", "rows", "the first of them")
    return "<h2>Rejected rows</h2>" + html_page.table(head, rows) if rows else ""


def _previews(report: DoctorReport) -> str:
    if not report.previews:
        return ""
    shown = "".join(
        "<pre>"
        + "".join(f'<span class="{state}">{html_page.text(piece)}</span>' for piece, state in one)
        + "</pre>"
        for one in report.previews
    )
    return (
        '<h2>Rows</h2><p><span class="supervised">supervised</span>, not supervised, '
        f'<span class="cut">cut at {report.max_length:,} tokens</span></p>{shown}'
    )
