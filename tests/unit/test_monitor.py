"""Figures are ratios of sums, survive a checkpoint, and no line stands twice."""

import json
import logging
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from dspark.config import LossSettings
from dspark.errors import DataError, RunError
from dspark.losses import denominators, objective
from dspark.training.monitor import MetricsFile, Monitor

K, V = 3, 11


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def one_pass(seed: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums vector, loss share and denominators of random blocks, all slots supervised but one."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(blocks, K, dtype=torch.bool)
    mask[0, -1] = False
    sums = objective(
        torch.randn(blocks, K, V, generator=generator),
        torch.randn(blocks, K, V, generator=generator),
        torch.randint(V, (blocks, K), generator=generator),
        mask,
        torch.randn(blocks, K, generator=generator),
        LossSettings(),
    )
    below = denominators(mask, LossSettings())
    return sums.to_vector(), sums.loss(below, LossSettings(), 1.0), below


def test_a_line_pools_over_its_steps(accelerator: Accelerator) -> None:
    monitor = Monitor(K, accelerator)
    small, large = one_pass(0, 2), one_pass(1, 6)
    for (vector, loss, below), norm in ((small, 1.0), (large, 3.0)):
        monitor.add(vector, loss, tokens=10, skipped=torch.tensor(2))
        monitor.end_step(torch.tensor(norm), below)
    figures = monitor.line()
    assert figures["train/loss"] == pytest.approx(float(small[1] + large[1]) / 2)
    assert figures["train/grad_norm"] == pytest.approx(2.0)
    assert figures["train/skipped_rows"] == 4
    assert figures["train/supervised_tokens"] == 2 * K - 1 + 6 * K - 1
    assert figures["train/tau"] == pytest.approx(figures["train/accepted_drafts"] + 1)
    ce = float(small[0][0] + large[0][0]) / float(small[2][0] + large[2][0])
    assert figures["train/ce_loss"] == pytest.approx(ce)
    assert {f"train/accept_rate@{k}" for k in range(K)} <= figures.keys()
    assert {f"train/survival@{k}" for k in range(K)} <= figures.keys()


def test_a_half_filled_window_survives_a_checkpoint(accelerator: Accelerator) -> None:
    whole, before, after = (Monitor(K, accelerator) for _ in range(3))
    for index, seed in enumerate((0, 1, 2)):
        vector, loss, below = one_pass(seed, 3)
        for monitor in (whole, before if index < 2 else after):
            if monitor is after:
                window, steps = before.state()
                after.restore(json.loads(json.dumps(window)), steps)
            monitor.add(vector, loss, tokens=7, skipped=torch.tensor(index))
            monitor.end_step(torch.tensor(1.5), below)
    mine, theirs = whole.line(), after.line()
    assert {k: v for k, v in mine.items() if not k.startswith("perf/")} == {
        k: v for k, v in theirs.items() if not k.startswith("perf/")
    }


def test_a_window_of_two_processes_is_continued_by_one(accelerator: Accelerator) -> None:
    monitor = Monitor(K, accelerator)
    first, second = one_pass(0, 2), one_pass(1, 2)
    size = 3 * K + 10
    window = []
    for vector, loss, _ in (first, second):
        sums = torch.zeros(size + 5, dtype=torch.float64)
        sums[:size], sums[size] = vector, loss
        window.append(sums.tolist())
    monitor.restore(window, 1)
    assert monitor.state()[0][0][size] == pytest.approx(float(first[1] + second[1]))


def test_a_loss_that_is_not_finite_stops_the_run(accelerator: Accelerator) -> None:
    monitor = Monitor(K, accelerator)
    vector, loss, below = one_pass(0, 2)
    monitor.add(vector, loss * float("nan"), tokens=1, skipped=torch.tensor(0))
    monitor.end_step(torch.tensor(1.0), below)
    with pytest.raises(RunError, match="the loss is nan"):
        monitor.state()
    with pytest.raises(RunError, match="the loss is nan"):
        monitor.line()


def test_a_gradient_that_is_not_finite_stops_the_run(accelerator: Accelerator) -> None:
    monitor = Monitor(K, accelerator)
    vector, loss, below = one_pass(0, 2)
    monitor.add(vector, loss, tokens=1, skipped=torch.tensor(0))
    monitor.end_step(torch.tensor(float("nan")), below)
    for function in (monitor.state, monitor.line):
        with pytest.raises(RunError, match="the gradient's norm is nan"):
            function()


def test_metrics_behind_the_checkpoint_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "')
    with caplog.at_level(logging.INFO):
        file = MetricsFile(path, last_step=2)
    file.write(3, {"a": 30.0})
    file.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2},
        {"step": 3, "a": 30.0},
    ]
    assert "dropped 2 lines" in caplog.text


def test_a_foreign_metrics_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('hello\n{"step": 1}\n')
    with pytest.raises(DataError, match="line 1 is not a line of metrics"):
        MetricsFile(path, last_step=2)
