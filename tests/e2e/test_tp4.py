"""A row of the run on four GPUs, rehearsed on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.testing import TINY_LING

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_row_of_two_ranks_on_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LING["flash"]))
    out = tmp_path / "out"
    options: list[object] = [
        "--config", tmp_path / "config.json", "--ranks", 2, "--device", "cpu", "--out", out,
        "--rows", "block5,3.5", "nextn:2,9", "--requests", 2, "--input", 40, "--output", 36,
        "--port", 8152,
    ]  # fmt: skip
    done = subprocess.run(
        [ROOT / "benchmarks" / "tp4.sh", *map(str, options)],
        capture_output=True,
        text=True,
        env={
            **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        },
    )  # fmt: skip
    # the second row asks for more than two proposals can give, and says so behind the first
    assert done.returncode == 1
    assert "nextn:2 at 9" in done.stderr
    assert "accept length must lie in 1..3" in done.stderr
    row: dict[str, Any] = json.loads((out / "report.json").read_text())["rows"][0]
    assert row["completed"] == 2
    assert row["output_tokens"] == 72
    assert row["accept_length"] == pytest.approx(3.5)
    assert row["server"]["synthetic_weights"] is True
    assert "weights DRAWN at random, acceptance SIMULATED" in done.stdout
    assert "| block5 | 3.50 |" in done.stdout
