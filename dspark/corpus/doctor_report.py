"""What `dspark doctor` found, for people and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.corpus.rejects import Reason, Rejects
from dspark.errors import DataError

__all__ = ["DoctorReport", "Preview", "histogram", "quantiles"]

_LOW_SUPERVISED = 0.05
_MANY_STOPPED = 0.2
_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

Preview = list[tuple[str, bool]]
"""Pieces of a row's text, and whether each is supervised."""


@dataclass
class DoctorReport:
    """Figures over the usable rows, unless a field says otherwise."""

    max_length: int
    template: str
    """Hash of the tokenizer's chat template."""
    rejects: Rejects = field(default_factory=Rejects)
    """All rows read, and those that training would not use."""
    kinds: Counter[str] = field(default_factory=Counter)
    """`sampled` (written by our sampler), `tokenised`, `conversation`, `prompt`."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row before it is cut; of a prompt, its generation prompt included."""
    tokens: int = 0
    """Tokens of rows with answers, after the cut."""
    supervised: int = 0
    cut: int = 0
    """Rows with answers that are longer than `max_length`."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    thinking: Counter[str] = field(default_factory=Counter)
    """Rows with answers by the template's switch: `on`, `off`, `unset`."""
    other_templates: Counter[str] = field(default_factory=Counter)
    """Rows that were rendered with another template, by its hash."""
    useless: dict[str, int] = field(default_factory=dict)
    """Files without a single row that can be read, and how many rows they have. Sampling and
    training stop at such a file, whatever the others hold."""
    duplicate_contents: int = 0
    """Rows whose tokens (of prompts: messages) another row had already, under another id."""
    previews: list[Preview] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Usable rows with answers."""
        return self.kinds.total() - self.kinds["prompt"]

    @property
    def supervised_share(self) -> float:
        return self.supervised / self.tokens if self.tokens else 0.0

    @property
    def ok(self) -> bool:
        """There is something to sample from or to train on, in every file."""
        too_few = self.rejects.counts[Reason.TOO_FEW_SUPERVISED]
        some = self.rejects.accepted > 0 and (self.supervised > 0 or not too_few)
        return some and not self.useless

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.useless:
            found = "; ".join(
                f"'{source}' holds no usable row: "
                + (f"all {rows} are rejected" if rows else "it is empty")
                for source, rows in self.useless.items()
            )
            explained = self.rejects.explained()
            return f"{found} ({explained})" if explained else found
        if not self.ok:
            return f"no row can be trained on: {self.rejects.summary()}"
        if not self.answered:
            return f"{self.kinds['prompt']} prompts, no answers yet: run dspark sample"
        return f"{self.answered} rows can be trained on, {self.supervised:,} supervised tokens"

    @property
    def warnings(self) -> list[str]:
        """What works but is probably not meant."""
        found = []
        if self.rejects.rejected:
            found.append(self.rejects.summary())
        if self.duplicate_contents:
            found.append(f"{self.duplicate_contents} rows repeat the content of another row")
        if self.cut:
            found.append(f"{self.cut} rows are longer than {self.max_length} tokens and get cut")
        stopped, known = self.finish_reasons["length"], self.finish_reasons.total()
        if known and stopped / known > _MANY_STOPPED:
            found.append(f"{stopped} of {known} answers were stopped by length, not by the target")
        if self.answered and self.supervised_share < _LOW_SUPERVISED:
            found.append(f"only {self.supervised_share:.1%} of the tokens are supervised")
        if self.other_templates:
            rows, hashes = self.other_templates.total(), ", ".join(self.other_templates)
            found.append(
                f"{rows} rows were rendered with another chat template ({hashes}) than the "
                f"tokenizer's ({self.template})"
            )
        if self.answered and self.kinds["prompt"]:
            found.append(f"{self.kinds['prompt']} rows are prompts without an answer")
        return found

    def check(self) -> None:
        """Refuse data from which nothing can be made.

        Raises:
            DataError: not `ok`.
        """
        if not self.ok:
            raise DataError(self.verdict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "rows": self.rejects.to_dict(),
            "useless_files": dict(self.useless),
            "kinds": dict(self.kinds),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": round(self.supervised_share, 4),
            "length": quantiles(self.lengths),
            "length_histogram": histogram(self.lengths),
            "max_length": self.max_length,
            "cut_share": _share(self.cut, self.answered),
            "finish_reasons": dict(self.finish_reasons),
            "length_stopped_share": _share(
                self.finish_reasons["length"], self.finish_reasons.total()
            ),
            "thinking": dict(self.thinking),
            "thinking_share": _share(self.thinking["on"], self.answered),
            "duplicate_ids": self.rejects.counts[Reason.DUPLICATE_ID],
            "duplicate_contents": self.duplicate_contents,
            "template_hash": self.template,
            "other_templates": dict(self.other_templates),
        }

    def render(self, console: Console) -> None:
        """The report for people: a table, the warnings, and masks in colour."""
        table = Table(show_header=False)
        for name, value in self._lines():
            table.add_row(name, value)
        console.print(table)
        for reason, places in self.rejects.places.items():
            console.print(Text(f"  {reason}: {', '.join(places)}"), style="dim")
        for warning in self.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"))
        for preview in self.previews:
            text = Text()
            for piece, supervised in preview:
                text.append(piece, style="black on green" if supervised else "dim")
            console.print(text)
        console.print(Text(self.verdict, style="bold green" if self.ok else "bold red"))

    def _lines(self) -> list[tuple[str, str]]:
        lines = [
            ("rows", f"{self.rejects.read:,} read, {self.rejects.accepted:,} usable"),
            ("kinds", ", ".join(f"{kind} {n:,}" for kind, n in self.kinds.items())),
            ("tokens a row", ", ".join(f"{k} {v:,}" for k, v in quantiles(self.lengths).items())),
            ("histogram", ", ".join(f"{k}: {v:,}" for k, v in histogram(self.lengths).items())),
        ]
        if self.answered:
            lines += [
                ("supervised", f"{self.supervised:,} of {self.tokens:,} tokens "
                               f"({self.supervised_share:.1%})"),
                ("finish", ", ".join(f"{k} {v:,}" for k, v in self.finish_reasons.items())),
                ("thinking", ", ".join(f"{k} {v:,}" for k, v in self.thinking.items())),
            ]  # fmt: skip
        return lines


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Smallest, median, 90%, 99% and largest; empty for no lengths."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return {name: ordered[round(q * last)] for name, q in _QUANTILES.items()} if ordered else {}


def histogram(lengths: Sequence[int]) -> dict[str, int]:
    """Counts by the next power of two: `<=256` holds 129..256."""
    bins = Counter(1 << max(0, length - 1).bit_length() for length in lengths)
    return {f"<={top}": bins[top] for top in sorted(bins)}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
