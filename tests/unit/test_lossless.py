"""Losslessness checks: they pass on our loop, and see it when one token or one row is off."""

from dataclasses import replace

import pytest
import torch

from dspark.bench import lossless
from dspark.bench.lossless import (
    Comparison,
    Difference,
    compare,
    compare_modes,
    first_difference,
    rows_are_exact,
    seeded,
)
from dspark.decoding import Completion, DecodeParams, SamplingParams, decode
from dspark.target import RowCache, Rows, Target
from dspark.testing import tiny_draft, tiny_target

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(4, marks=pytest.mark.slow), 8, pytest.param(15, marks=pytest.mark.slow)],
)
def test_greedy_and_sampled_output_is_equal(target: Target, block_size: int) -> None:
    modes = compare_modes(
        target, tiny_draft(target, block_size=block_size), PROMPTS, max_new_tokens=16, seed=3
    )
    assert set(modes) == {"greedy", "sampled"}
    for one in modes.values():
        assert one.equal
        assert one.num_tokens > 0
        assert one.summary()["differences"] == []


def test_a_changed_token_is_found_where_it_stands(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(t: Target, draft: object, prompt: list[int], params: DecodeParams) -> Completion:
        done = decode(t, None, prompt, params)
        if draft is not None and prompt == PROMPTS[1]:
            ids = [*done.token_ids[:4], done.token_ids[4] + 1, *done.token_ids[5:]]
            return replace(done, token_ids=ids)
        return done

    monkeypatch.setattr(lossless, "decode", broken)
    params = DecodeParams(8, SamplingParams(temperature=1.0), ignore_eos=True)
    found = compare(target, tiny_draft(target), PROMPTS, params)
    assert not found.equal
    (one,) = found.differences
    assert (one.prompt, one.position) == (1, 4)
    assert one.with_draft == (one.without or 0) + 1


def test_an_output_that_ends_early_differs_at_its_end() -> None:
    assert first_difference([1, 2], [1, 2, 3], 0) == Difference(0, 2, None, 3)
    assert first_difference([1, 2, 3], [1, 2], 0) == Difference(0, 2, 3, None)
    assert first_difference([4], [5], 7) == Difference(7, 0, 4, 5)
    assert first_difference([1, 2], [1, 2], 0) is None


def test_nothing_compared_is_not_equal() -> None:
    assert not Comparison(0, 0, ()).equal


def test_prompts_do_not_share_their_noise() -> None:
    params = DecodeParams(8, SamplingParams(temperature=1.0, seed=10))
    assert seeded(params, 3).sampling.seed == 13
    assert seeded(params, 3).max_new_tokens == 8


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_a_rows_logits_do_not_depend_on_the_width(dtype: torch.dtype) -> None:
    target = tiny_target()
    target.model.to(dtype)
    ids = torch.randint(0, 250, (45,), generator=torch.Generator().manual_seed(0)).tolist()
    report = rows_are_exact(target, ids, prompt_tokens=5)
    assert report.exact
    assert (report.mismatches, report.largest_gap) == (0, 0.0)
    # more than the tokens: most are seen as rows of several offsets
    assert report.compared > 40


def test_rows_that_depend_on_the_width_are_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = target.verify

    def wide_rows_are_off(cache: object, ids: torch.Tensor) -> Rows:
        rows = honest(cache, ids)  # type: ignore[arg-type]
        return replace(rows, logits=rows.logits + 1e-6 * (len(ids) > 8))

    monkeypatch.setattr(target, "verify", wide_rows_are_off)
    report = rows_are_exact(target, list(range(5, 40)))
    assert not report.exact
    assert 0 < report.largest_gap < 1e-5


def test_a_wrong_rollback_is_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_one_more(cache: object, rows: int) -> None:
        # what a cache does that cannot forget the row behind the kept ones
        cache.commit(rows)  # type: ignore[attr-defined]
        if rows > 1:
            cache.length += 1  # type: ignore[attr-defined]

    monkeypatch.setattr(target, "commit", keeps_one_more)
    assert not rows_are_exact(target, list(range(5, 40))).exact


def test_rows_left_from_a_rejection_are_seen(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that reads the token which the last call, not this one, had put at a position."""
    honest = target.verify
    left: dict[tuple[int, int], int] = {}

    def stale(cache: RowCache, ids: torch.Tensor) -> Rows:
        places = [(id(cache), cache.length + row) for row in range(len(ids))]
        read = [left.get(place, token) for place, token in zip(places, ids.tolist(), strict=True)]
        left.update(zip(places, ids.tolist(), strict=True))
        return honest(cache, torch.tensor(read))

    monkeypatch.setattr(target, "verify", stale)
    assert not rows_are_exact(target, list(range(5, 40))).exact
