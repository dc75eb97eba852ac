"""Contract check of an export: reload it in a clean process, decode, compare the accept length.

A wrong name, dtype, layer id or mask id in an export raises no error anywhere: it only lowers the
accept length, down to exactly 1.00 when nothing the draft proposes is ever kept. So an export is
decoded again by a process that has seen nothing but the files. `check.json` in the directory holds
the prompts and the figure to meet; anybody can repeat the check with
`python -m dspark.export.check DIRECTORY --target TARGET`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import dspark
from dspark import provenance
from dspark import target as targets
from dspark.acceptance import AcceptStats, pooled
from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, decode
from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError, DSparkError, RunError
from dspark.export.load import load_draft
from dspark.progress import quiet_transformers, track
from dspark.target import LingTarget, Target

__all__ = [
    "AVERAGE_PROBE_NAME",
    "PROBE_NAME",
    "Probe",
    "check",
    "check_in_clean_process",
    "main",
    "measure",
    "read_probe",
    "save_probe",
]

PROBE_NAME = "check.json"
AVERAGE_PROBE_NAME = "check_ema.json"
"""In a training checkpoint: the same for the average of the weights."""
RELATIVE_TOLERANCE = 0.05
ABSOLUTE_TOLERANCE = 0.05
"""Weights are rounded to bfloat16 on export, which may turn a few close proposals."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What is decoded, greedily, and what accept length it must give."""

    prompt_ids: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    expected: float
    """Accept length before the export, bonus included."""
    expected_from: str
    """Where ``expected`` comes from: the trainer's validation, or the exporter."""
    calibration: dict[str, Any] | None = None
    """What `calibrate` found, for the reader; the check does not repeat it."""


def measure(
    target: Target,
    draft: DSparkDraftModel,
    prompt_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> AcceptStats:
    """Greedy batch-1 decode of every prompt; rounds of all prompts together."""
    params = DecodeParams(max_new_tokens=max_new_tokens)
    each = [
        decode(target, draft, ids, params).stats
        for ids in track(prompt_ids, "export check", len(prompt_ids))
    ]
    return pooled(each, each[0].block_size)


def save_probe(directory: Path, probe: Probe, name: str = PROBE_NAME) -> None:
    """Write ``probe`` as `check.json`, a prompt a line."""
    held = {key: value for key, value in asdict(probe).items() if value is not None}
    fields = {key: json.dumps(value) for key, value in held.items()}
    prompts = ",\n    ".join(json.dumps(ids) for ids in probe.prompt_ids)
    fields["prompt_ids"] = f"[\n    {prompts}\n  ]"
    body = ",\n".join(f'  "{key}": {text}' for key, text in fields.items())
    provenance.write_text(directory / name, f"{{\n{body}\n}}\n")


def read_probe(directory: Path, name: str = PROBE_NAME) -> Probe:
    """Read `check.json` back.

    Raises:
        CheckpointError: it is missing or not understood.
    """
    path = directory / name
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        prompts = tuple(tuple(int(i) for i in ids) for ids in raw.pop("prompt_ids"))
        return Probe(prompt_ids=prompts, **raw)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {name}: nothing to check it by") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an export check: {error}") from None


def check(directory: Path, target: Target, probe: Probe) -> dict[str, Any]:
    """Reload ``directory``, decode the prompts of ``probe`` and hold the figure against it.

    Raises:
        CheckpointError: the export cannot be loaded or does not fit.
        RunError: the accept length is off, or exactly 1.

    Returns the figures, and a ``warning`` if the draft is as good as useless.
    """
    draft = load_draft(directory, target=target)
    stats = measure(target, draft, probe.prompt_ids, probe.max_new_tokens)
    got, wanted = stats.accept_length, probe.expected
    figures = f"accept_length {got:.4f} over {stats.rounds} rounds, expected {wanted:.4f}"
    origin = f"({probe.expected_from})"
    if stats.accepted == 0:
        if wanted <= 1:
            raise RunError(
                f"export check failed: {figures} {origin}; no drafted token was accepted before "
                "the export either: train longer, or export with --no-check"
            )
        raise RunError(
            f"export check failed: {figures} {origin}; no drafted token was ever accepted, so "
            "the weights are untrained or are read with another meaning than they were trained"
        )
    allowed = max(RELATIVE_TOLERANCE * wanted, ABSOLUTE_TOLERANCE)
    if abs(got - wanted) > allowed:
        raise RunError(f"export check failed: {figures} {origin}, allowed gap {allowed:.4f}")
    found = {
        "accept_length": got,
        "accepted_drafts": stats.accepted_drafts,
        "rounds": stats.rounds,
        "expected": wanted,
        "expected_from": probe.expected_from,
        "num_prompts": len(probe.prompt_ids),
        "max_new_tokens": probe.max_new_tokens,
    }
    if stats.accepted_drafts <= ABSOLUTE_TOLERANCE:
        # a random draft keeps a token by chance too, and was expected to
        found["warning"] = (
            f"only {stats.accepted} drafted tokens were accepted in {stats.rounds} rounds, which "
            "untrained weights may reach by chance: this draft makes nothing faster"
        )
    return found


def check_in_clean_process(directory: Path, target: Target) -> dict[str, Any]:
    """`check` in a new Python process that loads target and draft from their files.

    The process needs the memory of one more target.

    Raises:
        CheckpointError, RunError: as `check`.
        RunError: the process died.
    """
    command = [sys.executable, "-m", "dspark.export.check", str(directory), "--json"]
    devices = [target.device]
    if isinstance(target, LingTarget) and target.model.placement:
        devices = list(dict.fromkeys(target.model.placement))
    command += ["--target", target.name, "--device", "+".join(map(str, devices))]
    command += ["--dtype", str(target.dtype).removeprefix("torch.")]
    if target.revision:
        command += ["--revision", target.revision]
    # a bare checkout is not installed, and the caller may stand in any directory
    root = str(Path(dspark.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    lines = done.stdout.strip().splitlines()
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise RunError(
            f"export check failed: its process ended with code {done.returncode} and no answer"
        ) from None
    if "error" in answer:
        kind = RunError if done.returncode == RunError.exit_code else CheckpointError
        raise kind(answer["error"])
    return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Check a directory and print the figures; exit code 0, 1 (failed) or 2 (cannot be loaded)."""
    parser = argparse.ArgumentParser(prog="python -m dspark.export.check", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args(argv)
    quiet_transformers()
    settings = TargetSettings(
        path=args.target, revision=args.revision, device=args.device, dtype=args.dtype
    )
    code = 0
    try:
        probe = read_probe(args.directory)
        answer = check(args.directory, targets.load(settings), probe)
    except DSparkError as error:
        answer, code = {"error": str(error)}, error.exit_code
    if args.json:
        print(json.dumps(answer))
    else:
        for key, value in answer.items():
            print(f"{key}: {value}", file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    raise SystemExit(main())
