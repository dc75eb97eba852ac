"""Coupled noise: exact sampling, the same for every width, and filters as transformers has them."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark.decoding.sampling import SamplingParams, filter_logits, gumbel, pick, pick_candidate
from dspark.errors import ConfigError


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(3, torch.arange(300), torch.arange(4000)).double()
    # mean is Euler's constant, variance pi^2 / 6; 1.2M draws leave about 0.0012 of error
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.006)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    # and the tail: P(g > 5) = 1 - exp(-exp(-5))
    assert float((noise > 5).double().mean()) == pytest.approx(6.7153e-3, rel=0.05)


def test_neighbouring_keys_are_uncorrelated() -> None:
    noise = gumbel(3, torch.arange(300), torch.arange(4000))
    other = gumbel(4, torch.arange(300), torch.arange(4000))
    for one, two in (
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise, other),
    ):
        pair = torch.stack([one.flatten(), two.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.005


def test_noise_is_a_function_of_its_three_keys_alone() -> None:
    whole = gumbel(9, torch.arange(50), torch.arange(1000))
    ids = torch.tensor([3, 999, 17])
    assert torch.equal(gumbel(9, torch.tensor([41]), ids)[0], whole[41, ids])
    assert not torch.equal(gumbel(9 + 2**32, torch.arange(50), torch.arange(1000)), whole)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_follow_the_distribution(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -3.0])
    draws = 60_000
    params = SamplingParams(temperature=temperature, seed=11)
    ids = pick(logits.expand(draws, -1), params, torch.arange(draws))
    expected = (logits / temperature).softmax(-1) * draws
    counts = torch.bincount(ids, minlength=6)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1),
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    ],
)
def test_filters_are_those_of_transformers(params: SamplingParams) -> None:
    # equal logits are kept together here and cut by position there: draw some without ties
    logits = torch.stack([torch.linspace(-9, 9, 3000)[torch.randperm(3000)] for _ in range(6)])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    theirs = warpers(torch.zeros(6, 1, dtype=torch.int64), logits.clone())
    ours = filter_logits(logits, params)
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    torch.testing.assert_close(ours[ours.isfinite()], theirs[theirs.isfinite()])


def test_a_flat_distribution_needs_more_than_the_first_thousand_ids() -> None:
    kept = filter_logits(torch.zeros(1, 5000), SamplingParams(temperature=1.0, top_p=0.5))
    assert int(kept.isfinite().sum()) == 5000  # all tie
    logits = torch.linspace(0, 1e-3, 5000)[None]
    kept = filter_logits(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert 2400 < int(kept.isfinite().sum()) < 2600


def test_a_row_is_filtered_alike_whatever_stands_beside_it() -> None:
    """One row needs thousands of ids for its mass, its neighbour one."""
    flat, peaked = (
        torch.linspace(0, 1e-3, 5000),
        torch.zeros(5000).index_fill(0, torch.tensor(7), 50),
    )
    params = SamplingParams(temperature=1.0, top_p=0.5)
    for rows in ((flat, peaked), (peaked, flat)):
        together = filter_logits(torch.stack(rows), params)
        for row, one in zip(rows, together, strict=True):
            assert torch.equal(one, filter_logits(row[None], params)[0])


def test_a_mass_that_is_reached_exactly_needs_no_further_id() -> None:
    # 1/2, 1/4, 1/4 are exact in float32, and so are their sums
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    kept = filter_logits(logits, SamplingParams(temperature=1.0, top_p=0.5))
    assert kept.isfinite().tolist() == [[True, False, False]]


def test_a_mass_too_small_for_float32_keeps_the_most_probable_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    kept = filter_logits(logits, SamplingParams(temperature=1.0, top_p=1e-60))
    assert kept.isfinite().tolist() == [[False, True, False]]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert pick(torch.tensor([[0.0, 2.0, 2.0]]), SamplingParams(), torch.tensor([0])).item() == 1


def test_a_shortlist_that_holds_everything_draws_what_the_target_draws() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=4)
    ids = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    for position, row in enumerate(logits):
        full = pick(row[None], params, torch.tensor([position]))
        assert int(pick_candidate(row[ids], ids, params, position)) == int(full)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-7),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -1.0),
        ("top_k", -2),
    ],
)
def test_a_value_out_of_range_is_named(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=setting):
        SamplingParams(**{setting: value})  # type: ignore[arg-type]


def test_the_smallest_values_leave_the_best_token() -> None:
    logits = torch.tensor([[0.5, 3000.0, -1000.0, 2000.0]])
    for params in (
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1.0, top_p=1e-50),
        SamplingParams(temperature=1e-6, top_p=1e-50, min_p=1e-50),
    ):
        assert pick(logits, params, torch.tensor([5])).tolist() == [1]
