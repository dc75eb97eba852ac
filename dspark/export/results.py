"""Accept lengths for the card, from the JSON that `dspark eval --json` printed."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import DataError
from dspark.export.card import SetResult

__all__ = ["read_results"]


def read_results(
    paths: Sequence[Path], *, block_size: int, weights_sha256: str
) -> tuple[list[SetResult], dict[str, str]]:
    """A result for each prompt set, and how they came about; other outputs before the JSON may be.

    Of several conditions all are taken, of several drafts the one of these weights.

    Raises:
        DataError: a file is no such JSON, or was measured with another draft.
    """
    results: list[SetResult] = []
    measured: dict[str, list[str]] = {}
    each = [(path, one) for path in paths for one in _reports(path, weights_sha256)]
    for path, told in each:
        if not isinstance(told.get("settings"), dict) or not isinstance(told.get("sets"), dict):
            raise DataError(f"{path} is not what `dspark eval --json` prints: it has no sets")
        _check_draft(path, told, block_size, weights_sha256)
        sets = dict(told["sets"])
        if len(sets) > 1:
            sets["all of these"] = told
        sampling = _sampling(told["settings"])
        results += [_result(path, name, one, sampling) for name, one in sets.items()]
        for name, value in _how(told).items():
            if value not in measured.setdefault(name, []):
                measured[name].append(value)
    return results, {name: "; ".join(values) for name, values in measured.items()}


def _reports(path: Path, sha256: str) -> list[dict[str, Any]]:
    """One a condition, each as a run of this draft alone would print it."""
    told = _last_object(path)
    found = []
    conditions = told.get("conditions")
    for one in conditions if isinstance(conditions, list) else [told]:
        try:
            drafts = list(one["drafts"].values()) if "drafts" in one else [one]
            ours = next((each for each in drafts if each.get("draft_sha256") == sha256), drafts[0])
            found.append({"environment": told.get("environment"), **ours})
        except (TypeError, AttributeError, IndexError):
            raise DataError(
                f"{path} is not what `dspark eval --json` prints: a condition has no drafts"
            ) from None
    return found


def _last_object(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise DataError(f"cannot read --eval {path}: {reason.lower()}") from None
    for part in (text, (text.strip().splitlines() or [""])[-1]):
        try:
            value = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise DataError(f"--eval {path} holds no JSON object: give what `dspark eval --json` prints")


def _check_draft(path: Path, told: Mapping[str, Any], block_size: int, sha256: str) -> None:
    theirs, block = told.get("draft_sha256"), told["settings"].get("block_size")
    if block != block_size:
        raise DataError(
            f"--eval {path} measured a draft with block_size {block}, and this one has {block_size}"
        )
    if theirs != sha256:
        shown = theirs[:16] if isinstance(theirs, str) else theirs
        raise DataError(
            f"--eval {path} measured a draft whose weights are {shown} (draft_sha256), and this "
            f"one's are {sha256[:16]}: run `dspark eval --json` on this one"
        )


def _result(path: Path, name: str, one: Any, sampling: str) -> SetResult:
    try:
        low_high = one["interval"]
        figures = [float(one["accept_length"]), float(one["accepted_drafts"]), *(low_high or ())]
        if not all(math.isfinite(figure) for figure in figures):
            raise ValueError
        return SetResult(
            name=str(name),
            accept_length=figures[0],
            accepted_drafts=figures[1],
            num_prompts=int(one["num_prompts"]),
            rounds=int(one["rounds"]),
            interval=(float(low_high[0]), float(low_high[1])) if low_high else None,
            sampling=sampling,
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise DataError(
            f"--eval {path}: set '{name}' lacks accept_length, accepted_drafts, num_prompts, "
            "rounds or interval, or one of them is no number"
        ) from None


def _sampling(settings: Mapping[str, Any]) -> str:
    temperature, top_p = settings.get("temperature"), settings.get("top_p")
    words = ["greedy" if temperature == 0 else f"temperature {temperature}, top_p {top_p}"]
    if (thinking := settings.get("thinking")) is not None:
        words.append("thinking" if thinking else "no thinking")
    rule = settings.get("verification", "coupled")
    if temperature != 0 and rule != "coupled":
        words.append(f"{rule} verification")
    return ", ".join(words)


def _how(told: Mapping[str, Any]) -> dict[str, str]:
    settings, made = told["settings"], told.get("environment") or {}
    packages = made.get("packages") or {}
    commit = str(made.get("git_commit") or "not known")[:12]
    checks, same = told.get("lossless_checks") or {}, told.get("lossless")
    facts = {
        "most new tokens": settings.get("max_new_tokens"),
        "most proposals a round": settings.get("num_draft_tokens"),
        "confidence threshold": settings.get("confidence_threshold"),
        "seed": settings.get("seed"),
        # None where sampled output is the draft's own and nothing else was compared
        "output with and without the draft": (
            None
            if same is None
            else f"{'identical' if same else 'NOT identical'} ({', '.join(checks)})"
        ),
        "hardware": ", ".join(made.get("gpus") or ()) or made.get("cpu"),
        "dspark": f"{made.get('dspark')}, commit {commit}",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "time": made.get("time"),
        "command": f"`{' '.join(map(str, made.get('command') or ()))}`",
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "", "``")}
