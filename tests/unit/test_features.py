"""Features computed in the trainer and features read from shards are the same numbers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dspark import config_io
from dspark.config import CaptureSettings, Config
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ResponseRows, Row, ShardRows
from dspark.errors import DataError
from dspark.target import Target, load
from dspark.testing import save_tiny_target, tiny_target, tiny_tokenizer
from dspark.training import trainer
from dspark.training.features import batch_features, gather_rows
from dspark.training.window import draw_pass

LAYERS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, seven rows, and their shards in float32."""
    directory = tmp_path_factory.mktemp("features")
    save_tiny_target(directory / "target")
    rng = random.Random(1)
    with (directory / "rows.jsonl").open("w") as file:
        for number in range(7):
            ids = [rng.randrange(97, 107) for _ in range(rng.randint(12, 90))]
            mask = [0] * 4 + [1] * (len(ids) - 4)
            row = {"id": f"r{number}", "input_ids": ids, "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    target = load(str(directory / "target"), dtype="float32", device="cpu")
    settings = CaptureSettings(out=str(directory / "shards"), dtype="float32", batch_size=3)
    capture(target, tiny_tokenizer(), config(directory).data, settings, LAYERS)
    return directory


def config(place: Path, *overrides: str) -> Config:
    return config_io.load(
        None,
        [
            f"target.path={place / 'target'}",
            "target.dtype=float32",
            "target.device=cpu",
            "draft.num_layers=1",
            "draft.block_size=4",
            f"draft.target_layer_ids={list(LAYERS)}",
            "draft.markov_rank=8",
            f"data.responses=[{place / 'rows.jsonl'}]",
            f"data.shards={place / 'shards'}",
            "train.num_anchors=6",
            "train.batch_size=2",
            "train.steps=5",
            "train.log_every=1",
            *overrides,
        ],
    )


def test_online_and_offline_give_the_same_features(place: Path) -> None:
    target = load(str(place / "target"), dtype="float32", device="cpu")
    online = ResponseRows(config(place).data, tiny_tokenizer())
    offline = ShardRows(place / "shards")
    assert len(online) == len(offline) == 7
    rows = {offline[i].id: offline[i] for i in range(7)}
    numbers = [4, 0, 6]
    first = draw_pass([online[i] for i in numbers], [1, 2, 3], num_anchors=5, block_size=4)
    stored: list[Row] = [rows[online[i].id] for i in numbers]
    second = draw_pass(stored, [1, 2, 3], num_anchors=5, block_size=4)
    assert torch.equal(first.target_rows, second.target_rows)
    assert first.taps is None
    assert second.taps is not None
    computed = batch_features(target, LAYERS, first.input_ids, None, None)
    read = batch_features(target, LAYERS, second.input_ids, second.taps, second.last_hidden)
    for index, number in enumerate(numbers):
        length = len(online[number].input_ids)
        for mine, theirs in (
            (computed.taps, read.taps),
            (computed.last_hidden, read.last_hidden),
        ):
            torch.testing.assert_close(
                mine[index, :length], theirs[index, :length], rtol=1e-5, atol=1e-5
            )


def test_online_and_offline_runs_are_the_same_run(place: Path, tmp_path: Path) -> None:
    for kind in ("online", "offline"):
        trainer.run(config(place, f"train.features={kind}", f"train.output_dir={tmp_path / kind}"))
    lines = [
        [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        for kind in ("online", "offline")
    ]
    for mine, theirs in zip(*lines, strict=True):
        for key in ("train/loss", "train/tau", "train/grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
    first, second = (
        load_file(tmp_path / kind / "latest" / "model.safetensors")
        for kind in ("online", "offline")
    )
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)


def test_shards_of_other_taps_are_refused(place: Path, tmp_path: Path) -> None:
    other = config(
        place,
        "train.features=offline",
        f"train.output_dir={tmp_path / 'out'}",
        "draft.target_layer_ids=[0, 2, 3]",
    )
    with pytest.raises(DataError, match=r"layer_ids \[1, 2, 3\], this run has \[0, 2, 3\]"):
        trainer.run(other)


def test_gathered_rows_predict_the_labels() -> None:
    """Of a target's own greedy continuation, the gathered rows' arg max are the labels."""
    target: Target = tiny_target()
    ids = [97, 98, 99]
    for _ in range(20):
        hidden = target.features(torch.tensor([ids]), ()).last_hidden
        ids.append(int(target.logits(hidden[0, -1]).argmax()))
    other = Row("b", torch.tensor([100] * 9), torch.ones(9, dtype=torch.bool))
    row = Row("a", torch.tensor(ids), torch.tensor([0] * 3 + [1] * 20).bool())
    one = draw_pass([other, row], [0, 1], num_anchors=4, block_size=4)
    features = batch_features(target, (), one.input_ids, None, None)
    predicted = target.logits(gather_rows(features.last_hidden, one.target_rows)).argmax(-1)
    of_row = one.block_rows >= one.anchors.shape[1]
    assert of_row.any()
    mask = one.mask[of_row]
    assert torch.equal(predicted[of_row][mask], one.labels[of_row][mask])
