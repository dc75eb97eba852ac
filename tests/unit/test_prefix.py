"""Prompts that begin like an earlier one: the same output to the bit, and fewer positions read."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.decoding import (
    Commit,
    DecodeParams,
    PrefixCache,
    ReferenceStep,
    SamplingParams,
    nextn_draft,
    stream,
)
from dspark.kernels.accept import Field
from dspark.serving.graph.step import GraphStep
from dspark.target import HFTarget, LingTarget, Target, base
from dspark.testing import tiny_draft, tiny_ling, tiny_target

SIZE = 32
"""Tokens of a piece here."""
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", SIZE)


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


class Counted:
    """Counts the positions that a target reads in prefills."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        self.fail_at: int | None = None
        extend = target._extend

        def counting(cache: Any, input_ids: Tensor, count: int | None) -> Any:
            if count is None:
                if cache.length == self.fail_at:
                    raise RuntimeError("in the middle of a prompt")
                self.read += len(input_ids)
            return extend(cache, input_ids, count)

        monkeypatch.setattr(target, "_extend", counting)


def facts(commits: Iterator[Commit]) -> list[Commit]:
    """All but the times, and what was reused."""
    return [replace(one, step_s=0.0, num_reused=0) for one in commits]


def conversation(rng: random.Random, system: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts, and what to append each answer to: histories grow, are edited, or begin anew."""
    history: list[int] = []
    while True:
        if not history or len(history) > 300:
            history = system[: rng.choice([len(system), 20, 40])]
        elif rng.random() < 0.3:
            # somebody edits an earlier turn, and goes on from there
            del history[rng.randrange(1, len(history)) :]
            history[-1] = rng.randrange(3, 250)
        history += [rng.randrange(3, 250) for _ in range(rng.choice([1, 7, SIZE, 50, 70]))]
        yield list(history), history


def reusable(prompt: list[int], earlier: list[list[int]]) -> int:
    """Tokens that an unbounded cache spares: whole pieces that an earlier prompt began with."""
    best = 0
    for one in earlier:
        same = next((i for i, (a, b) in enumerate(zip(prompt, one, strict=False)) if a != b), None)
        same = min(len(prompt), len(one)) if same is None else same
        best = max(best, min(same // SIZE, (len(prompt) - 1) // SIZE) * SIZE)
    return best


@pytest.mark.parametrize("family", [tiny_target, tiny_ling])
def test_conversations_give_the_same_with_and_without(
    family: Callable[[], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prefixes = family(), PrefixCache(1 << 30)
    draft, counted = tiny_draft(target), Counted(target, monkeypatch)
    rng = random.Random(5)
    system, earlier = ids(45), {True: list[list[int]](), False: list[list[int]]()}
    reused = 0
    for turn, (prompt, history) in enumerate(conversation(rng, system)):
        drafted = rng.random() < 0.7
        params = DecodeParams(
            rng.choice([1, 6]),
            rng.choice([SamplingParams(), SAMPLED]),
            ignore_eos=True,
            top_logprobs=2,
            num_draft_tokens=None if drafted else 0,
        )
        cold = facts(stream(target, draft, prompt, params))
        counted.read = 0
        warm = list(stream(target, draft, prompt, params, prefixes))
        assert facts(iter(warm)) == cold
        spared = reusable(prompt, earlier[drafted])
        assert counted.read == len(prompt) - spared
        assert [one.num_reused for one in warm] == [spared] + [0] * (len(warm) - 1)
        earlier[drafted].append(prompt)
        history += [token for one in cold for token in one.token_ids]
        reused += spared > 0
        if turn == 14:
            break
    assert 5 < reused < 15


@pytest.mark.parametrize("family", [tiny_target, tiny_ling])
def test_the_state_behind_a_prompt_is_that_of_one_read_whole(
    family: Callable[[], Target],
) -> None:
    target, prefixes = family(), PrefixCache(1 << 30)
    draft, prompt = tiny_draft(target), ids(150)

    def begun(prompt: list[int], cache: PrefixCache | None) -> ReferenceStep:
        step = ReferenceStep(target, draft, SamplingParams(), prefixes=cache)
        step.prefill(torch.tensor(prompt))
        return step

    before = begun(prompt[:100], prefixes)
    # what is kept must not change when its request goes on
    for _ in range(3):
        before.step()
    warm, cold = begun(prompt, prefixes), begun(prompt, None)
    assert warm.num_reused == 96
    pairs: list[tuple[Any, Any]] = [(warm._cache, cold._cache), (warm._proposer, cold._proposer)]
    for one, other in pairs:
        for layer, tensors in other.written(0).items():
            for got, expected in zip(one.written(0)[layer], tensors, strict=True):
                assert torch.equal(got, expected), layer
    assert torch.equal(warm.propose(4), cold.propose(4))
    # and a reader does not change it either
    for _ in range(3):
        warm.step()
    again = begun(prompt, prefixes)
    assert again.num_reused == 128
    for layer, tensors in cold._cache.written(0).items():
        for got, expected in zip(again._cache.written(0)[layer], tensors, strict=True):
            assert torch.equal(got, expected), layer


def first(target: Target, prompt: list[int], prefixes: PrefixCache) -> Commit:
    return next(stream(target, None, prompt, DecodeParams(4, ignore_eos=True), prefixes))


def test_a_prompt_of_whole_pieces_reads_its_last_one_again() -> None:
    target, prefixes, prompt = tiny_target(), PrefixCache(1 << 30), ids(2 * SIZE)
    commits = [first(target, prompt, prefixes) for _ in range(2)]
    assert [one.num_reused for one in commits] == [0, SIZE]
    assert commits[0].token_ids == commits[1].token_ids
    assert first(target, [*prompt, 5], prefixes).num_reused == 2 * SIZE


def test_a_prompt_that_breaks_off_leaves_whole_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prefixes, prompt = tiny_ling(), PrefixCache(1 << 30), ids(120)
    counted = Counted(target, monkeypatch)
    expected = next(stream(target, None, prompt, DecodeParams(4, ignore_eos=True))).token_ids
    counted.fail_at = 64
    with pytest.raises(RuntimeError, match="in the middle"):
        first(target, prompt, prefixes)
    counted.fail_at = None
    commit = first(target, prompt, prefixes)
    assert (commit.num_reused, commit.token_ids) == (64, expected)


@pytest.mark.parametrize("kind", ["plain", "draft", "nextn"])
def test_a_prompt_that_nobody_wants_is_read_no_further(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prefixes, prompt = tiny_ling(nextn=True), PrefixCache(1 << 30), ids(120)
    draft: Any = {"plain": None, "draft": tiny_draft(target), "nextn": nextn_draft(target, 2)}[kind]
    params, counted = DecodeParams(4, ignore_eos=True), Counted(target, monkeypatch)
    expected = facts(stream(target, draft, prompt, params))
    counted.read, answers = 0, iter([True, False])
    broken_off = stream(target, draft, prompt, params, prefixes, lambda: next(answers))
    assert list(broken_off) == []
    assert counted.read == 2 * SIZE
    again = list(stream(target, draft, prompt, params, prefixes, lambda: True))
    assert again[0].num_reused == (0 if kind == "nextn" else 2 * SIZE)
    assert facts(iter(again)) == expected


def test_the_oldest_make_room_and_none_that_another_needs() -> None:
    target = tiny_target()
    probe = PrefixCache(1 << 30)
    first(target, ids(SIZE + 1), probe)
    piece = probe.held_bytes
    layers, groups, size = target.num_layers, 2, target.config.head_dim
    assert piece == 2 * layers * groups * size * SIZE * 4
    prefixes = PrefixCache(4 * piece + piece // 2)
    one, two, three = (ids(2 * SIZE + 1, seed) for seed in range(3))
    for prompt in (one, two, one):
        first(target, prompt, prefixes)
    assert prefixes.held_bytes == 4 * piece
    assert first(target, three, prefixes).num_reused == 0  # drops the second
    assert prefixes.held_bytes == 4 * piece
    assert first(target, one, prefixes).num_reused == 2 * SIZE
    # half of a conversation goes from its end
    first(target, three, prefixes)
    assert first(target, ids(SIZE + 1, 3), prefixes).num_reused == 0
    assert first(target, one, prefixes).num_reused == SIZE
    # of what is larger than all, the beginning stays
    long = ids(8 * SIZE, 4)
    assert first(target, long, prefixes).num_reused == 0
    assert first(target, long, prefixes).num_reused == 4 * SIZE
    assert prefixes.held_bytes <= prefixes.most_bytes
    prefixes.clear()
    assert prefixes.held_bytes == 0
    assert first(target, long, prefixes).num_reused == 0
    small = PrefixCache(piece - 1)
    first(target, long, small)
    assert (small.held_bytes, first(target, long, small).num_reused) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dense", [False, True])
def test_the_graph_engines_caches_are_those_of_a_prompt_read_whole(
    dense: bool, dtype: torch.dtype
) -> None:
    """Only what `begin` does, which launches no kernel."""
    target: HFTarget | LingTarget = tiny_ling(dtype=dtype)
    if dense:
        target = tiny_target()
        target.model.to(dtype)
    draft, prompt = tiny_draft(target).to(dtype), ids(150)
    params = DecodeParams(4, SAMPLED, ignore_eos=True)
    warm, cold = (
        GraphStep(target, draft, context=200, prefixes=cache)
        for cache in (PrefixCache(1 << 30), None)
    )
    warm.begin(prompt[:100], params)
    for one in warm.caches.tensors():
        one[:] = 7  # as another request would leave them
    warm.begin([*prompt[:70], 1, *prompt[71:130]], params)
    assert warm.num_reused == 64
    assert warm.begin(prompt, params) == cold.begin(prompt, params)
    assert (warm.num_reused, cold.num_reused) == (96, 0)
    assert int(warm.arena.of(Field.CURSOR)) == int(cold.arena.of(Field.CURSOR)) == 150
    for index, slots in cold.caches.kda.items():
        assert torch.equal(warm.caches.kda[index].states[0], slots.states[0])
        assert torch.equal(warm.caches.kda[index].inputs[0, :3], slots.inputs[0, :3])
    for index, latent in cold.caches.latents.items():
        assert torch.equal(warm.caches.latents[index][:150], latent[:150])
    assert bool(cold.caches.pairs) == dense
    for index, pair in cold.caches.pairs.items():
        for mine, whole in zip(warm.caches.pairs[index], pair, strict=True):
            assert torch.equal(mine[:, :150], whole[:, :150])
    for got, expected in ((warm.caches.keys, cold.caches.keys),
                          (warm.caches.values, cold.caches.values)):  # fmt: skip
        assert got is not None
        assert expected is not None
        assert torch.equal(got[:, :, :150], expected[:, :, :150])
