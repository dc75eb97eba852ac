"""8-bit features: a scale for every state, and a decoder that does what the plain formula says."""

from itertools import pairwise

import pytest
import torch

from dspark.corpus.dataset import Row, collate
from dspark.corpus.storage import STORAGE, decode_into, decoded, encode, row_bytes
from dspark.target import Features

HIDDEN, TAPS, TOKENS = 48, 3, 29


def features(seed: int = 0, tokens: int = TOKENS) -> Features:
    """States of very different sizes, one of them zero throughout."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, TAPS + 1, HIDDEN, generator=generator)
    states *= 10.0 ** torch.randint(-6, 5, (tokens, TAPS + 1, 1), generator=generator)
    states[3, 1] = 0
    states[4, 2, 7] = 1e6  # one number far above the others
    return Features(states[:, :TAPS].flatten(1), states[:, TAPS])


def every_byte() -> torch.Tensor:  # [256] without the two NaN
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return values[~values.float().isnan()]


def test_the_largest_number_of_every_state_is_kept_and_others_within_a_sixteenth() -> None:
    found = features()
    stored = encode(found, "float8_e4m3fn_all")
    assert stored.tap_scales is not None
    assert stored.tap_scales.shape == (TOKENS, TAPS)
    peaks = stored.taps.float().abs().view(TOKENS, TAPS, HIDDEN).amax(-1)
    filled = found.taps.view(TOKENS, TAPS, HIDDEN).abs().amax(-1) > 0
    assert (peaks[filled] == 448).all()
    assert (peaks[~filled] == 0).all()
    back = decoded(stored.taps, stored.tap_scales).float().view(TOKENS, TAPS, HIDDEN)
    given = found.taps.view(TOKENS, TAPS, HIDDEN)
    # below 448 / 2^15 the format has steps of 2^-9 instead of a fixed number of bits
    least = given.abs().amax(-1, keepdim=True) / 448 * 2**-9
    assert ((back - given).abs() <= torch.maximum(given.abs() / 14, least)).all()


@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 3e-5, 127.0, 129.0, 4.3e4, 2.0**110])
def test_the_fast_decoder_is_the_plain_formula(scale: float) -> None:
    values = every_byte().repeat(9, 1)  # [9, 254]
    scales = torch.tensor([[scale, 1.0]] * 9).bfloat16()
    scales[4] = torch.tensor([0.37, 11.0])
    out = torch.full(values.shape, -1.0, dtype=torch.bfloat16)
    decode_into(out, values, scales)
    plain = values.float().view(9, 2, -1) * scales.float()[..., None]
    assert torch.equal(out, plain.flatten(1).bfloat16())
    # and what other devices do
    wide = values.bfloat16().view(9, 2, -1).mul_(scales[..., None])
    assert torch.equal(out, wide.flatten(1))


def test_a_number_that_is_not_finite_stays_so() -> None:
    for value in (torch.nan, torch.inf):
        found = features()
        found.taps[5, 50] = value
        stored = encode(found, "float8_e4m3fn")
        back = decoded(stored.taps, stored.tap_scales)
        assert not back[5].isfinite().all()
        assert back[:5].isfinite().all()


@pytest.mark.parametrize("dtype", STORAGE)
def test_the_size_formula_counts_every_tensor(dtype: str) -> None:
    stored = encode(features(), dtype)
    held = sum(one.nbytes for one in stored.tensors().values()) + TOKENS * 5
    assert row_bytes(TOKENS, HIDDEN, TAPS, dtype) == held


def test_eight_bits_take_half_of_sixteen() -> None:
    sizes = [row_bytes(1, 2560, 5, name) for name in STORAGE]
    assert sizes == [61_445, 30_725, 17_935, 15_377]
    assert all(mine > theirs for mine, theirs in pairwise(sizes))


def test_rows_in_a_batch_are_those_that_were_encoded() -> None:
    rows, expected = [], []
    for number, tokens in enumerate((7, 12, 1)):
        stored = encode(features(number, max(5, tokens)), "float8_e4m3fn_all")
        part = {name: one[:tokens] for name, one in stored.tensors().items()}
        ids = torch.arange(tokens)
        rows.append(Row(str(number), ids, ids > 2, **part))  # type: ignore[arg-type]
        expected.append(decoded(part["taps"], part["tap_scales"]))
    batch = collate(rows, 16)
    assert batch.taps is not None
    assert batch.taps.shape == (3, 16, TAPS * HIDDEN)
    assert batch.taps.dtype == torch.float8_e4m3fn
    assert batch.last_scales is not None
    assert batch.last_scales.shape == (3, 16, 1)
    for place, taps in zip(decoded(batch.taps, batch.tap_scales), expected, strict=True):
        assert torch.equal(place[: len(taps)], taps)
        assert not place[len(taps) :].any()
