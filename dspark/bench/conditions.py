"""Several evaluations in one run: temperatures, thinking on and off, ways of verification."""

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.bench.bootstrap import paired
from dspark.bench.evaluate import EvalReport, Prompt, encode_sets, evaluate_all
from dspark.bench.records import Journal, digest, journal
from dspark.bench.report import environment
from dspark.config import EvalSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import Draft, NextNDraft, Verification
from dspark.errors import ConfigError
from dspark.target import Target

__all__ = ["DEFINITIONS", "Condition", "Evaluation", "check_thinking", "conditions", "run"]

log = logging.getLogger(__name__)

DEFINITIONS = "dspark.eval/2"
"""Of what the figures mean (`bench.evaluate`, `acceptance`): it goes up when one changes."""

_OF_A_RUN = ("time", "command")
"""Facts of an environment on which no figure depends."""


@dataclass(frozen=True)
class Condition:
    """What every draft is measured under."""

    temperature: float
    thinking: bool | None
    verification: Verification

    @property
    def name(self) -> str:
        parts = ["temperature " + str(self.temperature).removesuffix(".0")]
        if self.thinking is not None:
            parts.append(f"thinking {'on' if self.thinking else 'off'}")
        if self.temperature > 0:
            parts.append(f"{self.verification} verification")
        return ", ".join(parts)


def conditions(
    temperatures: Sequence[float],
    thinking: Sequence[bool | None],
    verifications: Sequence[Verification],
) -> list[Condition]:
    """All combinations, each once; greedily, all ways of verification are one."""
    every = itertools.product(temperatures, thinking, verifications)
    return list(
        dict.fromkeys(
            Condition(t, mode, rule if t > 0 else verifications[0]) for t, mode, rule in every
        )
    )


def check_thinking(tokenizer: Any) -> None:
    """Refuse a template without a thinking switch.

    Raises:
        ConfigError: it renders the same with thinking on and off.
    """
    on, off = (
        generation_prompt_ids(tokenizer, [{"role": "user", "content": "Hello?"}], mode)
        for mode in (True, False)
    )
    if on == off:
        raise ConfigError(
            "--thinking was given, but the target's chat template has no thinking switch: it "
            "renders the same with it on and off; leave the option out"
        )


@dataclass(frozen=True)
class Evaluation:
    """The reports of each condition, by draft."""

    reports: dict[Condition, dict[str, EvalReport]]
    environment: dict[str, Any]
    base: str
    """The draft that the others are compared with."""

    def paired(self, condition: Condition) -> dict[str, Any]:
        """The other drafts against the base, prompt by prompt."""
        reports = self.reports[condition]
        base = reports[self.base]
        return {
            name: paired(base.runs, one.runs, seed=base.settings["seed"])
            for name, one in reports.items()
            if name != self.base
        }

    def summaries(self) -> list[dict[str, Any]]:
        """One a condition, as JSON objects."""
        return [
            {
                "condition": condition.name,
                **asdict(condition),
                "drafts": {name: one.summary() for name, one in reports.items()},
                "base": self.base,
                "paired": self.paired(condition),
            }
            for condition, reports in self.reports.items()
        ]


def run(
    target: Target,
    drafts: Mapping[str, Draft],
    tokenizer: Any,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    settings: EvalSettings,
    asked: Sequence[Condition],
    *,
    num_draft_tokens: int | None = None,
    confidence_threshold: float = 0.0,
    base: str | None = None,
    out: Path | None = None,
) -> Evaluation:
    """`evaluate_all` under each condition; with ``out`` finished prompts are kept and taken up.

    Raises:
        ConfigError: ``out`` is another evaluation's.
    """
    if confidence_threshold:
        for name, draft in drafts.items():
            if isinstance(draft, NextNDraft) or draft.confidence_head is None:
                log.warning(
                    "%s has no confidence head: --confidence-threshold %g cuts none of its blocks",
                    name,
                    confidence_threshold,
                )
    facts = environment()
    opened: Any = nullcontext()
    if out is not None:
        options = {
            "num_draft_tokens": num_draft_tokens,
            "confidence_threshold": confidence_threshold,
        }
        key = _key(target, drafts, tokenizer, prompt_sets, settings, asked, options, facts)
        opened = journal(out, key, facts)
    reports = {}
    # the other kind of sampling need not be checked by itself where the run holds both
    both = {one.temperature > 0 for one in asked if one.temperature == 0 or _coupled(one)}
    with opened as book:
        for condition in asked:
            reports[condition] = evaluate_all(
                target,
                drafts,
                tokenizer,
                prompt_sets,
                settings.model_copy(update={"temperature": condition.temperature}),
                thinking=condition.thinking,
                verification=condition.verification,
                num_draft_tokens=num_draft_tokens,
                confidence_threshold=confidence_threshold,
                other_mode_prompts=0 if len(both) == 2 else 16,
                pages=book.pages(condition.name) if isinstance(book, Journal) else None,
            )
    kept = book.environment if isinstance(book, Journal) else facts
    return Evaluation(reports, kept, base or next(iter(drafts)))


def _coupled(condition: Condition) -> bool:
    return condition.verification == "coupled"


def _key(
    target: Target,
    drafts: Mapping[str, Draft],
    tokenizer: Any,
    prompt_sets: Mapping[str, Sequence[Prompt]],
    settings: EvalSettings,
    asked: Sequence[Condition],
    options: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    prompts = {
        str(thinking): encode_sets(target, tokenizer, prompt_sets, settings.limit, thinking)[0]
        for thinking in dict.fromkeys(one.thinking for one in asked)
    }
    return {
        "definitions": DEFINITIONS,
        "target": {
            "fingerprint": target.fingerprint(),
            "dtype": str(target.dtype),
            "device": str(target.device),
        },
        "drafts": {name: _draft_hash(one) for name, one in drafts.items()},
        "settings": {
            **settings.model_dump(mode="json", exclude={"prompts", "temperature", "limit"}),
            **options,
        },
        "conditions": [one.name for one in asked],
        "prompts": digest(prompts),
        "machine and versions": {
            name: value for name, value in facts.items() if name not in _OF_A_RUN
        },
    }


def _draft_hash(draft: Draft) -> str:
    if isinstance(draft, NextNDraft):
        return f"nextn:{draft.block_size}"
    found = hashlib.sha256(draft.config.to_json_string(use_diff=False).encode())
    for name, tensor in sorted(draft.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]
