"""Two processes that hold the draft in shards train the same draft as whole copies, and go on.

Launched with the files of configs/, on CPUs with gloo. Half of the rows have no supervised block,
so that some ranks have nothing to learn in some passes.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark import config_io
from dspark.export.hf import export_draft
from dspark.export.load import load_draft
from dspark.target import load
from dspark.testing import save_tiny_run, tiny_rows, tiny_run, tiny_tokenizer
from dspark.training import program

ROOT = Path(__file__).resolve().parents[2]
ZERO = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
KINDS = [pytest.param("zero2", marks=ZERO), pytest.param("zero3", marks=ZERO), "fsdp2"]
LIMIT = 240  # seconds: a rank that waits for another for ever fails here

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = tiny_rows(12)
    for row in rows[::2]:  # one supervised token is enough for the reader, none for a block
        row["loss_mask"] = [0] * (len(row["loss_mask"]) - 1) + [1]
    return save_tiny_run(tmp_path_factory.mktemp("sharded"), rows)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """One process and four passes a step, with whole copies."""
    torch.set_num_threads(1)
    here(place, place / "whole")
    return place / "whole"


def settings(place: Path, out: Path, *overrides: str) -> list[str]:
    own = [
        "draft.markov_rank=7",  # so that some weights do not divide by two
        "data.min_supervised_tokens=1",
        "train.steps=6",
        "train.grad_accumulation=2",
        "train.max_grad_norm=0.5",  # below some norms of this run
        "train.ema_decay=0.3",
        "train.save_every=3",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_limit=1",
        "train.validation_max_new_tokens=6",
    ]
    return tiny_run(place, out, *own, *overrides)


def here(place: Path, out: Path, *overrides: str) -> None:
    """The same run in this process, alone."""
    given = settings(place, out, "train.grad_accumulation=4", *overrides)
    assert program.run(config_io.load(None, given)).status == "finished"


def two(kind: str, place: Path, out: Path, *overrides: str) -> None:
    """Two processes, each with two passes a step."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    environ = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    if kind in ("zero2", "zero3", "fsdp2"):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
        command += ["--config_file", f"configs/accelerate/{kind}.yaml", "--main_process_port", "0"]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", "2"]
        environ["ACCELERATE_USE_CPU"] = "true"
    command += ["train.py", *settings(place, out, "train.num_processes=2", *overrides)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr


def lines(out: Path) -> list[dict[str, float]]:
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: v for key, v in line.items() if not key.startswith("perf/")} for line in read]


def weights(out: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(out / "latest" / file)


def moments(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = torch.load(
        out / "latest" / "optimizer.pt", weights_only=True
    )
    return found


def assert_close(one: Path, other: Path) -> None:
    """Within float32's rounding of sums in another order."""
    for mine, theirs in zip(lines(one), lines(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for file in ("model.safetensors", "ema.safetensors"):
        first, second = weights(one, file), weights(other, file)
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=5e-6)
    for name, held in moments(one).items():
        for key, value in held.items():
            torch.testing.assert_close(value, moments(other)[name][key], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["ddp", *KINDS])
def test_shards_make_the_steps_of_whole_copies(
    kind: str, place: Path, whole: Path, tmp_path: Path
) -> None:
    """Loss, norm before clipping, weights, their average and moments, in float32."""
    out = tmp_path / kind
    two(kind, place, out, "train.mixed_precision=no")  # fsdp2.yaml says bf16
    assert_close(out, whole)
    figures = lines(out)
    norms = [line["train/grad_norm"] for line in figures if "train/grad_norm" in line]
    assert max(norms) > 0.5
    # one process goes on where two stopped
    on = tmp_path / "on"
    here(place, on, f"train.resume={out / 'checkpoint-3'}")
    for file in ("model.safetensors", "ema.safetensors"):
        for name, value in weights(on, file).items():
            torch.testing.assert_close(value, weights(whole, file)[name], rtol=0, atol=5e-6)
    # and the checkpoint is one that exports
    target = load(str(place / "target"), dtype="float32", device="cpu")
    export_draft(out, tmp_path / "draft", target, tokenizer=tiny_tokenizer(), check=False)
    draft = load_draft(tmp_path / "draft", dtype=torch.float32)
    assert {name: value.shape for name, value in draft.named_parameters()} == {
        name: value.shape for name, value in weights(out).items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_shards_go_on_to_the_bit_with_fp32_masters(kind: str, place: Path, tmp_path: Path) -> None:
    """Under bf16, where weights that went through bf16 would show."""
    out, on = tmp_path / "out", tmp_path / "on"
    own = ["train.mixed_precision=bf16", "train.validation_prompts=[]"]
    two(kind, place, out, *own)
    held = weights(out)
    assert {value.dtype for value in held.values()} == {torch.float32}
    assert any((value != value.bfloat16().float()).any() for value in held.values())
    shutil.copytree(out / "checkpoint-3", on / "checkpoint-3")
    two(kind, place, on, *own)
    assert [line for line in lines(out) if line["step"] > 3] == lines(on)
    average = weights(out, "ema.safetensors")
    for name, value in held.items():
        assert torch.equal(value, weights(on)[name]), name
        assert torch.equal(average[name], weights(on, "ema.safetensors")[name]), name
    assert any((value != held[name]).any() for name, value in average.items())
    for name, kept in moments(out).items():
        for key, value in kept.items():
            assert torch.equal(value, moments(on)[name][key]), (name, key)
    # bf16 in whole copies rounds at other places; the run is the same one
    here(place, tmp_path / "whole", *own)
    for mine, theirs in zip(lines(out), lines(tmp_path / "whole"), strict=True):
        if "train/loss" in mine:
            assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.02)
