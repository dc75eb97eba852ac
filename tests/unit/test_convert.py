"""Drafts between layouts: the same bits, the same config, and what cannot be understood refused."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError
from dspark.export.card import CardFacts, SetResult
from dspark.export.check import Probe, read_probe, save_probe
from dspark.export.convert import convert_draft
from dspark.export.hf import export_draft
from dspark.export.layouts import FORMATS, Format
from dspark.export.load import load_draft, read_config
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_ling, tiny_target, tiny_tokenizer

# every step from one layout to another, once
WALK: tuple[Format, ...] = (
    "hf", "sglang", "hf", "vllm", "hf", "deepspec", "sglang",
    "vllm", "sglang", "deepspec", "vllm", "deepspec", "hf",
)  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    tiny = tiny_target()
    tiny.model.config.architectures = ["LlamaForCausalLM"]
    return tiny


@pytest.fixture(scope="module")
def exported(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the layout of speculators."""
    out = tmp_path_factory.mktemp("export") / "draft"
    export_draft(tiny_draft(target), out, target, format="vllm", check=False)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "draft"))


def edit(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one, `a__b` is key b in block a."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *blocks, name = key.split("__")
        place = config
        for block in blocks:
            place = place[block]
        place.pop(name, None)
        if value is not None:
            place[name] = value
    path.write_text(json.dumps(config))


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def logits(directory: Path, target: Target) -> Tensor:
    draft = load_draft(directory, target=target)
    taps = target.features(torch.arange(20)[None], draft.layer_ids).taps
    anchors = torch.tensor([[3, 9]])
    with torch.no_grad():
        hidden = draft(taps, anchors, anchors)
        prev = torch.arange(draft.block_size).expand(1, 2, -1)
        return draft.slot_logits(hidden, prev)


def test_the_walk_takes_every_step() -> None:
    assert set(pairwise(WALK)) == {(a, b) for a in FORMATS for b in FORMATS if a != b}


@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("block", [7, 8, 16])
def test_weights_and_config_come_back_to_the_bit_from_every_layout(
    target: Target, tmp_path: Path, block: int, head: str, confidence: bool
) -> None:
    settings: dict[str, Any] = {
        "block_size": block,
        "markov_head_type": head,
        "enable_confidence_head": confidence,
    }
    draft = tiny_draft(target, **settings)
    draft.config.num_anchors = 33
    draft.config.sts_temperatures = [0.5 + slot for slot in range(block)] if confidence else None
    export_draft(draft, tmp_path / "0", target, check=False)
    first, configs = stored(tmp_path / "0"), {"hf": (tmp_path / "0" / "config.json").read_text()}
    for step, (_, format) in enumerate(pairwise(WALK)):
        out = tmp_path / str(step + 1)
        convert_draft(tmp_path / str(step), out, format)
        assert same(stored(out), first), format
        text = (out / "config.json").read_text()
        assert configs.setdefault(format, text) == text, format
    assert len(set(configs.values())) == len(FORMATS)
    assert read_config(out).sts_temperatures == draft.config.sts_temperatures
    before, after = (logits(tmp_path / step, target) for step in ("0", "4"))
    assert torch.equal(before, after)


def test_weights_keep_the_dtype_that_they_are_stored_in(copy: Path, tmp_path: Path) -> None:
    held = {name: tensor.float() + 1e-4 for name, tensor in stored(copy).items()}
    save_file(held, copy / "model.safetensors")
    convert_draft(copy, tmp_path / "out", "sglang")
    assert same(stored(tmp_path / "out"), held)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_the_family_and_the_targets_name_outlive_the_layouts_without_a_place_for_them(
    tmp_path: Path,
) -> None:
    target = tiny_ling()
    draft = tiny_draft(target, mask_token_id=target.config.pad_token_id)
    export_draft(draft, tmp_path / "a", target, format="vllm", check=False)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    architectures = config["speculators_config"]["verifier"]["architectures"]
    assert architectures == ["BailingMoeV3ForCausalLM"]
    (tmp_path / "a" / "provenance.json").unlink()
    convert_draft(tmp_path / "a", tmp_path / "b", "deepspec")
    there = json.loads((tmp_path / "b" / "config.json").read_text())
    assert there["architectures"] == ["LingDSparkModel"]
    convert_draft(tmp_path / "b", tmp_path / "c", "vllm")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == config


def test_the_official_draft_keeps_its_family_where_nothing_tells_its_target(
    tmp_path: Path,
) -> None:
    target = tiny_ling()
    draft = tiny_draft(target, mask_token_id=target.config.pad_token_id)
    export_draft(draft, tmp_path / "a", target, check=False)
    there = (tmp_path / "a" / "config.json").read_text()
    steps: tuple[tuple[int, Format], ...] = ((1, "vllm"), (2, "hf"))
    for step, format in steps:
        (tmp_path / "a" / "provenance.json").unlink()
        convert_draft(tmp_path / "a", tmp_path / str(step), format)
        shutil.rmtree(tmp_path / "a")
        (tmp_path / str(step)).rename(tmp_path / "a")
    assert (tmp_path / "a" / "config.json").read_text() == there


def test_weights_that_are_not_the_configs_are_not_written(copy: Path, tmp_path: Path) -> None:
    held = stored(copy)
    del held["fc.weight"]
    save_file(held, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing fc\.weight"):
        convert_draft(copy, tmp_path / "out", "hf")
    held["fc.weight"] = torch.full((64, 192), float("nan"))
    save_file(held, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN or Inf in fc\.weight"):
        convert_draft(copy, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_tables_are_kept_left_out_or_taken_from_the_target(
    target: Target, copy: Path, tmp_path: Path
) -> None:
    convert_draft(copy, tmp_path / "slim", "sglang", slim=True)
    assert len(stored(tmp_path / "slim")) == len(stored(copy)) - 2
    with pytest.raises(ConfigError, match="--slim: DeepSpec needs the tables"):
        convert_draft(copy, tmp_path / "no", "deepspec", slim=True)
    with pytest.raises(ConfigError, match=r"needs embed_tokens\.weight and lm_head.* --target"):
        convert_draft(tmp_path / "slim", tmp_path / "no", "deepspec")
    assert not (tmp_path / "no").exists()
    convert_draft(tmp_path / "slim", tmp_path / "full", "deepspec", load_target=lambda: target)
    assert same(stored(tmp_path / "full"), stored(copy))


def test_a_given_target_is_checked_and_named(target: Target, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"vocab_size is 260 .* has 300"):
        convert_draft(copy, tmp_path / "out", "hf", target=tiny_target(vocab_size=300))
    edit(copy, speculators_config__verifier=None)
    (copy / "provenance.json").unlink()
    convert_draft(copy, tmp_path / "out", "vllm", target=target)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["LlamaForCausalLM"],
    }


def test_what_an_engine_cannot_serve_is_said(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_draft(tiny_draft(target, markov_head_type="rnn"), tmp_path / "a", target, check=False)
    (tmp_path / "a" / "provenance.json").unlink()
    convert_draft(tmp_path / "a", tmp_path / "b", "vllm")
    assert "vLLM reads vanilla Markov heads only, and markov_head_type is rnn" in caplog.text
    assert "the name of the target is not known (--target)" in caplog.text


def test_a_tap_that_no_engine_exposes_is_said(
    copy: Path, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taps = json.loads((copy / "config.json").read_text())["aux_hidden_state_layer_ids"]
    edit(copy, aux_hidden_state_layer_ids=[*taps[:-1], target.num_layers])
    convert_draft(copy, tmp_path / "out", "hf")
    assert "the target's last layer, and target_layer_ids ends in 5 (num_target" in caplog.text


def test_the_files_beside_the_weights_go_along_and_the_card_is_of_the_new_layout(
    target: Target, tmp_path: Path
) -> None:
    results = [SetResult(name="s", accept_length=2, accepted_drafts=1, num_prompts=3, rounds=4)]
    facts = CardFacts(licence="mit", results=results)
    export_draft(
        tiny_draft(target), tmp_path / "a", target, facts=facts, tokenizer=tiny_tokenizer(),
        check=False,
    )  # fmt: skip
    (tmp_path / "a" / "modeling.py").write_text("raise SystemExit")
    record = convert_draft(tmp_path / "a", tmp_path / "b", "vllm", slim=True)
    there = {path.name for path in (tmp_path / "b").iterdir()}
    assert there == {path.name for path in (tmp_path / "a").iterdir()} - {"modeling.py"}
    assert record == json.loads((tmp_path / "b" / "provenance.json").read_text())
    assert (record["format"], record["converted_from"]) == ("vllm", "a")
    card = (tmp_path / "b" / "README.md").read_text()
    assert "| s | 2.000 |" in card
    assert "(not in the file)" in card
    assert "`dspark convert b OUT --to sglang`" in card
    assert "--speculative-algorithm DSPARK" not in card
    convert_draft(tmp_path / "b", tmp_path / "a", "hf", overwrite=True)
    assert "--speculative-algorithm DSPARK" in (tmp_path / "a" / "README.md").read_text()


def test_a_check_is_told_of_the_layout_that_it_was_made_of(target: Target, tmp_path: Path) -> None:
    probe = Probe(prompt_ids=((1, 2, 3),), max_new_tokens=2, expected=1.5, expected_from="x")
    export_draft(tiny_draft(target), tmp_path / "a", target, check=False)
    save_probe(tmp_path / "a", probe)
    record = json.loads((tmp_path / "a" / "provenance.json").read_text())
    figures = {"num_prompts": 1, "max_new_tokens": 2, "accept_length": 1.5, "rounds": 1}
    record["check"] = {**figures, "expected": 1.5, "expected_from": "x"}
    (tmp_path / "a" / "provenance.json").write_text(json.dumps(record))
    (tmp_path / "a" / "README.md").unlink()  # it was written before the record said so
    convert_draft(tmp_path / "a", tmp_path / "b", "sglang")
    convert_draft(tmp_path / "b", tmp_path / "c", "vllm")
    card = (tmp_path / "c" / "README.md").read_text()
    assert "Export check (of the hf layout, before the conversion to this one): " in card
    assert read_probe(tmp_path / "c") == replace(probe, expected_from="x, before a conversion")
    # a file that is no check of ours is no check of the new directory either
    (tmp_path / "c" / "check.json").write_text("{}")
    convert_draft(tmp_path / "c", tmp_path / "d", "hf")
    assert not (tmp_path / "d" / "check.json").exists()


def test_a_card_that_somebody_has_edited_is_kept(copy: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(copy, tmp_path / "elsewhere"))
    convert_draft(moved, tmp_path / "a", "hf")
    renewed = (tmp_path / "a" / "README.md").read_text()
    assert "--draft a\n" in renewed
    assert "> Converted" not in renewed
    (tmp_path / "a" / "README.md").write_text(f"---\nlicense: mit\n{renewed[4:]}\nMeasured: 3.1\n")
    convert_draft(tmp_path / "a", tmp_path / "b", "vllm")
    card = (tmp_path / "b" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n")
    assert card.endswith("\nMeasured: 3.1\n")
    assert "> Converted by dspark to the layout vllm." in card
    (tmp_path / "a" / "README.md").unlink()
    convert_draft(tmp_path / "a", tmp_path / "c", "sglang")
    assert "--draft c\n" in (tmp_path / "c" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("target", "tiny"),
        ("target", {}),
        ("card", {"a": 1}),
        ("training", "x"),
        ("no card", "tiny"),
    ],
)
def test_a_record_that_no_export_wrote_so_is_one_sentence(
    copy: Path, tmp_path: Path, changed: str, value: Any
) -> None:
    path = copy / "provenance.json"
    record = json.loads(path.read_text())
    if changed == "no card":
        del record["card"]
        changed = "target"
    path.write_text(json.dumps({**record, changed: value}))
    with pytest.raises(CheckpointError, match=r"json is not as an export writes it .*: take the"):
        convert_draft(copy, tmp_path / "out", "hf")
    assert [one.name for one in tmp_path.iterdir()] == ["draft"]


@pytest.mark.parametrize("head", ["---\nlicense: mit\n---\n", ""])
def test_a_card_that_cannot_be_written_anew_says_whose_it_is(
    copy: Path, tmp_path: Path, head: str
) -> None:
    (copy / "provenance.json").unlink()
    (copy / "README.md").write_text(f"{head}\n# My draft\n\n---\n\nServe it.\n")
    convert_draft(copy, tmp_path / "a", "hf")
    convert_draft(tmp_path / "a", tmp_path / "b", "sglang")
    card = (tmp_path / "b" / "README.md").read_text()
    assert card.startswith(f"{head}\n> Converted by dspark to the layout sglang.".lstrip("\n"))
    assert card.endswith("commands included.\n\n# My draft\n\n---\n\nServe it.\n")
    assert card.count("> Converted") == 1


def test_the_directory_behind_a_link_is_replaced_and_the_link_stays(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    for format in ("hf", "sglang"):
        convert_draft(copy, tmp_path / "link", format)
        assert (tmp_path / "link").is_symlink()
        there = json.loads((tmp_path / "disk" / "real" / "provenance.json").read_text())
        assert there["format"] == format
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_vllm_is_told_the_name_that_a_hub_knows(
    copy: Path, tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "name", "smollm2-135m")
    convert_draft(copy, tmp_path / "a", "vllm", target=target)
    export_draft(tiny_draft(target), tmp_path / "b", target, format="vllm", check=False)
    for out in ("a", "b"):
        written = json.loads((tmp_path / out / "config.json").read_text())
        told = written["speculators_config"]["verifier"]["name_or_path"]
        assert told == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert f'base_model: "{told}"' in (tmp_path / "b" / "README.md").read_text()


# --- the layout of speculators, as others write it ---------------------------------------------


def test_the_layout_of_speculators_loads_without_keys_that_its_library_does_not_write(
    target: Target, copy: Path
) -> None:
    whole = read_config(copy).to_dict()
    edit(copy, num_target_layers=None, target_hidden_size=None, speculators_version="0.5.0")
    with pytest.raises(CheckpointError, match=r"lacks num_target_layers: .* \(--target\)"):
        read_config(copy)
    assert read_config(copy, target_layers=lambda: 6).to_dict() == whole
    assert load_draft(copy, target=target).config.to_dict() == whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sample_from_anchor": None}, "lacks sample_from_anchor: with block_size 4 and spec.* 4"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False; only True"),
        ({"speculators_config__proposal_methods": [{"speculative_tokens": 7}]}, "is 7, but .* 4 s"),
        ({"speculators_model_type": "eagle3"}, "'eagle3', not 'dspark'"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config__vocab_size": 300}, "draft_vocab_size 260 .* vocab_size 300"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100 differs from vocab_size 260"),
        ({"target_hidden_size": 128}, "target_hidden_size 128 differs from hidden_size 64"),
        ({"hidden_size": 32}, "hidden_size is 32 at the top level and 64 in transformer_layer"),
        ({"aux_hidden_state_layer_ids": None}, "lacks target_layer_ids"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, r"0\.\.5 .* got \[-1, 2\]"),
        ({"aux_hidden_state_layer_ids": [2, 7]}, r"0\.\.5 .* got \[1, 6\]"),
        ({"aux_hidden_state_layer_ids": ["2"]}, "must be a list of integers"),
        ({"target_layer_ids": [2, 3, 4]}, r"\[2, 3, 4\] and aux.* \[2, 3, 4\], which means \[1, 2"),
        ({"mask_token_id": 257}, "mask_token_id is 257 and pad_token_id is 257"),
        ({"mask_token_id": 260}, r"0\.\.259, got 260"),
        ({"markov_rnak": 8}, r"markov_rnak is 8, and .* \(did you mean 'markov_rank'\?\)"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is True; only False"),
        (
            {"transformer_layer_config__max_position_embeddings": 0},
            "embeddings must be >= 1, got 0",
        ),
        ({"transformer_layer_config__num_key_value_heads": -2}, "heads must be >= 1, got -2"),
        ({"transformer_layer_config__rms_norm_eps": float("nan")}, "finite and above 0, got nan"),
        ({"transformer_layer_config__hidden_act": "silo"}, "hidden_act 'silo' is no activation"),
        ({"transformer_layer_config__rope_parameters__rope_type": "x"}, "rope_type 'x' is no rot"),
        ({"speculators_config__proposal_methods": [{"speculative_tokens": 0}]}, ">= 1, got 0"),
        ({"speculators_config__proposal_methods": [{"speculative_tokens": "4"}]}, ">= 1, got '4'"),
        ({"speculators_config__proposal_methods": ["greedy"]}, "a list of objects, got .'greedy'"),
        ({"speculators_config__algorithm": "eagle3"}, "algorithm is 'eagle3', not 'dspark'"),
        ({"speculators_config__verifier": "tiny"}, "verifier must hold .* got 'tiny'"),
        ({"speculators_config__verifier__name_or_path": 3}, "name_or_path, a string"),
        ({"speculators_config__verifier__architectures": "Llama"}, "a list of strings"),
        ({"speculators_config": ["x"]}, "speculators_config must be an object"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_with_its_values(
    copy: Path, changes: dict[str, Any], words: str
) -> None:
    edit(copy, **changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_config(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("use_confidence_head", "dflash_config.use_confidence_head is True, and there is no such"),
        ("sample_from_anchor", "sample_from_anchor is 'no' at the top level and True in dflash"),
    ],
)
def test_a_key_in_a_block_is_understood_or_refused(
    copy: Path, tmp_path: Path, key: str, words: str
) -> None:
    convert_draft(copy, tmp_path / "hf", "hf")
    edit(tmp_path / "hf", **{f"dflash_config__{key}": True, "sample_from_anchor": "no"})
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path / "hf")


def test_the_first_exports_of_specforge_load(copy: Path, target: Target, tmp_path: Path) -> None:
    convert_draft(copy, tmp_path / "old", "sglang", slim=True)
    edit(
        tmp_path / "old",
        architectures=["DSparkDraftModel"],
        auto_map={"AutoModel": "dspark.DSparkDraftModel"},
        **dict.fromkeys(("markov_rank", "markov_head_type", "mask_token_id", "target_layer_ids")),
        dflash_config__confidence_head_alpha=1.0,
    )
    held = stored(tmp_path / "old")
    renamed = {name.replace("markov_head.", "logit_head."): held[name] for name in held}
    save_file(renamed, tmp_path / "old" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "old", target), logits(copy, target))
    convert_draft(tmp_path / "old", tmp_path / "new", "sglang")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3DSparkModel"]
    assert written["markov_rank"] == 8
    assert "auto_map" not in written
    assert same(stored(tmp_path / "new"), held)
