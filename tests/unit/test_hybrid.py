"""Rows of responses whose features are read where shards hold them, and computed where not."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import config_io
from dspark.config import CaptureSettings, Config
from dspark.corpus import store
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ResponseRows
from dspark.corpus.hybrid import HybridRows
from dspark.corpus.rolling import RollingWindow
from dspark.corpus.store import ShardRow
from dspark.errors import CheckpointError, ConfigError, DataError
from dspark.target import Target, fingerprint, load
from dspark.testing import save_tiny_run, tiny_run, tiny_tokenizer
from dspark.training import plan, program
from dspark.training.missing import MissingFeatures, open_window
from dspark.training.window import draw_pass

pytestmark = pytest.mark.slow

LAYERS = (1, 2, 4)
ROWS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, rows of one length (so that capture has the trainer's shapes) and shards."""
    directory = tmp_path_factory.mktemp("hybrid")
    rng = random.Random(0)
    rows = [
        {
            "id": f"r{number}",
            "input_ids": [rng.randrange(97, 107) for _ in range(64)],
            "loss_mask": [0] * 4 + [1] * 60,
        }
        for number in range(ROWS)
    ]
    save_tiny_run(directory, rows)
    captured(directory, "shards")
    return directory


def captured(place: Path, name: str, **changes: Any) -> Path:
    """Shards of two rows each."""
    target = load(str(place / "target"), dtype="float32", device="cpu")
    plain = {"out": str(place / name), "dtype": "float32", "batch_size": 1, "shard_bytes": 120_000}
    settings = CaptureSettings.model_construct(**{**plain, **changes})
    capture(target, tiny_tokenizer(), config(place, place).data, settings, LAYERS)
    assert len(list((place / name).glob("shard-*"))) > 3
    return place / name


def config(place: Path, out: Path, *overrides: str) -> Config:
    own = [
        "draft.num_layers=1",
        f"draft.target_layer_ids={list(LAYERS)}",
        f"data.shards={place / 'shards'}",
        "train.steps=12",
        "train.grad_accumulation=2",
        "train.save_every=5",
    ]
    return config_io.load(None, tiny_run(place, out, *own, *overrides))


def halved(place: Path, out: Path, name: str = "shards") -> Path:
    """The shards as a capture leaves them that was killed half way, one shard of them damaged."""
    shutil.copytree(place / name, out)
    manifest = json.loads((out / "manifest.json").read_text())
    shards = [one["file"] for one in manifest["shards"]]
    manifest |= {"complete": False, "shards": [], "check": None}
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / "target.safetensors").unlink()
    for name in shards[2:]:
        (out / name).unlink()
    (out / shards[1]).write_bytes((out / shards[1]).read_bytes()[:-9])
    return out


def generate(shards: Path, *more: str) -> list[str]:
    return ["train.features=offline", "data.on_missing=generate", f"data.shards={shards}", *more]


def figures(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def counts(out: Path) -> dict[str, int]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("shards", "window", "generated")
    return {name: int(sum(line[f"perf/rows_{name}"] for line in lines)) for name in names}


def assert_same(one: Path, other: Path) -> None:
    """Losses, norms and weights, to the bit."""
    assert figures(one) == figures(other)
    name = "latest/model.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()


def test_every_source_of_features_is_the_same_run(place: Path, tmp_path: Path) -> None:
    """Online, offline, with all rows present, with half of them, and with the window: to the bit.

    Split features: tests/e2e/test_split.py compares them with both.
    """
    half = halved(place, tmp_path / "half")
    kinds = {
        "online": ["train.features=online"],
        "offline": ["train.features=offline"],
        "whole": generate(place / "shards"),
        "half": generate(half),
        "window": generate(half, "data.window_bytes=100000000"),
    }
    for name, how in kinds.items():
        program.run(config(place, tmp_path / name, *how))
    for name in list(kinds)[1:]:
        assert_same(tmp_path / name, tmp_path / "online")
    assert counts(tmp_path / "whole") == {"shards": 24, "window": 0, "generated": 0}
    # one shard of two rows is left: 3 epochs of them, and of six others
    assert counts(tmp_path / "half") == {"shards": 6, "window": 0, "generated": 18}
    found = counts(tmp_path / "window")
    assert found["shards"] == 6
    # a row is looked for some steps before it is needed, so that the second epoch may be too early
    assert found["generated"] + found["window"] == 18
    assert found["window"] >= 6
    assert len(list((tmp_path / "half-window").glob("*.row"))) == 6


def test_eight_bit_features_are_one_run_too(place: Path, tmp_path: Path) -> None:
    captured(place, "eight", dtype="float8_e4m3fn", shard_bytes=20_000)
    kinds = {
        "online": ["train.features=online"],
        "offline": ["train.features=offline", f"data.shards={place / 'eight'}"],
        "half": generate(halved(place, tmp_path / "half8", "eight"), "data.window_bytes=9999999"),
    }
    for name, how in kinds.items():
        program.run(config(place, tmp_path / name, "train.steps=10", *how))
    assert_same(tmp_path / "half", tmp_path / "offline")
    assert min(counts(tmp_path / "half").values()) > 0
    exact, rounded = figures(tmp_path / "online"), figures(tmp_path / "offline")
    assert exact != rounded
    for mine, theirs in zip(exact, rounded, strict=True):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=0.02)


def test_a_run_goes_on_to_the_bit_with_whatever_is_left(place: Path, tmp_path: Path) -> None:
    """Other shards, another window and half of its files damaged: no figure changes."""
    half = halved(place, tmp_path / "half")
    program.run(config(place, tmp_path / "straight", "train.features=online"))
    own = generate(half, "data.window_bytes=100000000")
    program.run(config(place, tmp_path / "out", *own))
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    shutil.rmtree(tmp_path / "out" / "latest", ignore_errors=True)
    (tmp_path / "out" / "latest").unlink(missing_ok=True)
    files = sorted((tmp_path / "half-window").glob("*.row"))
    files[0].write_bytes(files[0].read_bytes()[:-50])
    damaged = bytearray(files[1].read_bytes())
    damaged[-200] ^= 1
    files[1].write_bytes(damaged)
    files[2].unlink()
    report = program.run(config(place, tmp_path / "out", *own))
    assert report.status == "finished"
    assert_same(tmp_path / "out", tmp_path / "straight")


@pytest.mark.parametrize("same", [True, False])
def test_a_run_of_an_earlier_version_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    own = ("train.features=online", "train.steps=2", "train.save_every=1")

    def earlier(target: Target, stored: str = "") -> str:
        return fingerprint.of_version_1(target.model) if same else "0" * 16

    with monkeypatch.context() as before:
        before.setattr(Target, "fingerprint", earlier)
        before.setattr(Target, "fingerprint_like", earlier)
        program.run(config(place, tmp_path / "out", *own))
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    if same:
        assert program.run(config(place, tmp_path / "out", *own)).step == 2
    else:
        with pytest.raises(
            CheckpointError, match=r"the target's weights are not those that .* was trained with"
        ):
            program.run(config(place, tmp_path / "out", *own))


@pytest.mark.parametrize("packed", [[], ["data.max_length=64", "data.pack_length=192"]])
def test_batches_of_present_and_missing_rows(
    place: Path, tmp_path: Path, packed: list[str]
) -> None:
    half = halved(place, tmp_path / "half")
    batch = ["train.batch_size=2", "train.grad_accumulation=1", "train.steps=4", *packed]
    for name, how in {"online": ["train.features=online"], "half": generate(half)}.items():
        program.run(config(place, tmp_path / name, *how, *batch))
    assert figures(tmp_path / "half") == figures(tmp_path / "online")
    found = counts(tmp_path / "half")
    assert found["shards"] > 0
    assert found["generated"] > found["shards"]


def opened(place: Path, shards: Path) -> tuple[HybridRows, ResponseRows]:
    responses = ResponseRows(config(place, place).data, tiny_tokenizer())
    return HybridRows(responses, shards), responses


def test_rows_are_matched_by_their_ids_and_their_masks(place: Path, tmp_path: Path) -> None:
    hybrid, responses = opened(place, place / "shards")
    assert hybrid.num_present == ROWS
    lines = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    lines[0]["loss_mask"][5] = 0
    lines[1]["input_ids"][9] = 120
    lines[2]["id"] = "another"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = config(place, place, f"data.responses=[{tmp_path / 'rows.jsonl'}]").data
    other = HybridRows(ResponseRows(changed, tiny_tokenizer()), place / "shards")
    assert [bool(other[i].source) for i in range(ROWS)] == [False] * 3 + [True] * 5
    assert other.num_present == 5
    assert hybrid.lengths() == responses.lengths()
    assert hybrid.used_ids() == responses.used_ids()


def test_a_shard_that_is_cut_while_it_is_open_is_a_miss(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(place / "shards", tmp_path / "s")
    hybrid, _ = opened(place, tmp_path / "s")
    assert hybrid[0].source == "shards"
    path = tmp_path / "s" / "shard-00000.safetensors"
    with path.open("r+b") as file:
        file.truncate(600)
    assert hybrid[0].source == ""
    assert hybrid[1].source == ""
    assert caplog.text.count("its rows count as missing") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e4m3fn_all"])
def test_computed_rows_are_rounded_as_the_shards_are(
    place: Path, tmp_path: Path, dtype: str
) -> None:
    """From shards, from the window and computed a moment ago: the same numbers."""
    target: Target = load(str(place / "target"), dtype="float32", device="cpu")
    shutil.copytree(
        captured(place, f"shards-{dtype}", dtype=dtype, shard_bytes=20_000), tmp_path / "s"
    )
    hybrid, responses = opened(place, tmp_path / "s")
    window = open_window(hybrid, 1 << 30, target, index=0, count=1)
    missing = MissingFeatures(dtype, window)

    def features(row: Any) -> Any:
        one = draw_pass([row], [1], num_anchors=5, block_size=4)
        found = missing.complete(target, LAYERS, one)
        assert found.taps.dtype == found.last_hidden.dtype == hybrid.dtype
        return torch.cat([found.taps, found.last_hidden], -1)

    with window:
        stored, computed = features(hybrid[3]), features(responses[3])
        window.flush()
        hybrid._places.clear()
        assert hybrid[3].source == "window"
        kept = features(hybrid[3])
        # rows that another target computed are not found
        target.head_weight.view(-1)[target.head_weight.numel() // 2 :] += 1
        with open_window(hybrid, 1 << 30, target, index=0, count=1):
            assert hybrid[3].source == ""
    assert missing.counts() == {"shards": 1, "window": 1, "generated": 1}
    assert torch.equal(stored, computed)
    assert torch.equal(stored, kept)


def row(name: str, tokens: int = 10) -> ShardRow:
    ids = torch.arange(tokens)
    return ShardRow(name, ids, ids > 2, torch.randn(tokens, 24), torch.randn(tokens, 8))


def header() -> store.Header:
    return store.Header(
        target="t", target_revision=None, target_fingerprint="f", layer_ids=[1, 2, 3],
        hidden_size=8, dtype="float32", template_hash="h", max_length=64,
    )  # fmt: skip


def test_the_window_forgets_the_oldest_rows_first(tmp_path: Path) -> None:
    rows = [row(f"r{number}") for number in range(9)]
    with RollingWindow(tmp_path / "w", header(), 10_000) as window:
        for one in rows:
            window.keep(one)
    files = list((tmp_path / "w").glob("*.row"))
    assert sum(path.stat().st_size for path in files) <= 10_000
    kept = len(files)
    assert 2 < kept < 9
    # the next run finds them, gives each process its part, and two of them the half each
    again = RollingWindow(tmp_path / "w", header(), 10_000)
    assert [again.find(one.key) is not None for one in rows] == [False] * (9 - kept) + [True] * kept
    found = again.find(rows[-1].key)
    assert found is not None
    assert torch.equal(found["taps"], rows[-1].taps)
    other = RollingWindow(tmp_path / "w", store.Header(**{**vars(header()), "dtype": "x"}), 10_000)
    assert other.find(rows[-1].key) is None
    shares = [RollingWindow(tmp_path / "w", header(), 2_000, index=i, count=2) for i in range(2)]
    left = list((tmp_path / "w").glob("*.row"))
    assert sum(path.stat().st_size for path in left) <= 4_000
    assert shares[0]._files.keys().isdisjoint(shares[1]._files)


def test_a_file_that_vanished_or_is_damaged_anywhere_is_a_miss(tmp_path: Path) -> None:
    window = RollingWindow(tmp_path / "w", header(), 100_000)
    one = row("a")
    window.keep(one)
    window.flush()
    (path,) = (tmp_path / "w").glob("*.row")
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert window.find(one.key) is None
    for size in (0, 5, 700, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert window.find(one.key) is None
    path.write_bytes(whole)
    assert window.find(one.key) is not None
    path.unlink()
    assert window.find(one.key) is None


def test_what_a_killed_process_was_writing_goes_away(tmp_path: Path) -> None:
    with RollingWindow(tmp_path / "w", header(), 10_000) as window:
        window.keep(row("a"))
    (tmp_path / "w" / ".0123.row.77.tmp").write_bytes(b"half")
    RollingWindow(tmp_path / "w", header(), 10_000)
    assert [path.suffix for path in (tmp_path / "w").iterdir()] == [".row"]


def test_a_disk_that_takes_no_more_ends_the_window_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dspark.corpus.rolling.save_row", full)
    with RollingWindow(tmp_path / "w", header(), 10_000) as window:
        for name in "abc":
            window.keep(row(name))
        window.flush()
        assert not window.active
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.responses=[]"], "data.on_missing is generate but data.responses is empty"),
        (["data.shards=null"], "data.shards is not set"),
        (["train.features=online"], "on_missing is generate but train.features is online, which"),
        (["data.shards=nowhere"], r"data.shards 'nowhere' holds no manifest\.json"),
    ],
)
def test_wrong_use_is_a_sentence(
    place: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    own = generate(place / "shards", *overrides)
    with pytest.raises((ConfigError, DataError, CheckpointError), match=sentence):
        program.run(config(place, tmp_path / "out", *own))


def test_a_window_without_generating_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"window_bytes is 5 but on_missing is refuse"):
        config(place, tmp_path, "data.window_bytes=5")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("target_fingerprint", "2-0-0", r"\(another config \(or its overrides\) and weights\)"),
        ("compute_dtype", "bfloat16", "compute_dtype bfloat16, this run has float32"),
    ],
)
def test_features_of_another_target_are_not_completed(
    place: Path, tmp_path: Path, name: str, value: str, sentence: str
) -> None:
    shards = halved(place, tmp_path / "s")
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["header"][name] = value
    (shards / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=sentence):
        program.run(config(place, tmp_path / "out", *generate(shards)))


def test_a_negative_id_is_a_sentence(place: Path, tmp_path: Path) -> None:
    shards = tmp_path / "s"
    shutil.copytree(place / "shards", shards)
    path = shards / "shard-00000.safetensors"
    damaged = bytearray(path.read_bytes())
    header = int.from_bytes(damaged[:8], "little")
    begin = 8 + header + json.loads(damaged[8 : 8 + header])["input_ids"]["data_offsets"][0]
    damaged[begin : begin + 4] = (-7).to_bytes(4, "little", signed=True)
    path.write_bytes(damaged)
    own = ["train.features=offline", f"data.shards={shards}"]
    with pytest.raises(DataError, match=r"token id -7, which is none: .*inspect DIR --verify"):
        program.run(config(place, tmp_path / "out", *own))


def test_other_taps_are_refused_there_too(place: Path, tmp_path: Path) -> None:
    other = generate(halved(place, tmp_path / "half"), "draft.target_layer_ids=[0, 2, 4]")
    with pytest.raises(DataError, match=r"layer_ids \[1, 2, 4\], this run has \[0, 2, 4\]"):
        program.run(config(place, tmp_path / "out", *other))


def test_the_plan_of_a_hybrid_run(place: Path, tmp_path: Path) -> None:
    own = generate(place / "shards")
    report = plan.plan_run(config(place, tmp_path / "out", *own), {}, resume=None)
    online = plan.plan_run(
        config(place, tmp_path / "out", "train.features=online"), {}, resume=None
    )
    assert report["data"] == online["data"]
    assert report["memory"] == online["memory"]
    assert report["disk"]["shards"] is None
    # what the shards lack the target computes in every pass
    half = generate(halved(place, tmp_path / "half"))
    some = plan.plan_run(config(place, tmp_path / "out", *half), {}, resume=None)
    held = [
        one["rows"] for one in json.loads((place / "shards/manifest.json").read_text())["shards"]
    ]
    computed = some["features"][-1]["computed"]
    assert computed == pytest.approx(1 - held[0] / sum(held))
    assert {way["computed"] for way in some["features"][:-1]} == {None}
    target = online["cost"]["tflop_per_step"]["target"]
    assert some["cost"]["tflop_per_step"]["target"] == pytest.approx(computed * target)
    report = plan.plan_run(config(place, tmp_path, *generate(tmp_path / "no")), {}, resume=None)
    assert "is not there yet" in report["data"]["note"]
    late = [*own, f"data.responses=[{tmp_path / 'late.jsonl'}]"]
    report = plan.plan_run(config(place, tmp_path, *late), {}, resume=None)
    assert "late.jsonl" in report["data"]["note"]
