"""The shipped prompt files, and the program that builds training prompts."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dspark.corpus import tasks
from dspark.corpus.files import expand
from dspark.corpus.overlap import Overlap
from dspark.corpus.prompts import Prompt, read_prompts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "data/prompts/demo.jsonl"
HELDOUT = ROOT / "data/prompts/heldout.jsonl"


def _text(prompt: Prompt) -> str:
    (message,) = prompt.messages
    return str(message["content"])


@pytest.mark.parametrize(("file", "count"), [(DEMO, 120), (HELDOUT, 48)])
def test_every_dozen_holds_four_math_three_code_and_five_chat_prompts(
    file: Path, count: int
) -> None:
    prompts = read_prompts([str(file)])
    assert len(prompts) == len({p.id for p in prompts}) == len({_text(p) for p in prompts}) == count
    for start in range(0, count, 12):
        categories = Counter(p.category for p in prompts[start : start + 12])
        assert categories == {"math": 4, "code": 3, "chat": 5}
    assert file.stat().st_size < 60_000


def test_heldout_prompts_are_neither_in_the_demo_nor_made_by_the_generators() -> None:
    training = [_text(p) for p in read_prompts([str(DEMO)])]
    training += [task.text for task in tasks.generate(5000, seed=11)]
    heldout = [_text(p) for p in read_prompts([str(HELDOUT)])]
    overlap = Overlap(training)
    assert [text for text in heldout if overlap.kind_of(text)] == []
    backwards = Overlap(heldout)
    assert [text for text in training if backwards.kind_of(text)] == []


def test_generated_rows_of_the_demo_can_be_made_again() -> None:
    rows = [json.loads(line) for line in DEMO.read_text().splitlines()]
    shipped = {r["messages"][0]["content"] for r in rows if r["source"] != "hand"}
    made: set[str] = set()
    for category, count in (("math", 30), ("code", 22), ("chat", 32)):
        made |= {t.text for t in tasks.generate(count, 2024, shares={category: 1.0})}
    assert shipped == made


def _build(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "data/build_prompts.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )


def test_build_prompts_keeps_excluded_text_out_and_says_so(tmp_path: Path) -> None:
    free, clean = tmp_path / "free.jsonl", tmp_path / "clean.jsonl"
    assert _build("--out", str(free), "--count", "60", "--seed", "9").returncode == 0
    rows = [json.loads(line) for line in free.read_text().splitlines()]
    taken = [row["messages"][0]["content"] for row in rows[:5]]
    evaluation = tmp_path / "eval.jsonl"
    evaluation.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in taken))

    done = _build("--out", str(clean), "--count", "60", "--seed", "9", "--exclude", str(evaluation))
    kept = {json.loads(line)["messages"][0]["content"] for line in clean.read_text().splitlines()}
    assert len(kept) == 60
    assert kept.isdisjoint(taken)
    assert "same text" in done.stdout or "13-gram" in done.stdout
    assert "category: chat 24, code 15, math 21" in done.stdout
    again = tmp_path / "again.jsonl"
    _build("--out", str(again), "--count", "60", "--seed", "9", "--exclude", str(evaluation))
    assert again.read_bytes() == clean.read_bytes()


def test_an_exclude_glob_without_files_is_wrong_use(tmp_path: Path) -> None:
    done = _build(
        "--out", str(tmp_path / "x.jsonl"), "--count", "9", "--exclude", "nowhere/*.jsonl"
    )
    assert done.returncode == 2
    assert done.stderr == "error: --exclude nowhere/*.jsonl matches no file\n"
    assert not (tmp_path / "x.jsonl").exists()


def test_a_list_of_failed_rows_is_no_data_unless_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.jsonl.errors.jsonl"):
        (tmp_path / name).write_text("{}")
    rows = str(tmp_path / "rows.jsonl")
    assert expand([str(tmp_path)]) == expand([str(tmp_path / "*.jsonl")]) == [rows]
    assert expand([rows + ".errors.jsonl"]) == [rows + ".errors.jsonl"]
