"""The captured step of dense decoders: the target's own output, whatever is proposed.

On a GPU long outputs through the graph, in bfloat16; on a CPU a few steps of the same launches
through the interpreter.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dspark.decoding import DecodeParams, SamplingParams, decode
from dspark.errors import ConfigError
from dspark.kernels.accept import Field
from dspark.serving.graph.draft_body import DraftBody
from dspark.serving.graph.step import GraphStep
from dspark.serving.graph.tuning import Tuning
from dspark.target import HFTarget
from dspark.testing import tiny_draft, tiny_target
from tests.kernels.oracle import Oracle, outputs

GREEDY = DecodeParams(max_new_tokens=256, ignore_eos=True)
SAMPLED = replace(GREEDY, sampling=SamplingParams(temperature=0.8, seed=(5 << 33) + 3))
FILTERED = replace(
    GREEDY, sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=11)
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3"])


def dense(device: torch.device, family: str, **keys: Any) -> HFTarget:
    target = tiny_target(family=family, **keys)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # the frequencies stay in float32, as a loader leaves them
    inverse = target.decoder.rotary_emb.inv_freq.clone()
    target.model.to(device, dtype)
    target.decoder.rotary_emb.inv_freq = inverse.to(device)
    return target


def small(target: HFTarget, draft: Any = None, context: int = 512, **options: Any) -> GraphStep:
    tuning = Tuning()
    if target.device.type == "cpu":
        tuning = Tuning(gqa_lanes=2, gqa_chunk=32, draft_lanes=2)
    return GraphStep(target, draft, context=context, tuning=tuning, **options)


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 250, (length,), generator=generator).tolist()
    return ids


@FAMILIES
def test_a_few_steps_are_those_of_the_reference(family: str, device: torch.device) -> None:
    """One proposal of the first step is wrong, and its keys and values are written over."""
    target = dense(device, family, tie_word_embeddings=family == "llama", num_hidden_layers=2)
    params = replace(GREEDY, max_new_tokens=8)
    ids = prompt(0, 29)
    expected = decode(target, None, ids, params).token_ids
    step = small(target, context=64)
    oracle = Oracle(step, 3)
    oracle.tell([*ids, *expected[:3], expected[3] ^ 1, *expected[4:], 0, 0, 0, 0])
    found, kept = outputs(step, ids, params)
    assert found == expected
    assert kept == [2, 3]


@FAMILIES
def test_logits_and_taps_are_those_of_the_reference(family: str, device: torch.device) -> None:
    target = dense(device, family, num_hidden_layers=5)
    draft = tiny_draft(target, num_taps=2).to(device, target.dtype)
    step = small(target, draft, context=64)
    ids = prompt(1, 21)
    first = step.begin(ids, GREEDY)
    cache = target.new_cache(draft.layer_ids)
    prefix = target.prefill(cache, torch.tensor(ids))
    context = draft.new_context()
    draft.extend(context, prefix.taps)
    close = 1e-4 if device.type == "cpu" else 5e-2
    assert step.caches.keys is not None
    assert step.caches.values is not None
    for layer in range(len(draft.layers)):
        mine = step.caches.keys[layer, :, :21], step.caches.values[layer, :, :21]
        for held, wanted in zip(mine, context.read(layer), strict=True):
            # of all together: a single number in bfloat16 may be small, and its error is not
            assert (held - wanted[0]).norm() <= 0.4 * close * wanted[0].norm()
    Oracle(step, 2).tell([*ids, first, 7, 9])
    step.launch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    rows = target.verify(cache, torch.tensor([first, 7, 9]))
    found = step.arena.parts("logits", 1, target.vocab_size)[0, :3]
    torch.testing.assert_close(found, rows.logits.float(), rtol=close, atol=20 * close)
    torch.testing.assert_close(step.arena.taps[:3], rows.taps, rtol=close, atol=20 * close)


def test_a_draft_with_yarn_sees_what_its_own_loop_does(device: torch.device) -> None:
    """Its rotation has a factor: in the prompt's keys, the committed rows' and the block's."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    rope = {**yarn, "rope_theta": 1e4, "attention_factor": 3.0}
    target = dense(device, "qwen3", num_hidden_layers=5, rope_parameters=rope)
    draft = tiny_draft(target, num_taps=2).to(device, target.dtype)
    step = small(target, draft, context=64)
    ids = prompt(1, 21)
    first = step.begin(ids, GREEDY)
    context, cache = draft.new_context(), target.new_cache(draft.layer_ids)
    taps = target.prefill(cache, torch.tensor(ids)).taps
    step.arena.taps[:2] = target.verify(cache, torch.tensor([first, 7])).taps
    draft.extend(context, torch.cat([taps, step.arena.taps[:2]]))
    for field, value in {
        Field.INJECT_BASE: 21, Field.INJECT_COUNT: 2, Field.CURSOR: 23, Field.ANCHOR: 9,
    }.items():  # fmt: skip
        step.arena.of(field).fill_(value)
    body = step._draft_body
    assert isinstance(body, DraftBody)
    body.inject()
    body.block()
    expected = draft.block_hidden(context, torch.tensor(9, device=device))
    close = 1e-4 if device.type == "cpu" else 5e-2
    found = step.arena.normed[: draft.block_size]
    assert (found - expected).norm() <= close * expected.norm()


def test_a_rows_logits_are_the_same_in_every_width(device: torch.device) -> None:
    target = dense(device, "qwen3", num_hidden_layers=1)
    step = small(target, context=128)
    oracle = Oracle(step, 15)
    ids = prompt(0, 27)
    oracle.tell([*ids, 5, *prompt(10, 40)])
    logits = []
    for rows in range(16, 0, -1) if device.type == "cuda" else (16, 6, 1):
        step.begin(ids, replace(GREEDY, num_draft_tokens=rows - 1))
        step.launch()
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert int(step.arena.of(Field.LIVE_ROWS)) == rows
        logits.append(step.arena.parts("logits", 1, target.vocab_size)[0, :rows].clone())
    assert logits[0].isfinite().all()
    for narrow in logits[1:]:
        assert torch.equal(narrow, logits[0][: len(narrow)])


@pytest.mark.gpu
@needs_gpu
@FAMILIES
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "seeded", "filters"])
def test_proposals_never_change_the_output(family: str, params: DecodeParams) -> None:
    target = dense(torch.device("cuda"), family)
    plain, step = small(target), small(target)
    oracle = Oracle(step, 15)
    widths = set()
    for seed in range(32):
        ids = prompt(seed, 3 + 7 * seed)
        expected, _ = outputs(plain, ids, params)
        assert len(expected) == 256
        oracle.tell(ids + expected + [0] * 32, wrong=(seed % 8) / 10)
        found, kept = outputs(step, ids, replace(params, num_draft_tokens=1 + seed % 15))
        assert found == expected, seed
        widths.update(kept)
    assert widths >= set(range(9))


@pytest.mark.gpu
@needs_gpu
@FAMILIES
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "seeded", "filters"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_a_real_draft_never_changes_the_output(
    family: str, params: DecodeParams, threshold: float
) -> None:
    target = dense(torch.device("cuda"), family)
    draft = tiny_draft(target, block_size=7).to("cuda", torch.bfloat16)
    draft.attach(target.embed_weight, target.head_weight)
    plain, step = small(target), small(target, draft)
    for seed in range(8):
        ids = prompt(seed, 5 + 11 * seed)
        expected, _ = outputs(plain, ids, params)
        found, _ = outputs(step, ids, replace(params, confidence_threshold=threshold))
        assert found == expected, seed


def test_what_the_kernels_cannot_run_is_refused(device: torch.device) -> None:
    target = dense(device, "llama")
    with pytest.raises(ConfigError, match="nextn is 2, but the model has no NEXTN block"):
        GraphStep(target, None, context=64, nextn=2)
    target.config.model_type = "gpt2"
    with pytest.raises(
        ConfigError, match=r"kernels for Ling-3\.0, Llama, Qwen3, and the target is"
    ):
        GraphStep(target, None, context=64)
