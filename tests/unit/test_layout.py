"""The shape of the repository: thin folders, one-way arrows, programs that answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("train", "serve", "data")
    for path in (ROOT / folder).glob("*.py")
)
TRAINERS = ("train.py", "train/overfit_one_batch.py", "train/train_ling3_nano.py")
"""Import accelerate and all of a training run, which takes its time."""


def test_the_thin_folders_are_no_packages() -> None:
    found = [
        path for folder in ("train", "serve", "data") for path in (ROOT / folder).rglob("__init__*")
    ]
    assert found == []


def test_there_are_programs_to_answer() -> None:
    assert len(PROGRAMS) >= 4


@pytest.mark.parametrize(
    "program",
    [
        *(one for one in PROGRAMS if one not in TRAINERS),
        *(pytest.param(one, marks=pytest.mark.slow) for one in TRAINERS),
    ],
)
def test_every_program_answers_from_a_bare_checkout(program: str) -> None:
    done = subprocess.run(
        [sys.executable, program, "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sys, dspark.cli; assert 'torch' not in sys.modules, 'torch is loaded'"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0
