"""Sample the target in this process: prompts in, responses.jsonl out, resumable at any moment.

`sampling` holds what this shares with `endpoint`, which asks a server instead.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.config import SampleSettings
from dspark.corpus.chat import check_template
from dspark.corpus.draw import Draw
from dspark.corpus.generate import generate
from dspark.corpus.ids import id_limit
from dspark.corpus.prompts import Prompt
from dspark.corpus.response_file import ResponseWriter
from dspark.corpus.responses import Response
from dspark.corpus.sampling import (
    Origin,
    SampleReport,
    Task,
    assistant_message,
    fingerprint_for,
    origin_of,
    rows_present,
    sampling_of,
    seed_key,
    tasks_of,
)
from dspark.errors import ConfigError, DataError, RunError
from dspark.progress import Bar, track
from dspark.target import Target

__all__ = ["SampleReport", "sample_responses"]

log = logging.getLogger(__name__)


def sample_responses(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: SampleSettings,
    out: Path | None = None,
    *,
    resume: bool = True,
) -> SampleReport:
    """Answer every prompt ``settings.samples_per_prompt`` times and append the rows to ``out``.

    Only the first user turn of a prompt with followups is answered. A rerun with the same settings
    writes what is missing.

    Args:
        tokenizer: the target's; its chat template renders the prompts.
        out: the file; None is ``settings.out``.
        resume: False refuses an ``out`` that holds rows already.

    Raises:
        ConfigError: ``out`` holds rows of another target, template or settings, or any row
            although ``resume`` is False; or `sample.regenerate` is all.
        TargetError: the tokenizer has no usable chat template.
        DataError: no prompt could be used.
        RunError: the target computed NaN, or the device's memory is too small for the batch.
    """
    check_template(tokenizer)
    if settings.regenerate != "last":
        raise ConfigError(
            f"sample.regenerate is {settings.regenerate}, which needs sample.endpoint: in this "
            "process only the last answer of a conversation is sampled; set it to last"
        )
    out = Path(settings.out if out is None else out)
    report = SampleReport()
    with ResponseWriter(out) as writer:
        origin = origin_of(target, tokenizer, settings, fingerprint_for(target, out))
        present = rows_present(out, origin, settings, resume)
        shown = track(prompts, "rendering prompts")
        tasks = list(tasks_of(target, tokenizer, shown, settings, present, report))
        if report.rejects.rejected:
            log.warning("%s", report.rejects.summary())
        if report.rejects.read and not report.rejects.accepted:
            raise DataError(f"no prompt can be sampled: {report.rejects.explained()}")
        if report.resumed:
            log.info("%s: resuming behind %d rows", out, report.resumed)
        # equal lengths together need the least padding, and the largest batch fails first, not last
        tasks.sort(key=lambda task: -len(task.ids))
        with Bar("sampling", len(tasks)) as bar:
            for rows in _rows(target, tokenizer, tasks, settings, origin, report):
                writer.write(rows)
                report.written += len(rows)
                bar.advance(len(rows), tok_s=f"{report.tokens_per_s:,.0f}")
    return report


def _rows(
    target: Target,
    tokenizer: Any,
    tasks: Sequence[Task],
    settings: SampleSettings,
    origin: Origin,
    report: SampleReport,
) -> Iterator[list[Response]]:
    """The rows of ``tasks`` as they are finished; their tokens are counted in ``report``."""
    started = time.monotonic()
    for start in range(0, len(tasks), settings.batch_size):
        batch = tasks[start : start + settings.batch_size]
        for finished in _answers(target, batch, settings, id_limit(tokenizer)):
            rows = []
            for position, new_ids in finished:
                task = batch[position]
                row = _response(target, tokenizer, task, new_ids, settings, origin)
                rows.append(row)
                report.new_tokens += len(new_ids)
                report.by_finish_reason[str(row.finish_reason)] += 1
                report.by_setting[task.setting] += 1
            report.seconds = time.monotonic() - started
            yield rows


def _answers(
    target: Target, batch: Sequence[Task], settings: SampleSettings, num_ids: int
) -> Iterator[list[tuple[int, list[int]]]]:
    limits = [task.limit for task in batch]
    uniforms = np.stack([_uniforms(settings.seed, task, max(limits)) for task in batch])
    draw = Draw(
        [settings.settings[task.setting] for task in batch],
        torch.from_numpy(uniforms).to(target.device),
    )
    try:
        prompts = [task.ids for task in batch]
        yield from generate(target, prompts, limits, draw, num_ids=num_ids)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"sample.batch_size {settings.batch_size} does not fit into the memory of "
            f"{target.device}; finished rows are kept, go on with a smaller one"
        ) from error


def _response(
    target: Target,
    tokenizer: Any,
    task: Task,
    new_ids: list[int],
    settings: SampleSettings,
    origin: Origin,
) -> Response:
    setting = settings.settings[task.setting]
    stopped = new_ids[-1] in target.eos_ids
    text = tokenizer.decode(new_ids[:-1] if stopped else new_ids, skip_special_tokens=False)
    answer = assistant_message(tokenizer, task.ids, text)
    return Response(
        id=task.prompt.id,
        sample=task.sample,
        messages=[*task.prompt.messages, answer],
        tools=task.prompt.tools,
        input_ids=[*task.ids, *new_ids],
        loss_mask=[0] * len(task.ids) + [1] * len(new_ids),
        finish_reason="stop" if stopped else "length",
        setting_index=task.setting,
        sampling=sampling_of(setting, task.limit),
        seed=settings.seed,
        thinking=setting.thinking,
        target=target.name,
        target_revision=target.revision,
        source=task.prompt.source,
        category=task.prompt.category,
        **origin,
    )


def _uniforms(seed: int, task: Task, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    key = int.from_bytes(seed_key(seed, task.prompt.id, task.sample)[8:24])
    return np.random.Generator(np.random.Philox(key=key)).random(count)
