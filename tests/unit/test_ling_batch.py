"""The in-process sampler on a Ling-3.0 target: a batch decodes what each prompt decodes alone."""

from typing import Any

import pytest
import torch

from dspark.corpus.generate import generate
from dspark.corpus.ling_batch import LingBatch
from dspark.decoding import DecodeParams, decode
from dspark.testing import tiny_ling


class Greedy:
    """Stands for a `Draw` at temperature 0."""

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        return logits.argmax(-1)

    def keep(self, rows: list[int]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("flash", marks=pytest.mark.slow), "tiny"])
@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_rows_of_a_batch_equal_each_alone(variant: str, count: int) -> None:
    """Few rows, and more than a step has."""
    target = tiny_ling(variant)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 90, (count,), generator=generator).tolist()
    prompts = [torch.randint(4, 512, (n,), generator=generator).tolist() for n in lengths]
    limits = [40 if index % 3 else 15 for index in range(count)]
    got: dict[int, list[int]] = {}
    draw: Any = Greedy()
    for finished in generate(target, prompts, limits, draw):
        got.update(finished)
    assert len(got) == count
    for index, prompt in enumerate(prompts):
        alone = decode(target, None, prompt, DecodeParams(limits[index]))
        assert got[index] == alone.token_ids, index


def test_padding_leaves_state_and_convolutions_empty() -> None:
    target = tiny_ling()
    batch = LingBatch(target, [[5], [7] * 30])
    batch.prefill()
    alone = target.new_cache()
    target.prefill(alone, torch.tensor([5]))
    for layer, state in batch._cache.kda.items():
        torch.testing.assert_close(state.state[:1], alone.kda[layer].state, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state.tail[:1], alone.kda[layer].tail, atol=1e-5, rtol=1e-4)
