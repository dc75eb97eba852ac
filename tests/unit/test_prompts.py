import gzip
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus.prompts import Prompt, content_id, read_prompts
from dspark.corpus.rejects import Reason, Rejects
from dspark.errors import DataError, MissingPackageError

GOOD = '{"messages": [{"role": "user", "content": "hi"}]}'


def write(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return str(path)


def one(tmp_path: Path, row: dict[str, Any]) -> Prompt:
    (prompt,) = read_prompts([write(tmp_path / "one.jsonl", json.dumps(row))])
    return prompt


def reason_of(tmp_path: Path, row: Any) -> Reason:
    rejects = Rejects()
    path = write(tmp_path / "bad.jsonl", json.dumps(row))
    with pytest.raises(DataError, match="1 of 1 rows rejected"):
        read_prompts([path], rejects=rejects)
    ((reason, count),) = rejects.counts.items()
    assert (count, rejects.read, rejects.accepted) == (1, 1, 0)
    assert rejects.places[reason][0].startswith(f"{path}:1")
    return reason


def calling(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": "q"}
    return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def chat(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"role": "user", "content": "q"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": '[{"from": "human", "value": "q"}]'},
        {"turns": ["q"]},
        {"text": "q"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
        {"messages": [{"role": "user", "content": ["", {"type": "text", "text": "q"}]}]},
        {"messages": [{"role": "system", "content": " "}, {"role": "User", "content": "q"}]},
        {"messages": [], "turns": ["q"], "unknown": 1},
        {"messages": [{"role": "user", "content": "q"}], "conversations": [{"from": "x"}]},
    ],
)
def test_every_row_shape_gives_the_same_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    prompt = one(tmp_path, row)
    assert prompt.messages == [{"role": "user", "content": "q"}]
    assert prompt.id == content_id([{"role": "user", "content": "q"}])


CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize("calls", [[CALL], CALL, CALL["function"]])
def test_roles_reasoning_and_tool_calls_are_normalised(tmp_path: Path, calls: Any) -> None:
    prompt = one(
        tmp_path,
        {
            "id": 7,
            "category": "math",
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "human", "content": "q"},
                {"role": "gpt", "content": "a", "thinking": "hm"},
                {"role": "user", "content": "r"},
                {"role": "model", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c", "x": 1},
                {"role": "assistant", "content": "dropped"},
            ],
        },
    )
    assert (prompt.id, prompt.category) == ("7", "math")
    assert prompt.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "user", "content": "r"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c"},
    ]


def test_turns_keep_later_turns_as_followups(tmp_path: Path) -> None:
    prompt = one(tmp_path, {"turns": ["a", "b", "c"]})
    assert prompt.messages == [{"role": "user", "content": "a"}]
    assert prompt.followups == ("b", "c")
    assert prompt.id != one(tmp_path, {"turns": ["a"]}).id


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], Reason.NOT_AN_OBJECT),
        (3, Reason.NOT_AN_OBJECT),
        ("text", Reason.NOT_AN_OBJECT),
        ({}, Reason.NO_MESSAGES),
        ({"question": "q"}, Reason.NO_MESSAGES),
        ({"messages": 5}, Reason.BAD_MESSAGES),
        ({"messages": "not json"}, Reason.BAD_MESSAGES),
        ({"messages": ["q"]}, Reason.BAD_MESSAGES),
        ({"turns": "q"}, Reason.BAD_MESSAGES),
        ({"turns": ["q", 3]}, Reason.BAD_CONTENT),
        ({"turns": ["q", " "]}, Reason.EMPTY_CONTENT),
        (chat(("wizard", "q")), Reason.UNKNOWN_ROLE),
        ({"messages": [{"content": "q"}]}, Reason.UNKNOWN_ROLE),
        ({"messages": [{"role": 3, "content": "q"}]}, Reason.UNKNOWN_ROLE),
        (chat(("user", None)), Reason.EMPTY_CONTENT),
        (chat(("user", "")), Reason.EMPTY_CONTENT),
        (chat(("user", " \n")), Reason.EMPTY_CONTENT),
        (chat(("user", "q"), ("assistant", ""), ("user", "r")), Reason.EMPTY_CONTENT),
        (chat(("user", 3)), Reason.BAD_CONTENT),
        (chat(("user", [{"type": "image_url", "image_url": "x"}])), Reason.BAD_CONTENT),
        (chat(("assistant", "a"), ("user", "q")), Reason.ASSISTANT_FIRST),
        (chat(("user", "q"), ("system", "s")), Reason.SYSTEM_NOT_FIRST),
        (chat(("system", "s")), Reason.NO_USER_TURN),
        (chat(("assistant", "a")), Reason.NO_USER_TURN),
        (chat(("user", "\ud800")), Reason.BAD_UNICODE),
        ({"input_ids": [1], "loss_mask": [1]}, Reason.TOKENS_ONLY),
        ({**chat(("user", "q")), "tools": [{"name": "f"}]}, Reason.TOOLS_UNSUPPORTED),
        ({"turns": ["q"], "tools": [{"name": "f"}]}, Reason.TOOLS_UNSUPPORTED),
        ({**chat(("user", "q")), "tools": "[{"}, Reason.BAD_TOOLS),
        ({**chat(("user", "q")), "tools": {"name": "f"}}, Reason.BAD_TOOLS),
        ({**chat(("user", "q")), "tools": ["f"]}, Reason.BAD_TOOLS),
        (calling("{x"), Reason.BAD_TOOL_CALL),
        (calling("[1]"), Reason.BAD_TOOL_CALL),
        (calling([1]), Reason.BAD_TOOL_CALL),
    ],
)
def test_bad_rows_have_a_reason(tmp_path: Path, row: Any, reason: Reason) -> None:
    assert reason_of(tmp_path, row) is reason


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": 5}, "a int, not a list"),
        ({"messages": "not json"}, "a string that is not JSON"),
        ({"messages": ["q"]}, "a message that is a str"),
        ({"turns": "q"}, "turns is a str, not a list"),
        ({"turns": ["q", 3]}, "turns: a int"),
        (chat(("wizard", "q")), "'wizard'"),
        ({"messages": [{"content": "q"}]}, "None"),
        (chat(("user", " ")), "user"),
        (chat(("user", 3)), "user: a int"),
        (chat(("user", [3])), "user: a part that is not text"),
        (calling("{x"), "arguments are not JSON"),
        (calling([1]), "arguments are not an object"),
    ],
)
def test_what_is_wrong_stands_beside_the_line(tmp_path: Path, row: Any, told: str) -> None:
    path = write(tmp_path / "bad.jsonl", json.dumps(row))
    with pytest.raises(DataError) as refused:
        read_prompts([path])
    assert str(refused.value).endswith(f"; first: {path}:1 ({told})")


def test_tools_are_read_for_callers_that_render_them(tmp_path: Path) -> None:
    listed = [[{"name": "f"}], '[{"name": "f"}]', [{"name": "g"}], [], "", None]
    rows = [json.dumps({**chat(("user", "q")), "tools": tools}) for tools in listed]
    rejects = Rejects()
    path = write(tmp_path / "rows.jsonl", *rows)
    prompts = read_prompts([path], rejects=rejects, with_tools=True)
    assert [prompt.tools for prompt in prompts] == [[{"name": "f"}], [{"name": "g"}], None]
    # the same question with other tools is another prompt, and without any it has its old id
    assert rejects.counts == {Reason.DUPLICATE_ID: 3}
    assert prompts[2].id == content_id([{"role": "user", "content": "q"}])


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    lines: list[str | bytes] = [
        b"\xef\xbb\xbf" + GOOD.encode() + b"\r",
        "",
        "  \r",
        GOOD.replace("hi", "with a trailing comma") + ",",
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "nul \x00"}]}',
        GOOD.replace("hi", "escaped nul \\u0000 and separator \u2028"),
        GOOD.replace("hi", "x" * 5_000_000),
        "[" * 100_000,
        GOOD,
        GOOD.replace("hi", "cut off")[:-4],
    ]
    rejects = Rejects()
    prompts = read_prompts([write(tmp_path / "rows.jsonl", *lines)], rejects=rejects)
    assert [len(p.messages[0]["content"]) for p in prompts] == [2, 29, 5_000_000]
    assert rejects.read == 9
    assert rejects.accepted == len(prompts)
    assert rejects.counts == {
        Reason.INVALID_JSON: 4,
        Reason.INVALID_UTF8: 1,
        Reason.DUPLICATE_ID: 1,
    }
    places = [
        place.split(" ")[0].rsplit(":", 1)[1] for place in rejects.places[Reason.INVALID_JSON]
    ]
    assert places == ["4", "6", "9", "11"]
    assert rejects.summary().startswith("6 of 9 rows rejected: invalid_json 4")


def test_given_ids_must_be_unique_across_sources(tmp_path: Path) -> None:
    rows = [json.dumps({"id": "a", "text": text}) for text in ("p", "q")]
    first = write(tmp_path / "1.jsonl", rows[0])
    second = write(tmp_path / "2.jsonl", rows[1])
    rejects = Rejects()
    assert [p.messages[0]["content"] for p in read_prompts([first, second], rejects=rejects)] == [
        "p"
    ]
    assert rejects.counts == {Reason.DUPLICATE_ID: 1}


def test_sources_are_files_globs_and_folders(tmp_path: Path) -> None:
    texts = [GOOD.replace("hi", str(i)) for i in range(6)]
    inner = tmp_path / "in"
    inner.mkdir()
    write(tmp_path / "b.jsonl", texts[0])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(texts[1].encode()))
    write(inner / "array.json", f"[{texts[2]}, {texts[3]}]")
    write(inner / "lines.json", texts[4], texts[5])
    write(inner / "README.md", "not data")

    def order(*sources: str, limit: int | None = None) -> str:
        return "".join(p.messages[0]["content"] for p in read_prompts(sources, limit))

    assert order(str(tmp_path)) == "102345"
    assert order(str(tmp_path / "*.jsonl*")) == "10"
    assert order(str(tmp_path / "**/*.json")) == "2345"
    assert order(str(tmp_path / "b.jsonl"), str(tmp_path)) == "012345"
    assert order(str(tmp_path), limit=3) == "102"


def test_a_parquet_row_with_a_value_that_python_cannot_hold(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"bad \xff", b"good", "ü".encode()], pyarrow.binary())
    table = {
        "text": pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers()),
        "when": pyarrow.array([10**17, 0, None], pyarrow.timestamp("ms")),
        "took": pyarrow.array([10**18, 0, None], pyarrow.duration("s")),
    }
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table(table), path)
    rejects = Rejects()
    assert [p.messages[0]["content"] for p in read_prompts([str(path)], rejects=rejects)] == [
        "good",
        "ü",
    ]
    assert (rejects.read, rejects.counts) == (3, {Reason.INVALID_UTF8: 1})
    assert rejects.places[Reason.INVALID_UTF8] == [f"{path}:1 (column 'text', byte 4)"]


def test_a_limit_may_be_larger_than_any_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "q"}')
    assert len(read_prompts([path], 10**20)) == 1


@pytest.mark.slow
def test_parquet_rows(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:  # an optional package: the other test holds
        return
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [
        {"conversations": [{"from": "human", "value": "q"}], "id": "x"},
        {"conversations": None, "id": "y"},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    rejects = Rejects()
    (prompt,) = read_prompts([str(path)], rejects=rejects)
    assert prompt.id == "x"
    (place,) = rejects.places[Reason.NO_MESSAGES]
    assert place.startswith(f"{path}:2 (none of messages, conversations, turns and text")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("missing.jsonl", "neither an existing file or folder nor a hub id"),
        ("/no/such/folder/x", "neither an existing file"),
        ("nothing-*.jsonl", "matches no"),
        ("", "neither an existing file"),
    ],
)
def test_wrong_sources_are_named(source: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_prompts([source])


def test_a_row_of_a_prompt_alone_is_told_the_key_to_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="if 'prompt' is the question, name it text"):
        read_prompts([write(tmp_path / "rows.jsonl", '{"prompt": "What is 2 + 2?"}')])


def test_unusable_files_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data source"):
        read_prompts([])
    with pytest.raises(DataError, match="it is empty"):
        read_prompts([write(tmp_path / "empty.jsonl")])
    with pytest.raises(DataError, match="cannot tell the format"):
        read_prompts([write(tmp_path / "rows.csv", "a,b")])
    with pytest.raises(DataError, match="not valid JSON"):
        read_prompts([write(tmp_path / "half.json", "[{")])
    damaged = tmp_path / "half.jsonl.gz"
    damaged.write_bytes(gzip.compress(GOOD.encode() * 100)[:-20])
    with pytest.raises(DataError, match="cannot read"):
        read_prompts([str(damaged)])


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parquet = write(tmp_path / "rows.parquet", "x")
    for source in ("owner/name", parquet):
        with pytest.raises(MissingPackageError, match=r"pip install 'dspark\[data\]'"):
            read_prompts([source])


def test_hub_sets_are_streamed_with_their_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Fake:
        @staticmethod
        def load_dataset(name: str, *, split: str, streaming: bool) -> list[dict[str, Any]]:
            calls.append((name, split, streaming))
            return [{"text": "q", "messages": None}]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "datasets", Fake)
    (prompt,) = read_prompts(["owner/name:test"])
    assert calls == [("owner/name", "test", True)]
    assert prompt.messages[0]["content"] == "q"
