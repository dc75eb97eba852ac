"""Sample the target in this process: prompts in, responses.jsonl out, resumable at any moment.

What a row becomes is a function of (seed, prompt id, number of the sample): they choose one of the
settings by weight and key the row's uniform numbers. So an interrupted run and its continuation
together draw what one uninterrupted run draws.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.config import SampleSettings, SamplingSetting
from dspark.corpus.chat import check_template, generation_prompt_ids, template_hash
from dspark.corpus.draw import Draw
from dspark.corpus.files import read_rows
from dspark.corpus.generate import generate
from dspark.corpus.ids import id_limit
from dspark.corpus.messages import Message
from dspark.corpus.prompts import Prompt
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.responses import FORMAT, Response, ResponseWriter
from dspark.errors import ConfigError, DataError, RunError
from dspark.progress import Bar
from dspark.target import Target

__all__ = ["SampleReport", "sample_responses"]

log = logging.getLogger(__name__)


@dataclass
class SampleReport:
    """What a run did. A prompt counts once for each of its samples."""

    rejects: Rejects = field(default_factory=Rejects)
    """Rows asked for (prompts x samples), and those that could not be asked."""
    written: int = 0
    resumed: int = 0
    """Rows that an earlier run had written to the same file."""
    new_tokens: int = 0
    seconds: float = 0.0
    by_finish_reason: Counter[str] = field(default_factory=Counter)
    by_setting: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {
            "rows": self.rejects.to_dict(),
            "written": self.written,
            "resumed": self.resumed,
            "new_tokens": self.new_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "by_finish_reason": dict(self.by_finish_reason),
            "by_setting": {str(key): count for key, count in sorted(self.by_setting.items())},
        }


@dataclass(frozen=True)
class _Task:
    prompt: Prompt
    sample: int
    setting: int
    ids: list[int]
    limit: int


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
            although ``resume`` is False.
        TargetError: the tokenizer has no usable chat template.
        DataError: no prompt could be used.
        RunError: the target computed NaN, or the device's memory is too small for the batch.
    """
    check_template(tokenizer)
    out = Path(settings.out if out is None else out)
    origin = _origin(target, tokenizer, settings)
    present = _present(out, origin, resume)
    report = SampleReport()
    tasks = list(_tasks(target, tokenizer, prompts, settings, present, report))
    if report.rejects.rejected:
        log.warning("%s", report.rejects.summary())
    if report.rejects.read and not report.rejects.accepted:
        raise DataError(f"no prompt can be sampled: {report.rejects.explained()}")
    if report.resumed:
        log.info("%s: resuming behind %d rows", out, report.resumed)
    # equal lengths together need the least padding, and the largest batch fails first, not last
    tasks.sort(key=lambda task: -len(task.ids))
    started = time.monotonic()
    with ResponseWriter(out) as writer, Bar("sampling", len(tasks)) as bar:
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
                writer.write(rows)
                report.written += len(rows)
                report.seconds = time.monotonic() - started
                bar.advance(len(rows), tok_s=f"{report.tokens_per_s:,.0f}")
    return report


def _tasks(
    target: Target,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    settings: SampleSettings,
    present: set[tuple[str, int]],
    report: SampleReport,
) -> Iterator[_Task]:
    with Bar("rendering prompts", len(prompts)) as bar:
        for prompt in prompts:
            bar.advance()
            for sample in range(settings.samples_per_prompt):
                report.rejects.read += 1
                if (prompt.id, sample) in present:
                    report.resumed += 1
                    continue
                index = _choose(settings, prompt.id, sample)
                thinking = settings.settings[index].thinking
                try:
                    ids = generation_prompt_ids(
                        tokenizer,
                        prompt.messages,
                        thinking,
                        vocab_size=target.vocab_size,
                        tools=prompt.tools,
                    )
                    room = target.max_position_embeddings - len(ids)
                    if len(ids) > settings.max_prompt_tokens or room < 1:
                        raise RowError(Reason.PROMPT_TOO_LONG, f"{len(ids)} tokens")
                except RowError as error:
                    report.rejects.add(error, prompt.id)
                    continue
                yield _Task(prompt, sample, index, ids, min(settings.max_new_tokens, room))


def _answers(
    target: Target, batch: Sequence[_Task], settings: SampleSettings, num_ids: int
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
    task: _Task,
    new_ids: list[int],
    settings: SampleSettings,
    origin: dict[str, str | None],
) -> Response:
    setting = settings.settings[task.setting]
    stopped = new_ids[-1] in target.eos_ids
    answer = _answer(tokenizer, task.ids, new_ids[:-1] if stopped else new_ids)
    return Response(
        id=task.prompt.id,
        sample=task.sample,
        messages=[*task.prompt.messages, answer],
        tools=task.prompt.tools,
        input_ids=[*task.ids, *new_ids],
        loss_mask=[0] * len(task.ids) + [1] * len(new_ids),
        finish_reason="stop" if stopped else "length",
        setting_index=task.setting,
        sampling={
            "temperature": setting.temperature,
            "top_p": setting.top_p,
            "top_k": setting.top_k,
            "min_p": setting.min_p,
            "max_new_tokens": task.limit,
        },
        seed=settings.seed,
        thinking=setting.thinking,
        target=target.name,
        target_revision=target.revision,
        source=task.prompt.source,
        category=task.prompt.category,
        **origin,
    )


def _answer(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> Message:
    """The assistant's message; reasoning that the prompt or the answer opens gets its own field."""
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    opened = tokenizer.decode(prompt_ids[-8:]).rstrip().endswith("<think>")
    if not opened and not text.lstrip().startswith("<think>"):
        return {"role": "assistant", "content": text}
    reasoning, _, answer = text.lstrip().removeprefix("<think>").partition("</think>")
    return {
        "role": "assistant",
        "content": answer.lstrip("\n"),
        "reasoning_content": reasoning.strip("\n"),
    }


def _key(seed: int, name: str, sample: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{name}\0{sample}".encode()).digest()


def _choose(settings: SampleSettings, name: str, sample: int) -> int:
    """Index of the row's setting, by weight."""
    options: tuple[SamplingSetting, ...] = settings.settings
    aim = int.from_bytes(_key(settings.seed, name, sample)[:8]) / 2**64
    aim *= sum(option.weight for option in options)
    for index, option in enumerate(options):
        aim -= option.weight
        if aim < 0:
            return index
    return len(options) - 1


def _uniforms(seed: int, task: _Task, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    key = int.from_bytes(_key(seed, task.prompt.id, task.sample)[8:24])
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def _origin(target: Target, tokenizer: Any, settings: SampleSettings) -> dict[str, str | None]:
    """Fields that must be the same on every row of a file."""
    fingerprint, template = target.fingerprint(), template_hash(tokenizer)
    value = {
        "settings": [option.model_dump() for option in settings.settings],
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "target": fingerprint,
        "template": template,
    }
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "target_fingerprint": fingerprint,
        "template_hash": template,
        "settings_hash": digest,
    }


def _present(out: Path, origin: dict[str, str | None], resume: bool) -> set[tuple[str, int]]:
    """(id, sample) of the rows in ``out``; a half-written last line does not count."""
    if not out.exists() or not out.stat().st_size:
        return set()
    if not resume:
        raise ConfigError(f"sample.out '{out}' exists already; resume, or choose another file")
    found = set()
    for raw in read_rows(str(out), Rejects()):
        row = raw.value
        if row.get("format") != FORMAT:
            raise ConfigError(f"sample.out '{out}' holds rows that no sampler wrote ({raw.place})")
        for name, ours in origin.items():
            if row.get(name) != ours:
                raise ConfigError(
                    f"sample.out '{out}' was written with another {name.replace('_', ' ')} "
                    f"({row.get(name)}, now {ours}); choose another file"
                )
        found.add((str(row.get("id")), int(row.get("sample", 0))))
    return found
