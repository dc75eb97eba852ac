"""What is wrong with this data, before any GPU hour is spent on it.

Every row is read as training would read it. The report says how many rows are usable and why the
others are not, how much of them is supervised, cut or stopped by length, and shows the mask of the
first rows in colour. Files that hold prompts only have no answers yet; that is not an error.
"""

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dspark.config import DataSettings
from dspark.corpus.chat import check_template, generation_prompt_ids, template_hash
from dspark.corpus.doctor_report import DoctorReport, Preview
from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.ids import id_limit
from dspark.corpus.messages import conversation, user_turns
from dspark.corpus.prompts import parse_prompt
from dspark.corpus.rejects import Reason, RowError
from dspark.corpus.responses import FORMAT, Response, parse_responses
from dspark.progress import Bar

__all__ = ["DoctorReport", "examine"]


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
            read, good = report.rejects.read, False
            for raw in read_rows(source, report.rejects):
                bar.advance()
                try:
                    if _has_answer(raw):
                        _answer(report, raw, tokenizer, data, keys, contents, show)
                    else:
                        _prompt(report, raw, tokenizer, keys, contents, show)
                    good = True
                except RowError as error:
                    report.rejects.add(error, raw.place)
                    # a row that stands in another file too is a fine row
                    good = good or error.reason == Reason.DUPLICATE_ID
            if not good:
                report.useless[source] = report.rejects.read - read
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
    ids = generation_prompt_ids(tokenizer, prompt.messages, tools=prompt.tools)
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
    rows = parse_responses(raw, tokenizer, vocab_size=id_limit(tokenizer))
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
    report.thinking[row.switch] += 1
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
