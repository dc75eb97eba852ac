"""Export and load: what is written is read back, and what would draft nothing is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export.card import CardFacts, SetResult
from dspark.export.hf import export_draft
from dspark.export.load import load_draft, read_config
from dspark.export.source import find_checkpoint, read_source
from dspark.export.template import template_sha256, warn_of_another
from dspark.target import Target, fingerprint
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "draft"
    export_draft(tiny_draft(target), out, target, tokenizer=tiny_tokenizer(), check=False)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "draft"))


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes the key, at the top level and in dflash_config."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        for place in (config, config.get("dflash_config", {})):
            if value is None:
                place.pop(key, None)
            elif place is config or key in place:
                place[key] = value
    path.write_text(json.dumps(config))


def rope(directory: Path) -> dict[str, Any]:
    """The rotary settings that a directory is read with."""
    return dict(read_config(directory).rope_parameters or {})


def train_checkpoint(draft: DSparkDraftModel, directory: Path) -> Path:
    """The files of the trainer's checkpoint that an export reads."""
    directory.mkdir(parents=True)
    weights = {name: parameter.detach().clone() for name, parameter in draft.trainable()}
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(draft.config.to_dict()))
    step = int(directory.name.rpartition("-")[2])
    state = {"step": step, "best": {"step": step, "accept_length": 1.5}}
    (directory / "trainer_state.json").write_text(json.dumps(state))
    (directory / "provenance.json").write_text(json.dumps({"git_commit": "abc"}))
    (directory / "COMPLETE").write_text("{}")
    return directory


# --- round trip -----------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_weights_come_back_exactly_as_bfloat16(target: Target, tmp_path: Path, head: str) -> None:
    draft = tiny_draft(target, markov_head_type=head)
    export_draft(draft, tmp_path / "out", target, check=False)
    loaded = load_draft(tmp_path / "out", target=target)
    mine, theirs = dict(draft.trainable()), dict(loaded.trainable())
    assert list(mine) == list(theirs)
    for name, parameter in mine.items():
        assert torch.equal(parameter.bfloat16().float(), theirs[name]), name
        assert theirs[name].dtype == target.dtype
    assert loaded.head_weight is not None
    assert loaded.head_weight.data_ptr() == target.head_weight.data_ptr()


def test_loaded_draft_computes_what_the_rounded_draft_computes(
    target: Target, exported: Path
) -> None:
    draft = tiny_draft(target)
    for _, parameter in draft.trainable():
        parameter.data = parameter.data.bfloat16().float()
    taps = target.features(torch.arange(20)[None], draft.layer_ids).taps
    anchors = torch.tensor([[3, 9]])
    with torch.no_grad():
        mine = draft(taps, anchors, anchors)
        theirs = load_draft(exported, target=target)(taps, anchors, anchors)
    assert torch.equal(mine, theirs)


def test_rotary_tables_stay_float32_in_a_bfloat16_draft(exported: Path, target: Target) -> None:
    loaded = load_draft(exported, target=target, dtype=torch.bfloat16)
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded.rotary_emb.inv_freq, tiny_draft(target).rotary_emb.inv_freq)


def test_a_scaled_rotary_embedding_is_repeated_where_old_readers_look(
    target: Target, copy: Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_config(copy, rope_scaling=yarn, rope_parameters=None)
    loaded = load_draft(copy, target=target)
    assert loaded.config.rope_parameters == {**yarn, "rope_theta": 10000.0}
    export_draft(loaded, copy.parent / "again", target, check=False)
    config = json.loads((copy.parent / "again" / "config.json").read_text())
    assert config["rope_scaling"] == config["rope_parameters"] == loaded.config.rope_parameters


def test_engines_are_told_the_targets_family(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.config, "architectures", ["BailingMoeV3ForCausalLM"])
    export_draft(tiny_draft(target), tmp_path / "out", target, check=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LingDSparkModel"
    ]
    load_draft(tmp_path / "out", target=target)


def test_another_template_than_the_exports_is_said(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer: Any = tiny_tokenizer()
    warn_of_another(copy, tokenizer)
    assert not caplog.records
    tokenizer.chat_template += " "
    ours = template_sha256(tokenizer)[:16]
    warn_of_another(copy, tokenizer)
    assert f"than the target's ({ours})" in caplog.text
    caplog.clear()
    for text in ("[]", "{", '{"template_sha256": null}'):
        (copy / "provenance.json").write_text(text)
        warn_of_another(copy, tokenizer)
    (copy / "provenance.json").unlink()
    warn_of_another(copy, tokenizer)
    assert not caplog.records


def test_the_two_tables_are_written_and_stand_in_for_a_target(
    target: Target, tmp_path: Path
) -> None:
    export_draft(tiny_draft(target), tmp_path / "out", target, check=False)
    alone = load_draft(tmp_path / "out")
    assert alone.embed_weight is not None
    assert torch.equal(alone.embed_weight, target.embed_weight.bfloat16())
    assert load_draft(tmp_path / "out", target=target).embed_weight is not alone.embed_weight


def test_provenance_and_card_say_where_the_draft_comes_from(target: Target, tmp_path: Path) -> None:
    checkpoint = train_checkpoint(tiny_draft(target), tmp_path / "run" / "checkpoint-30")
    facts = CardFacts(
        licence="apache-2.0",
        results=[
            SetResult(
                name="gsm8k",
                accept_length=2.5,
                accepted_drafts=1.5,
                num_prompts=8,
                rounds=90,
                interval=(2.25, 2.75),
            )
        ],
        measured={"command": ["dspark", "eval"], "date": "2026-01-01"},
        notes=["Synthetic weights."],
    )
    out, tokenizer = tmp_path / "out", tiny_tokenizer()
    record = export_draft(
        tmp_path / "run", out, target, facts=facts, check=False, tokenizer=tokenizer
    )
    assert record["source"] == str(checkpoint)
    assert (record["step"], record["trainer_accept_length"]) == (30, 1.5)
    assert record["target"]["fingerprint"] == target.fingerprint()
    assert record["training"] == {"git_commit": "abc"}
    assert len(record["template_sha256"]) == 64
    assert record["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert json.loads((tmp_path / "out" / "provenance.json").read_text()) == json.loads(
        json.dumps(record)
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert "| gsm8k | 2.500 | 2.250 to 2.750 | 1.500 | 8 | 90 |" in card
    assert "- command: dspark eval" in card
    assert "**Synthetic weights.**" in card
    assert "must be 5" in card
    assert "The export check was not run." in card


@pytest.mark.parametrize(
    ("block", "limits"),
    [
        (4, "4 tokens and adds at most 5.\n"),
        (8, "7 tokens and adds at most 8; `--num-draft-tokens` changes that.\n"),
        (20, "15 tokens and adds at most 16; `--num-draft-tokens` changes that.\n"),
    ],
)
def test_the_card_promises_the_proposals_that_decoding_makes(
    target: Target, tmp_path: Path, block: int, limits: str
) -> None:
    export_draft(tiny_draft(target, block_size=block), tmp_path / "out", target, check=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"With a block of {block}, a round proposes at most\n{limits}" in card


# --- what is refused on load -----------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "max_position_embeddings",
        "architectures",
    ],
)
def test_a_removed_config_key_is_named(copy: Path, key: str) -> None:
    edit_config(copy, **{key: None})
    with pytest.raises(CheckpointError, match=key):
        read_config(copy)


def test_a_removed_rotary_base_is_named(copy: Path) -> None:
    edit_config(copy, rope_theta=None, rope_parameters=None)
    with pytest.raises(CheckpointError, match="rope_theta"):
        read_config(copy)


def test_rotary_base_is_found_at_either_place(copy: Path) -> None:
    edit_config(copy, rope_theta=None)
    assert rope(copy)["rope_theta"] == 10000.0
    edit_config(copy, rope_theta=5e5, rope_parameters=None, rope_scaling=None)
    assert rope(copy)["rope_theta"] == 5e5
    edit_config(copy, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    with pytest.raises(CheckpointError, match=r"500000\.0 at the top level and 1000000\.0"):
        read_config(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM.*Qwen3DSparkModel"),
        ({"architectures": ["DSparkSpeculator"]}, "DSparkSpeculator"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"projector_type": "dflash"}, "projector_type is 'dflash'"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100 .* 260"),
        ({"architectures": -1}, "architectures is -1, but"),
        ({"architectures": {"a": 1}}, "architectures is {'a': 1}, but"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": 5}, "layer_types is 5; only a list"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object, got \[1\]"),
        ({"rope_theta": "x", "rope_parameters": None}, "rope_theta must be .* above 0, got 'x'"),
        ({"rope_theta": -1, "rope_parameters": None}, "rope_theta must be .* above 0, got -1"),
        ({"intermediate_size": 10**30}, "intermediate_size must be <= 2147483647, got 1000"),
        ({"block_size": "4"}, "block_size must be an integer, got '4'"),
        ({"block_size": 0}, "block_size must be >= 1, got 0"),
        ({"mask_token_id": 260}, r"0\.\.259, got 260"),
        ({"mask_token_id": -1}, r"0\.\.259, got -1"),
        ({"markov_head_type": "lstm"}, "lstm"),
        ({"target_layer_ids": [3, 2, 1]}, "rise strictly"),
        ({"target_layer_ids": [-1, 2, 3]}, "rise strictly"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_a_config_with_another_meaning_is_refused(
    copy: Path, changes: dict[str, Any], words: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(copy)
    assert "\n" not in str(caught.value)


def test_the_two_places_of_a_key_must_agree(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 258
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="259 at the top level and 258 in dflash_config"):
        read_config(copy)


def test_nested_keys_and_prefixed_names_of_other_trainers_load(
    exported: Path, copy: Path, target: Target
) -> None:
    config = json.loads((copy / "config.json").read_text())
    for key in config["dflash_config"]:
        if key not in ("block_size", "num_target_layers"):
            config.pop(key, None)
    config |= {"architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.X"}}
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in shards.items():
        save_file({f"model.{name}": tensors[name] for name in held}, copy / file)
    weight_map = {f"model.{name}": file for file, held in shards.items() for name in held}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    theirs = dict(load_draft(copy, target=target).trainable())
    for name, parameter in load_draft(exported, target=target).trainable():
        assert torch.equal(parameter, theirs[name])

    (copy / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks b\.safetensors, which its index"):
        load_draft(copy, target=target)


def test_only_a_draft_of_the_official_kind_may_mask_with_the_pad_id(
    copy: Path, target: Target
) -> None:
    edit_config(copy, mask_token_id=257)
    assert target.config.pad_token_id == 257
    with pytest.raises(CheckpointError, match="mask_token_id is 257 and pad_token_id is 257"):
        load_draft(copy, target=target)
    edit_config(copy, architectures=["LingDSparkModel"])
    assert load_draft(copy, target=target).config.mask_token_id == 257


def test_every_tensor_that_does_not_fit_is_said_at_once(copy: Path, target: Target) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"], tensors["hidden_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    tensors["d2t"] = torch.zeros(3)
    tensors["lm_head.weight"] = torch.zeros(7, 64)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_draft(copy, target=target)
    said = str(caught.value)
    for word in (
        "missing ",
        "layers.1.mlp.up_proj.weight",
        "hidden_norm.weight",
        "not expected d2t",
        "fc.weight is [64, 64] where the config wants [64, 192]",
        "lm_head.weight is [7, 64] where the config wants [260, 64]",
    ):
        assert word in said


def test_weights_that_are_not_finite_are_refused(copy: Path, target: Target) -> None:
    weights = load_file(copy / "model.safetensors")
    weights["fc.weight"][0, 0] = float("inf")
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"holds NaN or Inf in fc.weight"):
        load_draft(copy, target=target)


def test_missing_and_broken_files_are_one_sentence(copy: Path, tmp_path: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        load_draft(copy)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_draft(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_draft(copy)
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_draft(copy)
    with pytest.raises(CheckpointError, match="'nowhere' is not a directory"):
        load_draft("nowhere")


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json"])
def test_a_training_checkpoint_is_not_served(copy: Path, name: str) -> None:
    (copy / name).write_text("")
    with pytest.raises(
        CheckpointError, match="this is a training checkpoint; run `dspark export` first"
    ):
        load_draft(copy)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_hidden_layers": 3}, r"target_layer_ids \[1, 2, 3\].*0\.\.2"),
        ({"num_hidden_layers": 5}, "num_target_layers is 6 .* has 5"),
        ({"hidden_size": 32}, "hidden_size is 64 .* has 32"),
        ({"vocab_size": 300}, "vocab_size is 260 .* has 300"),
        ({"max_position_embeddings": 2048}, "max_position_embeddings is 512 .* has 2048"),
    ],
)
def test_a_draft_of_another_target_is_refused_with_both_numbers(
    exported: Path, overrides: dict[str, int], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_draft(exported, target=tiny_target(**overrides))


# --- sources and places ----------------------------------------------------------------------


def test_a_run_gives_its_best_checkpoint_else_its_newest(target: Target, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10, 100):
        train_checkpoint(tiny_draft(target), run / f"checkpoint-{step}")
    (run / "checkpoint-100" / "COMPLETE").unlink()
    assert find_checkpoint(run).name == "checkpoint-10"
    (run / "best").symlink_to("checkpoint-9")
    assert find_checkpoint(run).name == "checkpoint-9"
    with pytest.raises(CheckpointError, match="no COMPLETE file"):
        find_checkpoint(run / "checkpoint-100")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_checkpoint(tmp_path / "empty")


def test_a_checkpoint_is_read_in_float32(target: Target, tmp_path: Path) -> None:
    draft = tiny_draft(target)
    read = read_source(train_checkpoint(draft, tmp_path / "checkpoint-7"), target)
    for name, parameter in draft.trainable():
        assert torch.equal(dict(read.draft.trainable())[name], parameter)
    assert (read.step, read.accept_length) == (7, 1.5)


def test_a_diverged_draft_is_not_exported(target: Target, tmp_path: Path) -> None:
    draft = tiny_draft(target)
    draft.norm.weight.data[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN"):
        export_draft(draft, tmp_path / "out", target, check=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "engine", "words"),
    [
        ({"markov_rank": 0}, "sglang", "markov_rank is 0"),
        ({"markov_rank": 0}, "vllm", "markov_rank is 0"),
        ({"markov_head_type": "gated"}, "vllm", "markov_head_type is gated"),
    ],
)
def test_an_engine_that_cannot_serve_the_draft_is_named(
    target: Target, tmp_path: Path, settings: dict[str, Any], engine: Any, words: str
) -> None:
    draft = tiny_draft(target, **settings)
    with pytest.raises(ConfigError, match=words):
        export_draft(draft, tmp_path / "out", target, format=engine, check=False)


def test_only_an_earlier_export_is_replaced_unasked(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_draft(tiny_draft(target), out, target, tokenizer=tiny_tokenizer(), check=False)
    export_draft(tiny_draft(target, seed=1), out, target, check=False)
    assert not (out / "tokenizer.json").exists()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        export_draft(tiny_draft(target), out, target, check=False)
    assert (out / "notes.txt").exists()
    export_draft(tiny_draft(target), out, target, check=False, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_never_removes_what_it_reads_or_stands_in(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = train_checkpoint(tiny_draft(target), tmp_path / "run" / "checkpoint-1")
    for out in (checkpoint, tmp_path / "run"):
        with pytest.raises(CheckpointError, match="it holds"):
            export_draft(checkpoint, out, target, check=False, overwrite=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="it holds"):
        export_draft(tiny_draft(target), ".", target, check=False, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        export_draft(checkpoint, tmp_path / "file", target, check=False)


def test_other_weights_of_the_same_shape_are_said(
    copy: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    load_draft(copy, target=target)
    path = copy / "provenance.json"
    record = json.loads(path.read_text())
    old = fingerprint.of_version_1(target.model)
    path.write_text(json.dumps({**record, "target": {**record["target"], "fingerprint": old}}))
    load_draft(copy, target=target)
    assert not caplog.records
    path.write_text(json.dumps(record))
    other = tiny_target(seed=1)
    load_draft(copy, target=other)
    said = caplog.records[-1].getMessage()
    assert target.fingerprint() in said
    assert other.fingerprint() in said
