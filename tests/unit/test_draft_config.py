"""Shape of a draft from a target, and what is refused."""

import pytest

from dspark.config import DraftSettings
from dspark.draft.config import (
    DSparkConfig,
    check_mask_token,
    config_for_target,
    default_layer_ids,
)
from dspark.errors import ConfigError
from dspark.testing import tiny_target


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (30, 5, (1, 8, 14, 20, 27)),
        (6, 1, (3,)),
    ],
)
def test_default_taps_are_the_published_ones(layers: int, taps: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers, taps) == ids


def test_too_many_taps_for_a_shallow_target_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_taps 4 .* 6 layers; .* at most 3 taps"):
        default_layer_ids(6, 4)
    with pytest.raises(ConfigError, match="at most 3 taps"):  # told at once
        default_layer_ids(6, 10**20)


def test_geometry_follows_the_target() -> None:
    target = tiny_target()
    config = config_for_target(
        target.config, DraftSettings(num_layers=2, num_taps=3), mask_token_id=7
    )
    assert config.num_key_value_heads == 2
    assert config.head_dim == 16
    assert config.max_position_embeddings == target.max_position_embeddings
    assert config.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings is False


def test_the_targets_last_layer_is_no_tap() -> None:
    settings = DraftSettings(target_layer_ids=(1, 5))
    with pytest.raises(ConfigError, match="last layer 5"):
        config_for_target(tiny_target().config, settings, mask_token_id=7)


@pytest.mark.parametrize(
    ("mask", "word"), [(300, "outside"), (1, "pad"), (2, "end id"), (5, "occurs")]
)
def test_a_mask_id_with_another_meaning_is_refused_with_its_number(mask: int, word: str) -> None:
    with pytest.raises(ConfigError, match=rf"mask_token_id {mask}\b.*{word}"):
        check_mask_token(mask, vocab_size=260, pad_id=1, eos_ids=[2], used={5})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": 1000}, "mask_token_id"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 6]}, "target_layer_ids"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
    ],
)
def test_a_config_is_checked_on_construction(change: dict[str, object], word: str) -> None:
    good = {
        "vocab_size": 260,
        "block_size": 4,
        "mask_token_id": 7,
        "target_layer_ids": [1, 3],
        "num_target_layers": 6,
    }
    DSparkConfig(**good)
    with pytest.raises(ConfigError, match=word):
        DSparkConfig(**{**good, **change})
