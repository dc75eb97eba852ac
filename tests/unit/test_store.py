import gc
import hashlib
import json
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.corpus import inspect_features
from dspark.corpus.feature_store import FeatureStore
from dspark.corpus.store import (
    Header,
    Shard,
    ShardRow,
    bad_rows,
    finish,
    present_shard,
    row_bytes,
    start,
    write_shard,
)
from dspark.corpus.unusable import BadRow
from dspark.errors import CheckpointError, ConfigError, DataError

HIDDEN, TAPS = 4, 2


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "target": "tiny",
        "target_revision": None,
        "target_fingerprint": "f00d",
        "layer_ids": [1, 3],
        "hidden_size": HIDDEN,
        "dtype": "float32",
        "template_hash": "beef",
        "max_length": 64,
    }
    return Header(**{**values, **changes})


def rows(*lengths: int) -> list[ShardRow]:
    return [
        ShardRow(
            f"row{length}",
            torch.arange(length),
            torch.arange(length) > 1,
            torch.randn(length, TAPS * HIDDEN),
            torch.randn(length, HIDDEN),
        )
        for length in lengths
    ]


def make(directory: Path, *parts: list[ShardRow], complete: bool = True) -> list[Shard]:
    start(directory, header())
    shards = [
        write_shard(directory, n, part, [row.id for row in part], [])
        for n, part in enumerate(parts)
    ]
    if complete:
        finish(directory, header(), shards)
    return shards


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    parts = [rows(5, 3), rows(), rows(7)]
    make(tmp_path / "s", *parts)
    store = FeatureStore(tmp_path / "s")
    written = [row for part in parts for row in part]
    assert len(store) == 3
    assert store.num_tokens == 15
    for index, row in enumerate(written):
        name, tensors = store.row(index)
        assert name == row.id
        assert torch.equal(tensors["input_ids"].long(), row.input_ids)
        assert torch.equal(tensors["loss_mask"].bool(), row.loss_mask)
        assert torch.equal(tensors["taps"], row.taps)
        assert torch.equal(tensors["last_hidden"], row.last_hidden)
    assert store.used_ids() == set(range(7))
    with pytest.raises(IndexError):
        store.row(3)


def test_size_formula() -> None:
    # 1.3M rows x 4096 tokens of a 2560-wide target with 5 taps in bf16: 30,725 bytes a token
    assert row_bytes(1, 2560, 5, "bfloat16") == 30_725
    assert row_bytes(1_300_000 * 4096, 2560, 5, "bfloat16") == 163_604_480_000_000
    assert header(hidden_size=2560, layer_ids=[0] * 5, dtype="bfloat16").token_bytes == 30_725


def test_bytes_on_disk_match_the_formula(tmp_path: Path) -> None:
    (shard,) = make(tmp_path / "s", rows(500, 300))
    expected = header().token_bytes * 800
    assert shard.bytes == (tmp_path / "s" / shard.file).stat().st_size
    assert 0 <= shard.bytes - expected < 1500  # names, offsets and the file's own header


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_fingerprint": "dead"}, "target_fingerprint f00d, this run has dead"),
        ({"layer_ids": [1, 2]}, r"layer_ids \[1, 3\], this run has \[1, 2\]"),
        ({"template_hash": "cafe"}, "template_hash beef, this run has cafe"),
    ],
)
def test_features_of_something_else_are_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    make(tmp_path / "s", rows(5))
    store = FeatureStore(tmp_path / "s")
    store.check(target_fingerprint="f00d", layer_ids=None, template_hash="beef")
    with pytest.raises(DataError, match=sentence):
        store.check(**changes)
    with pytest.raises(ConfigError, match="choose another directory"):
        start(tmp_path / "s", header(**changes))


def test_incomplete_or_damaged_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        FeatureStore(tmp_path)
    shards = make(tmp_path / "s", rows(5), rows(6), complete=False)
    with pytest.raises(CheckpointError, match="incomplete"):
        FeatureStore(tmp_path / "s")
    finish(tmp_path / "s", header(), shards)
    path = tmp_path / "s" / shards[1].file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=f"has {len(whole) - 1} bytes of {len(whole)}"):
        FeatureStore(tmp_path / "s")
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(CheckpointError, match="cannot be read"):
        FeatureStore(tmp_path / "s").row(1)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        FeatureStore(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": "x/2"}))
    with pytest.raises(CheckpointError, match="'x/2'; this version reads"):
        FeatureStore(tmp_path / "s")
    manifest.write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*not valid JSON"):
        FeatureStore(tmp_path / "s")


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        start(tmp_path, header())


def test_only_whole_shards_of_the_same_plan_are_present(tmp_path: Path) -> None:
    out = tmp_path / "s"
    (shard, second) = make(out, rows(5, 3), rows(4))
    assert present_shard(out, 0, ["row5", "row3"]) == shard
    assert present_shard(out, 0, ["row5"]) is None
    assert present_shard(out, 2, ["row9"]) is None
    (out / second.file).write_bytes((out / second.file).read_bytes()[:40])
    assert present_shard(out, 1, ["row4"]) is None


def test_shards_behind_the_plan_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "s"
    first, _ = make(out, rows(5), rows(6))
    start(out, header())
    other = ".shard-00007.safetensors.77.tmp"  # another process may be writing it
    (out / other).touch()
    finish(out, header(), [first])
    assert len(FeatureStore(out)) == 1
    names = sorted(p.name for p in out.iterdir())
    assert names == [other, "manifest.json", "shard-00000.safetensors"]


def of_format_1(directory: Path) -> list[ShardRow]:
    """A directory as versions before the checksums wrote it."""
    parts = [rows(5, 3), rows(7)]
    start(directory, header())
    shards = []
    for number, part in enumerate(parts):
        path = directory / f"shard-{number:05d}.safetensors"
        tensors = {
            "input_ids": torch.cat([row.input_ids.int() for row in part]),
            "loss_mask": torch.cat([row.loss_mask.to(torch.uint8) for row in part]),
            "offsets": torch.tensor([0, *accumulate(len(row.input_ids) for row in part)]),
            "taps": torch.cat([row.taps for row in part]),
            "last_hidden": torch.cat([row.last_hidden for row in part]),
        }
        plan = hashlib.sha256("\n".join(row.key for row in part).encode()).hexdigest()
        names = {
            "format": "dspark.features/1",
            "ids": json.dumps([row.id for row in part]),
            "plan": plan,
            "skipped": json.dumps(["lost"] if number else []),
        }
        save_file(tensors, path, names)
        tokens = sum(len(row.input_ids) for row in part)
        size = path.stat().st_size
        skipped = json.loads(names["skipped"])
        shards.append(
            {"file": path.name, "rows": len(part), "tokens": tokens, "bytes": size}
            | {"skipped": skipped}
        )
    manifest = {
        "format": "dspark.features/1",
        "complete": True,
        "header": vars(header()),
        "rows": 3,
        "tokens": 15,
        "bytes": 0,
        "shards": shards,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return [row for part in parts for row in part]


def test_directories_of_format_1_are_read_and_gone_on_with(tmp_path: Path) -> None:
    written = of_format_1(tmp_path / "s")
    for partial in (False, True):
        store = FeatureStore(tmp_path / "s", partial=partial)
        assert [store.row(i)[0] for i in range(3)] == [row.id for row in written]
        assert store.row_keys() == [row.key for row in written]
        for index, row in enumerate(written):
            assert torch.equal(store.row(index)[1]["taps"], row.taps)
    # a capture of the same rows takes its shards as they are
    shard = present_shard(tmp_path / "s", 1, [written[2].key])
    assert shard is not None
    assert (shard.skipped, shard.crc32) == (["lost"], None)
    assert bad_rows(tmp_path / "s", shard) == [BadRow("lost", "")]
    with pytest.raises(ConfigError, match=r"2 of 2 shards .* are of format 1, which has no"):
        inspect_features.inspect(tmp_path / "s", verify=True)


def test_of_a_mixed_directory_is_checked_what_can_be(tmp_path: Path) -> None:
    of_format_1(tmp_path / "s")
    old = FeatureStore(tmp_path / "s")._shards
    new = write_shard(tmp_path / "s", 2, rows(9), ["row9"], [])
    finish(tmp_path / "s", header(), [*old, new])
    report = inspect_features.inspect(tmp_path / "s", verify=True)
    assert report["unverified"] == [one.file for one in old]
    assert report["damaged"] == []
    path = tmp_path / "s" / new.file
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert inspect_features.inspect(tmp_path / "s", verify=True)["damaged"] == [new.file]


def test_only_so_many_files_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.corpus.feature_store._OPEN_FILES", 3)
    make(tmp_path / "s", *(rows(number) for number in range(3, 11)))
    before = len(os.listdir("/proc/self/fd"))
    store = FeatureStore(tmp_path / "s")
    for index in (0, 3, 7, 1, 5, 6, 2, 4):
        assert len(store.row(index)[1]["input_ids"]) == index + 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_damaged_byte_is_found_when_it_is_looked_for(tmp_path: Path) -> None:
    first, second = make(tmp_path / "s", rows(5, 3), rows(7))
    report = inspect_features.inspect(tmp_path / "s", verify=True)
    assert report["damaged"] == []
    assert (report["rows"], report["tokens"], report["taps"]) == (3, 15, [1, 3])
    assert report["versions"]["torch"] == torch.__version__
    path = tmp_path / "s" / second.file
    damaged = bytearray(path.read_bytes())
    damaged[-30] ^= 1
    path.write_bytes(damaged)
    FeatureStore(tmp_path / "s").row(2)  # not noticed at a start
    assert inspect_features.inspect(tmp_path / "s", verify=False)["damaged"] == []
    assert inspect_features.inspect(tmp_path / "s", verify=True)["damaged"] == [second.file]
    (tmp_path / "s" / first.file).unlink()
    found = inspect_features.inspect(tmp_path / "s", verify=True)["damaged"]
    assert found == [first.file, second.file]


def test_an_unfinished_directory_gives_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = make(tmp_path / "s", rows(5, 3), rows(7), rows(9), complete=False)
    path = tmp_path / "s" / shards[1].file
    path.write_bytes(path.read_bytes()[:-1])
    store = FeatureStore(tmp_path / "s", partial=True)
    assert [store.row(i)[0] for i in range(len(store))] == ["row5", "row3", "row9"]
    assert f"{shards[1].file}' cannot be read" in caplog.text
    report = inspect_features.inspect(tmp_path / "s", verify=True)
    assert not report["complete"]
    assert (report["rows"], report["damaged"]) == (3, [shards[1].file])


def test_damaged_manifests_are_a_sentence(tmp_path: Path) -> None:
    make(tmp_path / "s", rows(5))
    path = tmp_path / "s" / "manifest.json"
    whole = json.loads(path.read_text())
    for name, value, sentence in [
        ("header", {"target": "x"}, "is damaged"),
        ("shards", [{"file": 3}], "is damaged"),
        ("header", {**whole["header"], "dtype": "int4"}, "dtype int4; this version reads float32"),
    ]:
        path.write_text(json.dumps({**whole, name: value}))
        with pytest.raises(CheckpointError, match=sentence):
            FeatureStore(tmp_path / "s")
