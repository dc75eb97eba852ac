"""What one prompt gave, and the directory that keeps it while an evaluation is under way.

`evaluation.json` holds what decides the figures, and the machine; `prompts.jsonl` one line a
finished prompt, with its tokens, counts and times. The same command goes on behind the last whole
line; a command that would measure something else is refused.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark import provenance
from dspark.acceptance import AcceptStats
from dspark.bench.lossless import Difference
from dspark.decoding import Completion, Outcomes
from dspark.errors import ConfigError, RunError

__all__ = ["Journal", "Pages", "PromptRun", "digest", "journal"]

_HEAD, _LINES = "evaluation.json", "prompts.jsonl"


@dataclass(frozen=True)
class PromptRun:
    """One prompt, decoded with the draft and without."""

    drafted: Completion
    plain: list[int]
    """Token ids without the draft; none where a draft may change them, seed by seed."""
    plain_timed: Completion
    """The first of them once more, step by step."""
    outcomes: Outcomes | None = None
    """What the rounds show of the confidence head."""
    other: tuple[int, Difference | None] | None = None
    """Under the other kind of sampling: tokens without the draft, and where those with it leave
    them; None: not compared."""

    @property
    def lossless(self) -> bool | None:
        """None where the outputs need not be equal."""
        if not self.plain:
            return None
        timed = self.plain_timed.token_ids
        return self.drafted.token_ids == self.plain and timed == self.plain[: len(timed)]

    def to_json(self) -> dict[str, Any]:
        """All but the plain decodes, which drafts share."""
        told = self.outcomes
        return {
            "drafted": asdict(self.drafted),
            "outcomes": told and {
                "logits": told.logits.tolist(),
                "kept": told.kept.int().tolist(),
                "known": told.known.int().tolist(),
            },
            "other": self.other and [self.other[0], self.other[1] and asdict(self.other[1])],
        }  # fmt: skip


def page_of(runs: Mapping[str, PromptRun]) -> dict[str, Any]:
    """One prompt's runs by draft, as a line holds them."""
    one = next(iter(runs.values()))
    return {
        "plain": one.plain,
        "plain_timed": asdict(one.plain_timed),
        "drafts": {name: run.to_json() for name, run in runs.items()},
    }


def runs_of(page: Mapping[str, Any]) -> dict[str, PromptRun]:
    """The inverse of `page_of`."""
    timed = _completion(page["plain_timed"])
    found = {}
    for name, one in page["drafts"].items():
        told, other = one["outcomes"], one["other"]
        found[name] = PromptRun(
            _completion(one["drafted"]),
            page["plain"],
            timed,
            told and Outcomes(
                torch.tensor(told["logits"], dtype=torch.float64),
                torch.tensor(told["kept"], dtype=torch.bool),
                torch.tensor(told["known"], dtype=torch.bool),
            ),
            other and (other[0], other[1] and Difference(**other[1])),
        )  # fmt: skip
    return found


def _completion(value: Mapping[str, Any]) -> Completion:
    return Completion(**{**value, "stats": AcceptStats(**value["stats"])})


@dataclass(frozen=True)
class Pages:
    """The finished prompts of one condition, by index."""

    kept: dict[int, dict[str, PromptRun]] = field(default_factory=dict)
    write: Callable[[int, dict[str, Any]], None] = lambda index, page: None

    def add(self, index: int, runs: dict[str, PromptRun]) -> None:
        self.kept[index] = runs
        self.write(index, page_of(runs))


@dataclass(frozen=True)
class Journal:
    """An open directory."""

    environment: dict[str, Any]
    """Of the command that began it."""
    lines: list[dict[str, Any]]
    write: Callable[[dict[str, Any]], None]

    def pages(self, condition: str) -> Pages:
        mine = [line for line in self.lines if line["condition"] == condition]
        return Pages(
            {line["index"]: runs_of(line) for line in mine},
            lambda index, page: self.write({"condition": condition, "index": index, **page}),
        )


def digest(value: Any) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def journal(
    directory: Path, key: Mapping[str, Any], environment: Mapping[str, Any]
) -> Iterator[Journal]:
    """Begin or go on with an evaluation in ``directory``.

    Args:
        key: what decides the figures, by part; all of it must be as it was.
        environment: kept from the beginning for the report.

    Raises:
        ConfigError: the directory is another evaluation's, or holds something else, or is in use.
        RunError: the disk is full.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(provenance.claimed(directory))
            head = _head(directory, json.loads(json.dumps(key)), environment)
            lines = _whole_lines(directory / _LINES)
            file = stack.enter_context((directory / _LINES).open("a", encoding="utf-8"))
        except BlockingIOError:
            raise ConfigError(
                f"another evaluation is writing to --out '{directory}': wait for its end, or "
                "choose another directory"
            ) from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"--out '{directory}' cannot be written: {reason}") from None

        def write(line: dict[str, Any]) -> None:
            try:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise RunError(
                    f"cannot write {directory / _LINES}: {reason}; the finished prompts are kept: "
                    "make room there, and run the same command again to go on"
                ) from error

        yield Journal(head["environment"], lines, write)


def _head(directory: Path, key: dict[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    path = directory / _HEAD
    if path.exists():
        head = provenance.read_object(path, ConfigError)
        before = head.get("key", {})
        other = [name for name in key if key[name] != before.get(name)]
        if other or "environment" not in head:
            raise ConfigError(
                f"--out '{directory}' holds another evaluation (not the same {', '.join(other)}): "
                "choose another directory, or delete this one"
            )
        return head
    foreign = sorted(one.name for one in directory.iterdir() if one.name != provenance.LOCK)
    if foreign:
        raise ConfigError(
            f"--out '{directory}' holds something else ({foreign[0]}): choose an empty directory"
        )
    head = {"key": key, "environment": dict(environment)}
    provenance.write_json(path, head)
    return head


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """What a kill left half written is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): delete its directory") from None
