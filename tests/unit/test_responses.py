import json
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus.chat import template_hash
from dspark.corpus.rejects import Reason, Rejects
from dspark.corpus.response_file import ResponseWriter
from dspark.corpus.responses import FORMAT, Response, read_responses
from dspark.errors import DataError, TargetError
from dspark.testing import tiny_tokenizer


def response(**changes: Any) -> Response:
    values: dict[str, Any] = {
        "id": "a",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é\u2028"}],
        "input_ids": [5, 6, 7],
        "loss_mask": [0, 1, 1],
        "finish_reason": "stop",
        "setting_index": 0,
        "sampling": {"temperature": 1.0},
        "seed": 3,
        "thinking": False,
        "target": "tiny",
        "template_hash": "0" * 16,
        "source": "p.jsonl",
        "category": "math",
    }
    return Response(**{**values, **changes})


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path | str, **options: Any) -> tuple[list[Response], Rejects]:
    rejects = Rejects()
    return list(read_responses([str(path)], rejects=rejects, **options)), rejects


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "responses.jsonl"
    rows = [response(), response(sample=1, thinking=None, category=None)]
    with ResponseWriter(path) as writer:
        writer.write(rows[:1])
        writer.write(rows[1:])
    back, rejects = read(path)
    assert back == rows
    assert [row.key for row in back] == ["a", "a#1"]
    assert (rejects.read, rejects.rejected) == (2, 0)
    line = json.loads(path.read_text(encoding="utf-8").split("\n")[0])
    assert line["format"] == FORMAT == "dspark.responses/1"


def test_tools_of_a_conversation_stay_with_its_rows(tmp_path: Path) -> None:
    told: Any = tiny_tokenizer()
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": said, "tools": json.dumps([{"name": name}])} for name in "fg"]
    path = write_lines(tmp_path / "r.jsonl", {"messages": said}, *rows)
    back, rejects = read(path, tokenizer=told)
    assert ([row.tools for row in back], rejects.counts) == ([None], {Reason.TOOLS_UNSUPPORTED: 2})
    told.chat_template = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + told.chat_template
    back, rejects = read(path, tokenizer=told)
    assert [row.tools for row in back] == [None, [{"name": "f"}], [{"name": "g"}]]
    assert len({row.id for row in back}) == 3
    texts = [told.decode(row.input_ids) for row in back]
    assert texts == [texts[0], f"f;{texts[0]}", f"g;{texts[0]}"]
    assert len({row.num_supervised for row in back}) == 1
    with ResponseWriter(tmp_path / "again.jsonl") as writer:
        writer.write(back)
    assert read(tmp_path / "again.jsonl")[0] == back


def test_a_file_is_written_by_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        ResponseWriter(tmp_path / "rows.jsonl"),
        pytest.raises(BlockingIOError, match="another run is writing there"),
    ):
        ResponseWriter(tmp_path / "rows.jsonl")
    ResponseWriter(tmp_path / "rows.jsonl").__exit__(None, None, None)


@pytest.mark.parametrize("size", [0, 10, 200_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_a_half_written_last_line_is_dropped_on_opening(
    tmp_path: Path, size: int, whole: int
) -> None:
    path = tmp_path / "responses.jsonl"
    rows = [response(id=f"row{i}", source="x" * 100_000) for i in range(whole)]
    with ResponseWriter(path) as writer:
        writer.write(rows)
    with path.open("ab") as file:
        file.write(b'{"format": "dspark.responses/1", "id": "' + b"h" * size)
    with ResponseWriter(path) as writer:
        writer.write([response(id="next")])
    back, rejects = read(path)
    assert back == [*rows, response(id="next")]
    assert rejects.rejected == 0


def test_a_last_line_without_its_line_feed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(response().to_json(), encoding="utf-8")
    with ResponseWriter(path) as writer:
        writer.write([response(id="next")])
    assert [row.id for row in read(path)[0]] == ["a", "next"]


def test_a_half_written_last_line_is_counted_by_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(response().to_json() + "\n" + response(id="b").to_json()[:-9])
    back, rejects = read(path)
    assert back == [response()]
    assert rejects.counts == {Reason.INVALID_JSON: 1}


def test_tokenised_rows_of_others_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "rows.jsonl",
        {"input_ids": [1, 2], "loss_mask": [False, True]},
        {"id": 9, "input_ids": [1, 2], "loss_mask": [0, 1], "other": None},
    )
    (first, second), _ = read(path)
    assert (first.input_ids, first.loss_mask) == ([1, 2], [0, 1])
    assert (second.id, second.source, second.finish_reason) == ("9", path, None)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, Reason.MASK_LENGTH),
        ({"input_ids": [1, 2]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [], "loss_mask": []}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": "1 2", "loss_mask": [1, 1]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, Reason.BAD_TOKEN_IDS),
        ({"input_ids": [1, 300], "loss_mask": [1, 1]}, Reason.ID_OUT_OF_VOCABULARY),
        ({"format": "dspark.responses/9", "input_ids": [1]}, Reason.UNKNOWN_FORMAT),
        ({"input_ids": [1], "loss_mask": [1], "sampling": "hot"}, Reason.UNKNOWN_FORMAT),
        ({"turns": ["q"]}, Reason.NO_ANSWER),
        ({"text": "q"}, Reason.NO_ANSWER),
        ({"messages": [{"role": "user", "content": "q"}]}, Reason.NO_ANSWER),
        ({"input_ids": [1], "loss_mask": [1], "id": "good"}, Reason.DUPLICATE_ID),
    ],
)
def test_unusable_rows_have_a_reason(tmp_path: Path, row: Any, reason: Reason) -> None:
    good = {"id": "good", "input_ids": [299, 1], "loss_mask": [0, 1]}
    path = write_lines(tmp_path / "rows.jsonl", good, row)
    back, rejects = read(path, vocab_size=300, tokenizer=tiny_tokenizer())
    assert [r.id for r in back] == ["good"]
    assert rejects.counts == {reason: 1}
    assert rejects.read == 2
    assert rejects.places[reason][0].startswith(f"{path}:2")


def test_conversations_are_rendered_with_the_template(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    path = write_lines(
        tmp_path / "rows.jsonl",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "yes"}]},
    )
    (row,), _ = read(path, tokenizer=tokenizer)
    assert tokenizer.decode(row.input_ids).endswith("assistant\nyes<|im_end|>")
    answer = [i for i, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
    assert tokenizer.decode(answer) == "yes<|im_end|>"
    assert row.template_hash == template_hash(tokenizer)
    assert row.num_supervised == 4
    with pytest.raises(DataError, match="needs the target's tokenizer"):
        read(path)


@pytest.mark.parametrize(
    ("finish", "kept", "taught"),
    [("length", "length", "yes"), ("stop", "stop", "yes<|im_end|>"), (7, None, "yes<|im_end|>")],
)
def test_a_conversation_cut_by_length_teaches_no_end_of_turn(
    tmp_path: Path, finish: Any, kept: str | None, taught: str
) -> None:
    tokenizer: Any = tiny_tokenizer()
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    path = write_lines(tmp_path / "rows.jsonl", {"messages": messages, "finish_reason": finish})
    (row,), _ = read(path, tokenizer=tokenizer)
    assert row.finish_reason == kept
    answer = [i for i, on in zip(row.input_ids, row.loss_mask, strict=True) if on]
    assert tokenizer.decode(answer) == taught
    assert tokenizer.decode(row.input_ids).endswith(f"assistant\n{taught}")


def test_what_no_row_can_use_is_told_with_its_first_place(tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer()
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    path = write_lines(tmp_path / "rows.jsonl", {"x": 1}, {"messages": chat}, {"messages": chat})
    tokenizer.chat_template = "{{ raise_exception('only French is spoken here') }}"
    with pytest.raises(
        DataError, match=r"template_error 2, no_messages 1; first: .*rows\.jsonl:2 \(only French"
    ):
        read(path, tokenizer=tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(TargetError, match="no chat template"):
        read(path, tokenizer=tokenizer)


def test_a_file_without_a_usable_row_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"x": 1}, {"messages": []})
    with pytest.raises(DataError, match="no usable response: 2 of 2 rows rejected: no_messages 2"):
        read(path)
