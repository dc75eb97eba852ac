"""Capture into a directory that holds something already: what goes on, and what is refused."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import provenance
from dspark.config import CaptureSettings, DataSettings
from dspark.corpus import inspect_features, shard_file, store
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ShardRows
from dspark.corpus.feature_store import FeatureStore
from dspark.errors import CheckpointError, ConfigError, RunError
from dspark.target import Target, fingerprint
from dspark.testing import tiny_target, tiny_tokenizer

torch.set_num_threads(1)

LAYERS = (0, 2, 5)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def responses(path: Path, count: int, first: int = 0) -> DataSettings:
    with path.open("w") as file:
        for i in range(first, first + count):
            ids = [(7 * i + j) % 250 for j in range(10 + i % 5)]
            row = {"id": f"r{i}", "input_ids": ids, "loss_mask": [0, 0] + [1] * (len(ids) - 2)}
            file.write(json.dumps(row) + "\n")
    return DataSettings(responses=(str(path),), max_length=48)


def settings(out: Path) -> CaptureSettings:
    return CaptureSettings.model_construct(
        out=str(out), dtype="float32", batch_size=3, shard_bytes=30_000
    )


@pytest.fixture(scope="module")
def finished(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    data = responses(place / "r.jsonl", 2)
    capture(tiny_target(), tokenizer, data, settings(place / "s"), LAYERS)
    return place / "s"


def state(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def rounded() -> Target:
    """Weights that bfloat16 holds: the same target in either dtype."""
    target = tiny_target()
    target.model.bfloat16().float()
    return target


def late(target: Target) -> None:
    head = target.head_weight
    head.view(-1)[head.numel() // 2 :] += 1


def eps(target: Target) -> None:
    target.config.rms_norm_eps = 0.01


def dtype(target: Target) -> None:
    target.model.bfloat16()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (late, r"target_fingerprint .* \(another weights\)"),
        (eps, r"another config \(or its overrides\)"),
        (dtype, "compute_dtype float32, this run has bfloat16"),
    ],
)
def test_another_target_does_not_go_on(
    tokenizer: Any, tmp_path: Path, change: Any, sentence: str
) -> None:
    data, out = responses(tmp_path / "r.jsonl", 4), tmp_path / "s"
    capture(rounded(), tokenizer, data, settings(out), LAYERS)
    before, other = state(out), rounded()
    change(other)
    with pytest.raises(ConfigError, match=sentence):
        capture(other, tokenizer, data, settings(out), LAYERS)
    assert state(out) == before


def test_a_directory_of_an_earlier_version_goes_on(tokenizer: Any, tmp_path: Path) -> None:
    data, out, target = responses(tmp_path / "r.jsonl", 4), tmp_path / "s", tiny_target()
    capture(target, tokenizer, data, settings(out), LAYERS)
    manifest = json.loads((out / "manifest.json").read_text())
    old = fingerprint.of_version_1(target.model)
    manifest["header"] = {**manifest["header"], "target_fingerprint": old}
    del manifest["header"]["compute_dtype"], manifest["tables"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert len(ShardRows(out, target_fingerprint=target.fingerprint_like(old))) == 4
    assert capture(target, tokenizer, data, settings(out), LAYERS).forward_s == 0
    header = FeatureStore(out).header
    assert (header.target_fingerprint, header.compute_dtype) == (old, None)
    with pytest.raises(ConfigError, match="target_fingerprint"):
        capture(tiny_target(seed=1), tokenizer, data, settings(out), LAYERS)


def test_two_captures_do_not_share_a_directory(tokenizer: Any, tmp_path: Path) -> None:
    data, out = responses(tmp_path / "r.jsonl", 4), tmp_path / "s"
    with (
        provenance.claimed(out),
        pytest.raises(ConfigError, match=r"another run is writing to capture\.out"),
    ):
        capture(tiny_target(), tokenizer, data, settings(out), LAYERS)
    assert not out.exists()


@pytest.mark.parametrize("complete", [True, False])
def test_rows_of_other_responses_are_not_deleted(
    tokenizer: Any, tmp_path: Path, complete: bool
) -> None:
    out, target = tmp_path / "s", tiny_target()
    capture(target, tokenizer, responses(tmp_path / "r.jsonl", 12), settings(out), LAYERS)
    path = out / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "complete": complete}))
    before = state(out)
    for data in (
        responses(tmp_path / "o.jsonl", 12, first=50),  # others
        responses(tmp_path / "l.jsonl", 4),  # fewer
    ):
        with pytest.raises(ConfigError, match=r"would delete .*choose another directory"):
            capture(target, tokenizer, data, settings(out), LAYERS)
        assert state(out) == before
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "dspark.features/9"}))
    with pytest.raises(CheckpointError, match=r"capture\.out .* has format 'dspark.features/9'"):
        capture(target, tokenizer, responses(tmp_path / "r.jsonl", 12), settings(out), LAYERS)


@pytest.mark.parametrize("shard_bytes", [15_000, 60_000])
def test_rows_are_not_computed_again_for_shards_of_another_size(
    tokenizer: Any, tmp_path: Path, shard_bytes: int
) -> None:
    out, target = tmp_path / "s", tiny_target()
    capture(target, tokenizer, responses(tmp_path / "r.jsonl", 12), settings(out), LAYERS)
    before = state(out)
    other = settings(out).model_copy(update={"shard_bytes": shard_bytes})
    told = rf"cut otherwise \(shard-.*capture\.shard_bytes .* \(it is {shard_bytes} now\)"
    with pytest.raises(ConfigError, match=told):
        capture(target, tokenizer, responses(tmp_path / "r.jsonl", 12), other, LAYERS)
    assert state(out) == before
    # more rows at the end still go on, and a shard that is gone is no shard of another size
    (out / "shard-00000.safetensors").unlink()
    more = capture(target, tokenizer, responses(tmp_path / "r.jsonl", 20), settings(out), LAYERS)
    assert more.rows == 20
    assert more.resumed_shards > 0


def test_a_damaged_shard_that_maps_is_written_again(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, out, target = responses(tmp_path / "r.jsonl", 8), tmp_path / "s", tiny_target()
    capture(target, tokenizer, data, settings(out), LAYERS)
    before = state(out)
    path = out / "shard-00000.safetensors"
    damaged = bytearray(before[path.name])
    damaged[-100] ^= 4
    path.write_bytes(damaged)
    report = capture(target, tokenizer, data, settings(out), LAYERS)
    assert report.resumed_shards == report.shards - 1 > 0
    assert path.read_bytes() == before[path.name]
    assert "is damaged: it is written again" in caplog.text


@pytest.mark.parametrize("how", ["missing", "cut", "changed"])
def test_tables_that_are_not_those_that_were_written(
    tokenizer: Any, tmp_path: Path, how: str
) -> None:
    data, out, target = responses(tmp_path / "r.jsonl", 4), tmp_path / "s", tiny_target()
    capture(target, tokenizer, data, settings(out), LAYERS)
    assert set(FeatureStore(out).tables() or {}) == {"head"}
    path = out / store.TABLES
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-4] + (b"" if how == "cut" else b"\1\2\3\4"))
    with pytest.raises(CheckpointError, match="run the same capture again"):
        FeatureStore(out).tables()
    assert inspect_features.inspect(out, verify=True)["damaged"] == [store.TABLES]
    capture(target, tokenizer, data, settings(out), LAYERS)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "name", [".manifest.json.99999999.tmp", ".shard-00000.safetensors.1.tmp", ".lock"]
)
def test_what_a_killed_capture_left_first_is_no_obstacle(
    tokenizer: Any, tmp_path: Path, name: str
) -> None:
    data, out = responses(tmp_path / "r.jsonl", 4), tmp_path / "s"
    out.mkdir()
    (out / name).write_text("{")
    capture(tiny_target(), tokenizer, data, settings(out), LAYERS)
    assert not list(out.glob(".*"))


def test_a_disk_that_gets_full_names_the_place_and_keeps_the_rest(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out, target = responses(tmp_path / "r.jsonl", 8), tmp_path / "s", tiny_target()
    write = shard_file.write_file

    def full(path: Path, *args: Any) -> str:
        if "00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(store, "write_file", full)
    with pytest.raises(RunError, match=r"no space left .*'.*s' are kept: make room .*again"):
        capture(target, tokenizer, data, settings(out), LAYERS)
    monkeypatch.undo()
    assert capture(target, tokenizer, data, settings(out), LAYERS).resumed_shards >= 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shards", None),
        ("shards", "x"),
        ("complete", "yes"),
        ("check", {"row": "r0", "argmax": ["1"]}),
        ("check", 3),
        ("tables", {"crc32": 3}),
        ("header.hidden_size", "64"),
        ("header.layer_ids", None),
        ("header.hidden_size", 32),
        ("header.layer_ids", [0, 2]),
        ("shard.rows", "4"),
        ("shard.file", "../x"),
        ("format", None),
    ],
)
def test_a_manifest_with_wrong_values_is_a_sentence(
    finished: Path, tmp_path: Path, name: str, value: Any
) -> None:
    out = tmp_path / "s"
    shutil.copytree(finished, out)
    manifest = json.loads((out / "manifest.json").read_text())
    place, _, key = name.rpartition(".")
    where = {"": manifest, "header": manifest["header"], "shard": manifest["shards"][0]}[place]
    where[key] = value
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert inspect_features.is_features(out)
    with pytest.raises(CheckpointError, match=r"is damaged|does not fit|has format None"):
        FeatureStore(out).row(0)
    with pytest.raises(CheckpointError, match=r"is damaged|does not fit|has format None"):
        inspect_features.inspect(out, verify=True)
