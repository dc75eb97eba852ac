"""The target's pass over packed rows, compiled and captured, gives what the pass itself gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.target import Features
from dspark.testing import tiny_ling, tiny_target
from dspark.training.captured import CapturedFeatures, compiled

LAYERS = (0, 2)


def rows(seed: int, length: int = 48) -> tuple[Tensor, Tensor]:
    """Ids and documents [2, length]: three of one row, two and padding of the other."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 120, (2, length), generator=generator)
    cut = 9 + 7 * seed
    documents = torch.full_like(ids, 4)
    documents[0, :cut], documents[0, cut:30], documents[0, 30:] = 0, 1, 2
    documents[1, : cut + 4], documents[1, cut + 4 : 40] = 3, 3
    return ids, documents


def test_layers_are_compiled_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    ids, documents = rows(0)
    expected = target.packed_features(ids, LAYERS, documents)
    calls = []

    def wrapped(function: Any, **options: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            calls.append(options)
            return function(*args, **named)

        return call

    monkeypatch.setattr(torch, "compile", wrapped)
    with compiled(target.layers):
        found = target.packed_features(ids, LAYERS, documents)
    assert len(calls) == len(target.layers)
    assert expected is not None
    assert found is not None
    assert torch.equal(found.taps, expected.taps)
    target.packed_features(ids, LAYERS, documents)
    assert len(calls) == len(target.layers)


def test_a_target_that_wants_documents_apart_is_asked_itself() -> None:
    ids, documents = rows(0)
    assert CapturedFeatures(tiny_ling())(ids, LAYERS, documents) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fault", [False, True])
def test_a_replay_is_the_pass_itself(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another shape, other taps, and where the pass may not be captured."""
    target = tiny_target()
    target.model.cuda()
    if fault:
        passed = target.packed_features

        def waits(*args: Any) -> Features | None:
            found = passed(*args)
            assert found is not None
            found.taps.sum().item()  # not allowed in a capture
            return found

        monkeypatch.setattr(target, "packed_features", waits)
    captured = CapturedFeatures(target)
    for seed, length, layers in [(0, 48, LAYERS), (1, 48, LAYERS), (2, 64, LAYERS), (3, 48, (1,))]:
        ids, documents = (one.cuda() for one in rows(seed, length))
        found = captured(ids, layers, documents)
        expected = target.packed_features(ids, layers, documents)
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found.taps, expected.taps, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(found.last_hidden, expected.last_hidden, rtol=2e-5, atol=2e-5)
        if seed == 1:
            assert (captured._graph is None) == fault
