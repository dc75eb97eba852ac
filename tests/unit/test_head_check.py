"""Final states and output heads that do not belong together are refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import config_io
from dspark.config import CaptureSettings
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ResponseRows
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.head_check import check_capture, check_head
from dspark.errors import CheckpointError, DataError, TargetError
from dspark.target import Features, Target, load
from dspark.target.front import Facts, Front, tables
from dspark.testing import (
    save_tiny_run,
    tiny_ling,
    tiny_rows,
    tiny_run,
    tiny_target,
    tiny_tokenizer,
)
from dspark.training import program

LAYERS = (1, 2, 3)


class Changed:
    """A target whose `features` are not those of its own logits."""

    def __init__(self, target: Target, change: Any) -> None:
        self._target, self._change = target, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(self, input_ids: torch.Tensor, layer_ids: Any) -> Features:
        return Features(*self._change(self._target, input_ids, layer_ids))


def without_norm(target: Any, input_ids: torch.Tensor, layer_ids: Any) -> Any:
    """The last layer's output, as a capture gives it that forgets the final norm."""
    found = target.features(input_ids, (*layer_ids, target.num_layers - 1))
    size = target.hidden_size
    return found.taps[..., :-size], found.taps[..., -size:]


def scaled(target: Any, input_ids: torch.Tensor, layer_ids: Any) -> Any:
    """The right arg max, and distributions far too sharp."""
    found = target.features(input_ids, layer_ids)
    return found.taps, found.last_hidden * 8


def first_row_for_all(target: Any, input_ids: torch.Tensor, layer_ids: Any) -> Any:
    """Right alone, wrong in a batch."""
    found = target.features(input_ids, layer_ids)
    return found.taps, found.last_hidden[:1].expand_as(found.last_hidden).clone()


def taps_of_the_first_row(target: Any, input_ids: torch.Tensor, layer_ids: Any) -> Any:
    """Final states that are right, taps that are mixed up."""
    found = target.features(input_ids, layer_ids)
    return found.taps[:1].expand_as(found.taps).clone(), found.last_hidden


def test_mixed_up_taps_are_refused(tmp_path: Path) -> None:
    given = rows(tmp_path)
    broken: Any = Changed(normed_target(), taps_of_the_first_row)
    with pytest.raises(TargetError, match=r"layer 1 of row '.*' is off by \d+% from that of the"):
        check_capture(broken, [given[0], given[1]], LAYERS, "float32")


def normed_target() -> Target:
    """A tiny target whose final norm is more than a common factor."""
    target = tiny_target()
    weight = target._decoder.norm.weight
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return target


def rows(place: Path) -> ResponseRows:
    save_tiny_run(place, tiny_rows(5, seed=1, longest=90))
    data = config_io.load(None, tiny_run(place, place / "out")).data
    return ResponseRows(data, tiny_tokenizer())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e4m3fn_all"])
def test_states_behind_the_final_norm_pass(tmp_path: Path, dtype: str) -> None:
    given = rows(tmp_path)
    agreement, overlap = check_capture(normed_target(), [given[0], given[1]], LAYERS, dtype)
    assert agreement > 0.9
    assert 0.85 < overlap < 1.001
    if dtype == "float32":
        assert agreement == 1.0


def test_a_target_with_recurrent_layers_passes(tmp_path: Path) -> None:
    given = rows(tmp_path)
    agreement, _ = check_capture(tiny_ling("flash"), [given[0], given[1]], LAYERS, "float32")
    assert agreement >= 0.98


@pytest.mark.parametrize("change", [without_norm, scaled, first_row_for_all])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn_all"])
def test_other_states_are_refused_before_anything_is_written(
    tmp_path: Path, change: Any, dtype: str
) -> None:
    rows(tmp_path)
    broken: Any = Changed(normed_target(), change)
    settings = CaptureSettings(out=str(tmp_path / "s"), dtype=dtype)  # type: ignore[arg-type]
    data = config_io.load(None, tiny_run(tmp_path, tmp_path / "out")).data
    least = "98%" if dtype == "float32" else "85%"
    sentence = rf"at [\d.]+% of \d+ positions and [\d.]+% of their distribution; {least} is the"
    with pytest.raises(TargetError, match=sentence):
        capture(broken, tiny_tokenizer(), data, settings, LAYERS)
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("head")
    save_tiny_run(directory, tiny_rows(5, seed=1, longest=90))
    target = load(str(directory / "target"), dtype="float32", device="cpu")
    settings = CaptureSettings(out=str(directory / "shards"), dtype="float32")
    data = config_io.load(None, tiny_run(directory, directory / "out")).data
    capture(target, tiny_tokenizer(), data, settings, LAYERS)
    return directory


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("", "its checksum is not that of the manifest"),
        ("checksum", "keep the head table of another model than the one at target.path"),
        ("weights", r"give \d of the 16 ids that they gave at capture"),
    ],
)
def test_the_tables_of_another_target_are_refused(
    place: Path, tmp_path: Path, without: str, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(place / "shards", tmp_path / "s")
    shutil.copytree(place / "target", tmp_path / "target")
    path, manifest = tmp_path / "s" / "target.safetensors", tmp_path / "s" / "manifest.json"
    whole, tables = path.read_bytes(), load_file(path)
    save_file({"head": tables["head"][torch.randperm(len(tables["head"]))].clone()}, path)
    if without:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tables": None}))
    if without == "weights":
        (tmp_path / "target" / "model.safetensors").unlink()
    own = [
        "train.features=offline",
        "draft.target_layer_ids=[1, 2, 3]",
        "train.steps=1",
        f"data.shards={tmp_path / 's'}",
        f"target.path={tmp_path / 'target'}",
    ]
    config = config_io.load(None, tiny_run(place, tmp_path / "out", *own))
    with pytest.raises((CheckpointError, DataError), match=sentence):
        program.run(config)
    path.write_bytes(whole)
    with caplog.at_level(logging.INFO):
        program.run(config)
    assert ("holds no weights to compare" in caplog.text) == (without == "weights")


def test_another_config_at_the_targets_path_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.01}))
    own = ["train.features=offline", "draft.target_layer_ids=[1, 2, 3]", "train.steps=1"]
    own += [f"data.shards={place / 'shards'}", f"target.path={tmp_path / 'target'}"]
    config = config_io.load(None, tiny_run(place, tmp_path / "out", *own))
    with pytest.raises(DataError, match=r"captured from a target whose config"):
        program.run(config)


def test_shards_of_another_order_are_told_from_missing_ones(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "shards", tmp_path / "s")
    target = tiny_target()
    check_head(FeatureStore(tmp_path / "s"), target.logits, where="s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    manifest["check"]["row"] = "another"
    (tmp_path / "s" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="row 'another'"):
        check_head(FeatureStore(tmp_path / "s"), target.logits, where="s")
    # its shard may be one of those that are not there
    check_head(FeatureStore(tmp_path / "s", partial=True), target.logits, where="s")


def test_targets_of_another_seed_differ(place: Path) -> None:
    with pytest.raises(CheckpointError, match="capture again"):
        check_head(FeatureStore(place / "shards"), tiny_target(seed=3).logits, where="s")


@pytest.mark.parametrize("make", [tiny_target, tiny_ling])
def test_stored_states_go_to_the_device_of_the_head(make: Any) -> None:
    """Shards are read on a CPU, the head may lie elsewhere; meta stands for any other device."""
    target = make()
    facts = Facts.of(target)
    target.model.to("meta")
    for one in (target, Front(facts, tables(target))):
        logits = one.logits(torch.zeros(3, target.hidden_size))
        assert (logits.device.type, logits.shape) == ("meta", (3, target.vocab_size))
