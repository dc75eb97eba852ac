"""Prompts that begin alike, on a GPU: what an earlier one left gives the same output to the bit."""

from dataclasses import replace

import pytest
import torch

from dspark.decoding import DecodeParams, PrefixCache, SamplingParams
from dspark.serving.graph.decoder import GraphDecoder
from dspark.serving.graph.step import GraphStep
from dspark.target import base
from dspark.testing import tiny_draft, tiny_ling, tiny_target

GREEDY = DecodeParams(max_new_tokens=64, ignore_eos=True)
SAMPLED = replace(GREEDY, sampling=SamplingParams(temperature=0.9, top_p=0.9, seed=3))


def outputs(step: GraphStep, ids: list[int], params: DecodeParams) -> list[int]:
    return [one for c in GraphDecoder(step).stream(ids, params) for one in c.token_ids]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["ling", "llama", "qwen3"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_a_prompt_that_begins_alike_gives_the_same_output(
    monkeypatch: pytest.MonkeyPatch, family: str, params: DecodeParams
) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cuda", 64)
    target = tiny_ling(dtype=torch.bfloat16) if family == "ling" else tiny_target(family=family)
    target.model.to("cuda", torch.bfloat16)
    draft = tiny_draft(target, block_size=7).to("cuda", torch.bfloat16)
    draft.attach(target.embed_weight, target.head_weight)
    warm, cold = (
        GraphStep(target, draft, context=512, prefixes=cache)
        for cache in (PrefixCache(1 << 28), None)
    )
    history: list[int] = torch.randint(4, 250, (30,)).tolist()
    reused = []
    for turn in range(5):
        found = outputs(warm, history, params)
        assert found == outputs(cold, history, params), turn
        reused.append(warm.num_reused)
        history = [*history, *found[:40], 5 + turn]
    assert reused[0] == 0
    assert reused[-1] == (len(history) - 41 - 41 - 1) // 64 * 64 > 0
