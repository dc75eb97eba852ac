import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import DataSettings
from dspark.corpus.dataset import ResponseRows, Row, collate, order, rows_at
from dspark.corpus.rejects import Reason
from dspark.errors import DataError
from dspark.testing import tiny_tokenizer


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokens(name: str, length: int, supervised: int) -> dict[str, Any]:
    mask = [0] * (length - supervised) + [1] * supervised
    return {"id": name, "input_ids": list(range(1, length + 1)), "loss_mask": mask}


def data(path: str, **changes: Any) -> DataSettings:
    return DataSettings(responses=(path,), max_length=8, **changes)


def test_rows_are_cut_at_max_length_and_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        tokens("short", 7, 3),
        tokens("exact", 8, 3),
        tokens("long", 9, 3),
        tokens("emptied", 12, 4),
        tokens("few", 6, 1),
    )
    rows = ResponseRows(data(path))
    assert [(rows[i].id, len(rows[i].input_ids)) for i in range(len(rows))] == [
        ("short", 7),
        ("exact", 8),
        ("long", 8),
    ]
    assert rows.num_cut == 1
    assert rows.rejects.counts == {Reason.TOO_FEW_SUPERVISED: 1, Reason.PROMPT_TOO_LONG: 1}
    assert rows.rejects.read == rows.rejects.accepted + 2 == 5
    assert rows.rejects.places == {
        Reason.PROMPT_TOO_LONG: ["emptied (0 of 4 supervised tokens within max_length 8)"],
        Reason.TOO_FEW_SUPERVISED: ["few (1 of 2)"],
    }
    assert rows[2].loss_mask.tolist() == [False] * 6 + [True] * 2
    assert rows[2].input_ids.dtype == torch.int64
    assert rows.num_tokens == 23
    assert rows.used_ids() == set(range(1, 9))


def test_rows_are_counted_by_the_thinking_switch(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        {**tokens("a", 6, 3), "thinking": True},
        {**tokens("b", 6, 3), "thinking": False},
        {**tokens("c", 6, 3), "thinking": True},
        {**tokens("rejected", 6, 1), "thinking": True},
        tokens("d", 6, 3),
    )
    assert ResponseRows(data(path)).thinking == {"on": 2, "off": 1, "unset": 1}


def test_a_file_without_supervision_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", tokens("a", 6, 0), tokens("b", 6, 0))
    with pytest.raises(DataError, match=r"no row of .* 2 supervised.*too_few_supervised 2"):
        ResponseRows(data(path))
    with pytest.raises(DataError, match=r"data\.responses is empty"):
        ResponseRows(DataSettings())


def test_a_file_of_empty_answers_is_an_error(tmp_path: Path) -> None:
    def chat(answer: str) -> dict[str, Any]:
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
        return {"messages": said}

    path = write(tmp_path / "r.jsonl", chat(""), chat(" \n"))
    with pytest.raises(DataError, match=r"no usable response: 2 of 2 .*empty_content 2"):
        ResponseRows(data(path), tiny_tokenizer())


def test_conversations_train_like_tokenised_rows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]}
    path = write(tmp_path / "r.jsonl", chat)
    rows = ResponseRows(DataSettings(responses=(path,)), tokenizer)
    assert tokenizer.decode(rows[0].input_ids[rows[0].loss_mask]) == "yes<|im_end|>"


def test_another_template_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "r.jsonl", {**tokens("a", 6, 3), "template_hash": "f" * 16})
    ResponseRows(data(path), tiny_tokenizer())
    assert "another chat template (ffffffffffffffff)" in caplog.text


def test_collate_pads_on_the_right() -> None:
    def row(name: str, length: int, features: bool = True) -> Row:
        ids = torch.arange(1, length + 1)
        taps = torch.ones(length, 6) if features else None
        return Row(name, ids, ids > 1, taps, taps)

    batch = collate([row("a", 2), row("b", 4)])
    assert batch.input_ids.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch.loss_mask.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert batch.taps is not None
    assert batch.taps.shape == (2, 4, 6)
    assert batch.taps[0, 2:].abs().sum() == 0
    assert batch.row_ids == ["a", "b"]
    assert collate([row("a", 2, False)]).taps is None


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    first, again, second = order(100, 3, 0), order(100, 3, 0), order(100, 3, 1)
    assert torch.equal(first, again)
    assert sorted(first.tolist()) == list(range(100))
    assert not torch.equal(first, second)
    assert not torch.equal(first, order(100, 4, 0))


def test_steps_walk_through_the_epoch_and_drop_its_rest() -> None:
    steps = [rows_at(step, 4, 10, seed=1) for step in range(6)]
    for epoch in range(3):
        expected = order(10, 1, epoch).tolist()[:8]
        assert steps[2 * epoch] + steps[2 * epoch + 1] == expected


def test_a_step_does_not_depend_on_how_it_is_split() -> None:
    for step in range(5):
        whole = rows_at(step, 8, 31, seed=2)
        assert whole == rows_at(step, 8, 31, seed=2)
        assert len(set(whole)) == 8


def test_fewer_rows_than_a_batch_wrap_around_evenly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        seen = [i for step in range(3) for i in rows_at(step, 8, 6, seed=77)]
    assert all(seen.count(i) == 4 for i in range(6))
    assert seen[:6] == order(6, 77, 0).tolist()
    assert seen[6:12] == order(6, 77, 1).tolist()
    assert caplog.text.count("fewer than the global batch of 8") == 1
