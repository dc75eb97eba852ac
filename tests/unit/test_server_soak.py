"""Clients that hang up neither lose nor mix up the answers of those that stay."""

import asyncio
from typing import Any

import pytest

from benchmarks.serving_soak import Answer, alone, cases, faults, play, settled
from dspark.serving.server import running
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer


@pytest.mark.slow
def test_100_requests_of_16_clients_of_which_a_fifth_hangs_up() -> None:
    target: Any = tiny_target(num_hidden_layers=4)
    draft = tiny_draft(target, num_layers=1, num_taps=1)
    todo = cases(100, leave=0.2, longest=10)
    with running(target, draft, tiny_tokenizer()) as address:
        expected = asyncio.run(play(address, alone(todo), clients=1))
        before = settled(address)
        found = asyncio.run(play(address, todo, clients=16))
        after = settled(address)
    assert len({one.text for one in expected if isinstance(one, Answer)}) > 50
    assert not faults(todo, expected, found)
    left = sum(one is None for one in found)
    assert 10 <= left <= 30
    assert (after["running"], after["waiting"], after["failed"]) == (0, 0, 0)
    assert 100 - left <= after["ended"] - before["ended"] <= 100
    assert after["aborted"] > before["aborted"]
