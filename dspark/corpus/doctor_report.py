"""What `dspark doctor` found: the figures, the verdict, and both as JSON or on a terminal."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.corpus.doctor_tables import Tally, histogram, quantiles, share
from dspark.corpus.rejects import Reason, Rejects
from dspark.errors import DataError

__all__ = ["DoctorReport", "Preview"]

_LOW_SUPERVISED = 0.05
_MANY = 0.2
_FEW_ROWS = 10
_STYLES = {"supervised": "black on green", "context": "dim", "cut": "black on yellow"}

Preview = list[tuple[str, str]]
"""Pieces of a row's text, each `supervised`, `context` (not supervised) or `cut` (dropped)."""


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
    lengths: Counter[int] = field(default_factory=Counter)
    """Rows by their tokens before the cut; of a prompt, its generation prompt included."""
    tokens: int = 0
    """Tokens of rows with answers, after the cut."""
    supervised: int = 0
    cut: int = 0
    """Rows with answers that are longer than `max_length`."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    thinking: Counter[str] = field(default_factory=Counter)
    """Rows with answers by the template's switch: `on`, `off`, `unset`."""
    reasoning: int = 0
    """Rows with an answer that holds reasoning text."""
    languages: dict[str, Tally] = field(default_factory=dict)
    """By the language of the answer (of prompts: of the question); see `languages`."""
    settings: dict[str, Tally] = field(default_factory=dict)
    """Sampled rows by `temperature`, `top_p`, ... they were drawn with."""
    categories: dict[str, list[int]] = field(default_factory=dict)
    """Rows read of each category, and those of them that are rejected."""
    empty_answers: int = 0
    """Rows whose answers hold no text, reasoning or tool call."""
    all_supervised: int = 0
    """Rows whose mask takes in the prompt: it is 1 everywhere."""
    without_anchor: int = 0
    """Rows in which no two supervised tokens follow each other: no block fits anywhere."""
    prompt_files: list[str] = field(default_factory=list)
    """Files of prompts only; training stops at one that stands among responses."""
    repeated_answers: int = 0
    """Rows whose answer (of 40 characters or more) another row had already, word for word."""
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
        counts = self.rejects.counts
        too_few = counts[Reason.TOO_FEW_SUPERVISED] + counts[Reason.PROMPT_TOO_LONG]
        some = self.rejects.accepted > 0 and (self.supervised > 0 or not too_few)
        return some and not self.useless and not self._all_empty and not self._no_block

    @property
    def _no_block(self) -> bool:
        return bool(self.answered) and self.without_anchor == self.answered

    @property
    def _all_empty(self) -> bool:
        return bool(self.answered) and self.empty_answers == self.answered

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
        if self._all_empty:
            return (
                f"all {self.answered} answers are empty: nothing but the end of the turn would be "
                "learned; look at how they were sampled"
            )
        if self._no_block:
            return (
                f"none of the {self.answered} rows holds two supervised tokens in a row, so no "
                "block can be trained: look at the loss masks"
            )
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
        for name, (read, rejected) in self.categories.items():
            if read == rejected and self.rejects.accepted:
                found.append(f"all {read} rows of category '{name}' are rejected")
        if self.empty_answers:
            found.append(f"{self.empty_answers} of {self.answered} answers are empty")
        if self.duplicate_contents:
            found.append(f"{self.duplicate_contents} rows repeat the content of another row")
        if self.answered >= _FEW_ROWS and self.repeated_answers > _MANY * self.answered:
            found.append(
                f"{self.repeated_answers} of {self.answered} answers are word for word another "
                "row's: are they an error message or a refusal?"
            )
        if self.all_supervised:
            found.append(f"{self.all_supervised} rows supervise their prompt too: every mask is 1")
        if self.cut:
            found.append(f"{self.cut} rows are longer than {self.max_length} tokens and get cut")
        stopped, known = self.finish_reasons["length"], self.finish_reasons.total()
        if known and stopped / known > _MANY:
            found.append(f"{stopped} of {known} answers were stopped by length, not by the target")
        if self.answered and self.supervised_share < _LOW_SUPERVISED:
            found.append(f"only {self.supervised_share:.1%} of the tokens are supervised")
        if self.other_templates:
            rows, hashes = self.other_templates.total(), ", ".join(self.other_templates)
            found.append(
                f"{rows} rows were rendered with another chat template ({hashes}) than the "
                f"tokenizer's ({self.template})"
            )
        if self.without_anchor:
            found.append(
                f"{self.without_anchor} rows teach nothing: no two supervised tokens in a row"
            )
        if self.answered and self.kinds["prompt"]:
            found.append(f"{self.kinds['prompt']} rows are prompts without an answer")
        if self.answered and self.prompt_files:
            found.append(
                f"training stops at {', '.join(self.prompt_files[:3])}, which holds no answer: "
                "leave it out of data.responses"
            )
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
        rows, accepted = self.rejects.read, self.rejects.accepted
        same_id = self.rejects.counts[Reason.DUPLICATE_ID]
        stopped = self.finish_reasons["length"]
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
            "cut_share": share(self.cut, self.answered),
            "finish_reasons": dict(self.finish_reasons),
            "length_stopped_share": share(stopped, self.finish_reasons.total()),
            "thinking": dict(self.thinking),
            "thinking_share": share(self.thinking["on"], self.answered),
            "reasoning_rows": self.reasoning,
            "reasoning_share": share(self.reasoning, self.answered),
            "languages": {
                name: {
                    "rows": tally.rows,
                    "row_share": share(tally.rows, accepted),
                    "supervised_tokens": tally.supervised,
                    "supervised_share": share(tally.supervised, self.supervised),
                }
                for name, tally in self.by_rows(self.languages)
            },
            "settings": {name: asdict(tally) for name, tally in self.by_rows(self.settings)},
            "categories": {
                name: {"read": read, "rejected": rejected}
                for name, (read, rejected) in self.categories.items()
            },
            "empty_answers": self.empty_answers,
            "all_supervised": self.all_supervised,
            "rows_without_anchor": self.without_anchor,
            "repeated_answers": self.repeated_answers,
            "duplicate_ids": same_id,
            "duplicate_id_share": share(same_id, rows),
            "duplicate_contents": self.duplicate_contents,
            "duplicate_content_share": share(self.duplicate_contents, accepted),
            "template_hash": self.template,
            "other_templates": dict(self.other_templates),
        }

    @staticmethod
    def by_rows(tallies: dict[str, Tally]) -> list[tuple[str, Tally]]:
        """The commonest first."""
        return sorted(tallies.items(), key=lambda pair: (-pair[1].rows, pair[0]))

    def render(self, console: Console) -> None:
        """The report for people: a table, the warnings, and masks in colour."""
        table = Table(show_header=False)
        for name, value in self.facts():
            table.add_row(name, Text(value))
        console.print(table)
        for reason, places in self.rejects.places.items():
            console.print(Text(f"  {reason}: {', '.join(places)}"), style="dim")
        for warning in self.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"))
        for preview in self.previews:
            text = Text()
            for piece, state in preview:
                text.append(piece, style=_STYLES[state])
            console.print(text)
        console.print(Text(self.verdict, style="bold green" if self.ok else "bold red"))

    def facts(self) -> list[tuple[str, str]]:
        """Lines of the table: name and value."""
        told = self.to_dict()

        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{name} {count:,}" for name, count in counts.items())

        lines = [
            ("rows", f"{self.rejects.read:,} read, {self.rejects.accepted:,} usable"),
            ("kinds", listed(told["kinds"])),
            ("tokens a row", listed(told["length"])),
            ("histogram", ", ".join(f"{k}: {v:,}" for k, v in told["length_histogram"].items())),
            ("languages", ", ".join(
                f"{name} {one['row_share']:.1%}" + (
                    f" ({one['supervised_share']:.1%} of the supervised)" if self.answered else ""
                ) for name, one in told["languages"].items())),
            ("duplicates", f"{told['duplicate_id_share']:.1%} by id, "
                           f"{told['duplicate_content_share']:.1%} by content"),
        ]  # fmt: skip
        if self.answered:
            lines += [
                ("supervised", f"{self.supervised:,} of {self.tokens:,} tokens "
                               f"({self.supervised_share:.1%})"),
                ("finish", listed(told["finish_reasons"])),
                ("thinking", f"{listed(told['thinking'])}; reasoning text in "
                             f"{told['reasoning_share']:.1%} of the rows"),
            ]  # fmt: skip
        lines += [
            (f"sampled at {name}", f"{tally.rows:,} rows, {tally.supervised:,} supervised tokens, "
                                   f"{share(tally.stopped, tally.rows):.1%} stopped by length")
            for name, tally in self.by_rows(self.settings)
        ]  # fmt: skip
        return [*lines, ("template", self.template)]
