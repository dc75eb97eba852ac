"""What a prompt leaves for the first step of the graph engine."""

import pytest
import torch

from dspark.serving.graph import prompt
from dspark.serving.graph.arena import Caches
from dspark.serving.graph.dense import dense_weights
from dspark.serving.graph.prompt import PromptCache, fill_context
from dspark.serving.graph.weights import DraftWeights, TargetWeights
from dspark.target import base
from dspark.testing import tiny_draft, tiny_ling, tiny_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 5])
def test_the_drafts_context_is_that_of_its_own_loop(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, start: int
) -> None:
    monkeypatch.setattr(prompt, "_PIECE", 7)
    target = tiny_ling(dtype=dtype)
    draft = tiny_draft(target).to(dtype)
    weights = DraftWeights.of(draft)
    caches = Caches.empty(TargetWeights.of(target.model), weights, 64)
    width = weights.fc.shape[1]
    taps = torch.randn(23, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    context = draft.new_context()
    draft.extend(context, taps)
    fill_context(weights, caches, taps[:start])
    fill_context(weights, caches, taps[start:], start)
    assert caches.keys is not None
    assert caches.values is not None
    close = 1e-5 if dtype == torch.float32 else 2e-2
    for layer in range(len(draft.layers)):
        for held, wanted in zip((caches.keys, caches.values), context.read(layer), strict=True):
            torch.testing.assert_close(held[layer, :, :23], wanted[0], rtol=close, atol=close)
            assert not held[layer, :, 23:].any()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("piece", [64, 7])
def test_a_dense_prompt_is_read_into_the_kernels_caches(
    monkeypatch: pytest.MonkeyPatch, family: str, piece: int
) -> None:
    """In one piece or several: keys, values, taps and logits are those of the target's own loop."""
    target = tiny_target(family=family, num_hidden_layers=3)
    ids = torch.randint(0, 250, (23,), generator=torch.Generator().manual_seed(1))
    own = target.new_cache((0, 2))
    wanted = target.prefill(own, ids)
    caches = Caches.empty(dense_weights(target), None, 64)
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", piece)
    found = target.prefill(PromptCache(caches, (0, 2)), ids)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.taps, wanted.taps, rtol=1e-4, atol=1e-4)
    for layer in range(3):
        for held, expected in zip(caches.pairs[layer], own.committed(layer), strict=True):
            torch.testing.assert_close(held[:, :23], expected, rtol=1e-4, atol=1e-4)
            assert not held[:, 23:].any()
