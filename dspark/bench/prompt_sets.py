"""Evaluation prompts by set: one file or one set of the hub, named after it."""

from collections.abc import Sequence
from pathlib import Path

from dspark.corpus.messages import Message
from dspark.corpus.presets import HubSource
from dspark.corpus.prompts import read_prompts
from dspark.errors import ConfigError

__all__ = ["read_sets"]


def read_sets(sources: Sequence[str]) -> dict[str, list[list[Message]]]:
    """Name of the file or set -> its prompts (messages up to the turn to be answered).

    ``sources``: files, globs, folders, hub ids or names of `corpus.presets`.

    Raises:
        ConfigError: no source was given.
        DataError: a source has no usable prompt.
    """
    if not sources:
        raise ConfigError(
            "eval.prompts is empty; give --prompts with files, globs, hub ids, or names of sets "
            "(gsm8k, math500, humaneval, mt-bench)"
        )
    names: dict[str, str] = {}
    sets: dict[str, list[list[Message]]] = {}
    for prompt in read_prompts(sources):
        source = prompt.source
        if source not in names:
            # two files of one name are two sets
            short = _short(source)
            names[source] = source if short in names.values() else short
        sets.setdefault(names[source], []).append(prompt.messages)
    return sets


def _short(source: str) -> str:
    hub = HubSource.parse(source) if source.startswith("hub://") else None
    return hub.short() if hub else Path(source).name.split(".")[0]
