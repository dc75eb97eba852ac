"""What every sampler shares, wherever the target runs: which rows to ask for, and how.

What a row becomes is a function of (seed, prompt id, number of the sample): they choose one of the
settings by weight and key the row's random numbers. So an interrupted run and its continuation
together draw what one uninterrupted run draws.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

from dspark.config import SampleSettings, SamplingSetting
from dspark.corpus.chat import generation_prompt_ids, template_hash
from dspark.corpus.files import read_rows
from dspark.corpus.messages import Message
from dspark.corpus.prompts import Prompt
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.responses import FORMAT, row_key
from dspark.corpus.row_names import RowNames
from dspark.errors import ConfigError
from dspark.target import Target

__all__ = [
    "Asked",
    "Origin",
    "SampleReport",
    "Task",
    "assistant_message",
    "choose",
    "fingerprint_for",
    "origin_of",
    "prompt_ids",
    "rows_present",
    "sampling_of",
    "seed_key",
    "tasks_of",
]


class Origin(TypedDict):
    """Fields that must be the same on every row of a file."""

    target_fingerprint: str | None
    template_hash: str
    settings_hash: str


class Asked(Protocol):
    """A target as samplers need it: a `Target`, or a `Remote` of one that a server holds."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str | None: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    def fingerprint(self) -> str | None: ...


@dataclass
class SampleReport:
    """What a run did. A prompt counts once for each of its samples.

    `rejects.read == written + resumed + rejects.rejected + errors` at the end of a whole run.
    """

    rejects: Rejects = field(default_factory=Rejects)
    """Rows asked for (prompts x samples), and those that could not be asked or used."""
    written: int = 0
    resumed: int = 0
    """Rows that an earlier run had written to the same file."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rows that an endpoint failed to answer, by kind; a rerun asks them again."""
    first_errors: dict[str, str] = field(default_factory=dict)
    """What was said of the first row of each kind of error."""
    ended_early: Counter[str] = field(default_factory=Counter)
    """Written conversations that lack later turns, by reason."""
    retries: int = 0
    """Requests that an endpoint was sent again."""
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
            "errors": dict(self.errors),
            "first_errors": self.first_errors,
            "ended_early": dict(self.ended_early),
            "retries": self.retries,
            "new_tokens": self.new_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "by_finish_reason": dict(self.by_finish_reason),
            "by_setting": {str(key): count for key, count in sorted(self.by_setting.items())},
        }


@dataclass(frozen=True)
class Task:
    """One answer to ask for."""

    prompt: Prompt
    sample: int
    setting: int
    """Index into `sample.settings`."""
    ids: list[int]
    """The rendered prompt."""
    limit: int
    """Most new tokens."""


def tasks_of(
    target: Asked,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    settings: SampleSettings,
    present: set[tuple[str, int]],
    report: SampleReport,
    *,
    until_first_answer: bool = False,
) -> Iterator[Task]:
    """What is left to ask, each rendered when it is taken; the rest is counted in ``report``.

    ``until_first_answer`` renders only what stands before the first assistant turn.
    """
    names = RowNames(settings, present)
    for prompt in prompts:
        names.add(prompt)
        for sample in range(settings.samples_per_prompt):
            report.rejects.read += 1
            if (prompt.id, sample) in present:
                report.resumed += 1
                continue
            if (other := names.clash(prompt, sample)) is not None:
                problem = RowError(
                    Reason.DUPLICATE_ID, f"a row of prompt '{other[:40]}' has the id"
                )
                report.rejects.add(problem, row_key(prompt.id, sample))
                continue
            index = choose(settings, prompt.id, sample)
            messages = prompt.messages
            if until_first_answer:
                messages = messages[: _first_answer(messages)]
            try:
                ids, limit = prompt_ids(
                    target, tokenizer, messages, settings, index, tools=prompt.tools
                )
            except RowError as error:
                report.rejects.add(error, prompt.id)
                continue
            yield Task(prompt, sample, index, ids, limit)


def prompt_ids(
    target: Asked,
    tokenizer: Any,
    messages: Sequence[Message],
    settings: SampleSettings,
    index: int,
    *,
    tools: Any = None,
) -> tuple[list[int], int]:
    """Ids of a prompt under setting ``index``, and how many new tokens may follow.

    Raises:
        RowError: the prompt cannot be rendered or is too long.
    """
    ids = generation_prompt_ids(
        tokenizer,
        messages,
        settings.settings[index].thinking,
        vocab_size=target.vocab_size,
        tools=tools,
    )
    room = target.max_position_embeddings - len(ids)
    if len(ids) > settings.max_prompt_tokens or room < 1:
        raise RowError(Reason.PROMPT_TOO_LONG, f"{len(ids)} tokens")
    return ids, min(settings.max_new_tokens, room)


def _first_answer(messages: Sequence[Message]) -> int:
    roles = [message["role"] for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def assistant_message(tokenizer: Any, prompt: Sequence[int], text: str) -> Message:
    """The message of an answer; reasoning that the prompt or the answer opens gets its own field.

    ``prompt`` are the ids before the answer.
    """
    opened = tokenizer.decode(prompt[-8:]).rstrip().endswith("<think>")
    if not opened and not text.lstrip().startswith("<think>"):
        return {"role": "assistant", "content": text}
    reasoning, _, answer = text.lstrip().removeprefix("<think>").partition("</think>")
    return {
        "role": "assistant",
        "content": answer.lstrip("\n"),
        "reasoning_content": reasoning.strip("\n"),
    }


def sampling_of(setting: SamplingSetting, limit: int) -> dict[str, Any]:
    """`Response.sampling`."""
    return {
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "top_k": setting.top_k,
        "min_p": setting.min_p,
        "max_new_tokens": limit,
    }


def seed_key(seed: int, name: str, sample: int) -> bytes:
    """32 bytes that belong to one row; the first 8 choose its setting."""
    return hashlib.sha256(f"{seed}\0{name}\0{sample}".encode()).digest()


def choose(settings: SampleSettings, name: str, sample: int) -> int:
    """Index of the row's setting, by weight."""
    options: tuple[SamplingSetting, ...] = settings.settings
    aim = int.from_bytes(seed_key(settings.seed, name, sample)[:8]) / 2**64
    aim *= sum(option.weight for option in options)
    for index, option in enumerate(options):
        aim -= option.weight
        if aim < 0:
            return index
    return len(options) - 1


def origin_of(
    target: Asked, tokenizer: Any, settings: SampleSettings, fingerprint: str | None = None
) -> Origin:
    """What rows must share to stand in one file; ``fingerprint`` is the target's if not its own.

    Where nobody has seen the weights, the target's name and revision and the name it is served
    under take the place of its fingerprint; such rows and in-process ones are kept in two files.
    """
    fingerprint = fingerprint or target.fingerprint()
    template = template_hash(tokenizer)
    value: dict[str, Any] = {
        "settings": [option.model_dump() for option in settings.settings],
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "target": fingerprint,
        "template": template,
    }
    if fingerprint is None:
        value["target"] = [target.name, target.revision, settings.model]
    if settings.regenerate != "last":
        value["regenerate"] = settings.regenerate
    if settings.allow_retokenized:
        value["allow_retokenized"] = True
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "target_fingerprint": fingerprint,
        "template_hash": template,
        "settings_hash": digest,
    }


def fingerprint_for(target: Target, out: Path) -> str:
    """The target's fingerprint, of the version that the rows in ``out`` have if there are any."""
    try:
        with out.open(encoding="utf-8") as file:
            stored = json.loads(file.readline())["target_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        stored = None
    return target.fingerprint_like(stored) if isinstance(stored, str) else target.fingerprint()


def rows_present(
    out: Path, origin: Origin, settings: SampleSettings, resume: bool
) -> set[tuple[str, int]]:
    """(prompt id, sample) of the answers that stand whole in ``out``.

    Call it while a `ResponseWriter` holds the file, or another run may add rows behind the reading.
    A half-written last line does not count, nor a conversation that lacks its last sequence.

    Raises:
        ConfigError: the file holds rows of another origin, or any although ``resume`` is False.
    """
    if not out.exists() or not out.stat().st_size:
        return set()
    if not resume:
        raise ConfigError(f"sample.out '{out}' exists already; resume, or choose another file")
    found = set()
    for raw in read_rows(str(out), Rejects()):
        row = raw.value
        numbers = [row.get("part", 0), row.get("parts", 1), row.get("sample", 0)]
        if row.get("format") != FORMAT or not all(type(number) is int for number in numbers):
            raise ConfigError(f"sample.out '{out}' holds rows that no sampler wrote ({raw.place})")
        for name, ours in origin.items():
            if row.get(name) != ours:
                told = _changed(row, settings) if name == "settings_hash" else ""
                raise ConfigError(
                    f"sample.out '{out}' was written with another {name.replace('_', ' ')} "
                    f"({row.get(name)}, now {ours}){told}; choose another file"
                )
        part, parts, sample = numbers
        if part == parts - 1:
            identity = str(row.get("id"))
            name = identity.removesuffix(f"/{part}") if part else identity
            found.add((name, sample))
    return found


def _changed(row: dict[str, Any], settings: SampleSettings) -> str:
    """Which of the settings behind the hash a row of the file shows to be others."""
    found, index = [], row.get("setting_index")
    if row.get("seed") != settings.seed:
        found.append(f"sample.seed {row.get('seed')}, now {settings.seed}")
    if isinstance(index, int) and index < len(settings.settings):
        option, held = settings.settings[index], row.get("sampling")
        ours = {**sampling_of(option, settings.max_new_tokens), "thinking": option.thinking}
        theirs = {**(held if isinstance(held, dict) else {}), "thinking": row.get("thinking")}
        limit, most = theirs.pop("max_new_tokens", None), ours.pop("max_new_tokens")
        found += [
            f"sample.settings.{index}.{name} {theirs.get(name)}, now {value}"
            for name, value in ours.items()
            if theirs.get(name) != value
        ]
        # a row near the end of the context takes fewer tokens than the settings say
        if isinstance(limit, int) and (limit > most or (limit < most and not found)):
            found.append(f"sample.max_new_tokens {limit}, now {most}")
    rest = "sample.settings, max_new_tokens, model, regenerate or target.revision is another"
    return f": {'; '.join(found) or rest}"
