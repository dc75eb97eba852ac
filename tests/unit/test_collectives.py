"""What the benchmark of the exchange is asked for, and how it is told; it is timed on a GPU."""

import pytest
import torch

from dspark.bench import collectives
from dspark.bench.collective_options import CollectiveOptions
from dspark.bench.collectives import print_report
from dspark.cli import main
from dspark.errors import ConfigError, RunError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 3}, "--tp must be one of"),
        ({"ranks": 1}, "got 1"),
        ({"hidden": 100}, "--hidden must be a multiple of 16, got 100"),
        ({"skew": (0, -1)}, "--skew must be >= 0, got -1"),
        ({"repeats": 0}, "--repeats must be >= 1, got 0"),
        ({"rounds": -1}, "--rounds must be >= 0"),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CollectiveOptions(**given)  # type: ignore[arg-type]


def test_ranks_on_one_gpu_are_called_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    time = {"median_us": 5.25, "p90_us": 6.5}
    print_report(
        {
            "ranks": 4,
            "hidden": 2560,
            "simulated": True,
            "exchange": [
                {"skew": 0, "rounds": 0, **time},
                {"skew": 20, "rounds": 1_000_000, **time},
            ],
            "embedding": {
                "whole": {"bytes": 805_000_000, **time},
                "shared": {"bytes": 201_000_000, **time},
            },
            "nccl": None,
            "alone": time,
        }
    )
    said = capsys.readouterr().err
    assert "SIMULATED on one GPU" in said
    assert "up to 20 looks late" in said
    assert "1,000,000 rounds right to the bit" in said
    assert "table on every rank: 805 MB" in said
    assert said.count("5.25") == 5
    assert "NCCL" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "dspark bench collectives needs a GPU"), (["--tp", "3"], "--tp must be one of")],
)
def test_without_a_gpu_the_command_says_so_when_its_options_are_right(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["dspark", "bench", "collectives", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_sum_that_is_not_that_of_one_process_fails_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"exchange": [{"skew": 40, "rounds": 100, "wrong": 3}]}
    monkeypatch.setattr(collectives, "_simulated", lambda options: found)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RunError, match="3 elements in 100 rounds with ranks up to 40 looks late"):
        collectives.measure(CollectiveOptions(skew=(40,), rounds=100))
