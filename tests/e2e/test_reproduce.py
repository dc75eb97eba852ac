"""The scripts for Ling-3.0-flash's real weights, run whole with the nano model in place of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NANO = "checkpoints/ling3-nano"
DRAFT = "checkpoints/ling3-nano-dspark-block16"


def script(
    name: str, *options: object, **environment: object
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [ROOT / name, *map(str, options)],
        capture_output=True,
        text=True,
        env={
            **os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            **{key: str(value) for key, value in environment.items()},
        },
    )  # fmt: skip


@pytest.mark.slow
def test_both_drafts_are_measured_and_judged_on_one_page(tmp_path: Path) -> None:
    done = script(
        "benchmarks/reproduce_ling3.sh", NANO, DRAFT, "--ranks", 1, "--device", "cpu",
        "--nextn", "nextn:2", "--requests", 1, "--max-tokens", 16, "--input", 40, "--output", 20,
        "--gsm8k", "data/prompts/heldout.jsonl", "--out", tmp_path, "--port", 8153,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "verdict.md").read_text()
    assert done.stdout == page
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row.split(":")[0] for row in rows] == ["| DSpark"] * 4 + ["| NEXTN"] * 4
    assert all("1 of 1 equal | all | equal |" in rows[index] for index in (1, 5))
    # nothing that is published of another model is put beside it
    assert "which is NOT Ling-3.0-flash" in page
    assert "B200 |" not in page
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found) == 6
    assert found["nextn-random"]["output_tokens"] == 20


@pytest.mark.slow
def test_a_new_draft_is_made_and_set_beside_the_official_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = script(
        "train/distill_ling3_flash.sh", "configs/ling3-nano-dspark.yaml",
        "sample.max_new_tokens=24", "train.features=split", "train.target_devices=[cpu]",
        "train.steps=3", "train.batch_size=2", "train.num_anchors=4", f"train.output_dir={run}",
        "train.validation_prompts=[]", "train.validate_every=100", "train.save_every=100",
        OFFICIAL=DRAFT, COUNT=8, OUT=tmp_path / "corpus", LAUNCH=sys.executable,
        TARGET_DEVICE="cpu", EVAL="--limit 1 --max-new-tokens 16 --json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["base"] == DRAFT
    mine, official = report["drafts"][str(run / "draft")], report["drafts"][DRAFT]
    assert mine["lossless"] is True
    # three steps teach nothing
    assert official["accept_length"] > mine["accept_length"] >= 1


def test_an_official_draft_that_is_not_there_is_told_before_anything_is_done(
    tmp_path: Path,
) -> None:
    done = script("train/distill_ling3_flash.sh", OFFICIAL=tmp_path, OUT=tmp_path / "corpus")
    assert done.returncode == 2
    assert f"OFFICIAL is '{tmp_path}', which holds no config.json" in done.stderr
    assert not (tmp_path / "corpus").exists()
