"""A report as one page that needs nothing else: no script, no font, no address.

Whatever stands in the data is text here, never markup.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

__all__ = ["bars", "begin", "page", "table", "text"]

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
svg { max-width: 100%; } svg text { fill: var(--ink); font-size: 12px; }
svg rect { fill: var(--bar); }
"""


def begin(title: str) -> str:
    """How a page begins whose title begins like this."""
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}'


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """The whole page; ``parts`` are markup, ``title`` is not."""
    return (
        f"{begin(title)}</title>"
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}{style}</style></head>\n<body><h1>{text(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def text(value: object) -> str:
    """Escaped, and without what cannot be written or shown."""
    shown = str(value).encode("utf-8", "replace").decode()
    return escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", shown))


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; ``head`` may be empty."""
    top = "<tr>" + "".join(f"<th>{text(name)}</th>" for name in head) + "</tr>" if head else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{text(value)}</td>" for value in row) + "</tr>" for row in rows
    )
    return f"<table>{top}{body}</table>"


def bars(label: str, bins: Mapping[str, float], shown: str = ",") -> str:
    """A histogram as inline SVG: a bar a bin, its value behind it in the format ``shown``."""
    most = max(bins.values(), default=0) or 1
    drawn = "".join(
        f'<text x="70" y="{20 * i + 14}" text-anchor="end">{text(name)}</text>'
        f'<rect x="80" y="{20 * i + 2}" width="{max(1, round(400 * value / most))}" height="15"/>'
        f'<text x="{86 + max(1, round(400 * value / most))}" y="{20 * i + 14}">'
        f"{value:{shown}}</text>"
        for i, (name, value) in enumerate(bins.items())
    )
    size = f'width="600" height="{20 * len(bins) + 4}"'
    return f'<svg role="img" aria-label="{text(label)}" {size}>{drawn}</svg>'
