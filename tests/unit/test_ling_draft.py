"""The official draft of Ling-3.0-flash as it may come: names, places of keys, tables or none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.bench.inspect import inspect
from dspark.decoding import DecodeParams, decode
from dspark.errors import CheckpointError
from dspark.export.load import load_draft
from dspark.target import LingTarget
from dspark.testing import tiny_draft, tiny_ling

ROOT = Path(__file__).parents[2]
PROMPT = list(range(10, 30))
DRAFT_KEYS = (
    "block_size",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)


@pytest.fixture(scope="module")
def target() -> LingTarget:
    return tiny_ling()


def official(directory: Path, target: LingTarget, **keys: Any) -> Path:
    """A draft in the official layout: mask id = pad, no keys but those that were published."""
    draft = tiny_draft(target, mask_token_id=target.config.pad_token_id)
    held = {name: p.detach().bfloat16().contiguous() for name, p in draft.trainable()}
    directory.mkdir()
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((ROOT / "configs/drafts/ling-3.0-flash-dspark.json").read_text())
    own = draft.config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", *DRAFT_KEYS,
        "rope_parameters", "layer_types", "pad_token_id", "eos_token_id",
    )  # fmt: skip
    raw |= {name: getattr(own, name) for name in names}
    (directory / "config.json").write_text(json.dumps({**raw, **keys}))
    return directory


def test_it_has_the_published_number_of_parameters() -> None:
    report = inspect(ROOT / "configs/drafts/ling-3.0-flash-dspark.json")
    assert report["parameters"] == 1_363_707_905
    assert report["own_parameters"] == 558_925_825


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param("dflash_config", marks=pytest.mark.slow),
        "dspark_config",
    ],
)
@pytest.mark.parametrize("prefix", [pytest.param("", marks=pytest.mark.slow), "model."])
@pytest.mark.parametrize("tables", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_published_form_loads_to_the_same(
    tmp_path: Path, target: LingTarget, block: str | None, prefix: str, tables: bool
) -> None:
    plain = load_draft(official(tmp_path / "plain", target), target=target)
    directory = official(tmp_path / "other", target)
    held = load_file(directory / "model.safetensors")
    if tables:
        held["embed_tokens.weight"] = target.embed_weight.bfloat16().clone()
        held["lm_head.weight"] = target.head_weight.bfloat16().clone()
    held = {prefix * (not name.startswith("lm_head")) + name: x for name, x in held.items()}
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    if block is not None:
        raw = json.loads((directory / "config.json").read_text())
        nested = {key: raw.pop(key) for key in DRAFT_KEYS}
        (directory / "config.json").write_text(json.dumps({**raw, block: nested}))
    other = load_draft(directory, target=target)
    ours, theirs = dict(plain.trainable()), dict(other.trainable())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    params = DecodeParams(20, ignore_eos=True)
    assert (
        decode(target, other, PROMPT, params).token_ids
        == decode(target, None, PROMPT, params).token_ids
    )


def test_the_number_of_target_layers_may_be_left_out(tmp_path: Path, target: LingTarget) -> None:
    directory = official(tmp_path / "draft", target, num_target_layers=None)
    assert load_draft(directory, target=target).config.num_target_layers == 7
    with pytest.raises(CheckpointError, match="num_target_layers is 9 but"):
        load_draft(official(tmp_path / "wrong", target, num_target_layers=9), target=target)


def test_a_partial_rotary_factor_copied_from_the_target_means_nothing(
    tmp_path: Path, target: LingTarget
) -> None:
    rope = {"rope_type": "default", "rope_theta": 6e6, "partial_rotary_factor": 0.5}
    copied = official(tmp_path / "draft", target, rope_parameters=rope, partial_rotary_factor=0.5)
    one = load_draft(copied, target=target)
    other = load_draft(official(tmp_path / "plain", target), target=target)
    assert torch.equal(one.rotary_emb.inv_freq, other.rotary_emb.inv_freq)
