"""Small sums that the doctor's report is made of."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Tally", "histogram", "plain", "quantiles", "share"]

_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class Tally:
    """Usable rows of one kind, and what they teach."""

    rows: int = 0
    supervised: int = 0
    """Tokens."""
    stopped: int = 0
    """Rows that were stopped by length."""


def quantiles(lengths: Iterable[int] | Mapping[int, int]) -> dict[str, int]:
    """Smallest, median, 90%, 99% and largest, by name; a mapping counts each length."""
    counts = Counter(lengths)
    last = counts.total() - 1
    found: dict[str, int] = {}
    passed = 0
    for length in sorted(counts):
        passed += counts[length]
        for name, q in _QUANTILES.items():
            if name not in found and round(q * last) < passed:
                found[name] = length
    return {name: found[name] for name in _QUANTILES if name in found}


def histogram(lengths: Iterable[int] | Mapping[int, int]) -> dict[str, int]:
    """Counts by the next power of two: `<=256` holds 129..256. A mapping counts each length."""
    bins: Counter[int] = Counter()
    for length, count in Counter(lengths).items():
        bins[1 << max(0, length - 1).bit_length()] += count
    return {f"<={top}": bins[top] for top in sorted(bins)}


def share(part: int, whole: int) -> float:
    """To four digits; 0 of nothing is 0."""
    return round(part / whole, 4) if whole else 0.0


def plain(text: str) -> str:
    """A name from a data file, as it can be printed: one line, no lone surrogate, not endless."""
    shown = text[:80].encode("utf-8", "replace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
