"""A run that is killed at whatever moment goes on to the same end, to the bit."""

import itertools
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.testing import save_tiny_run, tiny_rows, tiny_run

STEPS = 12  # ten rows, two a step: a pass ends with steps 5 and 10
KILLED = [-signal.SIGKILL]
SAME = ("model.safetensors", "check.json", "ema.safetensors", "check_ema.json")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_run(tmp_path_factory.mktemp("killed"), tiny_rows(10))


def settings(place: Path, out: Path, *overrides: str) -> list[str]:
    own = [
        f"train.steps={STEPS}",
        "train.batch_size=2",
        "train.lr=0.003",
        "train.log_every=2",
        "train.save_every=3",
        "train.keep=1",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_limit=1",
        "train.validation_max_new_tokens=4",
        "train.validate_every=6",
    ]
    return tiny_run(place, out, *own, *overrides)


def figures(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def assert_same_end(out: Path, whole: Path) -> None:
    """Every line of metrics, what the last checkpoint holds, both links, and no litter."""
    assert figures(out) == figures(whole)
    for name in SAME:
        mine, theirs = out / "latest" / name, whole / "latest" / name
        assert mine.exists() == theirs.exists(), name
        assert not mine.exists() or mine.read_bytes() == theirs.read_bytes(), name
    mine, theirs = (
        json.loads((one / "latest" / "trainer_state.json").read_text()) for one in (out, whole)
    )
    assert mine == theirs
    held: list[Any] = [
        torch.load(one / "latest" / "optimizer.pt", weights_only=True) for one in (out, whole)
    ]
    assert held[0].keys() == held[1].keys()
    for name, moments in held[0].items():
        for key, value in moments.items():
            assert torch.equal(value, held[1][name][key]), (name, key)
    for link in ("latest", "best"):
        assert os.readlink(out / link) == os.readlink(whole / link)
    names = [{one.name for one in path.iterdir()} for path in (out, whole)]
    assert {one for one in names[0] if not one.startswith("checkpoint-")} == {
        one for one in names[1] if not one.startswith("checkpoint-")
    }


def moments_of(events: list[str], count: int, rng: random.Random) -> list[int]:
    """Numbers of ``count`` events: the last batch of each pass, the links of the last checkpoint
    (no later one would set them right), and then the kinds in turn.
    """
    steps = [number for number, label in enumerate(events) if label == "before optimizer step"]
    links = [number for number, label in enumerate(events) if label.endswith(" link")]
    # before `latest` of the last checkpoint, and in the middle of its `best`
    chosen = [steps[4], steps[9] + 1, links[-4], links[-1]]
    kinds = sorted(set(events))
    rng.shuffle(kinds)
    turn = itertools.cycle(kinds)
    while len(chosen) < count:
        kind = next(turn)
        left = [n for n, label in enumerate(events) if label == kind and n not in chosen]
        chosen += rng.sample(left, 1) if left else []
    return chosen


@pytest.mark.parametrize(
    ("own", "count", "twice"),
    [([], 10, False), (["train.ema_decay=0.9"], 6, True)],
    ids=["plain", "with an average"],
)
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(
    forks: Any, place: Path, tmp_path: Path, own: list[str], count: int, twice: bool
) -> None:
    whole = tmp_path / "whole"
    ended = forks.run(settings(place, whole, *own), watched=True)
    assert ended.codes == [0], ended.said
    kinds = Counter(ended.events)
    assert len(kinds) >= 15, kinds
    rng = random.Random()
    for number in moments_of(ended.events, count, rng):
        out = tmp_path / f"killed-{number}"
        moment = f"{ended.events[number]}, event {number}"
        assert forks.run(settings(place, out, *own), kill_at=number).codes == KILLED, moment
        if twice:  # the second time somewhere in what is left, or not at all
            again = rng.randrange(len(ended.events) // 2)
            assert forks.run(settings(place, out, *own), kill_at=again).codes in (KILLED, [0])
            moment += f", then {again}"
        last = forks.run(settings(place, out, *own))
        assert last.codes == [0], (moment, last.said)
        try:
            assert_same_end(out, whole)
        except AssertionError as error:
            raise AssertionError(f"killed at {moment}") from error
