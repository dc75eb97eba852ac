"""What is wrong with this data, before any GPU hour is spent on it.

Every row is read as training would read it. The report says how many rows are usable and why the
others are not, how much of them is supervised, cut or stopped by length, in which languages they
are and how they were sampled, and shows the mask of the first rows in colour. Files that hold
prompts only have no answers yet; that is not an error. What is kept of a row does not grow with
its length: files of any size can be examined.
"""

from array import array
from collections.abc import Sequence
from itertools import groupby
from operator import and_
from typing import Any

from dspark.config import DataSettings
from dspark.corpus.chat import check_template, generation_prompt_ids, template_hash
from dspark.corpus.doctor_report import DoctorReport, Preview
from dspark.corpus.doctor_tables import Tally, plain
from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.ids import id_limit
from dspark.corpus.languages import language
from dspark.corpus.messages import Message, conversation, user_turns
from dspark.corpus.prompts import parse_prompt
from dspark.corpus.rejects import Reason, RowError
from dspark.corpus.responses import FORMAT, Response, parse_responses, too_few
from dspark.corpus.seen import Seen
from dspark.progress import Bar

__all__ = ["DoctorReport", "examine"]

_MOST_NAMES = 100  # of categories, settings and the like; the rest are counted together
_REST = "(others)"
_SENTENCE = 40  # characters; shorter answers ("yes") repeat themselves in good data too
_SHOWN_CUT = 64  # tokens of the dropped end of a row


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
    reader = _Reader(tokenizer, data, show)
    report = reader.report
    with Bar("examining", None) as bar:
        for source in expand(sources):
            read, good, answers = report.rejects.read, False, reader.answers
            for raw in read_rows(source, report.rejects):
                bar.advance()
                # a row that stands in another file too is a fine row
                good = reader.take(raw) in (None, Reason.DUPLICATE_ID) or good
            if not good:
                report.useless[source] = report.rejects.read - read
            elif reader.answers == answers:
                report.prompt_files.append(source)
    return report


class _Reader:
    """Counts one row after the other into `report`."""

    def __init__(self, tokenizer: Any, data: DataSettings, show: int) -> None:
        self.report = DoctorReport(data.max_length, template_hash(tokenizer))
        self._tokenizer = tokenizer
        self._vocab_size = id_limit(tokenizer)
        self._data = data
        self._show = show
        self._keys, self._contents, self._answers = Seen(), Seen(), Seen()
        self.answers = 0
        """Rows that training would read, rejected ones included."""

    def take(self, raw: RawRow) -> Reason | None:
        """The reason for which the row as a whole cannot be used, if there is one."""
        reason = None
        before = self.report.rejects.rejected
        try:
            if _has_answer(raw):
                self.answers += 1
                self._answer(raw)
            else:
                self._prompt(raw)
        except RowError as error:
            reason = error.reason
            self.report.rejects.add(error, raw.place)
        category = raw.value.get("category")
        if isinstance(category, str):
            name = _named(category, self.report.categories)
            counts = self.report.categories.setdefault(name, [0, 0])
            counts[0] += 1
            counts[1] += self.report.rejects.rejected > before
        return reason

    def _prompt(self, raw: RawRow) -> None:
        prompt = parse_prompt(raw)
        ids = generation_prompt_ids(self._tokenizer, prompt.messages, tools=prompt.tools)
        self._claim(prompt.id)
        self._count_content(ids)
        self.report.kinds["prompt"] += 1
        self.report.lengths[len(ids)] += 1
        asked = language(str(prompt.messages[-1]["content"]))
        self.report.languages.setdefault(asked, Tally()).rows += 1
        if len(self.report.previews) < self._show:
            self.report.previews.append([(self._tokenizer.decode(ids), "context")])

    def _answer(self, raw: RawRow) -> None:
        report = self.report
        rows = parse_responses(raw, self._tokenizer, vocab_size=self._vocab_size)
        for row in rows:
            self._claim(row.key)
        # a conversation counts as the sequences it is trained as
        report.rejects.read += len(rows) - 1
        kind = "conversation"
        if raw.value.get("input_ids") is not None:
            kind = "sampled" if raw.value.get("format") == FORMAT else "tokenised"
        for row in rows:
            mask = row.loss_mask[: self._data.max_length]
            supervised = sum(mask)
            if error := too_few(row, self._data):
                report.rejects.add(error, raw.place)
                continue
            report.kinds[kind] += 1
            report.without_anchor += not any(map(and_, mask, mask[1:]))
            report.supervised += supervised
            report.all_supervised += all(row.loss_mask)
            self._count_row(row)
            self._count_answer(row, supervised, alone=len(rows) == 1)
            self._count_content(row.input_ids)
            if len(report.previews) < self._show:
                report.previews.append(preview(self._tokenizer, row, report.max_length))

    def _count_row(self, row: Response) -> None:
        report, length = self.report, len(row.input_ids)
        report.lengths[length] += 1
        report.tokens += min(length, report.max_length)
        report.cut += length > report.max_length
        report.thinking[row.switch] += 1
        if row.finish_reason:
            report.finish_reasons[_named(row.finish_reason, report.finish_reasons)] += 1
        if row.template_hash and row.template_hash != report.template:
            report.other_templates[_named(row.template_hash, report.other_templates)] += 1

    def _count_answer(self, row: Response, supervised: int, *, alone: bool) -> None:
        report = self.report
        text, reasoning, called = self._said(row, alone)
        report.reasoning += bool(reasoning)
        report.empty_answers += not (text or reasoning or called)
        if len(text) >= _SENTENCE and not called:
            report.repeated_answers += not self._answers.add(text)
        tallies = [report.languages.setdefault(language(text or reasoning), Tally())]
        if row.sampling:
            name = ", ".join(f"{key} {value}" for key, value in row.sampling.items())
            tallies.append(report.settings.setdefault(_named(name, report.settings), Tally()))
        for tally in tallies:
            tally.rows += 1
            tally.supervised += supervised
            tally.stopped += row.finish_reason == "length"

    def _said(self, row: Response, alone: bool) -> tuple[str, str, bool]:
        """Text and reasoning of the last answer, and whether it calls tools.

        A conversation that is trained as several sequences has its messages in each of them.
        """
        last = None
        if alone:
            last = next((m for m in reversed(row.messages) if _is_answer(m)), None)
        if last is not None:
            text, given = str(last.get("content") or ""), str(last.get("reasoning_content") or "")
            reasoning, answer = _split(text)
            return answer, given.strip() or reasoning, bool(last.get("tool_calls"))
        ids = [token for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
        reasoning, answer = _split(self._tokenizer.decode(ids, skip_special_tokens=True))
        return answer, reasoning, False

    def _claim(self, key: str) -> None:
        if not self._keys.add(key):
            raise RowError(Reason.DUPLICATE_ID, key[:40])

    def _count_content(self, ids: Sequence[int]) -> None:
        self.report.duplicate_contents += not self._contents.add(array("q", ids).tobytes())


def _has_answer(raw: RawRow) -> bool:
    if raw.value.get("input_ids") is not None:
        return True
    if user_turns(raw.value) is not None:
        return False
    return any(_is_answer(message) for message in conversation(raw.value))


def _is_answer(message: Message) -> bool:
    # messages of tokenised rows are taken as they are
    return isinstance(message, dict) and message.get("role") == "assistant"


def _split(text: str) -> tuple[str, str]:
    """Reasoning that stands in the text before `</think>`, and the answer."""
    reasoning, mark, answer = text.partition("</think>")
    if not mark:
        return "", text.strip()
    return reasoning.replace("<think>", "", 1).strip(), answer.strip()


def _named(name: str, held: dict[str, Any]) -> str:
    """``name`` as it can be shown; one for all further ones where there are very many."""
    name = plain(name)
    return name if name in held or len(held) < _MOST_NAMES else _REST


def preview(tokenizer: Any, row: Response, max_length: int) -> Preview:
    """The row's text in pieces of equal supervision; of what is dropped, the beginning."""
    pairs = zip(row.input_ids[:max_length], row.loss_mask[:max_length], strict=True)
    pieces = [
        (tokenizer.decode([token for token, _ in run]), "supervised" if on else "context")
        for on, run in groupby(pairs, key=lambda pair: pair[1])
    ]
    dropped = row.input_ids[max_length:]
    if dropped:
        more = " …" if len(dropped) > _SHOWN_CUT else ""
        pieces.append((tokenizer.decode(dropped[:_SHOWN_CUT]) + more, "cut"))
    return pieces
