"""A run that is killed or stopped anywhere continues to the bit, or says why it does not."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark import config_io
from dspark.errors import CheckpointError
from dspark.testing import save_tiny_run, tiny_rows, tiny_run
from dspark.training import program, trainer

STEPS = 14  # ten rows, two a step: a pass ends with steps 5 and 10


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_run(tmp_path_factory.mktemp("resume"), tiny_rows(10))


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """The run that nothing interrupts."""
    torch.set_num_threads(1)
    assert run(place, place / "whole").status == "finished"
    return place / "whole"


def settings(place: Path, out: Path, steps: int = STEPS) -> list[str]:
    own = [
        f"train.steps={steps}",
        "train.grad_accumulation=2",
        "train.lr=0.003",
        "train.log_every=3",
        "train.save_every=4",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_limit=1",
        "train.validation_max_new_tokens=6",
        "train.validate_every=6",
    ]
    return tiny_run(place, out, *own)


def run(place: Path, out: Path) -> trainer.TrainReport:
    return program.run(config_io.load(None, settings(place, out)))


def figures(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def assert_equal_to_the_bit(out: Path, whole: Path) -> None:
    assert figures(out) == figures(whole)
    for name in ("model.safetensors", "check.json"):
        assert (out / "latest" / name).read_bytes() == (whole / "latest" / name).read_bytes()
    mine, theirs = (
        torch.load(one / "latest" / "optimizer.pt", weights_only=True) for one in (out, whole)
    )
    assert mine.keys() == theirs.keys()
    for name, moments in mine.items():
        for key, value in moments.items():
            assert torch.equal(value, theirs[name][key]), (name, key)
    assert os.readlink(out / "best") == os.readlink(whole / "best")


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    optimize = trainer.Trainer._optimize

    def interrupted(self: Any, window: Any, stop: Any) -> bool:
        if window.step + 1 == step:
            signal.raise_signal(signal.SIGUSR1)
        return optimize(self, window, stop)

    monkeypatch.setattr(trainer.Trainer, "_optimize", interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(2, id="mid-pass", marks=pytest.mark.slow),
        pytest.param(5, id="end of pass", marks=pytest.mark.slow),
        pytest.param(7, id="mid-window"),
        pytest.param(12, id="log", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_continues_to_the_bit(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        report = run(place, out)
    assert (report.status, report.step) == ("interrupted", step)
    assert run(place, out).status == "finished"
    assert_equal_to_the_bit(out, whole)


@pytest.mark.slow
def test_what_a_killed_save_left_is_ignored(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        run(place, out)
    half, aside = out / "checkpoint-8", out / ".checkpoint-8.tmp"
    shutil.copytree(out / "checkpoint-7", half)
    (half / "COMPLETE").unlink()
    shutil.copytree(half, aside)
    (aside / "optimizer.pt").write_bytes(b"cut")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/loss": 0.0}\n{"step": 12, "trai')
    assert run(place, out).status == "finished"
    assert_equal_to_the_bit(out, whole)
    assert not aside.exists()


def test_a_damaged_checkpoint_is_no_silent_fresh_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        run(place, out)
    (out / "checkpoint-3" / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is missing"):
        run(place, out)
    (out / "checkpoint-3" / "COMPLETE").unlink()
    before = (out / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"move it away to start afresh"):
        run(place, out)
    assert (out / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_going_back_behind_a_newer_checkpoint_is_refused(
    place: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out, symlinks=True)
    older = min(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    config = config_io.load(None, [*settings(place, out), f"train.resume={older}"])
    with pytest.raises(CheckpointError, match="would overtake"):
        program.run(config)


@pytest.mark.slow
def test_a_checkpoint_from_elsewhere_continues_here(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        run(place, tmp_path / "first")
    there = tmp_path / "first" / "latest"
    config = config_io.load(None, [*settings(place, tmp_path / "second"), f"train.resume={there}"])
    assert program.run(config).status == "finished"
    mine, theirs = (
        load_file(one / "latest" / "model.safetensors") for one in (tmp_path / "second", whole)
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
