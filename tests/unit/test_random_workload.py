"""Prompt lookup's rounds along a known output, against a search from the end."""

import importlib
import random
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("random_workload").looked_up


def searched(prompt: list[int], output: list[int], limit: int) -> list[tuple[int, int, int]]:
    """Proposed, kept and added tokens of every round."""
    ids, end = prompt + output, len(prompt) + 1
    rounds = []
    while end < len(ids):
        places = (
            place + n
            for n in (3, 2, 1)
            for place in range(end - n - 1, -1, -1)
            if ids[place : place + n] == ids[end - n : end]
        )
        begin = next(places, end)
        proposed = ids[begin : min(begin + limit, end)]
        kept = 0
        for one, true in zip(proposed, ids[end:], strict=False):
            if one != true:
                break
            kept += 1
        added = min(kept + 1, len(ids) - end)
        rounds.append((len(proposed), kept, added))
        end += added
    return rounds


@pytest.mark.parametrize("seed", range(30))
def test_prompt_lookup_is_what_a_search_finds(seed: int, looked_up: Any) -> None:
    rng = random.Random(seed)
    prompt, output = (
        [rng.randrange(4) for _ in range(rng.randrange(1, most))] for most in (30, 60)
    )
    rounds = searched(prompt, output, 7)
    found = looked_up(prompt, output, 7)
    assert found.rounds == len(rounds)
    totals = [sum(one) for one in zip(*rounds, strict=True)] or [0, 0, 0]
    assert [found.proposed, found.accepted, found.emitted] == totals


def test_tiled_text_rewards_copying(looked_up: Any) -> None:
    tile = list(range(40))
    found = looked_up(tile * 3, (tile * 4)[: 8 * 16 + 1], 15)
    # the first token is the prefill's
    assert found.accept_length == 16
