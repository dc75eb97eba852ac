"""Steps, learning rate and ramps are functions of the optimizer step alone."""

import math

import pytest
import torch

from dspark.config import TrainSettings
from dspark.corpus.dataset import rows_at
from dspark.errors import DataError
from dspark.training.optim import Schedule, build_optimizer, plan_steps, ramp_at, set_learning_rate


def schedule(kind: str, total: int = 100, warmup: float = 0.04) -> Schedule:
    return Schedule(peak=1e-3, total_steps=total, warmup_ratio=warmup, kind=kind)  # type: ignore[arg-type]


def test_ten_rows_with_accumulation_three_make_three_steps_a_pass() -> None:
    settings = TrainSettings(batch_size=1, grad_accumulation=3, epochs=2)
    plan = plan_steps(settings, num_rows=10, num_processes=1)
    assert (plan.global_batch, plan.total_steps, plan.left_out) == (3, 6, 1)
    assert plan.epoch(3) == pytest.approx(1.0)
    # the pass of the plan is the pass of the rows: nine different ones, then another order
    visited = [rows_at(step, plan.global_batch, 10, seed=0) for step in range(6)]
    for one_pass in (visited[:3], visited[3:]):
        assert len({row for step in one_pass for row in step}) == 9
    assert visited[:3] != visited[3:]


@pytest.mark.parametrize(("accumulation", "processes"), [(4, 1), (2, 2), (1, 4)])
def test_the_same_global_batch_makes_the_same_plan(accumulation: int, processes: int) -> None:
    settings = TrainSettings(batch_size=2, grad_accumulation=accumulation, epochs=5)
    plan = plan_steps(settings, num_rows=37, num_processes=processes)
    assert (plan.global_batch, plan.total_steps) == (8, 20)


def test_fewer_rows_than_a_global_batch_still_make_one_step() -> None:
    settings = TrainSettings(batch_size=8, epochs=1)
    plan = plan_steps(settings, num_rows=3, num_processes=1)
    assert (plan.total_steps, plan.left_out) == (1, 0)
    assert plan.epoch(3) == pytest.approx(8.0)


def test_steps_win_over_epochs() -> None:
    settings = TrainSettings(steps=7, epochs=100)
    assert plan_steps(settings, num_rows=3, num_processes=1).total_steps == 7


def test_no_rows_is_a_sentence() -> None:
    with pytest.raises(DataError, match="no row"):
        plan_steps(TrainSettings(), num_rows=0, num_processes=1)


def test_warm_up_reaches_the_peak_once_and_never_passes_it() -> None:
    rates = [schedule("cosine").lr(step) for step in range(100)]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert max(rates) == 1e-3
    assert rates.count(1e-3) == 1


def test_cosine_is_halfway_down_in_the_middle_and_trains_until_the_last_step() -> None:
    cosine = schedule("cosine", warmup=0.0)
    assert cosine.lr(50) == pytest.approx(5e-4)
    assert cosine.lr(99) == pytest.approx(5e-4 * (1 + math.cos(math.pi * 0.99)))
    assert cosine.lr(99) > 0


def test_constant_stays_at_the_peak() -> None:
    assert {schedule("constant", warmup=0.0).lr(step) for step in range(100)} == {1e-3}


def test_wsd_falls_linearly_over_the_last_fifth() -> None:
    wsd = schedule("wsd")
    assert wsd.lr(79) == 1e-3
    assert wsd.lr(80) == pytest.approx(1e-3 * 20 / 21)
    assert wsd.lr(99) == pytest.approx(1e-3 * 1 / 21)


def test_ramp_rises_over_its_share_of_the_steps() -> None:
    values = [ramp_at(step, total_steps=40, start=0.0, ratio=0.1) for step in range(6)]
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert ramp_at(0, total_steps=40, start=0.0, ratio=0.0) == 1.0


def test_late_ramp_is_off_before_its_start() -> None:
    values = [ramp_at(step, total_steps=40, start=0.5, ratio=0.05) for step in range(18, 24)]
    assert values == pytest.approx([0.0, 0.0, 1 / 3, 2 / 3, 1.0, 1.0])
    assert [ramp_at(step, total_steps=40, start=0.5, ratio=0.0) for step in (19, 20)] == [0.0, 1.0]


def test_only_matrices_decay() -> None:
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    vector = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(
        [("m", matrix), ("v", vector)], TrainSettings(lr=0.1, weight_decay=0.5)
    )
    set_learning_rate(optimizer, 0.01)
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.01 * 0.5))
    assert torch.equal(vector.detach(), torch.ones(2))


def test_masters_must_be_fp32() -> None:
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="fp32 master"):
        build_optimizer([("half", half)], TrainSettings())
