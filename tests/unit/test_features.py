"""Features computed in the trainer and features read from shards are the same numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark import config_io
from dspark.config import CaptureSettings, Config
from dspark.corpus.capture import capture
from dspark.corpus.dataset import ResponseRows, Row, ShardRows
from dspark.errors import CheckpointError, DataError, TargetError
from dspark.losses import denominators
from dspark.target import Features, Target, load
from dspark.testing import (
    save_tiny_run,
    tiny_draft,
    tiny_rows,
    tiny_run,
    tiny_target,
    tiny_tokenizer,
)
from dspark.training import features as training_features
from dspark.training import program
from dspark.training.features import batch_features, gather_rows, silence
from dspark.training.objective import Objective
from dspark.training.window import Pass, draw_pass

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
    save_tiny_run(directory, tiny_rows(7, seed=1, longest=90))
    target = load(str(directory / "target"), dtype="float32", device="cpu")
    settings = CaptureSettings(out=str(directory / "shards"), dtype="float32", batch_size=3)
    capture(target, tiny_tokenizer(), config(directory).data, settings, LAYERS)
    return directory


def config(place: Path, *overrides: str) -> Config:
    own = [
        "draft.num_layers=1",
        f"draft.target_layer_ids={list(LAYERS)}",
        f"data.shards={place / 'shards'}",
        "train.batch_size=2",
        "train.steps=5",
    ]
    return config_io.load(None, tiny_run(place, place / "out", *own, *overrides))


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
    computed = batch_features(target, LAYERS, first.input_ids, None, None, first.spans)
    read = batch_features(target, LAYERS, second.input_ids, second.taps, second.last_hidden)
    for index, number in enumerate(numbers):
        length = len(online[number].input_ids)
        for mine, theirs in (
            (computed.taps, read.taps),
            (computed.last_hidden, read.last_hidden),
        ):
            assert torch.equal(mine[index, :length], theirs[index, :length])


def test_a_row_that_is_left_out_adds_nothing(place: Path) -> None:
    target = load(str(place / "target"), dtype="float32", device="cpu")
    rows = ResponseRows(config(place).data, tiny_tokenizer())
    draft = tiny_draft(target)
    layers = draft.layer_ids
    settings = config(place).loss
    objective = Objective(draft, target.logits, settings)
    both = draw_pass([rows[0], rows[1]], [1, 2], num_anchors=5, block_size=4)
    alone = draw_pass([rows[0]], [1], num_anchors=5, block_size=4)
    divisors = denominators(both.mask, settings)

    def share(one: Pass, bad: int | None) -> tuple[Tensor, list[Tensor], Tensor]:
        features = batch_features(target, layers, one.input_ids, None, None)
        if bad is not None:
            features.last_hidden[bad, 3] = torch.inf
            features.taps[bad, :, 7] = torch.nan
        usable = features.usable_documents(one.documents, len(one.spans))
        assert usable.tolist() == [number != bad for number in range(len(usable))]
        mask = silence(features, usable, one.documents, one.mask, one.block_documents)
        loss, vector = objective(
            features.taps,
            gather_rows(features.last_hidden, one.target_rows),
            **one.blocks(mask=mask),
            denominators=divisors,
            ramp=1.0,
        )
        draft.zero_grad()
        loss.backward()
        grads = [p.grad.clone() for _, p in draft.trainable() if p.grad is not None]
        return loss, grads, vector

    left, right = share(both, 1), share(alone, None)
    torch.testing.assert_close(left, right)
    assert len(left[1]) > 5
    assert not torch.allclose(share(both, None)[0], right[0])


def test_padding_does_not_make_a_row_unusable() -> None:
    taps, last = torch.ones(3, 6, 8), torch.ones(3, 6, 4)
    taps[0, 4], last[0, 5] = torch.nan, torch.inf
    taps[1, :4, 4:] = 0
    taps[2, :3, 4:] = 0
    assert Features(taps, last).usable(torch.tensor([4, 4, 4])).tolist() == [True, False, True]
    assert Features(taps, last).usable(torch.tensor([5, 5, 3])).tolist() == [False, True, False]


def test_online_and_offline_runs_are_the_same_run(place: Path, tmp_path: Path) -> None:
    for kind in ("online", "offline"):
        program.run(config(place, f"train.features={kind}", f"train.output_dir={tmp_path / kind}"))
    lines = [
        [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        for kind in ("online", "offline")
    ]
    for mine, theirs in zip(*lines, strict=True):
        for key in ("train/loss", "train/tau", "train/grad_norm"):
            assert mine[key] == theirs[key]
    first, second = (
        load_file(tmp_path / kind / "latest" / "model.safetensors")
        for kind in ("online", "offline")
    )
    for name in first:
        assert torch.equal(first[name], second[name])


def test_shards_bring_what_a_run_needs_of_the_target(place: Path, tmp_path: Path) -> None:
    """No weight of the target is read, and the run is the same."""
    bare = tmp_path / "bare"
    shutil.copytree(place / "target", bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert not list(bare.glob("*.bin"))
    lines = []
    for name, path in {"whole": place / "target", "bare": bare}.items():
        out = tmp_path / name
        offline = ["train.features=offline", f"target.path={path}", f"train.output_dir={out}"]
        program.run(config(place, *offline))
        lines.append([json.loads(line) for line in (out / "metrics.jsonl").open()])
    for mine, theirs in zip(*lines, strict=True):
        assert mine["train/loss"] == theirs["train/loss"]
    with pytest.raises(TargetError):
        program.run(
            config(
                place,
                "train.features=offline",
                f"target.path={bare}",
                f"train.output_dir={tmp_path / 'validated'}",
                f"train.validation_prompts=[{place / 'rows.jsonl'}]",
            )
        )


def test_the_head_of_another_target_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "shards", tmp_path / "shards")
    tables = load_file(tmp_path / "shards" / "target.safetensors")
    save_file({"head": tables["head"][:-1].clone()}, tmp_path / "shards" / "target.safetensors")
    manifest = tmp_path / "shards" / "manifest.json"  # as earlier versions left it, no checksum
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "tables": None}))
    other = ["train.features=offline", f"data.shards={tmp_path / 'shards'}"]
    with pytest.raises(DataError, match=r"output head of \[\d+, \d+\], but target .* has"):
        program.run(config(place, *other, f"train.output_dir={tmp_path / 'out'}"))
    (tmp_path / "shards" / "target.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"target.safetensors' cannot be read"):
        program.run(config(place, *other, f"train.output_dir={tmp_path / 'out'}"))


def test_shards_of_other_taps_are_refused(place: Path, tmp_path: Path) -> None:
    other = config(
        place,
        "train.features=offline",
        f"train.output_dir={tmp_path / 'out'}",
        "draft.target_layer_ids=[0, 2, 3]",
    )
    with pytest.raises(DataError, match=r"layer_ids \[1, 2, 3\], this run has \[0, 2, 3\]"):
        program.run(other)


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


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    target = tiny_target()
    ids = torch.randint(1, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    spans = ((0, 0, 7), (0, 7, 17), (1, 0, 20))
    packed = target.packed_features(ids, LAYERS, training_features._documents(ids, spans))
    assert packed is not None
    for row, first, tokens in spans:
        alone = target.features(ids[row : row + 1, first : first + tokens], LAYERS)
        place = (row, slice(first, first + tokens))
        assert torch.allclose(packed.taps[place], alone.taps[0], atol=1e-3)
        assert torch.allclose(packed.last_hidden[place], alone.last_hidden[0], atol=1e-3)


def test_a_broken_document_does_not_spoil_the_others_of_its_row() -> None:
    target = tiny_target()
    bad, spans = 199, ((0, 0, 7), (0, 7, 9), (0, 16, 6), (1, 0, 20))
    ids = torch.randint(1, bad, (2, 24), generator=torch.Generator().manual_seed(0))
    documents = training_features._documents(ids, spans)
    target.embed_weight.data[bad] = torch.nan
    clean = target.packed_features(ids, LAYERS, documents)
    ids[0, 10] = bad
    found = target.packed_features(ids, LAYERS, documents)
    assert clean is not None
    assert found is not None
    assert found.usable_documents(documents, len(spans)).tolist() == [True, False, True, True]
    for number, (row, first, tokens) in enumerate(spans):
        place = (row, slice(first, first + tokens))
        if number == 1:
            alone = target.features(ids[row : row + 1, first : first + tokens], LAYERS)
            # as it is alone: broken from there on
            assert not alone.last_hidden[0, 3:].isfinite().any()
            assert not found.last_hidden[row, 10:16].isfinite().any()
            continue
        assert torch.equal(found.taps[place], clean.taps[place])
        assert torch.equal(found.last_hidden[place], clean.last_hidden[place])


def test_a_packed_pass_is_one_pass_off_the_cpu() -> None:
    asked: list[torch.Tensor] = []

    class Elsewhere:
        def packed_features(self, ids: Any, layer_ids: Any, documents: torch.Tensor) -> str:
            asked.append(documents)
            return "together"

    ids = torch.empty(1, 6, dtype=torch.int64, device="meta")
    target: Any = Elsewhere()
    found: Any = batch_features(target, LAYERS, ids, None, None, ((0, 0, 2), (0, 2, 3)))
    assert found == "together"
    assert asked[0].tolist() == [[0, 0, 1, 1, 1, 2]]


def test_a_target_with_windows_wants_every_document_by_itself() -> None:
    ids = torch.ones(1, 6, dtype=torch.int64)
    # a Llama does not heed the key
    plain = tiny_target(sliding_window=4)
    assert plain.packed_features(ids, LAYERS, torch.zeros_like(ids)) is not None
    kinds = ["full_attention", "sliding_attention"] * 3
    target = tiny_target(family="qwen3", sliding_window=4, layer_types=kinds)
    assert target.packed_features(ids, LAYERS, torch.zeros_like(ids)) is None
