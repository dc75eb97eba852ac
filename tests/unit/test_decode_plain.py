"""Prompts decoded side by side give what each gives alone, to the bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.decoding import DecodeParams, SamplingParams, decode, decode_plain
from dspark.errors import ConfigError
from dspark.target import HFTarget
from dspark.target.lockstep import LockstepCache
from dspark.testing import tiny_target

LENGTHS = (3, 17, 240, 258, 90, 400, 5, 6, 7)
"""Around the chunk border of 256; nine sequences make a step of 16 rows, eight one of 8."""


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target()


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize(
    "count", [1, pytest.param(8, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_rows_are_equal_to_the_bit(count: int, dtype: torch.dtype, window: int | None) -> None:
    target = tiny_target()
    if window is not None:  # of every other layer
        keys: dict[str, Any] = {
            "sliding_window": window,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
        }
        target = tiny_target(family="qwen3", use_sliding_window=True, **keys)
    target.model.to(dtype)
    caches = []
    for ids in prompts()[:count]:
        cache = target.new_cache()
        target.prefill(cache, torch.tensor(ids))
        caches.append(cache)
    together = LockstepCache(caches, 30)
    kept = torch.arange(count) % 3 != 1
    tokens = torch.arange(count) + 5
    for step in range(25):
        rows = target.step_together(together, tokens + step)
        together.commit(kept | (step > 4))
        for index, cache in enumerate(caches):
            alone = target.verify(cache, tokens[index : index + 1] + step).logits[0]
            assert torch.equal(rows[index], alone), (step, index)
            target.commit(cache, int(kept[index]) if step <= 4 else 1)


@pytest.mark.parametrize("length", [255, 256, 257])
def test_the_longest_sequence_sees_its_own_token_in_a_new_chunk(
    target: HFTarget, length: int
) -> None:
    """No other sequence is longer, so nothing else makes the step read the next chunk."""
    ids = prompts((length, 4))
    caches = [target.new_cache(), target.new_cache()]
    for cache, prompt in zip(caches, ids, strict=True):
        target.prefill(cache, torch.tensor(prompt))
    together = LockstepCache(caches, 4)
    for step in range(3):
        rows = target.step_together(together, torch.tensor([9, 8]) + step)
        together.commit(torch.tensor([True, True]))
        for index, cache in enumerate(caches):
            alone = target.verify(cache, torch.tensor([9 - index + step])).logits[0]
            assert torch.equal(rows[index], alone), (step, index)
            target.commit(cache, 1)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.9, top_p=0.9, seed=4)])
@pytest.mark.slow
def test_outputs_end_where_each_would_alone(target: HFTarget, sampling: SamplingParams) -> None:
    """Own seeds and budgets, stop ids, the context limit, and more prompts than a step has rows."""
    many = [*prompts(), *prompts((4, 12, 30, 500, 64, 65, 66, 20, 21))]
    params = [
        DecodeParams(
            40 + index,
            replace(sampling, seed=index),
            stop_ids=frozenset(range(0, 250, 9)) if index % 3 == 0 else frozenset(),
        )
        for index in range(len(many))
    ]
    outputs = decode_plain(target, many, params)
    lengths = set()
    for prompt, one, ids in zip(many, params, outputs, strict=True):
        assert ids == decode(target, None, prompt, one).token_ids
        lengths.add(len(ids) - one.max_new_tokens)
    # one filled the context, one was stopped, one used its budget
    assert len(outputs[12]) == 12
    assert min(lengths) < -28
    assert max(lengths) == 0


def test_a_prompt_that_fills_the_context_is_refused(target: HFTarget) -> None:
    with pytest.raises(ConfigError, match="positions"):
        decode_plain(target, [[5], [5] * 512], [DecodeParams(4)] * 2)
