"""What a plan says of figures given by hand: its lines word by word, and its warnings."""

from typing import Any

import pytest

from dspark import config_io
from dspark.training.plan_text import lines, warnings

GIB = 2**30
BATCH = {
    "rows_per_pass": 2,
    "grad_accumulation": 3,
    "processes": 4,
    "global_batch": 1024,
    "packed": True,
    "tokens_per_step": 98_304,
    "anchors_per_step": 12_288,
    "slots_per_step": 49_152,
}
STEPS = {"total": 5000, "epochs": 2.5, "warmup": 200, "tokens": 491_520_000}
DATA = {
    "known": True,
    "assumed": False,
    "note": None,
    "documents": 1_000_000,
    "rows": 250_000,
    "tokens": 750_000_000,
    "fill": 0.915,
    "longest_row": 4096,
    "tokens_per_row": 3000.4,
    "anchors_per_row": 511.7,
}
COST = {
    "tflop_per_step": {"layers": 120.4, "attention": 2.345},
    "tflop_per_step_total": 1234.5,
    "assumed_mfu": 0.35,
    "assumed_peak_tflops": 989.0,
    "seconds_per_step": 0.5678,
    "target_seconds_per_step": 0.4321,
    "gpus": 7,
    "gpu_hours": 3150.0,
    "hours": 450.25,
}
WAY = {
    "features": "offline",
    "storage": "bfloat16",
    "computed": None,
    "chosen": False,
    "memory_peak": 40 * GIB,
    "fits": True,
    "gpus": 5,
    "target_devices": 3,
    "seconds_per_step": 0.6,
    "hours": 20.25,
    "capture_gpu_hours": 12.5,
    "gpu_hours": 113.75,
    "bytes_per_token": 30_725,
    "store_bytes": 38_100_000_000_000,
    "store_free": 50_000_000_000_000,
    "read_bytes_per_second": 1.5e9,
}
ONLINE = {
    **WAY,
    "features": "online",
    "storage": None,
    "chosen": True,
    "target_devices": None,
    "capture_gpu_hours": None,
    "bytes_per_token": None,
    "store_bytes": None,
    "store_free": None,
    "read_bytes_per_second": None,
}


def plan(**changed: Any) -> dict[str, Any]:
    return {
        "launch": {"processes": 4, "strategy": "zero2", "precision": "no"},
        "batch": BATCH,
        "data": DATA,
        "steps": STEPS,
        "draft": {
            "draft.num_layers": 5,
            "draft.block_size": 8,
            "draft.target_layer_ids": [1, 9],
            "draft.mask_token_id": 151,
        },
        "parameters": {
            "layers": 5_000,
            "context": 400,
            "norms": 30,
            "markov_head": 0,
            "confidence_head": 2,
            "trainable": 5_432,
            "shared_tables": 9_000,
            "with_tables": 14_432,
            "target": 135_000,
            "target_active": 124_000,
        },
        "memory": {
            "weights": 3 * GIB,
            "target_weights": 5 * GIB,
            "peak": 9 * GIB,
            "budget": 80 * GIB,
            "budget_assumed": True,
            "largest_batch_size": 1_024,
        },
        "target_workers": {
            "devices": ["cuda:2", "cuda:3+cuda:4"],
            "weights_a_device": 62.5 * GIB,
            "tflop_per_step": 777.7,
        },
        "disk": {
            "checkpoint": 6_500_000_000,
            "checkpoints": 4,
            "total": 26_000_000_000,
            "shards": 9_100_000_000,
            "free": 100_000_000_000,
        },
        "cost": COST,
        "resume": "out/checkpoint-7",
        "features": [ONLINE],
        "warnings": ["not enough of it"],
        **changed,
    }


def line(**changed: Any) -> str:
    """Of the one way in which features come, what the plan says."""
    (found,) = (one for one in lines(plan(features=[{**WAY, **changed}])) if "offline" in one)
    return found.removeprefix("features      offline bfloat16: ")


def test_every_line_tells_its_figures() -> None:
    other = {
        "processes": 8,
        "batch": {**BATCH, "processes": 8, "global_batch": 2048, "packed": False},
        "steps": {**STEPS, "epochs": None},
        "memory_peak": {"replicated": 30 * GIB, "zero2": 12 * GIB},
        "cost": {**COST, "target_seconds_per_step": None, "gpu_hours": None},
    }
    assert list(lines(plan(at_num_processes=other))) == [
        "launch      4 process(es), zero2, fp32",
        "goes on     from out/checkpoint-7",
        "batch       2 packed rows x 3 passes x 4 process(es) = 1,024 a step: 98,304 tokens, "
        "12,288 anchors, 49,152 slots",
        "data        1,000,000 documents in 250,000 rows, 91.5% full, 750,000,000 tokens; a row "
        "holds 3,000 on average, 4,096 at most (padded), and 512 anchors",
        "steps       5,000 = 2.50 passes over the data, 200 of them warm-up; 491,520,000 tokens in "
        "all",
        "draft       5 layers, blocks of 8, taps [1, 9], mask id 151",
        "parameters  5,432 trainable: layers 5,000, context 400, norms 30, confidence head 2",
        "            14,432 with the target's embedding and head; target 135,000, of which a token "
        "passes through 124,000",
        "memory      ESTIMATED peak a GPU 9.0 GiB of an ASSUMED 80; parts, not all at one time: "
        "weights 3.00, target weights 5.00; largest batch_size 1,024",
        "target      in workers on cuda:2, cuda:3+cuda:4: at least 62.5 GiB a device for its "
        "weights; 778 TFLOP a step over all of them",
        "disk        a checkpoint 6.5 GB, at most 4 at a time: 26.0 GB (100.0 free)",
        "            capture shards 9.1 GB",
        "cost        1,234 TFLOP a step (layers 120, attention 2.35); ASSUMED MFU 0.35 of 989 "
        "TFLOP/s (bf16): 0.568 s a step (the target's workers 0.432; both at a time), 3,150 "
        "GPU-hours (450 h), without validation and saving",
        "features    * online: 114 GPU-hours; trains 20.2 h on 5 GPU(s); peak 40.0 GiB",
        "on train.num_processes=8:",
        "  batch     2 rows x 3 passes x 8 process(es) = 2,048 a step: 98,304 tokens, 12,288 "
        "anchors, 49,152 slots",
        "  steps     5,000, 200 of them warm-up; 491,520,000 tokens in all",
        "  memory    peak a GPU: replicated 30.0 GiB, zero2 12.0 GiB",
        "  cost      1,234 TFLOP a step (layers 120, attention 2.35); ASSUMED MFU 0.35 of 989 "
        "TFLOP/s (bf16): 0.568 s a step, without validation and saving",
        "warning: not enough of it",
    ]


def test_what_is_not_known_yet_is_said_to_be() -> None:
    told = plan(
        launch={"processes": 1, "strategy": "replicated", "precision": "bf16"},
        resume=None,
        target_workers=None,
        data={**DATA, "known": False, "note": "no rows yet"},
        steps={**STEPS, "total": None, "epochs": 10.0},
        draft={**plan()["draft"], "draft.mask_token_id": None},
        disk={**plan()["disk"], "shards": None},
        memory={**plan()["memory"], "budget_assumed": False},
    )
    assert [one[12:] for one in lines(told)][:5] == [
        "1 process(es), replicated, bf16",
        list(lines(plan()))[2][12:],
        "unknown (no rows yet): rows are taken to be full (3,000 tokens), so tokens, memory and "
        "cost are upper bounds",
        "unknown until the data is there: 10 passes over it",
        "5 layers, blocks of 8, taps [1, 9], mask id open until the tokenizer is there",
    ]
    text = "\n".join(lines(told))
    assert "ASSUMED 80" not in text
    assert "in workers on" not in text
    assert "capture shards" not in text


@pytest.mark.parametrize(
    ("known", "like"), [(True, "rows like those that are there"), (False, "full rows")]
)
def test_tokens_that_are_assumed_are_said_to_be(known: bool, like: str) -> None:
    (said,) = (
        one
        for one in lines(plan(data={**DATA, "assumed": True, "known": known}))
        if one.startswith("data ")
    )
    assert said == (
        f"data        ASSUMED 750,000,000 tokens in 250,000 {like} (3,000 tokens, 512 anchors each)"
    )


def test_a_source_of_features_tells_time_room_and_rate() -> None:
    cost = "114 GPU-hours, 12.5 of them capture; trains 20.2 h on 5 GPU(s); peak 40.0 GiB; "
    target = "captured with the target on 3 device(s); "
    disk = "30,725 bytes a token, 38.1 TB on disk"
    rate = "; read at 1.50 GB/s"
    assert line() == cost + target + disk + rate
    assert line(store_free=38_099_000_000_000) == f"{cost}{target}{disk} (38.1 TB free){rate}"
    assert line(store_free=None, target_devices=None, capture_gpu_hours=None, fits=False) == (
        f"{cost.replace(', 12.5 of them capture', '')}{disk}, captured already{rate}; DOES NOT FIT"
    )
    assert line(hours=None, store_bytes=None, target_devices=None) == (
        f"0.6 s a step; peak 40.0 GiB; 30,725 bytes a token{rate}"
    )
    assert line(store_free=None, computed=0.125, target_devices=None).endswith(
        f"GiB; {disk}{rate}; 12.5% of the rows computed in every pass"
    )
    split = {**ONLINE, "features": "split", "chosen": False, "target_devices": 2}
    told = list(lines(plan(features=[ONLINE, split])))
    assert told[-2] == (
        "              split: 114 GPU-hours; trains 20.2 h on 5 GPU(s); peak 40.0 GiB; the target "
        "on 2 device(s)"
    )


def test_what_will_not_fit_is_told_with_what_would() -> None:
    config = config_io.load(None, ["train.output_dir=out"])
    whole = plan(data={**DATA, "rows": 1024})
    assert warnings(whole, config) == []
    memory = {**whole["memory"], "peak": 100.5 * GIB}
    small = plan(
        memory=memory,
        target_workers={**whole["target_workers"], "weights_a_device": 80.5 * GIB},
        disk={**whole["disk"], "free": 25_900_000_000},
        data={**DATA, "rows": 1023},
    )
    about = "about 100.5 GiB are needed of a GPU that has 80, most for target weights (5.0 GiB): "
    assert warnings(small, config) == [
        about + "train.batch_size=1024 fits (raise train.grad_accumulation for the same global "
        "batch)",
        "the target's weights are 80.5 GiB a device and a GPU has 80: spread a Ling-3.0 target "
        "over more, as cuda:2+cuda:3+cuda:4 in train.target_devices",
        "checkpoints take up to 26.0 GB but 25.9 GB are free where train.output_dir 'out' is: "
        "lower train.keep or choose another place",
        "1,023 rows are fewer than the global batch of 1,024: every step would see rows more than "
        "once",
    ]
    nothing = plan(memory={**memory, "largest_batch_size": 0}, data={**DATA, "rows": None})
    assert warnings(nothing, config) == [about + "not even train.batch_size=1 fits"]
    # what just fits, fits
    brim = plan(
        memory={**memory, "peak": 80 * GIB},
        target_workers={**whole["target_workers"], "weights_a_device": 80 * GIB},
        disk={**whole["disk"], "free": 26_000_000_000},
    )
    assert warnings(brim, config) == []
