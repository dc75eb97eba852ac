import itertools
import json
import logging
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.config import CaptureSettings, DataSettings
from dspark.corpus import store
from dspark.corpus.capture import _check_disk, capture
from dspark.corpus.chat import template_hash
from dspark.corpus.dataset import ResponseRows, ShardRows, collate
from dspark.corpus.storage import decoded
from dspark.corpus.unusable import Unusable, diagnose
from dspark.errors import ConfigError, DataError, RunError
from dspark.target import Features, Target
from dspark.testing import tiny_target, tiny_tokenizer

torch.set_num_threads(1)

LAYERS = (0, 2, 5)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def responses(path: Path, count: int, extra: int = 0) -> DataSettings:
    generator = torch.Generator().manual_seed(0)
    with path.open("w") as file:
        for i in range(count + extra):
            length = int(torch.randint(4, 60, (), generator=generator))
            ids = torch.randint(0, 250, (length,), generator=generator).tolist()
            row = {"id": f"r{i}", "input_ids": ids, "loss_mask": [0, 0] + [1] * (length - 2)}
            file.write(json.dumps(row) + "\n")
    return DataSettings(responses=(str(path),), max_length=48)


def settings(out: Path, **changes: Any) -> CaptureSettings:
    plain = {"out": str(out), "dtype": "float32", "batch_size": 3}
    # the smallest shard a user may ask for would hold all of these rows
    return CaptureSettings.model_construct(**{**plain, "shard_bytes": 60_000, **changes})


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs inside ends as it is about to write its third shard."""
    write, shards = store.write_shard, itertools.count(1)

    def third(*args: Any) -> Any:
        if next(shards) == 3:
            raise KeyboardInterrupt
        return write(*args)

    with monkeypatch.context() as changed:
        changed.setattr(store, "write_shard", third)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_shards_hold_the_features_of_each_row_alone(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    report = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    online = ResponseRows(data, tokenizer)
    offline = ShardRows(
        tmp_path / "s",
        target_fingerprint=target.fingerprint(),
        layer_ids=LAYERS,
        template_hash=template_hash(tokenizer),
    )
    assert report.shards > 2
    assert len(offline) == len(online) == report.rows == 12
    assert offline.num_tokens == online.num_tokens == report.tokens
    assert report.cut == online.num_cut > 0
    assert offline.used_ids() == online.used_ids()
    for i in range(12):
        here, there = online[i], offline[i]
        assert here.id == there.id
        assert torch.equal(here.input_ids, there.input_ids)
        assert torch.equal(here.loss_mask, there.loss_mask)
        alone = target.features(here.input_ids[None], LAYERS)
        assert there.taps is not None
        assert there.last_hidden is not None
        # the same sums in another order: padding changes the shape of the products
        torch.testing.assert_close(there.taps, alone.taps[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.last_hidden, alone.last_hidden[0], rtol=1e-4, atol=1e-4)
    assert (tmp_path / "s" / "provenance.json").exists()


def test_a_killed_capture_goes_on_behind_its_last_whole_shard(
    target: Target, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    capture(target, tokenizer, data, settings(tmp_path / "whole"), LAYERS)
    with killed(monkeypatch):
        capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    # a shard that a killed process was writing stands under another name
    (tmp_path / "s" / ".shard-00002.safetensors.1.tmp").write_bytes(b"half")
    report = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert report.resumed_shards == 2
    whole, resumed = ShardRows(tmp_path / "whole"), ShardRows(tmp_path / "s")
    assert len(resumed) == len(whole) == 12
    for i in range(12):
        for field in ("input_ids", "loss_mask", "taps", "last_hidden"):
            assert torch.equal(getattr(resumed[i], field), getattr(whole[i], field))
    assert not list((tmp_path / "s").glob(".*"))


def test_more_responses_keep_the_whole_shards(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 8)
    first = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    data = responses(tmp_path / "r.jsonl", 8, extra=4)
    report = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert report.rows == 12
    assert first.shards - 1 <= report.resumed_shards < report.shards


def test_a_disk_that_is_too_small_is_refused_before_writing(
    target: Target,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    rows = ResponseRows(data, tokenizer)
    needed = rows.num_tokens * (target.hidden_size * (len(LAYERS) + 1) * 4 + 5)
    needed += target.head_weight.numel() * 4  # the embedding is the same
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * needed, 0, needed - 1))
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert f"needs {needed:,} bytes and its disk has {needed - 1:,} free" in str(caught.value)
    assert "1029 bytes each (hidden 64 x (3 taps + 1) in float32)" in caplog.text
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * needed, 0, needed))
    capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    # what is there needs no room a second time
    tables = target.head_weight.numel() * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 * needed, 0, tables))
    capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)


def test_what_a_large_capture_takes_is_told_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1.3M rows of 4096 tokens: five taps of a 2560-wide target in bf16 are 163.6 TB."""
    header = store.Header(
        target="t",
        target_revision=None,
        target_fingerprint="f",
        layer_ids=[1, 9, 17, 25, 33],
        hidden_size=2560,
        dtype="bfloat16",
        template_hash="h",
        max_length=4096,
    )
    tokens = 1_300_000 * 4096
    # per token: an id (4), whether it is supervised (1), five taps and the last hidden state
    needed = tokens * (4 + 1 + (5 + 1) * 2560 * 2)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed, 0, needed - 1))
    refused = r"needs 163,604,480,000,000 bytes and its disk has 163,604,479,999,999 free"
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match=refused):
        _check_disk(tmp_path / "s", tokens, tokens, header)
    said = "features of 5,324,800,000 tokens: 30725 bytes each (hidden 2560 x (5 taps + 1)"
    assert said in caplog.text
    assert f"{needed / 2**30:.2f} GiB in all" in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed, 0, needed // 2))
    with caplog.at_level(logging.INFO):
        _check_disk(tmp_path / "s", tokens, tokens // 4, header)
    gib = needed / 2**30
    told = f"{gib:.2f} GiB in all, {gib / 4:.2f} GiB to write, {gib / 2:.2f} GiB free"
    assert told in caplog.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(needed, 0, needed))
    _check_disk(tmp_path / "s", tokens, tokens, header)
    assert not (tmp_path / "s").exists()


class Poisoned:
    """A target whose features of some rows are unusable."""

    def __init__(self, target: Target, bad: set[int], value: float, where: str) -> None:
        self._target, self._bad, self._value, self._where = target, bad, value, where

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def features(self, input_ids: torch.Tensor, layer_ids: Any) -> Features:
        out = self._target.features(input_ids, layer_ids)
        taps, last = out.taps.clone(), out.last_hidden.clone()
        for row, first in enumerate(input_ids[:, 0].tolist()):
            if first in self._bad:
                if self._where == "tap":
                    taps[row, :, 64:128] = self._value
                elif self._where == "position":
                    taps[row, 1, 3] = self._value
                else:
                    last[row] = self._value
        return Features(taps, last)


@pytest.mark.parametrize(
    ("value", "where"),
    [(float("nan"), "position"), (float("inf"), "last"), (0.0, "tap"), (0.0, "last")],
)
def test_rows_with_unusable_features_are_named_and_skipped_within_a_budget(
    target: Target,
    tokenizer: Any,
    tmp_path: Path,
    value: float,
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    rows = ResponseRows(data, tokenizer)
    firsts = [int(rows[i].input_ids[0]) for i in range(12)]
    one: Any = Poisoned(target, {firsts[4]}, value, where)
    report = capture(one, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert report.skipped == ["r4"]
    assert "row r4: features with NaN, Inf or only zeros" in caplog.text
    (line,) = quarantined(tmp_path / "s")
    reason = "all zero" if value == 0 else str(value)
    state = {"tap": "layer 2", "position": "layer 0", "last": "final"}[where]
    position = {"position": 1, "tap": None, "last": 0 if value else None}[where]
    assert line == {"id": "r4", "reason": reason, "state": state, "position": position}
    left = ShardRows(tmp_path / "s")
    assert [left[i].id for i in range(11)] == [f"r{i}" for i in range(12) if i != 4]
    two: Any = Poisoned(target, {firsts[4], firsts[7]}, value, where)
    with pytest.raises(RunError, match=r"2 of 12 rows .*r4, r7\); check .* its dtype float32, and"):
        capture(two, tokenizer, data, settings(tmp_path / "t"), LAYERS)


def quarantined(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]


def test_the_quarantine_survives_a_kill_without_doubles(
    target: Target, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    rows = ResponseRows(data, tokenizer)
    monkeypatch.setattr("dspark.corpus.unusable._BUDGET", 0.5)
    bad = {int(rows[i].input_ids[0]) for i in (1, 3, 10)}
    poisoned: Any = Poisoned(target, bad, torch.inf, "last")
    with killed(monkeypatch):
        capture(poisoned, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert [line["id"] for line in quarantined(tmp_path / "s")] == ["r1", "r3"]
    (tmp_path / "s" / "quarantine.jsonl").write_text('{"id": "r1", "rea')  # as a kill may leave it
    for _ in range(2):
        report = capture(poisoned, tokenizer, data, settings(tmp_path / "s"), LAYERS)
        assert [line["id"] for line in quarantined(tmp_path / "s")] == ["r1", "r3", "r10"]
        assert report.skipped == ["r1", "r3", "r10"]
    # without such rows there is no such file, though a killed run may have left one
    (tmp_path / "t").mkdir()
    shutil.copy(tmp_path / "s" / "quarantine.jsonl", tmp_path / "t")
    shutil.copy(tmp_path / "s" / "manifest.json", tmp_path / "t")
    capture(target, tokenizer, data, settings(tmp_path / "t"), LAYERS)
    assert not (tmp_path / "t" / "quarantine.jsonl").exists()


def test_a_wrong_number_is_named_where_it_has_spread_least() -> None:
    """It came in at token 7 of layer 2; one layer on, attention has it all over the row."""
    taps, last = torch.ones(12, 3 * 8), torch.ones(12, 8)
    taps[7, 8 + 3] = torch.inf
    taps[:, 16:], last[:] = torch.nan, torch.nan
    found = diagnose("r", Features(taps, last), LAYERS)
    assert (found.reason, found.state, found.position) == ("inf", "layer 2", 7)
    # beside NaN, Inf is what came of it
    taps[7, 8 + 4] = torch.nan
    assert diagnose("r", Features(taps, last), LAYERS).reason == "nan"


def test_a_row_that_comes_twice_is_counted_once() -> None:
    unusable = Unusable(100, torch.float32)
    for _ in range(2):
        unusable.add(["r1"])
    assert unusable.ids == ["r1"]
    with pytest.raises(RunError, match="2 of 100 rows"):
        unusable.add(["r2"])


def test_what_overflows_where_it_is_stored_is_unusable(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 4)
    first = int(ResponseRows(data, tokenizer)[3].input_ids[0])
    large: Any = Poisoned(target, {first}, torch.finfo(torch.float32).max, "last")
    for dtype, skipped in (("float32", []), ("bfloat16", ["r3"])):
        report = capture(large, tokenizer, data, settings(tmp_path / dtype, dtype=dtype), LAYERS)
        assert report.skipped == skipped


def test_rows_of_which_none_is_usable_are_refused(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 1)
    first = int(ResponseRows(data, tokenizer)[0].input_ids[0])
    bad: Any = Poisoned(target, {first}, torch.nan, "last")
    with pytest.raises(RunError, match="no row has usable features: r0"):
        capture(bad, tokenizer, data, settings(tmp_path / "s"), LAYERS)


def test_the_report_tells_the_target_from_all_else(
    target: Target, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    report = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert report.forward_s > 0
    assert report.other_s > 0
    assert report.agreement == 1.0
    told = report.to_dict()
    assert told["forward_s"] == report.forward_s
    assert told["other_s"] == report.other_s
    again = capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    assert again.resumed_shards == report.shards
    assert again.forward_s == 0
    # by a clock that moves when it is looked at, before and after every forward pass
    ticks = itertools.count(0.0)
    clock = SimpleNamespace(perf_counter=lambda: next(ticks))
    monkeypatch.setattr("dspark.corpus.capture.time", clock)
    ticked = capture(target, tokenizer, data, settings(tmp_path / "t"), LAYERS)
    assert ticked.other_s == ticked.forward_s + 1 > 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e4m3fn_all"])
def test_files_are_as_large_as_the_formula_and_their_headers(
    target: Target, tokenizer: Any, tmp_path: Path, dtype: str
) -> None:
    data = responses(tmp_path / "r.jsonl", 12)
    report = capture(target, tokenizer, data, settings(tmp_path / "s", dtype=dtype), LAYERS)
    held = 0
    for path in (tmp_path / "s").glob("shard-*"):
        whole = path.read_bytes()
        held += len(whole) - 8 - int.from_bytes(whole[:8], "little")
    offsets = 8 * (report.rows + report.shards)
    formula = store.row_bytes(report.tokens, target.hidden_size, len(LAYERS), dtype)
    assert held == formula + offsets
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "s").glob("shard-*"))


def test_eight_bit_shards_are_close_to_the_features(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 6)
    for name in ("float32", "float8_e4m3fn"):
        capture(target, tokenizer, data, settings(tmp_path / name, dtype=name), LAYERS)
    exact = collate([ShardRows(tmp_path / "float32")[i] for i in range(6)])
    found = collate([ShardRows(tmp_path / "float8_e4m3fn")[i] for i in range(6)])
    assert exact.taps is not None
    assert found.taps is not None
    taps = decoded(found.taps, found.tap_scales)
    assert taps.dtype == torch.bfloat16
    off = (taps.float() - exact.taps).norm() / exact.taps.norm()
    assert 0.01 < off < 0.04


def test_bfloat16_shards_round_the_features(target: Target, tokenizer: Any, tmp_path: Path) -> None:
    data = responses(tmp_path / "r.jsonl", 3)
    capture(target, tokenizer, data, settings(tmp_path / "s", dtype="bfloat16"), LAYERS)
    taps = ShardRows(tmp_path / "s")[0].taps
    assert taps is not None
    assert taps.dtype == torch.bfloat16


def test_other_targets_taps_and_templates_are_refused(
    target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    data = responses(tmp_path / "r.jsonl", 3)
    capture(target, tokenizer, data, settings(tmp_path / "s"), LAYERS)
    with pytest.raises(DataError, match="target_fingerprint"):
        ShardRows(tmp_path / "s", target_fingerprint=tiny_target(seed=1).fingerprint())
    with pytest.raises(DataError, match="layer_ids"):
        ShardRows(tmp_path / "s", layer_ids=(0, 2, 4))
    with pytest.raises(ConfigError, match="layer_ids"):
        capture(target, tokenizer, data, settings(tmp_path / "s"), (0, 1, 5))
