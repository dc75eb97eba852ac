"""Drafts of other trainers: every convention they may have used is either read or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import CheckpointError
from dspark.export.config_json import to_json
from dspark.export.hf import export_draft
from dspark.export.load import load_draft, read_config
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "draft"
    export_draft(tiny_draft(target), out, target, check=False)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "draft"))


def rewrite(directory: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change the top level of config.json."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in remove}))


@pytest.mark.parametrize(
    ("key", "value"), [("attention_bias", True), ("use_sliding_window", True), ("shift_label", 0)]
)
def test_a_layer_or_label_that_is_computed_otherwise_is_refused(
    copy: Path, key: str, value: Any
) -> None:
    rewrite(copy, **{key: value})
    with pytest.raises(CheckpointError, match=key):
        read_config(copy)


def test_every_key_that_is_written_is_read_back(target: Target, tmp_path: Path) -> None:
    draft = tiny_draft(target)
    # none of them at its default
    changes = {"num_anchors": 33, "initializer_range": 0.05, "rms_norm_eps": 1e-5}
    ends = {"pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5}
    for key, value in {**changes, **ends, "hidden_act": "gelu"}.items():
        setattr(draft.config, key, value)
    export_draft(draft, tmp_path / "out", target, check=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    again = to_json(read_config(tmp_path / "out"), architecture=written["architectures"][0])
    assert json.loads(json.dumps(again)) == written
    assert {**changes, **ends, "hidden_act": "gelu"}.items() <= written.items()


def test_keys_may_stand_in_a_block_named_after_the_method(exported: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    nested = config.pop("dflash_config")
    keys = tuple(nested)
    (copy / "config.json").write_text(json.dumps({**config, "dspark_config": nested}))
    rewrite(copy, remove=keys)
    assert read_config(copy).to_dict() == read_config(exported).to_dict()


def test_a_scaling_in_the_old_spelling_is_read_and_a_partial_rotation_is_not(copy: Path) -> None:
    old = {"type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}
    rewrite(copy, remove=("rope_parameters",), rope_scaling=old)
    rope = read_config(copy).rope_parameters
    assert rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def test_two_scalings_that_differ_are_refused(copy: Path) -> None:
    rewrite(copy, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(CheckpointError, match=r"rope_type is default in rope_par.* and linear in"):
        read_config(copy)


def test_without_a_confidence_head_its_input_need_not_be_told(
    target: Target, tmp_path: Path
) -> None:
    draft = tiny_draft(target, enable_confidence_head=False)
    export_draft(draft, tmp_path / "out", target, check=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["confidence_head_with_markov"]
    del config["dflash_config"]["confidence_head_with_markov"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    loaded = load_draft(tmp_path / "out", target=target)
    assert loaded.confidence_head is None
    assert not loaded.training


def test_a_rotary_table_among_the_weights_is_no_weight(copy: Path, target: Target) -> None:
    path = copy / "model.safetensors"
    save_file({**load_file(path), "model.rotary_emb.inv_freq": torch.zeros(8)}, path)
    loaded = load_draft(copy, target=target)
    assert torch.equal(loaded.rotary_emb.inv_freq, tiny_draft(target).rotary_emb.inv_freq)


def test_a_tensor_in_two_shards_is_refused(copy: Path, target: Target) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    save_file(tensors, copy / "a.safetensors")
    # under the other spelling of its name, so that the index itself is in order
    save_file({"model.norm.weight": tensors["norm.weight"] + 1}, copy / "b.safetensors")
    places = {**dict.fromkeys(tensors, "a.safetensors"), "model.norm.weight": "b.safetensors"}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' twice"):
        load_draft(copy, target=target)


def test_the_two_tables_of_an_untied_target_are_not_confused(tmp_path: Path) -> None:
    target = tiny_target(tie_word_embeddings=False)
    assert not torch.equal(target.embed_weight, target.head_weight)
    export_draft(tiny_draft(target), tmp_path / "out", target, check=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embed_weight.bfloat16())
    assert torch.equal(tensors["lm_head.weight"], target.head_weight.bfloat16())
    alone = load_draft(tmp_path / "out")
    assert alone.embed_weight is not None
    assert alone.head_weight is not None
    assert torch.equal(alone.embed_weight, tensors["embed_tokens.weight"])
    assert torch.equal(alone.head_weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("slim", [False, True])
def test_the_card_says_what_is_in_the_file_and_who_cannot_read_it(
    target: Target, tmp_path: Path, kind: str, slim: bool
) -> None:
    draft = tiny_draft(target, markov_head_type=kind)
    export_draft(draft, tmp_path / "out", target, slim=slim, check=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("(copies are in the file)" in card) is not slim
    assert ("(not in the file)" in card) is slim
    assert (f"this one is {kind}" in card) is (kind != "vanilla")
