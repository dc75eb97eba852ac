"""Filters as a threshold: the ids that `filter_logits` leaves, and no others."""

import pytest
import torch

from dspark.decoding.sampling import SamplingParams, filter_logits
from dspark.kernels.accept import Field, Real
from dspark.kernels.filter_floor import FilterScratch, filter_floor

ROWS = 6
"""Live rows: each costs the interpreter seconds, and so does each case."""


def floors(logits: torch.Tensor, params: SamplingParams, rows: int = ROWS) -> torch.Tensor:
    device = logits.device
    ints = torch.zeros(int(Field.STOPS) + 8, dtype=torch.int32, device=device)
    reals = torch.zeros(len(Real), device=device)
    ints[Field.LIVE_ROWS], ints[Field.TOP_K] = rows, params.top_k
    reals[Real.TEMPERATURE], reals[Real.TOP_P] = params.temperature, params.top_p
    reals[Real.MIN_P] = params.min_p
    out = torch.full((16,), torch.nan, device=device)
    filter_floor(logits, ints, reals, FilterScratch(device, 2), out)
    return out


CASES = [
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.999, min_p=0.05),
    SamplingParams(temperature=0.6, min_p=0.2),
    SamplingParams(temperature=2.0, top_k=100000),
]


@pytest.mark.slow
@pytest.mark.parametrize("params", CASES if torch.cuda.is_available() else CASES[1:4:2], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2] if torch.cuda.is_available() else [0])
def test_what_stays_is_what_the_filters_leave(
    params: SamplingParams, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(16, 333, generator=generator) * 3).to(device)
    logits[3] -= 200.0  # keys of negative numbers
    logits[4] *= 0.01
    logits[5] = logits[5].round()  # ties
    expected = filter_logits(logits, params).isfinite()
    found = logits / params.temperature >= floors(logits, params)[:, None]
    assert torch.equal(found[:ROWS], expected[:ROWS])


def test_greedy_rows_and_dead_rows(device: torch.device) -> None:
    logits = torch.randn(16, 333, generator=torch.Generator().manual_seed(0)).to(device)
    logits[3:] = torch.nan
    out = floors(logits, SamplingParams(temperature=1.0, top_k=4), rows=3)
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()
    assert floors(logits, SamplingParams(top_k=4), rows=3)[:3].eq(-torch.inf).all()


def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    logits = torch.randn(16, 333, generator=torch.Generator().manual_seed(1)).to(device)
    params = SamplingParams(temperature=0.9, top_k=30, top_p=0.8)
    whole = floors(logits, params)
    logits[:2] = torch.nan
    assert torch.equal(floors(logits, params, rows=4)[2:4], whole[2:4])


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="filter_floor wants"):
        floors(torch.zeros(8, 20, device=device), SamplingParams(temperature=1.0))
