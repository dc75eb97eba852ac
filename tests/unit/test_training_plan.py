"""`train.py --plan`: arithmetic by hand, bounds without data, and refusals as in a run."""

import importlib.util
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from dspark import config_io
from dspark.config import LossSettings
from dspark.corpus import store
from dspark.draft import DSparkDraftModel
from dspark.draft.config import DSparkConfig
from dspark.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MissingPackageError,
    TargetError,
)
from dspark.export.config_json import from_json
from dspark.losses import objective_chunked
from dspark.target import outline
from dspark.target.config import LingConfig
from dspark.target.sizes import parameter_counts
from dspark.testing import save_tiny_target
from dspark.training import (
    checkpoint,
    memory,
    plan,
    plan_features,
    plan_sizes,
    plan_text,
    program,
)
from dspark.training.flops import PassWork, draft_flops
from dspark.training.plan_model import draft_shape, inner_size, target_counts

ROOT = Path(__file__).resolve().parents[2]
FLASH = ROOT / "configs/ling-3.0-flash-dspark.yaml"
LENGTHS = [40, 20, 60, 30, 50, 70, 10, 24, 36, 60]  # tokens of the rows, 4 of each unsupervised
TINY = [
    "target.dtype=float32",
    "draft.num_layers=2",
    "draft.block_size=4",
    "draft.num_taps=3",
    "draft.markov_rank=8",
    "train.num_anchors=30",
]
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16 + 3 * 64 * 96 + 2 * 64
HEADER = store.Header(
    target="tiny",
    target_revision=None,
    target_fingerprint="0" * 16,
    layer_ids=[1, 2, 3],
    hidden_size=64,
    dtype="float32",
    template_hash="",
    max_length=64,
)
OWN = 2 * LAYER + 3 * 64 * 64 + 2 * 64 + 2 * 260 * 8 + (64 + 8 + 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target without weights, and ten rows."""
    directory = tmp_path_factory.mktemp("plan")
    save_tiny_target(directory / "target")
    (directory / "target" / "model.safetensors").unlink()
    rng = random.Random(0)
    rows = [
        {
            "id": f"r{number}",
            "input_ids": [rng.randrange(97, 107) for _ in range(length)],
            "loss_mask": [0] * 4 + [1] * (length - 4),
        }
        for number, length in enumerate(LENGTHS)
    ]
    for name, held in (("rows", rows), ("fewer", rows[:9])):
        lines = "".join(json.dumps(row) + "\n" for row in held)
        (directory / f"{name}.jsonl").write_text(lines)
    return directory


def settings(place: Path, *overrides: str) -> list[str]:
    return [
        *TINY,
        f"target.path={place / 'target'}",
        f"data.responses=[{place / 'rows.jsonl'}]",
        f"train.output_dir={place / 'out'}",
        *overrides,
    ]


def planned(
    place: Path, *overrides: str, environ: dict[str, str] | None = None, **how: Any
) -> dict[str, Any]:
    config = config_io.load(None, settings(place, *overrides))
    return plan.plan_run(config, environ or {}, resume=None, **how)


# --- by hand ------------------------------------------------------------------------------


def test_batch_steps_and_parameters_are_those_of_the_settings(place: Path) -> None:
    report = planned(place, "train.batch_size=2", "train.grad_accumulation=2", "train.epochs=30")
    anchors = [min(30, length - 5) for length in LENGTHS]
    assert sum(LENGTHS) == 400
    assert report["batch"] == {
        "rows_per_pass": 2,
        "grad_accumulation": 2,
        "processes": 1,
        "global_batch": 4,
        "packed": False,
        "tokens_per_step": 160,
        "anchors_per_step": round(4 * sum(anchors) / 10),
        "slots_per_step": round(4 * sum(anchors) / 10 * 4),
    }
    assert report["steps"] == {"total": 60, "epochs": 30.0, "warmup": 3, "tokens": 60 * 160}
    assert report["data"] == {
        "known": True,
        "assumed": False,
        "note": None,
        "documents": 10,
        "rows": 10,
        "tokens": 400,
        "fill": None,
        "longest_row": 128,  # whole tiles
        "tokens_per_row": 40.0,
        "anchors_per_row": sum(anchors) / 10,
    }
    found = report["parameters"]
    assert (found["layers"], found["context"]) == (2 * LAYER, 3 * 64 * 64)
    assert (found["markov_head"], found["confidence_head"]) == (2 * 260 * 8, 64 + 8 + 1)
    assert found["trainable"] == OWN
    assert found["target"] == 260 * 64 + found["target_active"] == 6 * (LAYER - 32) + 64 + 260 * 64
    assert report["disk"]["checkpoint"] == 12 * OWN
    assert report["disk"]["total"] == 3 * 12 * OWN  # keep 2, and the one being written
    assert report["warnings"] == []


def test_packed_rows_count_as_rows(place: Path) -> None:
    report = planned(place, "data.max_length=80", "data.pack_length=80", "train.epochs=3")
    data = report["data"]
    assert data["documents"] == 10
    assert data["rows"] == 6  # 70+10, 60+20, 60, 50+30, 40+36, 24
    assert data["fill"] == pytest.approx(400 / (6 * 80))
    assert data["tokens_per_row"] == pytest.approx(400 / 6)
    assert report["batch"]["packed"]
    assert report["steps"]["total"] == 18
    assert report["steps"]["tokens"] == 18 * round(400 / 6)
    assert data["anchors_per_row"] == pytest.approx((5 * 30 + 19) / 6)
    # as many documents more as rows
    many = planned(place, "data.max_length=80", "data.pack_length=80", tokens=4000)["data"]
    assert (many["rows"], many["documents"]) == (60, 100)
    assert (
        planned(place, "data.max_length=80", "data.pack_length=200")["data"]["longest_row"] == 256
    )


def test_memory_of_every_engine_is_its_shares(place: Path) -> None:
    config = draft_of(place)
    target = memory.TargetSize(
        weight_bytes=1000, itemsize=2, hidden_size=64, inner_size=96, num_taps=3, runs=True
    )
    count = 4 * 10**8

    def held(holding: memory.Holding, **changed: Any) -> dict[str, int]:
        given: dict[str, Any] = {
            "holding": holding,
            "processes": 4,
            "bf16": True,
            "batch_size": 1,
            "row_tokens": 128,
            "row_anchors": 30,
            "grad_accumulation": 2,
            "gradient_checkpointing": False,
            "compiled": True,
            **changed,
        }
        shape = memory.TrainingShape(**given)
        return memory.estimate(config, count, target, shape, LossSettings()).to_dict()

    names = ("weights", "gradients", "moments", "copies")
    for holding, wanted in {
        "replicated": (4 * count, 4 * count, 8 * count, 2 * count),
        "zero2": (count, count, 2 * count, 2 * count),
        "zero3": (count, count, 2 * count, 2 * count),
        "fsdp2": (count, count, 2 * count, 2 * count),
    }.items():
        found = held(holding)  # type: ignore[arg-type]
        assert tuple(found[name] for name in names) == wanted, holding
        assert found["features"] == 128 * 4 * 64 * 2
    assert held("fsdp2")["buckets"] == 4 * count
    assert held("fsdp2", grad_accumulation=1)["buckets"] == 2 * count
    assert held("zero2")["buckets"] == 2 * 2 * 10**8
    assert "copies" not in held("replicated", bf16=False)
    assert "gathered" not in held("replicated")
    # a lone process with one pass has its gradients where the activations were
    alone = {"processes": 1, "grad_accumulation": 1}
    one, two = held("replicated", **alone), held("replicated", processes=1)
    assert two["peak"] - one["peak"] == one["activations"] + one["objective"]
    # less is kept, and it grows with the rows of a pass
    assert held("zero2", gradient_checkpointing=True)["activations"] < held("zero2")["activations"]
    assert held("zero2", batch_size=2)["activations"] == 2 * held("zero2")["activations"]


def test_the_measured_step_of_the_ling_draft_is_met() -> None:
    """One H200, one row of 4096 tokens and 512 anchors: 26.9 TFLOP, 12.3 GiB with both tables."""
    config = official_draft()
    shape = memory.TrainingShape(
        holding="replicated",
        processes=1,
        bf16=True,
        batch_size=1,
        row_tokens=4096,
        row_anchors=512,
        grad_accumulation=1,
        gradient_checkpointing=False,
        compiled=True,
    )
    tables = memory.TargetSize(
        weight_bytes=2 * 2 * 157184 * 2560,
        itemsize=2,
        hidden_size=2560,
        inner_size=6144,
        num_taps=5,
        runs=False,
    )
    found = memory.estimate(config, 558_925_825, tables, shape, LossSettings())
    assert found.peak / 2**30 == pytest.approx(12.3, rel=0.1)
    rows = {"draft": config, "parameters": 558_925_825, "target": tables, "shape": shape}
    most = memory.largest_batch(**rows, loss=LossSettings(), room=80 * 2**30)  # type: ignore[arg-type]
    assert 20 < most < 40
    work = PassWork(context=4096, slots=4096, seen=4096 * (2048 + 8), supervised=4096)
    assert sum(draft_flops(config, work).values()) == pytest.approx(26.9e12, rel=0.01)


def test_products_are_those_that_a_pass_makes(place: Path) -> None:
    """torch's own count of a pass on a CPU, whose attention sees every key."""
    config = draft_of(place)
    draft = DSparkDraftModel(config)
    embed, head = torch.randn(260, 64), torch.randn(260, 64)
    draft.attach(embed, head)
    length, anchors, block = 48, 5, 4
    taps = torch.randn(1, length, 3 * 64)
    ids = torch.randint(260, (1, anchors))
    blocks = torch.randint(260, (anchors, block))
    with FlopCounterMode(display=False) as counter:
        hidden = draft(taps, ids, torch.arange(10, 10 + anchors)[None])[0]
        sums = objective_chunked(
            hidden,
            torch.randn(anchors, block, 64),
            blocks,
            torch.ones(anchors, block, dtype=torch.bool),
            blocks,
            draft=draft,
            target_head=lambda rows: rows @ head.T,
            settings=LossSettings(),
        )
        sums.loss(torch.ones(2, dtype=torch.float64), LossSettings(), 1.0).backward()  # type: ignore[no-untyped-call]
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for name, n in counted.items() if "mm" in str(name))
    slots = anchors * block
    work = PassWork(context=length, slots=slots, seen=0, supervised=slots)
    wanted = sum(draft_flops(config, work).values())
    confidence = 6 * slots * (64 + 8)
    assert products == wanted + confidence


def test_cost_follows_from_the_assumed_share(place: Path) -> None:
    one = planned(place, "train.steps=10", mfu=0.4)["cost"]
    half = planned(place, "train.steps=10", mfu=0.2)["cost"]
    assert half["gpu_hours"] == pytest.approx(2 * one["gpu_hours"])
    parts = one["tflop_per_step"]
    assert one["tflop_per_step_total"] == pytest.approx(sum(parts.values()))
    active = 6 * (LAYER - 32) + 64
    assert parts["target"] == pytest.approx(2 * active * 40 / 1e12)
    assert one["gpu_hours"] == pytest.approx(10 * one["tflop_per_step_total"] / (989 * 0.4) / 3600)
    again = planned(place, "train.steps=10", "train.gradient_checkpointing=true")["cost"]
    more = again["tflop_per_step"]["recomputation"]
    assert more == pytest.approx((parts["attention"] + parts["layers"]) / 3)
    slots = 4 * sum(min(30, length - 5) for length in LENGTHS) / 10
    # an anchor sees half of its document, a long document has more of them, and its own block
    seen = slots * (sum(length * length for length in LENGTHS) / (2 * 400) + 4)
    work = PassWork(context=40, slots=slots, seen=seen, supervised=slots)
    for name, value in draft_flops(draft_of(place), work).items():
        assert parts[name] == pytest.approx(value / 1e12), name
    # processes do their rows at the same time
    four = planned(place, "train.steps=10", environ={"WORLD_SIZE": "4", "LOCAL_RANK": "0"})["cost"]
    assert four["tflop_per_step_total"] == pytest.approx(4 * one["tflop_per_step_total"])
    assert four["seconds_per_step"] == pytest.approx(one["seconds_per_step"])
    assert (four["hours"], four["gpu_hours"]) == pytest.approx((one["hours"], 4 * one["gpu_hours"]))


def test_memory_follows_from_the_settings(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bf16 = planned(place)["memory"], planned(place, "train.mixed_precision=bf16")["memory"]
    assert (plain["budget"], plain["budget_assumed"]) == (80 * 2**30, True)
    assert "copies" not in plain
    assert bf16["copies"] == 2 * OWN
    # of the longest row, and of the row with the most anchors
    assert plain["features"] == 128 * 4 * 64 * 4
    fewer = planned(place, "train.num_anchors=5")["memory"]
    assert fewer["activations"] < plain["activations"]
    monkeypatch.setattr(plan_sizes, "_BUDGET", plain["peak"])
    assert planned(place)["memory"]["largest_batch_size"] == 1
    monkeypatch.setattr(plan_sizes, "_BUDGET", plain["peak"] - 1)
    assert planned(place)["memory"]["largest_batch_size"] == 0
    ways = planned(place, "train.steps=3")["features"]
    assert [way["fits"] for way in ways] == [False] + [True] * (len(ways) - 1)
    # a target that is too large for one device is not spread unless it can be
    monkeypatch.setattr(plan_sizes, "_BUDGET", 1000)
    ways = planned(place, "train.steps=3")["features"]
    assert {way["target_devices"] for way in ways} == {None, 1}
    assert not any(way["fits"] for way in ways)


def test_validation_takes_a_checkpoint_more_and_the_target(place: Path, tmp_path: Path) -> None:
    own = ["train.validation_prompts=[" + str(place / "rows.jsonl") + "]"]
    with pytest.raises(DataError, match="tokens_only"):
        planned(place, *own)
    (tmp_path / "ask.jsonl").write_text('{"text": "q"}\n')
    own = [f"train.validation_prompts=[{tmp_path / 'ask.jsonl'}]"]
    assert planned(place, *own)["disk"]["checkpoints"] == 4
    # a decode would need the target where features are read, so they are compared without
    ways, plain = planned(place, *own)["features"], planned(place)["features"]
    assert [way["memory_peak"] for way in ways] == [way["memory_peak"] for way in plain]
    with pytest.raises(DataError, match="room for 600 new tokens in 512 positions"):
        planned(place, *own, "train.validation_max_new_tokens=600")
    shutil.copytree(place / "target", tmp_path / "target")
    template = tmp_path / "target" / "chat_template.jinja"
    assert template.exists()
    template.write_text("{{ 1 // 0 }}")
    with pytest.raises(TargetError, match="division"):
        planned(place, *own, f"target.path={tmp_path / 'target'}")


def test_other_processes_are_planned_for_as_when_they_run(place: Path) -> None:
    own = ["train.num_processes=2", "train.epochs=3"]
    own += ["train.features=split", "train.target_devices=[cpu, cpu, cpu]"]
    report = planned(place, *own)
    then, now = (
        report["at_num_processes"],
        planned(place, *own, environ={"WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    )
    assert "at_num_processes" not in now
    peaks = then.pop("memory_peak")
    assert then.pop("processes") == 2
    assert then == {name: now[name] for name in then}
    assert set(then) == {"batch", "steps", "target_workers", "cost"}
    assert then["steps"] != report["steps"]
    assert then["target_workers"] != report["target_workers"]
    assert set(peaks) == {"replicated", "zero2", "zero3", "fsdp2"}
    assert peaks["replicated"] == now["memory"]["peak"] != report["memory"]["peak"]


def test_sources_of_features_are_compared_for_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of a real run: 1.24 billion tokens of Ling-3.0-flash are 38 TB at 30.7 KB each."""
    (tmp_path / "Ling-3.0-flash").mkdir()
    shutil.copy(
        ROOT / "configs/targets/ling-3.0-flash.json", tmp_path / "Ling-3.0-flash" / "config.json"
    )
    monkeypatch.chdir(tmp_path)
    config = config_io.load(str(FLASH), ["train.num_processes=1"])
    report = plan.plan_run(config, {}, resume=None, tokens=1_240_000_000)
    ways = {(way["features"], way["storage"]): way for way in report["features"]}
    online, split = ways["online", None], ways["split", None]
    half, full = ways["offline", "bfloat16"], ways["offline", "float32"]
    assert [way["chosen"] for way in report["features"]].count(True) == 1 == split["chosen"]
    assert half["bytes_per_token"] == 2560 * 6 * 2 + 5 == full["bytes_per_token"] - 2560 * 6 * 2
    assert ways["offline", "float8_e4m3fn"]["bytes_per_token"] == 2560 * (5 + 2) + 5 * 2 + 5
    assert half["store_bytes"] == 1_240_000_000 * 30_725 > 38e12
    # one pass over the tokens, on three devices of which one computes at a time
    active = report["parameters"]["target_active"]
    hours = 2 * active * 1.24e9 / (989e12 * 0.4) / 3600
    assert half["capture_gpu_hours"] == pytest.approx(3 * hours)
    assert half["gpu_hours"] == pytest.approx(half["hours"] + 3 * hours)
    assert (online["target_devices"], split["target_devices"], half["target_devices"]) == (
        None,
        3,
        3,
    )
    # ten passes in the trainer's process
    assert online["gpu_hours"] == pytest.approx(half["hours"] + 10 * hours, rel=1e-3)
    assert split["gpu_hours"] == pytest.approx(7 * max(half["hours"], 10 * hours / 2), rel=1e-3)
    assert (online["fits"], split["fits"], half["fits"]) == (False, True, True)
    assert online["memory_peak"] - half["memory_peak"] > report["parameters"]["target"]
    rate = half["read_bytes_per_second"] * half["seconds_per_step"]
    assert rate == pytest.approx(report["batch"]["tokens_per_step"] * 30_725)
    text = "\n".join(plan_text.lines(report))
    assert "* split" in text
    assert "38.1 TB on disk" in text
    assert "ASSUMED 1,240,000,000 tokens" in text
    assert text.count("DOES NOT FIT") == 1
    # 249 GB fit on no single device, whoever it computes for
    one = config_io.load(
        str(FLASH), ["train.num_processes=1", "train.target_devices=[cuda:2, cuda:3+cuda:4]"]
    )
    found = plan.plan_run(one, {}, resume=None)
    assert not any(way["fits"] for way in found["features"])
    assert found["target_workers"]["weights_a_device"] > 231 * 2**30


def test_assumed_tokens_are_more_rows_of_the_same_kind(place: Path) -> None:
    few, many = planned(place, "train.epochs=3"), planned(place, "train.epochs=3", tokens=4000)
    assert (many["data"]["rows"], many["data"]["documents"]) == (100, 100)
    assert many["steps"]["total"] == 10 * few["steps"]["total"]
    assert many["batch"] == few["batch"]
    assert "like those that are there" in "\n".join(plan_text.lines(many))
    # a small target fits beside the draft, and on one device
    ways = many["features"]
    assert all(way["fits"] for way in ways)
    assert {way["target_devices"] for way in ways} == {None, 1}
    assert ways[0]["chosen"]
    # a copy of the target for every trainer
    split = planned(place, "train.num_processes=3", "train.steps=5")["features"][1]
    assert split["gpus"] == 6
    offline = planned(place, "train.features=offline", f"data.shards={place / 'none'}")["features"]
    assert [way["storage"] for way in offline if way["chosen"]] == ["bfloat16"]
    # of a run that computes what its shards lack, too, offline is what shards of all rows would do
    store.start(place / "begun", HEADER)
    how = ["train.features=offline", "data.on_missing=generate", f"data.shards={place / 'begun'}"]
    mixed = planned(place, *how, "train.epochs=3", tokens=4000)["features"]
    assert all(way["hours"] < ways[0]["hours"] for way in ways[2:])
    own = {"chosen", "store_free"}
    assert [{k: way[k] for k in way.keys() - own} for way in mixed[:-1]] == [
        {k: way[k] for k in way.keys() - own} for way in many["features"]
    ]
    assert [way["chosen"] for way in mixed] == [False] * (len(mixed) - 1) + [True]
    assert (mixed[-1]["computed"], mixed[-1]["hours"]) == (1.0, ways[0]["hours"])
    # it captures nothing, though there may be no shards yet
    none = planned(place, *how[:2], f"data.shards={place / 'none'}", tokens=4000)["features"][-1]
    assert (none["chosen"], none["capture_gpu_hours"], none["store_free"]) == (True, None, None)
    assert planned(place, tokens=1)["data"]["rows"] == 1
    unknown = planned(place, "data.responses=[later.jsonl]")["features"]
    assert {way["gpu_hours"] for way in unknown} == {None}
    assert all(way["seconds_per_step"] > 0 for way in unknown)


@pytest.mark.parametrize("text", ["0", "-3", "many", "nan", "inf", "1e20", ""])
def test_a_number_of_tokens_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens must be a number of tokens such as"):
        plan.count(text)
    assert plan.count("1.24e9") == plan.count("1_240_000_000") == 1_240_000_000


# --- what is not there --------------------------------------------------------------------


def test_split_features_move_the_target_to_its_workers(place: Path) -> None:
    online = planned(place)
    how = ["train.features=split", "train.target_devices=[cpu, cpu]"]
    split = planned(place, *how)
    weights = online["memory"]["target_weights"]
    assert online["target_workers"] is None
    assert split["target_workers"]["devices"] == ["cpu", "cpu"]
    assert split["target_workers"]["weights_a_device"] == weights
    target = outline(config_io.load(None, settings(place)).target)
    table = target.embed_weight.numel() * target.embed_weight.element_size()
    assert split["memory"]["target_weights"] in (table, 2 * table)
    assert split["memory"]["target_weights"] < weights
    moved = online["cost"]["tflop_per_step"]["target"]
    assert split["target_workers"]["tflop_per_step"] == moved > 0
    assert "target" not in split["cost"]["tflop_per_step"]
    assert split["disk"]["shards"] is None
    assert "at least" in "\n".join(plan_text.lines(split))
    # the slower of both sides sets the pace
    cost = split["cost"]
    assert cost["target_seconds_per_step"] == pytest.approx(moved / 989 / 0.4 / 2)
    trainer = cost["tflop_per_step_total"] / 989 / 0.4
    assert cost["seconds_per_step"] == pytest.approx(max(trainer, cost["target_seconds_per_step"]))


def test_an_average_of_the_weights_is_counted(place: Path) -> None:
    plain, averaged = planned(place), planned(place, "train.ema_decay=0.9")
    assert averaged["memory"]["average"] == 4 * OWN
    assert averaged["memory"]["peak"] - plain["memory"]["peak"] == 4 * OWN
    assert averaged["disk"]["checkpoint"] - plain["disk"]["checkpoint"] == 4 * OWN
    assert "average" not in plain["memory"]


def test_without_data_the_settings_are_the_bound(place: Path) -> None:
    gone = ["data.responses=[later.jsonl]", "data.max_length=96", "train.batch_size=2"]
    report = planned(place, *gone)
    data = report["data"]
    assert (data["known"], data["rows"], data["tokens_per_row"]) == (False, None, 96)
    assert "later.jsonl" in data["note"]
    assert report["steps"] == {"total": None, "epochs": 10.0, "warmup": None, "tokens": None}
    assert report["batch"]["tokens_per_step"] == 192
    assert report["cost"]["gpu_hours"] is None
    assert data["longest_row"] == 128
    assert data["anchors_per_row"] == 30
    all_anchors = planned(place, *gone, "train.num_anchors=200")
    assert all_anchors["data"]["anchors_per_row"] == 95
    slots = 2 * 30 * 4
    work = PassWork(context=192, slots=slots, seen=slots * (48 + 4), supervised=slots)
    wanted = draft_flops(draft_of(place), work)["attention"]
    assert report["cost"]["tflop_per_step"]["attention"] == pytest.approx(wanted / 1e12)
    packed = planned(place, *gone, "data.pack_length=300")
    assert (packed["data"]["tokens_per_row"], packed["data"]["longest_row"]) == (300, 384)
    (place / "rows.txt").write_text("no rows")
    with pytest.raises(DataError, match=r"rows\.txt"):
        planned(place, f"data.responses=[{place / 'rows.txt'}]")
    told = planned(place, *gone, "train.steps=50")
    assert told["steps"] == {"total": 50, "epochs": None, "warmup": 2, "tokens": 50 * 192}


def test_a_config_alone_is_enough_and_its_draft_is_the_official_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flagship recipe beside the target's config.json and nothing else."""
    (tmp_path / "Ling-3.0-flash").mkdir()
    shutil.copy(
        ROOT / "configs/targets/ling-3.0-flash.json", tmp_path / "Ling-3.0-flash" / "config.json"
    )
    monkeypatch.chdir(tmp_path)
    config = config_io.load(FLASH)
    target = outline(config.target)
    draft = draft_shape(config, target, None, None, None)
    ours, official = vars(draft), vars(official_draft())
    raw = json.loads((ROOT / "configs/drafts/ling-3.0-flash-dspark.json").read_text())
    compared = set(raw) - {"architectures", "model_type", "dtype", "mask_token_id"}
    assert len(compared) > 18
    for key in compared:
        mine, theirs = ours[key], official[key]
        assert list(mine) == list(theirs) if isinstance(mine, list | tuple) else mine == theirs, key
    assert draft.mask_token_id not in (raw["mask_token_id"], raw["pad_token_id"])

    report = plan.plan_run(config, {}, resume=None)
    assert report["parameters"]["with_tables"] == 1_363_707_905
    assert report["parameters"]["trainable"] == 558_925_825
    assert report["data"]["note"] == f"target '{config.target.path}' has no tokenizer yet"
    assert report["batch"]["global_batch"] == 256
    assert report["at_num_processes"]["batch"]["global_batch"] == 512
    peaks = report["at_num_processes"]["memory_peak"]
    assert peaks["zero2"] < peaks["replicated"]
    cost = report["at_num_processes"]["cost"]
    assert cost["seconds_per_step"] == cost["target_seconds_per_step"] > 20  # the slower side
    assert cost["gpus"] == 8
    # it fits as it is meant to run, and would not with the target beside the draft
    assert report["warnings"] == []
    beside = config_io.load(str(FLASH), ["train.features=online", "train.target_devices=[]"])
    beside = beside.model_copy(update={"target": config.target})
    alone = plan.plan_run(beside, {}, resume=None)
    assert "most for target weights (231.7 GiB)" in alone["warnings"][0]
    # nine tenths of a GPU are for weights
    assert [way["target_devices"] for way in alone["features"][:2]] == [None, 4]
    counts = parameter_counts(LingConfig.from_file(tmp_path / "Ling-3.0-flash" / "config.json"))
    head = 157_184 * 2560
    assert report["parameters"]["target_active"] == counts["active_parameters"] - head
    # the mask's id is open until a tokenizer is there, or it is given
    given = ["train.num_processes=1", ""]
    for mask in (None, 77):
        given[1] = f"draft.mask_token_id={json.dumps(mask)}"
        found = plan.plan_run(config_io.load(FLASH, given), {}, resume=None)
        assert found["draft"]["draft.mask_token_id"] == mask
    given[1] = f"draft.mask_token_id={raw['pad_token_id']}"
    with pytest.raises(ConfigError, match="mask_token_id"):
        plan.plan_run(config_io.load(FLASH, given), {}, resume=None)
    (tmp_path / "start").mkdir()
    shutil.copy(
        ROOT / "configs/drafts/ling-3.0-flash-dspark.json", tmp_path / "start" / "config.json"
    )
    given[1:] = ["draft.init_from=start", "draft.mask_token_id=null"]
    found = plan.plan_run(config_io.load(FLASH, given), {}, resume=None)
    assert found["draft"]["draft.mask_token_id"] == raw["mask_token_id"]
    assert not (tmp_path / "outputs").exists()


def test_shards_are_measured_by_their_manifest(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = ["train.features=offline", f"data.shards={tmp_path / 'shards'}", "train.steps=2"]
    report = planned(place, *offline)
    assert report["data"]["note"] == f"data.shards '{tmp_path / 'shards'}' is not there yet"
    assert report["disk"]["shards"] is None
    rows = [
        store.ShardRow(
            str(length),
            torch.full((length,), 97),
            torch.ones(length, dtype=torch.bool),
            torch.ones(length, 3 * 64),
            torch.ones(length, 64),
        )
        for length in (40, 20)
    ]
    store.start(tmp_path / "shards", HEADER)
    with pytest.raises(CheckpointError, match="is incomplete"):
        planned(place, *offline)
    shard = store.write_shard(tmp_path / "shards", 0, rows, ["40", "20"], [])
    store.finish(tmp_path / "shards", HEADER, [shard])
    report = planned(place, *offline)
    assert (report["data"]["documents"], report["data"]["tokens"]) == (2, 60)
    assert report["data"]["anchors_per_row"] == (30 + 19) / 2
    # whether the responses are there does not matter to them
    assert planned(place, *offline, "data.responses=[later.jsonl]")["data"] == report["data"]
    # one that would have to be captured is told what is free where it would go
    monkeypatch.setattr(plan_features, "free_bytes", lambda place: len(str(place)))
    ways = planned(place, *offline, "capture.out=/there")["features"]
    assert [way["store_free"] for way in ways if way["features"] == "offline"] == [
        None if way["chosen"] else len("/there") for way in ways if way["features"] == "offline"
    ]
    # as they are, not as a capture would be: and that is done
    assert report["disk"]["shards"] == 60 * (4 * 64 * 4 + 5)
    (chosen,) = (way for way in report["features"] if way["chosen"])
    assert (chosen["storage"], chosen["capture_gpu_hours"]) == ("float32", None)
    assert "captured already" in "\n".join(plan_text.lines(report))
    assert "target" not in report["cost"]["tflop_per_step"]
    assert "target_pass" not in report["memory"]


def test_a_run_that_would_go_on_is_said_to(place: Path, tmp_path: Path) -> None:
    """The plan neither clears what a killed save left nor chooses another mask id."""
    save_tiny_target(tmp_path / "target")
    own = [f"target.path={tmp_path / 'target'}", f"train.output_dir={tmp_path / 'out'}"]
    own += ["target.device=cpu", "train.steps=1", "draft.mask_token_id=200"]
    config = config_io.load(None, settings(place, *own))
    program.run(config)
    left = tmp_path / "out" / f"{checkpoint._ASIDE}9.tmp"
    left.mkdir()
    resume = program.find_resume(config, clear=False)
    open_mask = config_io.load(None, settings(place, *own[:3], "train.steps=1"))
    report = plan.plan_run(open_mask, {}, resume=resume)
    assert report["resume"] == str(tmp_path / "out" / "checkpoint-1")
    assert report["draft"]["draft.mask_token_id"] == 200
    assert left.exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("train.num_anchors=29", "train.num_anchors is 29 but .* was trained with 30"),
        ("train.batch_size=3", r"global batch .* is 3 but .* was trained with 1"),
        ("data.pack_length=4096", "data.pack_length is 4096 but .* was trained with None"),
        ("train.steps=3", "the run is 3 steps long but .* was trained for 1"),
        ("draft.num_layers=1", "draft.num_layers is 1 but .* was trained with 2"),
        ("data.responses=[{place}/fewer.jsonl]", "data rows is 9 but .* was trained with 10"),
    ],
)
def test_going_on_with_other_settings_is_refused_as_by_the_run(
    place: Path, tmp_path: Path, changed: str, message: str
) -> None:
    save_tiny_target(tmp_path / "target")
    own = [f"target.path={tmp_path / 'target'}", f"train.output_dir={tmp_path / 'out'}"]
    own += ["target.device=cpu", "train.steps=1", "draft.mask_token_id=200"]
    program.run(config_io.load(None, settings(place, *own)))
    config = config_io.load(None, settings(place, *own, changed.format(place=place)))
    resume = program.find_resume(config, clear=False)
    with pytest.raises(CheckpointError, match=message):
        plan.plan_run(config, {}, resume=resume)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["train.target_devices=[cuda:3, nonsense]"], "holds 'nonsense', which cannot run"),
        (["train.target_devices=[cuda:3, cuda]"], "without a number: write cuda:4"),
        (["train.target_devices=[cuda:3]", "train.num_processes=2"], r"1 device\(s\) for 2"),
        (["train.target_devices=[cuda:2+cuda:3]"], "for Ling-3.0 targets and .* is none"),
        (["train.target_devices=[cuda:3]", "target.device=cuda:0+cuda:1"], "takes its own GPU"),
    ],
)
def test_devices_are_looked_at(place: Path, given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(place, "train.features=split", *given)


def test_devices_of_a_machine_are_for_its_own_trainers(place: Path) -> None:
    environ = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    own = ["train.features=split", "train.target_devices=[cuda:2, cuda:3]"]
    assert planned(place, *own, environ=environ)["launch"]["processes"] == 4
    with pytest.raises(ConfigError, match=r"2 device\(s\) for 4 trainers"):
        planned(place, *own[:1], "train.target_devices=[cuda:4, cuda:5]",
                environ={**environ, "LOCAL_WORLD_SIZE": "4"})  # fmt: skip


# --- launches -----------------------------------------------------------------------------


def launched(monkeypatch: pytest.MonkeyPatch, **more: str) -> dict[str, str]:
    """What `accelerate launch` leaves with DeepSpeed, which need not be installed for this."""
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return object() if name == "deepspeed" else found(name, package)

    monkeypatch.setattr("importlib.util.find_spec", find)
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "ACCELERATE_MIXED_PRECISION": "no",
        **more,
    }


def test_the_launcher_says_how_many_and_how(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in (2, 3):
        path = str(ROOT / f"configs/deepspeed/zero{stage}.json")
        environ = launched(monkeypatch, ACCELERATE_DEEPSPEED_CONFIG_FILE=path)
        report = planned(place, "train.mixed_precision=bf16", environ=environ)
        assert report["launch"] == {
            "processes": 4,
            "strategy": f"zero{stage}",
            "precision": "bf16",
        }
        assert report["memory"]["weights"] == 4 * -(-OWN // 4)
        assert report["batch"]["global_batch"] == 4
    for more, strategy in (({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "zero3"), ({}, "zero2")):
        environ = launched(monkeypatch, **more)
        told = planned(place, environ=environ)
        assert told["launch"]["strategy"] == strategy
        # parts of a draft in shards are not compiled, whatever the setting says
        apart = planned(place, "train.compile=true", environ=environ)["memory"]
        assert (apart == told["memory"]) is (strategy == "zero3")
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}
    fsdp |= {"LOCAL_RANK": "0", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert planned(place, environ=fsdp)["launch"] == {
        "processes": 2,
        "strategy": "fsdp2",
        "precision": "bf16",
    }


def test_a_launch_that_would_be_refused_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = launched(monkeypatch, ACCELERATE_DEEPSPEED_ZERO_STAGE="1")
    with pytest.raises(ConfigError, match=r"stage is 1: this trainer knows 2 and 3"):
        planned(place, environ=environ)
    path = tmp_path / "zero.json"
    environ = launched(monkeypatch, ACCELERATE_DEEPSPEED_CONFIG_FILE=str(path))
    with pytest.raises(ConfigError, match=rf"'{path}' is not a file \(from "):
        planned(place, environ=environ)
    for given, said in (
        ("{", "accelerate refuses the DeepSpeed settings: Expecting"),
        ('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}', "precision is bf16"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": 5}', r"processes \(4\)"),
    ):
        path.write_text(given)
        with pytest.raises(ConfigError, match=said):
            planned(place, "train.mixed_precision=bf16", environ=environ)
    with pytest.raises(ConfigError, match="asked for Megatron-LM"):
        planned(place, environ={"ACCELERATE_USE_MEGATRON_LM": "true"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="needs the package wandb"):
        planned(place, "train.tracker.kind=wandb")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"train.num_processes is 8 but 4 process"):
        planned(place, "train.num_processes=8", environ={"WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    with pytest.raises(ConfigError, match="FSDP of one process shards nothing"):
        planned(place, environ={"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})


# --- the program --------------------------------------------------------------------------


def test_the_program_prints_and_leaves_nothing(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program.main(["--plan", "--json", *settings(place, "train.num_processes=2")])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        "launch", "batch", "data", "steps", "draft", "parameters", "memory", "target_workers",
        "disk", "cost", "features", "resume", "at_num_processes", "warnings",
    }  # fmt: skip
    program.main(["--plan", *settings(place, "train.num_processes=2")])
    told = capsys.readouterr().out
    assert "ASSUMED MFU 0.4 of 989" in told
    assert "on train.num_processes=2:" in told
    assert f"{OWN:,} trainable" in told
    program.main(["--plan", "--json", "--mfu", "0.2", "--tokens", "4e3", *settings(place)])
    report = json.loads(capsys.readouterr().out)
    assert (report["cost"]["assumed_mfu"], report["data"]["tokens"]) == (0.2, 4000)
    # what a killed save left is the run's to clear, and one process of several tells the plan
    left = tmp_path / f"{checkpoint._ASIDE}9.tmp"
    left.mkdir()
    monkeypatch.setenv("RANK", "1")
    program.main(["--plan", *settings(place), f"train.output_dir={tmp_path}"])
    assert capsys.readouterr().out == ""
    assert left.exists()
    assert not (place / "out").exists()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["train.stepz=3"], "did you mean 'train.steps'"),
        (["data.responses=[]"], "data.responses is empty"),
        (["train.features=offline"], "data.shards is not set"),
        (["draft.init_from=nowhere"], "nowhere"),
        (["train.resume=nowhere"], "neither auto, nor none, nor a directory"),
        (["train.validation_prompts=[nowhere.jsonl]"], "nowhere.jsonl"),
        (["draft.mask_token_id=100"], "occurs in the training data"),
        (["draft.target_layer_ids=[1, 5]"], "the target's last layer 5"),
        (
            ["draft.markov_init=embedding", "draft.markov_rank=300"],
            "markov_rank of at most 64 (the target's hidden size), got 300",
        ),
        (["target.path=/nowhere"], "neither a model directory"),
        (["target.config_overrides={rope_scaling: null}"], "is for Ling-3.0 targets"),
        *(
            (
                ["--mfu", text],
                f"--mfu must be a share above 0 and at most 1, such as 0.4; got '{text}'",
            )
            for text in ("2", "0", "nan", "x")
        ),
        (["--tokens", "x"], "such as 1.24e9; got 'x'"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["--plan", *settings(place), *given])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_rows_that_no_block_can_learn_from_are_refused(place: Path, tmp_path: Path) -> None:
    row = {"id": "r", "input_ids": [97] * 9, "loss_mask": [0] * 8 + [1]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    own = [f"data.responses=[{tmp_path / 'rows.jsonl'}]", "data.min_supervised_tokens=1"]
    with pytest.raises(DataError, match="none of the 1 rows holds two supervised tokens"):
        planned(place, *own)


@pytest.mark.parametrize("given", [("--mfu", "0.5"), ("--tokens", "9")])
def test_what_a_plan_assumes_is_refused_without_one(
    given: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(list(given))
    assert ended.value.code == 2
    assert f"error: {' '.join(given)} is for --plan; give that too" in capsys.readouterr().err


def test_a_tokenizer_that_is_damaged_is_not_one_that_is_missing(
    place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "target", tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    with pytest.raises(TargetError, match="tokenizer"):
        planned(place, f"target.path={tmp_path / 'target'}")


def test_the_whole_peak_may_be_assumed() -> None:
    assert plan.share("1") == 1.0


def test_a_token_passes_through_its_share_of_the_experts(tmp_path: Path) -> None:
    transformers.Qwen3MoeConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[],
    ).save_pretrained(tmp_path)  # fmt: skip
    target = outline(config_io.load(None, [f"target.path={tmp_path}"]).target)
    count, active = target_counts(target)
    tables, experts = 2 * 260 * 64, 2 * 8 * 3 * 64 * 32
    assert active == count - tables - experts * 6 // 8


@pytest.mark.parametrize(
    ("given", "widest"),
    [
        ({"intermediate_size": 96}, 96),
        ({"intermediate_size": 96, "moe_intermediate_size": 60, "num_experts_per_tok": 2}, 120),
        ({"intermediate_size": 300, "moe_intermediate_size": 60, "num_experts_per_tok": 2}, 300),
    ],
)
def test_a_layer_is_as_wide_as_what_a_token_passes_through(
    given: dict[str, int], widest: int
) -> None:
    assert inner_size(SimpleNamespace(**given)) == widest


def draft_of(place: Path) -> DSparkConfig:
    config = config_io.load(None, settings(place))
    return draft_shape(config, outline(config.target), None, None, None)


def official_draft() -> DSparkConfig:
    path = ROOT / "configs/drafts/ling-3.0-flash-dspark.json"
    return from_json(json.loads(path.read_text()), str(path))
