"""Sample a target that a server holds: the rows of `sampler`, from vLLM, SGLang or their like.

Prompts are read as fast as answers come and no faster: `sample.concurrency` conversations are in
flight, and each waits until its rows are on disk before the next one is taken. Rows stand in the
file in the order in which they were answered.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config import SampleSettings
from dspark.corpus.chat import check_template
from dspark.corpus.client import Client, Failed
from dspark.corpus.dialogue import Dialogue, Interviewer
from dspark.corpus.engines import Answer, Api, BadAnswer, Question, parse, request
from dspark.corpus.prompts import Prompt
from dspark.corpus.rejects import RowError
from dspark.corpus.response_file import ResponseWriter
from dspark.corpus.responses import Response
from dspark.corpus.sampling import (
    Asked,
    Origin,
    SampleReport,
    Task,
    origin_of,
    rows_present,
    sampling_of,
    tasks_of,
)
from dspark.errors import ConfigError, DataError, DSparkError, RunError
from dspark.progress import Bar

__all__ = ["errors_file", "sample_endpoint"]

log = logging.getLogger(__name__)

_FEWEST_FAILURES = 20
_MOST_AT_DSPARK = 8
"""Requests in flight at `dspark serve`, which answers one at a time and lets few wait."""


def errors_file(out: Path) -> Path:
    """Where the rows stand that the endpoint failed to answer in the last run."""
    return out.with_name(out.name + ".errors.jsonl")


def sample_endpoint(
    target: Asked,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    settings: SampleSettings,
    out: Path | None = None,
    *,
    resume: bool = True,
) -> SampleReport:
    """Have `sample.endpoint` answer every prompt; append the rows to ``out``.

    A rerun with the same settings asks for what is missing, errors of the last run included, whose
    list (`errors_file`) is begun anew.

    Args:
        target: a `Remote`, or the target itself.
        prompts: taken one by one, while others are being answered.
        out: the file; None is ``settings.out``.

    Raises:
        ConfigError: ``out`` holds other rows, the endpoint turns requests away, or it returns no
            token ids.
        DataError: a source of prompts cannot be read, or no row could be used.
        RunError: the endpoint does not answer (any more).
    """
    check_template(tokenizer)
    out = Path(settings.out if out is None else out)
    origin = origin_of(target, tokenizer, settings)
    report = SampleReport()
    client = Client(settings)
    with ResponseWriter(out) as writer, Bar("sampling", None) as bar:
        present = rows_present(out, origin, settings, resume)
        if present:
            log.info("%s: resuming behind %d rows", out, len(present))
        sink = _Sink(writer, out, report, bar)
        run = _Run(target, tokenizer, settings, origin, report, sink, client)
        tasks = _Lazy(
            tasks_of(
                target,
                tokenizer,
                prompts,
                settings,
                present,
                report,
                until_first_answer=settings.regenerate == "all",
            )
        )
        asyncio.run(run.all(tasks))
    if tasks.problem is not None:
        raise tasks.problem
    if report.rejects.rejected:
        log.warning("%s", report.rejects.summary())
    if report.rejects.read and not report.rejects.accepted:
        raise DataError(f"no row could be sampled: {report.rejects.explained()}")
    return report


class _Lazy(Iterator[Task]):
    """Tasks, one at a time; an unreadable source ends them and is told when all are answered."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self.problem: DSparkError | None = None

    def __next__(self) -> Task:
        try:
            return next(self._tasks)
        except DSparkError as error:
            self.problem = error
            raise StopIteration from None


@dataclass(frozen=True)
class _Outcome:
    """Rows of one task, or why there are none."""

    task: Task
    rows: list[Response]
    dialogue: Dialogue | None = None
    failed: Failed | None = None


class _Sink:
    """Writes outcomes; many that are finished at about the same time share one wait for the disk.

    The report counts what is on disk.
    """

    def __init__(self, writer: ResponseWriter, out: Path, report: SampleReport, bar: Bar) -> None:
        self._writer = writer
        self._out = out
        self._errors = errors_file(out)
        self._report = report
        self._bar = bar
        self._pending: list[_Outcome] = []
        self._lock = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None
        self._started = time.monotonic()

    def begin(self, engine: str) -> None:
        """Refuse a file of another engine (its draws, maybe its weights, are others); drop the
        last run's list of errors, which are about to be asked again.

        Raises:
            ConfigError: names both.
        """
        with open(self._out, "rb") as file:
            line = file.readline()
        begun = json.loads(line).get("engine") if line.strip() else engine
        if begun != engine:
            raise ConfigError(
                f"sample.out '{self._out}' was sampled from {begun}, and sample.endpoint is now "
                f"{engine}; choose another file"
            )
        self._errors.unlink(missing_ok=True)

    async def put(self, outcome: _Outcome) -> None:
        """Return when ``outcome`` is on disk."""
        self._pending.append(outcome)
        async with self._lock:
            if self._pending:
                await self.flush()

    async def flush(self) -> None:
        """Write what is pending; a cancellation does not tear a write that has begun."""
        if self._writing is not None:
            await self._writing
        batch, self._pending = self._pending, []
        if batch:
            self._writing = asyncio.create_task(self._write(batch))
            await asyncio.shield(self._writing)

    async def _write(self, batch: list[_Outcome]) -> None:
        rows = [row for outcome in batch for row in outcome.rows]
        failed = [outcome for outcome in batch if outcome.failed is not None]
        if rows:
            await asyncio.to_thread(self._writer.write, rows)
        if failed:
            await asyncio.to_thread(self._write_errors, failed)
        for outcome in batch:
            self._count(outcome)
        self._report.seconds = time.monotonic() - self._started
        self._bar.advance(len(batch), tok_s=f"{self._report.tokens_per_s:,.0f}")

    def _write_errors(self, failed: list[_Outcome]) -> None:
        lines = b""
        for outcome in failed:
            error = outcome.failed
            assert error is not None
            line = {
                "id": outcome.task.prompt.id,
                "sample": outcome.task.sample,
                "reason": str(error.kind),
                "detail": error.detail,
                "attempts": error.attempts,
            }
            lines += json.dumps(line, ensure_ascii=False).encode() + b"\n"
        try:
            with open(self._errors, "ab") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as full:
            raise OSError(full.errno, full.strerror, str(self._errors)) from full

    def _count(self, outcome: _Outcome) -> None:
        report = self._report
        if outcome.failed is not None:
            kind = str(outcome.failed.kind)
            report.errors[kind] += 1
            report.first_errors.setdefault(kind, outcome.failed.detail)
            return
        assert outcome.dialogue is not None
        report.written += 1
        report.new_tokens += outcome.dialogue.new_tokens
        report.by_finish_reason[outcome.dialogue.pieces[-1].finish_reason] += 1
        report.by_setting[outcome.task.setting] += 1
        if outcome.dialogue.ended_early:
            report.ended_early[outcome.dialogue.ended_early] += 1


class _Run:
    def __init__(
        self,
        target: Asked,
        tokenizer: Any,
        settings: SampleSettings,
        origin: Origin,
        report: SampleReport,
        sink: _Sink,
        client: Client,
    ) -> None:
        self._target = target
        self._settings = settings
        self._origin = origin
        self._report = report
        self._sink = sink
        self._interviewer = Interviewer(target, tokenizer, settings)
        self._client = client
        self._api: Api = "openai"
        self._model = self._engine = ""
        self._seen_ids = False
        self._failures = 0  # one behind the other

    async def all(self, tasks: Iterator[Task]) -> None:
        async with self._client:
            self._api, self._model, engine = await self._client.find()
            self._engine = self._client.hide(f"{engine}:{self._model}")
            self._sink.begin(self._engine)
            count = self._settings.concurrency
            if engine == "dspark":
                count = min(count, _MOST_AT_DSPARK)
            workers = [asyncio.create_task(self._work(tasks)) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
                self._report.retries = self._client.retries
                await self._sink.flush()

    async def _work(self, tasks: Iterator[Task]) -> None:
        for task in tasks:
            try:
                dialogue = await self._interviewer.hold(task, self._ask)
            except RowError as error:
                told = RowError(error.reason, self._client.hide(error.detail))
                self._report.rejects.add(told, task.prompt.id)
                self._failures = 0
            except Failed as error:
                await self._sink.put(_Outcome(task, [], failed=error))
                self._failures += 1
                self._stop_if_dead(error)
            else:
                self._failures = 0
                await self._sink.put(_Outcome(task, self._rows(task, dialogue), dialogue))

    async def _ask(self, question: Question) -> Answer:
        path, body = request(self._api, self._model, question)
        answer = await self._client.ask(
            path, body, lambda got: self._parse(got, question), seed=question.seed
        )
        if answer.ids is None and not self._settings.allow_retokenized:
            raise ConfigError(
                f"sample.endpoint {self._settings.endpoint} ({self._api}) returns no token ids, "
                "and tokenising the text again may give others than were sampled; serve the "
                "target with SGLang or vLLM (0.10.2 or later), or accept that by "
                "sample.allow_retokenized=true"
            )
        return answer

    def _parse(self, body: Any, question: Question) -> Answer:
        answer = parse(self._api, body, question)
        if answer.ids is None and self._seen_ids:
            raise BadAnswer("no token ids, which other answers had")
        self._seen_ids |= answer.ids is not None
        return answer

    def _stop_if_dead(self, error: Failed) -> None:
        if self._failures >= max(_FEWEST_FAILURES, 2 * self._settings.concurrency):
            raise RunError(
                f"sample.endpoint {self._settings.endpoint} failed to answer {self._failures} "
                f"rows one behind the other, the last with {error}; finished rows are kept, run "
                "the same command when it answers again"
            )

    def _rows(self, task: Task, dialogue: Dialogue) -> list[Response]:
        prompt, setting = task.prompt, self._settings.settings[task.setting]
        return [
            Response(
                id=f"{prompt.id}/{part}" if part else prompt.id,
                sample=task.sample,
                messages=piece.messages,
                tools=prompt.tools,
                input_ids=piece.input_ids,
                loss_mask=piece.loss_mask,
                finish_reason=piece.finish_reason,
                setting_index=task.setting,
                sampling=sampling_of(setting, piece.limit),
                seed=self._settings.seed,
                thinking=setting.thinking,
                target=self._target.name,
                target_revision=self._target.revision,
                source=prompt.source,
                category=prompt.category,
                part=part,
                parts=len(dialogue.pieces),
                engine=self._engine,
                retokenized=piece.retokenized,
                **self._origin,
            )
            for part, piece in enumerate(dialogue.pieces)
        ]
