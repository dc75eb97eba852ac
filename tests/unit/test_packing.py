"""Documents that share a row are trained on as if each had a row of its own."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.config import DataSettings, LossSettings
from dspark.corpus.dataset import Row
from dspark.corpus.packing import PackedRows, pack
from dspark.draft import DSparkDraftModel, sample_blocks
from dspark.draft.anchors import allot
from dspark.errors import DataError
from dspark.losses import denominators
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target
from dspark.training.features import batch_features, gather_rows, silence
from dspark.training.objective import Objective
from dspark.training.window import Pass, draw_pass

MANY = 1000  # anchors: every candidate is one


class Documents(list[Row]):
    def lengths(self) -> list[int]:
        return [len(row.input_ids) for row in self]

    def used_ids(self) -> set[int]:
        return {int(i) for row in self for i in row.input_ids}


def documents(seed: int, lengths: Sequence[int] = (23, 9, 31, 14)) -> Documents:
    """Supervised up to their last token and, in the second one, from the first."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(97, 120, (length,), generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        mask[: 0 if number == 1 else 4] = False
        rows.append(Row(f"d{number}", ids, mask))
    return Documents(rows)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def draft(target: Target) -> DSparkDraftModel:
    return tiny_draft(target)


@pytest.mark.parametrize("seed", range(5))
def test_every_document_lies_whole_in_one_row(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(200)]
    rows = pack(lengths, 100)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert max(sum(lengths[number] for number in row) for row in rows) <= 100
    assert len(rows) <= 11 / 9 * math.ceil(sum(lengths) / 100) + 1
    assert rows == pack(lengths, 100)


def test_a_row_holds_its_documents_one_behind_the_other() -> None:
    docs = documents(0)
    packed = PackedRows(docs, 40)
    seen = []
    for number in range(len(packed)):
        row = packed[number]
        first = 0
        for name, tokens in row.parts():
            document = docs[int(name[1:])]
            part = slice(first, first + tokens)
            assert torch.equal(row.input_ids[part], document.input_ids)
            assert torch.equal(row.loss_mask[part], document.loss_mask)
            first += tokens
            seen.append(name)
        assert first == len(row.input_ids) <= 40
    assert sorted(seen) == ["d0", "d1", "d2", "d3"]
    assert packed.fill == pytest.approx(77 / (40 * len(packed)))


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match=r"31 tokens but data.pack_length is 30: set it to 31"):
        PackedRows(documents(0), 30)
    with pytest.raises(ValueError, match="pack_length is 30, less than max_length 31"):
        DataSettings(max_length=31, pack_length=30)


def test_blocks_end_with_their_document() -> None:
    docs = documents(0)
    one = draw_pass([PackedRows(docs, 77)[0]], [5], num_anchors=MANY, block_size=4)
    ends = torch.tensor([23, 32, 63, 77])
    anchors = one.anchors.flatten()[one.block_rows]
    assert one.anchors.shape == (1, 61)  # no anchor is wasted on a block without a slot
    # neither a document's last token nor, behind it, an unsupervised first one
    assert sorted(anchors.tolist()) == [
        *range(4, 22), *range(23, 31), *range(36, 62), *range(67, 76)
    ]  # fmt: skip
    end = ends[one.block_documents]
    assert torch.equal(one.mask.sum(-1), (end - 1 - anchors).clamp(max=4))
    expected = torch.tensor([0, 23, 32, 63])[one.block_documents]
    assert torch.equal(one.anchor_starts.flatten()[one.block_rows], expected)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_packed_documents_give_the_loss_of_single_ones(
    target: Target, draft: DSparkDraftModel, seed: int
) -> None:
    docs, settings = documents(seed), LossSettings()
    objective = Objective(draft, target.logits, settings)

    def trained(one: Pass) -> tuple[Tensor, Tensor, list[Tensor]]:
        loss, vector = share(objective, target, one, denominators(one.mask, settings))
        draft.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad.clone() for _, p in draft.trainable() if p.grad is not None]
        return loss.detach(), vector, gradients

    apart = trained(draw_pass(docs, [1, 2, 3, 4], num_anchors=MANY, block_size=4))
    together = trained(draw_pass([PackedRows(docs, 77)[0]], [9], num_anchors=MANY, block_size=4))
    torch.testing.assert_close(together, apart, rtol=2e-5, atol=1e-6)
    assert len(apart[2]) > 5


def test_a_neighbour_changes_nothing(target: Target, draft: DSparkDraftModel) -> None:
    docs = documents(0)
    other = Documents(docs)
    other[2] = replace(docs[2], input_ids=docs[2].input_ids.flip(0) + 1)
    hidden = []
    for rows in (docs, other):
        one = draw_pass([PackedRows(rows, 77)[0]], [5], num_anchors=MANY, block_size=4)
        features = batch_features(target, draft.layer_ids, one.input_ids, None, None, one.spans)
        with torch.no_grad():
            out = draft(features.taps, one.anchor_ids, one.anchors, one.starts, one.anchor_starts)
        hidden.append(out.flatten(0, 1)[one.block_rows])
        mine = one.block_documents
    same = (hidden[0] == hidden[1]).flatten(1).all(1)
    assert torch.equal(same, mine != 2)


def test_features_of_a_packed_row_are_those_of_its_documents(target: Target) -> None:
    docs = documents(0, (23, 9, 31, 14, 22))
    packed = draw_pass([PackedRows(docs, 99)[0]], [5], num_anchors=3, block_size=4)
    found = batch_features(target, (0, 2), packed.input_ids, None, None, packed.spans)
    for (row, first, tokens), document in zip(packed.spans, docs, strict=True):
        alone = target.features(document.input_ids[None], (0, 2))
        part = slice(first, first + tokens)
        torch.testing.assert_close(found.taps[row, part], alone.taps[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found.last_hidden[row, part], alone.last_hidden[0], rtol=1e-5, atol=1e-5
        )
    assert not found.taps[0, 99:].any()


def test_features_from_shards_are_joined(target: Target) -> None:
    docs = Documents()
    for document in documents(0):
        features = target.features(document.input_ids[None], (0, 2))
        docs.append(replace(document, taps=features.taps[0], last_hidden=features.last_hidden[0]))
    one = draw_pass([PackedRows(docs, 77)[0]], [5], num_anchors=3, block_size=4)
    assert one.taps is not None
    assert torch.equal(one.taps[0, 23:32], docs[1].taps)  # type: ignore[arg-type]


def test_only_the_document_without_features_is_left_out(
    target: Target, draft: DSparkDraftModel
) -> None:
    docs, settings = documents(0), LossSettings()
    objective = Objective(draft, target.logits, settings)
    one = draw_pass([PackedRows(docs, 77)[0]], [5], num_anchors=MANY, block_size=4)
    rest = [document for document in docs if document.id != "d2"]
    alone = draw_pass(rest, [1, 2, 3], num_anchors=MANY, block_size=4)
    divisors = denominators(one.mask, settings)
    broken = share(objective, target, one, divisors, bad=40)
    expected = share(objective, target, alone, divisors)
    torch.testing.assert_close(broken, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(share(objective, target, one, divisors)[0], broken[0])


def share(
    objective: Objective, target: Target, one: Pass, divisors: Tensor, *, bad: int | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and sums of a pass; position ``bad`` of row 0 is NaN."""
    layers = objective.draft.layer_ids
    features = batch_features(target, layers, one.input_ids, None, None, one.spans)
    if bad is not None:
        features.taps[0, bad] = torch.nan
    usable = features.usable_documents(one.documents, len(one.spans))
    assert int((~usable).sum()) == (bad is not None)
    mask = silence(features, usable, one.documents, one.mask, one.block_documents)
    loss: Tensor
    loss, vector = objective(
        features.taps,
        gather_rows(features.last_hidden, one.target_rows),
        **one.blocks(mask=mask),
        denominators=divisors,
        ramp=1.0,
    )
    return loss, vector


@pytest.mark.parametrize("seed", range(5))
def test_anchors_cover_short_and_long_documents_alike(seed: int) -> None:
    rng = random.Random(seed)
    candidates = [rng.choice([0, 3, 20, 200, 1500]) for _ in range(12)]
    total, budget = sum(candidates), 512
    shares = allot(budget, candidates)
    assert sum(shares) == min(budget, total)
    for share_, count in zip(shares, candidates, strict=True):
        assert share_ <= count
        if total > budget:
            assert abs(share_ - budget * count / total) < (1 if share_ > 1 else 1.001)
            assert share_ > 0 or count == 0


def test_a_row_spends_its_anchors_on_each_document() -> None:
    docs = documents(0)
    row = PackedRows(docs, 77)[0]
    one = draw_pass([row], [5], num_anchors=20, block_size=4)
    assert torch.bincount(one.block_documents).tolist() == allot(20, [18, 8, 26, 9])


def test_rows_can_be_padded_to_one_shape() -> None:
    docs = documents(0)
    row = PackedRows(docs, 77)[0]
    small = draw_pass([row], [5], num_anchors=20, block_size=4)
    large = draw_pass([row], [5], num_anchors=20, block_size=4, length=300, pad_to=128)
    assert large.input_ids.shape == (1, 384)
    for name in ("block_rows", "labels", "mask", "target_rows", "block_documents"):
        assert torch.equal(getattr(large, name), getattr(small, name))
    few = draw_pass([docs[1]], [5], num_anchors=20, block_size=4, length=300)
    assert few.anchors.shape == (1, 20)
    assert len(few.block_rows) == 8


def test_a_budget_smaller_than_the_documents_is_spent() -> None:
    assert sum(allot(3, [10, 10, 10, 10, 1])) == 3
    assert allot(5, [100, 1, 1, 1, 1]) == [1, 1, 1, 1, 1]
    assert allot(9, [4, 3]) == [4, 3]


def test_a_single_document_has_the_anchors_of_an_unpacked_row() -> None:
    row = documents(0)[2]
    drawn = [
        sample_blocks(
            row.input_ids[None],
            row.loss_mask[None],
            num_anchors=6,
            block_size=4,
            generators=[torch.Generator().manual_seed(3)],
            starts=starts,
        )
        for starts in (None, torch.zeros(1, 31, dtype=torch.int64))
    ]
    assert torch.equal(drawn[0].anchors, drawn[1].anchors)
    assert torch.equal(drawn[0].mask, drawn[1].mask)


@pytest.mark.slow
def test_a_packed_run_trains_and_goes_on(tmp_path: Path) -> None:
    """Two and then two more steps are the same as four."""
    import json

    from safetensors.torch import load_file

    from dspark import config_io
    from dspark.testing import save_tiny_target
    from dspark.training import program

    save_tiny_target(tmp_path / "target")
    with (tmp_path / "rows.jsonl").open("w") as file:
        for document in documents(0, (23, 9, 31, 14, 12, 22, 18, 17)):
            row = {
                "id": document.id,
                "input_ids": document.input_ids.tolist(),
                "loss_mask": document.loss_mask.int().tolist(),
            }
            file.write(json.dumps(row) + "\n")

    def run(out: str, steps: int) -> None:
        overrides = [
            f"target.path={tmp_path / 'target'}",
            "target.dtype=float32",
            "target.device=cpu",
            "draft.num_layers=1",
            "draft.block_size=4",
            "draft.num_taps=2",
            "draft.markov_rank=8",
            f"data.responses=[{tmp_path / 'rows.jsonl'}]",
            "data.max_length=40",
            "data.pack_length=40",
            f"train.output_dir={tmp_path / out}",
            "train.num_anchors=6",
            "train.schedule=constant",
            "train.warmup_ratio=0",
            "loss.accept_length_ramp=0",
            f"train.steps={steps}",
            "train.log_every=1",
        ]
        program.run(config_io.load(None, overrides))

    run("whole", 4)
    run("parts", 2)
    run("parts", 4)
    whole, parts = (
        load_file(tmp_path / out / "latest" / "model.safetensors") for out in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    state = json.loads((tmp_path / "whole" / "latest" / "trainer_state.json").read_text())
    assert state["structure"]["data.pack_length"] == 40
    assert state["structure"]["data rows"] == 4
    told = json.loads((tmp_path / "whole" / "latest" / "provenance.json").read_text())
    assert told["data"]["rows"] == 8
