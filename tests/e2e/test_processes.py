"""Two processes: batches in which one or both have nothing to learn, uneven passes, another world.

On CPUs with gloo. A rank that waits for another for ever is killed after a while, and fails here.
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark.corpus.dataset import rows_at
from dspark.testing import save_tiny_run, tiny_rows, tiny_run, write_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_run(tmp_path_factory.mktemp("processes"), tiny_rows(10))


def figures(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    for mine, theirs in zip(figures(one), figures(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for name in ("model", "ema"):
        paths = [path / "latest" / f"{name}.safetensors" for path in (one, other)]
        if paths[0].exists() or paths[1].exists():
            first, second = map(load_file, paths)
            for key, value in second.items():
                torch.testing.assert_close(first[key], value, rtol=0, atol=5e-6)


def test_steps_in_which_one_or_all_ranks_have_nothing_to_learn(
    forks: Any, place: Path, tmp_path: Path
) -> None:
    rows = tiny_rows(10)
    empty = {0, 1, 2, 3, 4, 5}
    for number in empty:  # one supervised token is enough for the reader, none for a block
        rows[number]["loss_mask"] = [0] * (len(rows[number]["loss_mask"]) - 1) + [1]
    write_rows(tmp_path / "rows.jsonl", rows)
    own = [
        f"data.responses=[{tmp_path / 'rows.jsonl'}]",
        "data.min_supervised_tokens=1",
        "train.epochs=3",
        "train.grad_accumulation=1",
    ]
    two = tiny_run(place, tmp_path / "two", *own)
    assert forks.run(two, processes=2).codes == [0, 0]
    one = tiny_run(place, tmp_path / "one", *own, "train.grad_accumulation=2")
    assert forks.run(one).codes == [0]
    assert_same_run(tmp_path / "two", tmp_path / "one")
    drawn = [[row in empty for row in rows_at(step, 2, 10, seed=0)] for step in range(15)]
    told = [line["train/empty_steps"] for line in figures(tmp_path / "two")]
    assert told == [float(all(step)) for step in drawn]
    # all that this is about did happen: all ranks, rank 0 alone, rank 1 alone
    assert [True, True] in drawn
    assert [True, False] in drawn
    assert [False, True] in drawn


def test_answers_that_are_all_empty_stop_every_rank_with_a_sentence(
    forks: Any, place: Path, tmp_path: Path
) -> None:
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]
    write_rows(tmp_path / "rows.jsonl", [{"messages": said}] * 3)
    settings = tiny_run(place, tmp_path / "out", f"data.responses=[{tmp_path / 'rows.jsonl'}]")
    ended = forks.run(settings, processes=2)
    assert ended.codes == [2, 2], ended.said
    for words in ended.said:
        assert "no usable response: 3 of 3" in words
        assert "Traceback" not in words
    assert not (tmp_path / "out").exists()


def test_accumulation_of_three_on_ten_rows(forks: Any, place: Path, tmp_path: Path) -> None:
    """Whole steps only, rates of the optimizer step, in one process and in two."""
    found = {}
    for name, processes, accumulation in (("a", 2, 3), ("b", 1, 6), ("c", 1, 3)):
        own = [
            "train.epochs=3",
            f"train.grad_accumulation={accumulation}",
            "loss.accept_length_ramp=0",
        ]
        settings = tiny_run(place, tmp_path / name, *own)
        assert forks.run(settings, processes=processes).codes == [0] * processes
        found[name] = figures(tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    # of ten rows six make a step and four wait for the next pass; a warm-up of one step
    assert [line["train/lr"] for line in found["a"]] == pytest.approx([0.001, 0.002, 0.001])
    assert [line["train/epoch"] for line in found["a"]] == [1, 2, 3]
    # nine make three steps
    assert [line["step"] for line in found["c"]] == list(range(1, 10))
    assert [line["train/epoch"] for line in found["c"]] == pytest.approx(
        [n / 3 for n in range(1, 10)]
    )
    assert max(line["train/lr"] for line in found["c"]) == 0.002


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_killed_run_goes_on_in_another_world(
    forks: Any, place: Path, tmp_path: Path, before: int, after: int
) -> None:
    """The same rows and anchors, and figures within 1e-5, the average of the weights included."""
    own = ["train.steps=8", "train.save_every=3", "train.ema_decay=0.8", "train.log_every=2"]

    def settings(out: Path, processes: int) -> list[str]:
        share = f"train.grad_accumulation={4 // processes}"
        return tiny_run(place, out, *own, share, f"train.num_processes={processes}")

    whole, out = tmp_path / "whole", tmp_path / "out"
    ended = forks.run(settings(whole, before), processes=before, watched=True)
    assert ended.codes == [0] * before, ended.said
    steps = [n for n, label in enumerate(ended.events) if label == "after optimizer step"]
    killed = forks.run(settings(out, before), processes=before, kill_at=steps[4], limit=60)
    # the rank that is left finds out, if it is not killed at the same time
    assert killed.codes[0] == -signal.SIGKILL
    assert 0 not in killed.codes
    assert figures(out) == figures(whole)[:2]
    last = forks.run(settings(out, after), processes=after)
    assert last.codes == [0] * after, last.said
    assert "checkpoint-3" in last.said[0]
    assert_same_run(out, whole)
    other = tmp_path / "other"
    assert forks.run(settings(other, after), processes=after).codes == [0] * after
    assert_same_run(other, whole)
