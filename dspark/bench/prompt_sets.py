"""Evaluation prompts by set: one file, one set, named after the file."""

from collections.abc import Sequence
from pathlib import Path

from dspark.corpus.messages import Message
from dspark.corpus.prompts import read_prompts
from dspark.errors import ConfigError

__all__ = ["read_sets"]


def read_sets(sources: Sequence[str]) -> dict[str, list[list[Message]]]:
    """Name of the file -> its prompts (messages up to the turn to be answered).

    Raises:
        ConfigError: no source was given.
        DataError: a source has no usable prompt.
    """
    if not sources:
        raise ConfigError("eval.prompts is empty; give --prompts with files, globs or hub ids")
    sets: dict[str, list[list[Message]]] = {}
    for prompt in read_prompts(sources):
        sets.setdefault(Path(prompt.source).name.split(".")[0], []).append(prompt.messages)
    return sets
