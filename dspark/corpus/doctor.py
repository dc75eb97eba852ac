"""What is wrong with this data, before any GPU hour is spent on it.

Every row is read as training would read it. The report says how many rows are usable and why the
others are not, how much of them is supervised, cut or stopped by length, and shows the mask of the
first rows in colour. Files that hold prompts only have no answers yet; that is not an error.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.config import DataSettings
from dspark.corpus.chat import check_template, generation_prompt_ids, template_hash
from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.messages import conversation, user_turns
from dspark.corpus.prompts import parse_prompt
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.responses import FORMAT, Response, parse_responses
from dspark.errors import DataError
from dspark.progress import Bar

__all__ = ["DoctorReport", "examine"]

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
        """There is something to sample from or to train on."""
        too_few = self.rejects.counts[Reason.TOO_FEW_SUPERVISED]
        return self.rejects.accepted > 0 and (self.supervised > 0 or not too_few)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.rejects.read:
            return "there is no row"
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


def examine(
    sources: Sequence[str], tokenizer: Any, data: DataSettings, *, show: int = 1
) -> DoctorReport:
    """Read every row of files, globs, folders or hub ids.

    Args:
        tokenizer: the target's; ids at or above its length are out of the vocabulary.
        data: `max_length` and `min_supervised_tokens` are applied as training does.
        show: rows whose text and mask are kept in `previews`.

    Raises:
        DataError: a source does not exist or cannot be read.
        TargetError: the tokenizer has no usable chat template.
    """
    check_template(tokenizer)
    report = DoctorReport(data.max_length, template_hash(tokenizer))
    keys: set[str] = set()
    contents: set[bytes] = set()
    with Bar("examining", None) as bar:
        for source in expand(sources):
            for raw in read_rows(source, report.rejects):
                bar.advance()
                try:
                    if _has_answer(raw):
                        _answer(report, raw, tokenizer, data, keys, contents, show)
                    else:
                        _prompt(report, raw, tokenizer, keys, contents, show)
                except RowError as error:
                    report.rejects.add(error, raw.place)
    return report


def _has_answer(raw: RawRow) -> bool:
    if "input_ids" in raw.value:
        return True
    if user_turns(raw.value) is not None:
        return False
    return any(message["role"] == "assistant" for message in conversation(raw.value))


def _prompt(
    report: DoctorReport,
    raw: RawRow,
    tokenizer: Any,
    keys: set[str],
    contents: set[bytes],
    show: int,
) -> None:
    prompt = parse_prompt(raw)
    ids = generation_prompt_ids(tokenizer, prompt.messages)
    _claim(prompt.id, keys)
    _count_content(report, ids, contents)
    report.kinds["prompt"] += 1
    report.lengths.append(len(ids))
    if len(report.previews) < show:
        report.previews.append([(tokenizer.decode(ids), False)])


def _answer(
    report: DoctorReport,
    raw: RawRow,
    tokenizer: Any,
    data: DataSettings,
    keys: set[str],
    contents: set[bytes],
    show: int,
) -> None:
    rows = parse_responses(raw, tokenizer, vocab_size=len(tokenizer))
    for row in rows:
        _claim(row.key, keys)
    # a conversation counts as the sequences it is trained as
    report.rejects.read += len(rows) - 1
    kind = "conversation"
    if "input_ids" in raw.value:
        kind = "sampled" if raw.value.get("format") == FORMAT else "tokenised"
    for row in rows:
        supervised = sum(row.loss_mask[: data.max_length])
        if supervised < data.min_supervised_tokens:
            detail = f"{supervised} of {data.min_supervised_tokens}"
            report.rejects.add(RowError(Reason.TOO_FEW_SUPERVISED, detail), raw.place)
            continue
        report.kinds[kind] += 1
        report.supervised += supervised
        _count_row(report, row)
        _count_content(report, row.input_ids, contents)
        if len(report.previews) < show:
            report.previews.append(preview(tokenizer, row))


def _count_row(report: DoctorReport, row: Response) -> None:
    length = len(row.input_ids)
    report.lengths.append(length)
    report.tokens += min(length, report.max_length)
    report.cut += length > report.max_length
    report.thinking[{True: "on", False: "off", None: "unset"}[row.thinking]] += 1
    if row.finish_reason:
        report.finish_reasons[row.finish_reason] += 1
    if row.template_hash and row.template_hash != report.template:
        report.other_templates[row.template_hash] += 1


def _claim(key: str, keys: set[str]) -> None:
    if key in keys:
        raise RowError(Reason.DUPLICATE_ID, key[:40])
    keys.add(key)


def _count_content(report: DoctorReport, ids: Sequence[int], contents: set[bytes]) -> None:
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).digest()
    report.duplicate_contents += digest in contents
    contents.add(digest)


def preview(tokenizer: Any, row: Response) -> Preview:
    """The row's text in pieces of equal supervision."""
    pairs = zip(row.input_ids, row.loss_mask, strict=True)
    return [
        (tokenizer.decode([token for token, _ in run]), bool(on))
        for on, run in groupby(pairs, key=lambda pair: pair[1])
    ]


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
