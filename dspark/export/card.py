"""The model card (README.md) of an exported draft; a fact that was not given is not claimed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.decoding import draft_limit
from dspark.target.catalog import hub_id

__all__ = ["CardFacts", "SetResult", "render"]


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Accept length over one prompt set, as `dspark eval` measured it."""

    name: str
    accept_length: float
    accepted_drafts: float
    num_prompts: int
    rounds: int
    interval: tuple[float, float] | None = None
    """95% bootstrap interval of ``accept_length`` over prompts."""
    sampling: str = ""
    """At which the target was sampled; empty where ``CardFacts.measured`` tells it of all sets."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What the card says beside the shape of the draft."""

    title: str | None = None
    """None: made of the target's name and the block size."""
    licence: str | None = None
    """SPDX id in lower case, such as `apache-2.0`; None: the card says that none was stated."""
    sampling: Sequence[Mapping[str, Any]] = ()
    """Sampling settings of the training responses, with their weights."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Short facts: steps, rows, supervised tokens, hours, hardware."""
    results: Sequence[SetResult] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    """How ``results`` came about: command, commit, hardware, date, temperature, max_new_tokens."""
    notes: Sequence[str] = ()
    """Sentences a reader must not miss, such as that this is a toy."""


_METRIC = """\
`accept_length` is the mean number of tokens a verify round adds to the output, the target's own
token (bonus or correction) included, pooled over all rounds of a set; the token that the prefill
yields is no round, and a round cut by a stop token counts only what stood before the cut.
`accepted_drafts` counts the kept draft tokens alone. With a block of {k}, a round proposes at most
{proposed} tokens and adds at most {top}{more}.
"""

_USE = """\
The draft shares the target's embedding and output head{tables}.
It is of no use without this target.

```
{fetch}dspark serve --target {target} --draft {place}
dspark eval --target {target} --draft {place} --prompts prompts.jsonl
```

{sglang}

vLLM{vllm_limit}:

```
--speculative-config '{{"method": "dspark", "model": "{path}", "num_speculative_tokens": {k}}}'
```

The switches of these engines are theirs and change. That a version of them was tried with this
draft is said below, or it was not tried.
"""

_SGLANG = """\
SGLang (a given `--speculative-num-draft-tokens` must be {window}):

```
--speculative-algorithm DSPARK --speculative-draft-model-path {path}
```
"""
_NOT_SGLANG = """\
The files are in the layout of speculators, which SGLang does not read:
`dspark convert {place} OUT --to sglang` writes the one it reads.
"""


def render(
    facts: CardFacts,
    *,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    tables: bool,
    path: str,
    repo_id: str | None = None,
) -> str:
    """The card as Markdown with the hub's front matter.

    Args:
        config: what is written as config.json.
        record: what is written as provenance.json.
        tables: copies of the target's tables are in the file.
        path: how commands on the card name this directory.
        repo_id: where it can be fetched from, and how engines then name it.
    """
    target = record["target"]
    name = str(target["name"])
    served = repo_id or path
    block = int(config["block_size"])
    proposed = draft_limit(block, None)
    title = facts.title or f"DSpark draft for {name}, block {block}"
    parts = [
        _front_matter(facts, hub_id(name)),
        f"# {title}",
        _identity(config, target, record["num_parameters"]),
        *(f"**{note}**" for note in facts.notes),
        "## Use",
        _USE.format(
            target=name,
            place=path,
            fetch=f"hf download {repo_id} --local-dir {path}\n" if repo_id else "",
            path=served,
            k=block,
            sglang=(_NOT_SGLANG if record["format"] == "vllm" else _SGLANG)
            .format(place=path, path=served, window=block + 1)
            .strip(),
            tables=" (copies are in the file)" if tables else " (not in the file)",
            vllm_limit=""
            if config["markov_head_type"] == "vanilla"
            else f" (reads vanilla Markov heads only; this one is {config['markov_head_type']})",
        ),
        "## Accept length",
        _METRIC.format(
            k=block,
            proposed=proposed,
            top=proposed + 1,
            more="" if proposed == block else "; `--num-draft-tokens` changes that",
        ),
        _results(facts),
        _check(record.get("check"), record.get("checked_as")),
        _calibration(record.get("calibration")),
        "## Training",
        _training(facts),
        _data(record),
        "## Provenance",
        _provenance(record),
        "## Licence",
        f"{facts.licence}" if facts.licence else "No licence was stated when this was exported.",
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _front_matter(facts: CardFacts, target: str) -> str:
    # JSON strings are YAML strings, whatever characters the name holds
    lines = ["---", f"base_model: {json.dumps(target, ensure_ascii=False)}"]
    if facts.licence:
        lines.append(f"license: {json.dumps(facts.licence)}")
    return "\n".join([*lines, "tags: [speculative-decoding, dspark, draft-model]", "---"])


def _identity(config: Mapping[str, Any], target: Mapping[str, Any], num_parameters: int) -> str:
    name = target["name"]
    rows = {
        "target": name if hub_id(name) == name else f"{name} ({hub_id(name)})",
        "target revision": target.get("revision") or "not pinned",
        "target fingerprint": target.get("fingerprint") or "not known",
        "trained parameters": f"{num_parameters:,}",
        "layers": config["num_hidden_layers"],
        "block size": config["block_size"],
        "tapped target layers (0-based outputs)": ", ".join(map(str, config["target_layer_ids"])),
        "Markov head": f"{config['markov_head_type']}, rank {config['markov_rank']}"
        if config["markov_rank"]
        else "none",
        "confidence head": "yes" if config["enable_confidence_head"] else "no",
        "mask token id": config["mask_token_id"],
    }
    if temperatures := config.get("sts_temperatures"):
        rows["confidence temperatures (`sts_temperatures`)"] = ", ".join(
            f"{one:.3g}" for one in temperatures
        )
    return _table(("", ""), rows.items())


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _results(facts: CardFacts) -> str:
    if not facts.results:
        return "No prompt set was measured for this card."
    rows = []
    sampled = any(one.sampling for one in facts.results)
    for one in facts.results:
        low_high = f"{one.interval[0]:.3f} to {one.interval[1]:.3f}" if one.interval else "-"
        figures = (f"{one.accept_length:.3f}", low_high, f"{one.accepted_drafts:.3f}")
        first = (one.name, one.sampling or "-") if sampled else (one.name,)
        rows.append((*first, *figures, one.num_prompts, one.rounds))
    first = ("set", "sampling") if sampled else ("set",)
    head = (*first, "accept_length", "95% interval", "accepted_drafts", "prompts", "rounds")
    return _table(head, rows) + "\n\n" + _facts(facts.measured, "How this was measured")


def _facts(facts: Mapping[str, Any], title: str) -> str:
    if not facts:
        return ""
    return f"{title}:\n\n" + "\n".join(f"- {key}: {_flat(value)}" for key, value in facts.items())


def _flat(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def _check(check: Mapping[str, Any] | None, checked_as: str | None) -> str:
    if check is None:
        return "The export check was not run."
    of = f" (of the {checked_as} layout, before the conversion to this one)" if checked_as else ""
    return (
        f"Export check{of}: reloaded in a clean process, {check['num_prompts']} prompts, greedy, "
        f"{check['max_new_tokens']} new tokens at most: accept_length {check['accept_length']:.3f} "
        f"over {check['rounds']} rounds, against {check['expected']:.3f} "
        f"({check['expected_from']})."
        + (f"\n\n**{check['warning']}.**" if "warning" in check else "")
    )


def _calibration(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = []
    for name, title in (("survival", "survival up to a slot"), ("slot", "a slot's own confidence")):
        before, after = found["before"][name], found["after"][name]
        for key in ("ece", "auroc", "brier"):
            pair = ("-" if one[key] is None else f"{one[key]:.4f}" for one in (before, after))
            rows.append((f"{key}, {title}", *pair))
    return (
        "## Confidence\n\n"
        "A slot's confidence is sigmoid(logit / temperature), survival their product. The "
        "temperatures were fitted by sequential temperature scaling on "
        f"{found['rounds']} rounds of {found['num_prompts']} prompts ({found['prompts']}; "
        f"sampling temperature {found['temperature']:g}, {found['max_new_tokens']} new tokens at "
        "most). Each half of the prompts is judged by temperatures fitted on the other; figures "
        "are means over slots, the calibration error over 20 bins."
        + ("" if found.get("gains", True) else " **They did not gain, so they were not written.**")
        + "\n\n"
        + _table(("", "before", "after"), rows)
    )


def _training(facts: CardFacts) -> str:
    parts = [_facts(facts.training, "Distilled with dspark")]
    if facts.sampling:
        keys = list(dict.fromkeys(key for one in facts.sampling for key in one))
        rows = [[one.get(key, "-") for key in keys] for one in facts.sampling]
        parts.append("Responses of the target were sampled with:\n\n" + _table(keys, rows))
    text = "\n\n".join(part for part in parts if part)
    return text or "`provenance.json` holds what is known."


def _data(record: Mapping[str, Any]) -> str:
    """Where the training rows came from, as far as the run's settings and checkpoint tell."""
    config, told = record.get("config") or {}, (record.get("training") or {}).get("data") or {}
    sample, data = config.get("sample") or {}, config.get("data") or {}
    facts = {
        "prompts": sample.get("prompts"),
        "responses": data.get("responses"),
        "feature shards": data.get("shards"),
        "rows": told.get("rows"),
        "most new tokens of a response": sample.get("max_new_tokens"),
        "most tokens of a row": data.get("max_length"),
    }
    return _facts({key: value for key, value in facts.items() if value}, "Training data")


def _provenance(record: Mapping[str, Any]) -> str:
    """Versions and commands of the training, where it is known, and of the export."""
    stages = {"training": record.get("training") or {}, "export": record}
    known = {name: one for name, one in stages.items() if one.get("dspark")}
    rows: dict[str, list[Any]] = {
        "time": [one.get("time") for one in known.values()],
        "dspark": [one.get("dspark") for one in known.values()],
        "commit": [_commit(one) for one in known.values()],
        "python": [one.get("python") for one in known.values()],
    }
    packages = dict.fromkeys(key for one in known.values() for key in one.get("packages") or {})
    for key in packages:
        rows[key] = [(one.get("packages") or {}).get(key) for one in known.values()]
    table = _table(("", *known), [(key, *(v or "-" for v in row)) for key, row in rows.items()])
    commands = {
        name: f"`{' '.join(one['command'])}`" for name, one in known.items() if one.get("command")
    }
    facts = {
        "checkpoint": record.get("source"),
        "converted from": record.get("converted_from"),
        "chat template (sha256)": record.get("template_sha256"),
    }
    given = {key: value for key, value in facts.items() if value}
    return "\n\n".join(filter(None, [table, _facts(commands, "Commands"), _facts(given, "Files")]))


def _commit(one: Mapping[str, Any]) -> str:
    commit = one.get("git_commit")
    return (
        f"{commit[:12]}{' and changes' if one.get('git_dirty') else ''}" if commit else "not known"
    )
