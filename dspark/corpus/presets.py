"""Public sets by short name, and how a set of the hub is written down.

Inside the corpus a hub set is one string, `hub://owner/name[@revision][#file]:[config:]split`; a
user writes the same without `hub://`, or a name of `PRESETS`, with `:split` for another split.
Nothing here reaches for the network except `pinned`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dspark.errors import ConfigError, nearest

__all__ = [
    "PRESETS",
    "HubSource",
    "Preset",
    "hub_sources",
    "licence_of",
    "pinned",
    "refuse_evaluation",
    "unknown",
]

_SCHEME = "hub://"
_SHAPES = ("messages", "conversations", "turns", "text")
_WRITTEN = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?(#(?P<file>[\w./-]+))?"
    r"(:((?P<config>[\w.-]+):)?(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """One split of one set of the hub."""

    name: str
    """`owner/name`."""
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    """A branch, tag or commit; None is the default branch."""
    file: str | None = None
    """One data file of a set whose files differ in shape."""

    def __str__(self) -> str:
        return _SCHEME + self.written()

    def written(self) -> str:
        """As a user would write it."""
        name = self.name + (f"@{self.revision}" if self.revision else "")
        name += f"#{self.file}" if self.file else ""
        return f"{name}:{self.config}:{self.split}" if self.config else f"{name}:{self.split}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The source that ``text`` names (with or without `hub://`), None if it names none."""
        match = _WRITTEN.fullmatch(text.removeprefix(_SCHEME))
        if match is None:
            return None
        return cls(**{key: value for key, value in match.groupdict().items() if value})

    def short(self) -> str:
        """What reports call it: a data file's stem, the name of its preset, or its own."""
        if self.file:
            return Path(self.file).name.split(".")[0]
        return _NAMES.get(self.name) or self.name.partition("/")[2]

    def options(self) -> dict[str, Any]:
        """What `datasets.load_dataset` is given beside the name; nothing that is not set."""
        given = {"name": self.config, "revision": self.revision, "data_files": self.file}
        return {"split": self.split, **{key: value for key, value in given.items() if value}}

    def shaped(self, row: dict[str, Any]) -> dict[str, Any]:
        """``row`` without its nulls, and with the prompt's column under a name that is read."""
        row = {key: value for key, value in row.items() if value is not None}
        preset = _BY_HUB_ID.get(self.name)
        if preset and preset.column in row and not any(row.get(shape) for shape in _SHAPES):
            value = row[preset.column]
            row["turns" if isinstance(value, list) else "text"] = value
        return row


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A public set that users know by name."""

    hub_id: str
    splits: tuple[str, ...] = ("train",)
    """Those that the short name alone stands for."""
    config: str | None = None
    files: tuple[str, ...] = ()
    """Data files to be read one by one, where one table cannot hold them all."""
    shape: str
    """The column that holds the conversation."""
    column: str | None = None
    """A column that holds the prompt's text, where no row is of a shape that is read anyway."""
    licence: str
    """As its card says; what the rows themselves were made from may ask for more."""
    evaluation: bool = False
    """Only to measure on and to be kept out of training data."""

    def sources(self, split: str | None = None) -> list[HubSource]:
        """What is read, in order: ``split``, else all of `splits`; each file by itself."""
        return [
            HubSource(name=self.hub_id, split=each, config=self.config, file=file)
            for each in ((split,) if split else self.splits)
            for file in (self.files or (None,))
        ]


PRESETS: dict[str, Preset] = {
    "open-perfectblend": Preset(
        hub_id="mlabonne/open-perfectblend", shape="conversations", licence="apache-2.0"
    ),
    "ling-open-perfectblend": Preset(
        hub_id="AQ-MedAI/Ling-flash-2.0-open-perfectblend-regenerate",
        shape="conversations",
        licence="see its card; prompts of open-perfectblend, answers of Ling-flash-2.0",
    ),
    "sharegpt": Preset(
        hub_id="Aeala/ShareGPT_Vicuna_unfiltered",
        shape="conversations",
        licence="apache-2.0 by its card; conversations that users of a hosted model shared",
    ),
    "ultrachat": Preset(
        hub_id="HuggingFaceH4/ultrachat_200k",
        splits=("train_sft",),
        shape="messages",
        licence="mit",
    ),
    "magpie": Preset(
        hub_id="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
        shape="conversations",
        licence="llama3.1",
    ),
    "nemotron-post-training-v2": Preset(
        hub_id="nvidia/Nemotron-Post-Training-Dataset-v2",
        splits=("chat", "code", "math", "stem"),
        shape="messages",
        licence="cc-by-4.0, named in each row; gated: its conditions are accepted on the hub",
    ),
    "speculator-benchmarks": Preset(
        hub_id="RedHatAI/speculator_benchmarks",
        files=tuple(
            f"{name}.jsonl"
            for name in (
                "HumanEval", "math_reasoning", "qa", "question", "rag", "summarization",
                "translation", "writing",
            )
        ),
        shape="turns",
        column="prompt",
        licence="apache-2.0; HumanEval is MIT, the rest is of Spec-Bench",
        evaluation=True,
    ),
    "gsm8k": Preset(
        hub_id="openai/gsm8k",
        splits=("test",),
        config="main",
        shape="question",
        column="question",
        licence="mit",
        evaluation=True,
    ),
    "math500": Preset(
        hub_id="HuggingFaceH4/MATH-500",
        splits=("test",),
        shape="problem",
        column="problem",
        licence="mit, that of MATH, of which it is a part",
        evaluation=True,
    ),
    "humaneval": Preset(
        hub_id="openai/openai_humaneval",
        splits=("test",),
        shape="prompt",
        column="prompt",
        licence="mit",
        evaluation=True,
    ),
    "mt-bench": Preset(
        hub_id="HuggingFaceH4/mt_bench_prompts",
        shape="prompt",
        column="prompt",
        licence="apache-2.0",
        evaluation=True,
    ),
}  # fmt: skip

_BY_HUB_ID = {preset.hub_id: preset for preset in PRESETS.values()}
_NAMES = {preset.hub_id: name for name, preset in PRESETS.items()}


def hub_sources(text: str) -> list[HubSource] | None:
    """What a preset's name, `name:split` or a hub id stands for; None if ``text`` is neither.

    A hub id without a split that is known here stands for the preset's splits.
    """
    name, _, split = text.partition(":")
    if preset := PRESETS.get(name):
        return preset.sources(split or None) if _word(split) else None
    source = HubSource.parse(text)
    if source is None:
        return None
    known = _BY_HUB_ID.get(source.name)
    if known is None or ":" in text or source.file:
        return [source]
    return [replace(one, revision=source.revision) for one in known.sources()]


def unknown(text: str) -> str:
    """The end of a sentence about a name that stands for nothing: the nearest one, or all."""
    if near := nearest(text.partition(":")[0].lower(), PRESETS):
        return near
    return f"; sets known by name: {', '.join(PRESETS)}" if text and _word(text) else ""


def refuse_evaluation(sources: Iterable[str], setting: str) -> None:
    """Stop before evaluation text becomes training data.

    Raises:
        ConfigError: one of ``sources`` is a set to measure on.
    """
    for source in sources:
        named = None if Path(source).exists() else hub_sources(source.removeprefix(_SCHEME))
        preset = _BY_HUB_ID.get(named[0].name) if named else None
        if preset and preset.evaluation:
            raise ConfigError(
                f"{setting}: '{preset.hub_id}' is an evaluation set and nothing to train on; "
                "leave it out here and give it to `dspark prepare --exclude`"
            )


def licence_of(source: HubSource) -> str | None:
    """What is known here of a set's licence."""
    preset = _BY_HUB_ID.get(source.name)
    return preset.licence if preset else None


def pinned(source: HubSource) -> HubSource:
    """``source`` at the commit that its revision is now, as it was if the hub cannot be asked."""
    try:
        from huggingface_hub import HfApi

        sha = HfApi().dataset_info(source.name, revision=source.revision, timeout=10).sha
    except Exception:  # offline, gated, unknown: reading will tell, or a cache will answer
        return source
    return replace(source, revision=sha) if isinstance(sha, str) else source


def _word(text: str) -> bool:
    return not text or re.fullmatch(r"[\w-]+", text) is not None
