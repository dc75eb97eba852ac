"""What a serving benchmark sends, above all SGLang's `random` workload."""

import random

import numpy as np
import pytest

from dspark.bench.workloads import RandomLengths, chat, random_prompts, texts
from dspark.errors import ConfigError
from dspark.testing import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]


def as_sglang(full: int, ratio: float, count: int) -> list[int]:
    """Its `compute_random_lens`, on numpy's global generator."""
    drawn: list[int] = np.random.randint(max(int(full * ratio), 1), full + 1, size=count).tolist()
    return drawn


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_random_lengths_are_sglangs_for_the_same_seed(ratio: float) -> None:
    np.random.seed(7)
    expected = as_sglang(100, ratio, 60), as_sglang(4, ratio, 60)
    lengths = RandomLengths(input_len=100, output_len=4, range_ratio=ratio)
    assert lengths.draw(60, 7) == expected
    assert min(expected[0]) >= 100 * ratio


def test_random_prompts_are_first_turns_tiled_or_cut_to_the_id() -> None:
    every = ["abc", "a longer text that is cut", "xy"]
    lengths = RandomLengths(input_len=8, output_len=5, range_ratio=1.0)
    load = random_prompts([asked(one) for one in every], TOKENIZER, lengths, seed=3)
    shuffled = list(every)
    random.Random(3).shuffle(shuffled)
    assert [TOKENIZER.decode(ids) for ids in load.prompts] == [(one * 8)[:8] for one in shuffled]
    assert load.max_tokens == [5, 5, 5]
    assert load.ignore_eos


def test_a_text_comes_back_one_id_further_on() -> None:
    lengths = RandomLengths(input_len=7, output_len=1, range_ratio=1.0)
    load = random_prompts([asked("abc"), asked("")], TOKENIZER, lengths, count=4)
    shown = [TOKENIZER.decode(ids) for ids in load.prompts]
    assert shown == ["abcabca", "bcabcab", "cabcabc", "abcabca"]


def test_random_needs_a_token_to_repeat() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        random_prompts([asked("")], TOKENIZER, RandomLengths())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": 0}, "--random-input-len must be >= 1, got 0"),
        ({"output_len": -1}, "--random-output-len must be >= 1, got -1"),
        ({"range_ratio": 1.5}, "--random-range-ratio must lie in 0..1, got 1.5"),
        ({"range_ratio": float("nan")}, "--random-range-ratio must lie in 0..1, got nan"),
    ],
)
def test_lengths_are_checked(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RandomLengths(**options)  # type: ignore[arg-type]


def test_prompts_go_with_the_template_or_as_they_are() -> None:
    load = chat([asked("one")], 9)
    assert load.prompts == [asked("one")]
    assert not load.ignore_eos
    assert texts([asked("one")], 9, ends=False).prompts == ["be brief\n\none"]
    assert texts([asked("one")], 9, ends=False).ignore_eos
