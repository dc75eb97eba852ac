"""Conversations that are regenerated turn by turn."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspark.config import SampleSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.corpus.endpoint import sample_endpoint
from dspark.corpus.prompts import Prompt, read_prompts
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.sampling import SampleReport
from dspark.corpus.tool_calls import Call, given_calls, same_calls, split_calls
from dspark.target.ling_chat import TEMPLATE as LING
from dspark.target.remote import Remote
from dspark.testing import tiny_tokenizer
from tests.unit.fake_engine import FakeEngine
from tests.unit.templates import FORGETFUL

Say = Callable[[list[int]], str]


# ChatML whose history shows the last answer's reasoning only, as Qwen3's does
@pytest.fixture
def tokenizer() -> Any:
    return tiny_tokenizer()


def sample(
    tokenizer: Any,
    tmp_path: Path,
    rows: Sequence[dict[str, Any]],
    say: Say | None = None,
    *,
    engine: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[list[Response], SampleReport, FakeEngine]:
    source, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = frozenset({tokenizer.eos_token_id})
    target = Remote("tiny", None, len(tokenizer), 2048, ends)
    with FakeEngine(tokenizer, say=say, **(engine or {})) as server:
        values = {
            "endpoint": server.url,
            "regenerate": "all",
            "max_new_tokens": 200,
            "concurrency": 2,
            **changes,
        }
        prompts = read_prompts([str(source)], with_tools=True)
        report = sample_endpoint(target, tokenizer, prompts, SampleSettings(**values), out)
    return list(read_responses([str(out)])) if out.read_bytes() else [], report, server


def counted(tokenizer: Any, form: str = "answer {}") -> Say:
    """The number of the turn, as far as the prompt shows it."""

    def say(ids: list[int]) -> str:
        return form.format(tokenizer.decode(ids).count("assistant\n"))

    return say


def spans(row: Response) -> list[list[int]]:
    """The supervised runs of ids."""
    found: list[list[int]] = []
    for before, now, token in zip([0, *row.loss_mask], row.loss_mask, row.input_ids, strict=False):
        if now and not before:
            found.append([])
        if now:
            found[-1].append(token)
    return found


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


THREE = [
    user("one"),
    assistant("recorded"),
    user("two"),
    assistant("recorded too"),
    user("three"),
    assistant("recorded last"),
]


@pytest.mark.parametrize(
    "shape", [{"id": "c", "messages": THREE}, {"id": "c", "turns": ["one", "two", "three"]}]
)
def test_later_turns_see_the_new_history(
    tokenizer: Any, tmp_path: Path, shape: dict[str, Any]
) -> None:
    rows, report, server = sample(tokenizer, tmp_path, [shape], counted(tokenizer))
    asked = [tokenizer.decode(body["prompt"]) for body in server.bodies]
    assert len(asked) == 3
    assert not any("recorded" in text for text in asked)
    assert "answer 1<|im_end|>" in asked[1]
    assert "answer 2<|im_end|>" in asked[2]
    # this template keeps history as it was: one sequence, three supervised answers
    (row,) = rows
    assert [tokenizer.decode(span) for span in spans(row)] == [
        f"answer {number}<|im_end|>" for number in (1, 2, 3)
    ]
    assert row.input_ids[: len(server.bodies[2]["prompt"])] == server.bodies[2]["prompt"]
    assert [message["content"] for message in row.messages] == [
        "one",
        "answer 1",
        "two",
        "answer 2",
        "three",
        "answer 3",
    ]
    assert (report.written, report.ended_early.total(), row.parts) == (1, 0, 1)
    # every turn draws from a seed of its own
    assert len({body["seed"] for body in server.bodies}) == 3


def test_last_answers_once_behind_the_recorded_history(tokenizer: Any, tmp_path: Path) -> None:
    rows, _, server = sample(
        tokenizer,
        tmp_path,
        [{"id": "c", "messages": THREE}, {"id": "t", "turns": ["one", "two"]}],
        counted(tokenizer),
        regenerate="last",
    )
    assert len(server.bodies) == 2
    whole = {row.id: row for row in rows}
    assert whole["c"].messages == [*THREE[:-1], assistant("answer 3")]
    assert whole["t"].messages == [user("one"), assistant("answer 1")]
    assert whole["c"].loss_mask.index(1) == len(
        generation_prompt_ids(tokenizer, whole["c"].messages[:-1])
    )


def test_a_template_that_forgets_gets_a_sequence_a_turn(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = FORGETFUL
    prompts = [{"id": f"c{i}", "messages": [user(f"{i}"), *THREE[1:]]} for i in range(3)]
    say = counted(tokenizer, "<think>hm {0}</think>answer {0}")
    rows, report, server = sample(tokenizer, tmp_path, prompts, say)
    assert report.written == 3
    assert [(row.id, row.part, row.parts) for row in rows if row.id.startswith("c1")] == [
        ("c1", 0, 3),
        ("c1/1", 1, 3),
        ("c1/2", 2, 3),
    ]
    asked = [body["prompt"] for body in server.bodies]
    for row in rows:
        # each in exactly the context it was drawn in, and nothing else is taught
        start = row.loss_mask.index(1)
        assert row.input_ids[:start] in asked
        number = row.part + 1
        (span,) = spans(row)
        assert tokenizer.decode(span) == f"<think>hm {number}</think>answer {number}<|im_end|>"
        assert tokenizer.decode(row.input_ids[:start]).count("hm") == 0
        assert len(row.messages) == 2 * number
    # a conversation counts once
    again, report, server = sample(tokenizer, tmp_path, prompts, say)
    assert (report.resumed, report.written, server.bodies) == (3, 0, [])
    assert again == rows


def test_half_a_conversation_is_asked_again(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = FORGETFUL
    prompts = [{"id": f"c{i}", "messages": [user(f"{i}"), *THREE[1:]]} for i in range(3)]
    say = counted(tokenizer, "<think>hm {0}</think>answer {0}")
    rows, _, _ = sample(tokenizer, tmp_path, prompts, say)
    out = tmp_path / "rows.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    for cut in (b"".join(lines[:-1]), b"".join(lines[:-2]), b"".join(lines)[:-9]):
        out.write_bytes(cut)
        again, report, _ = sample(tokenizer, tmp_path, prompts, say)
        assert (report.resumed, report.written) == (2, 1)
        assert sorted(row.key for row in again) == sorted(row.key for row in rows)


def test_a_cut_answer_ends_the_conversation(tokenizer: Any, tmp_path: Path) -> None:
    rows, report, server = sample(
        tokenizer,
        tmp_path,
        [{"id": "c", "messages": THREE}],
        lambda ids: "x" * 30,
        max_new_tokens=9,
    )
    assert (len(server.bodies), report.ended_early) == (1, {"length": 1})
    assert (rows[0].finish_reason, rows[0].messages[-1]["content"]) == ("length", "x" * 9)


def test_a_later_prompt_that_is_too_long_ends_it_too(tokenizer: Any, tmp_path: Path) -> None:
    rows, report, _ = sample(
        tokenizer,
        tmp_path,
        [{"id": "c", "messages": THREE}],
        lambda ids: "x" * 60,
        max_prompt_tokens=100,
    )
    assert report.ended_early == {"prompt_too_long": 1}
    assert (report.written, report.rejects.rejected) == (1, 0)
    assert len(rows[0].messages) == 2


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]
WITH_TOOL = {
    "id": "c",
    "tools": TOOLS,
    "messages": [
        user("2+3?"),
        assistant("", tool_calls=CALL),
        {"role": "tool", "content": "5"},
        assistant("recorded 5"),
        user("sure?"),
    ],
}
MADE = (
    "</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)


@pytest.fixture
def ling() -> Any:
    told: Any = tiny_tokenizer()
    told.chat_template = LING.replace("<|role_end|>", "<|im_end|>")
    return told


def in_turn(tokenizer: Any, *texts: str) -> Say:
    return lambda ids: texts[tokenizer.decode(ids).count("ASSISTANT") - 1]


def test_the_recorded_result_follows_the_recorded_call(ling: Any, tmp_path: Path) -> None:
    say = in_turn(ling, "sum" + MADE, "add</think>five", "yes</think>sure")
    rows, report, server = sample(ling, tmp_path, [WITH_TOOL], say)
    assert report.ended_early.total() == 0
    assert len(server.bodies) == 3
    second = ling.decode(server.bodies[1]["prompt"])
    assert "<tool_response>\n5\n</tool_response>" in second
    assert "recorded" not in ling.decode(server.bodies[2]["prompt"])
    # Ling's template keeps reasoning and calls as they were written
    (row,) = rows
    assert [ling.decode(span) for span in spans(row)] == [
        f"{text}<|im_end|>" for text in ("sum" + MADE, "add</think>five", "yes</think>sure")
    ]
    assert row.messages[1] == assistant("", reasoning_content="sum", tool_calls=CALL)
    assert row.tools == TOOLS


@pytest.mark.parametrize(
    "text",
    [
        "sum" + MADE.replace(">3<", ">4<"),
        "sum" + MADE.replace("add", "sub"),
        "sum" + MADE + "<tool_call>add\n</tool_call>",
        "sum" + MADE.removesuffix("</tool_call>"),
        "easy</think>5",
    ],
)
def test_another_call_ends_the_conversation(ling: Any, tmp_path: Path, text: str) -> None:
    rows, report, server = sample(ling, tmp_path, [WITH_TOOL], lambda ids: text)
    assert (len(server.bodies), report.ended_early) == (1, {"other_tool_call": 1})
    (row,) = rows
    # what the target did say is taught
    assert [ling.decode(span) for span in spans(row)] == [text + "<|im_end|>"]


def test_a_call_where_none_was_recorded_ends_it(ling: Any, tmp_path: Path) -> None:
    prompt = {"id": "c", "tools": TOOLS, "messages": THREE}
    rows, report, _ = sample(ling, tmp_path, [prompt], in_turn(ling, "</think>a", "x" + MADE))
    assert report.ended_early == {"other_tool_call": 1}
    assert len(rows[0].messages) == 4


def test_calls_of_a_chat_answer_are_compared_too(ling: Any, tmp_path: Path) -> None:
    call = {
        "id": "x",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a":2,"b":3}'},
    }
    rows, report, server = sample(
        ling,
        tmp_path,
        [{**WITH_TOOL, "messages": WITH_TOOL["messages"][:3]}],
        lambda ids: "five" if "OBSERVATION" in ling.decode(ids) else "",
        engine={"gives_ids": False, "first_message": {"reasoning": "sum", "tool_calls": [call]}},
        endpoint_api="openai",
        allow_retokenized=True,
    )
    assert (len(server.bodies), report.ended_early.total()) == (2, 0)
    sent = server.bodies[1]["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(sent["arguments"]) == {"a": 2, "b": 3}
    assert ling.decode(spans(rows[0])[0]).startswith("sum</think>")
    assert rows[-1].messages[1]["tool_calls"] == CALL
    assert all(row.retokenized for row in rows)


def retokenized(
    tokenizer: Any, tmp_path: Path, message: dict[str, Any], *, cut: bool = False
) -> tuple[list[Response], SampleReport]:
    """One prompt, answered by an engine that returns ``message`` and no ids."""
    rows, report, _ = sample(
        tokenizer,
        tmp_path,
        [{"id": "x", "messages": [user("q")]}, {"id": "plain", "messages": THREE}],
        lambda ids: "fine",
        engine={
            "gives_ids": False,
            "fault": lambda n, ids: "length" if cut else None,
            "first_message": message,
        },
        endpoint_api="openai",
        allow_retokenized=True,
        regenerate="last",
    )
    return rows, report


@pytest.mark.parametrize("count", [1, 2])
def test_calls_that_the_template_leaves_out_are_no_immediate_end(
    tokenizer: Any, tmp_path: Path, count: int
) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    if count == 2:  # only the first is written
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "{{ m['content'] }}",
            "{{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}",
        )
        assert "tool_calls" in tokenizer.chat_template
    rows, report = retokenized(tokenizer, tmp_path, {"content": "", "tool_calls": [call] * count})
    assert ([row.id for row in rows], report.rejects.counts) == (["plain"], {"calls_lost": 1})


@pytest.mark.parametrize(
    ("text", "taught"), [("na\ufffd\ufffd", "na"), ("\ufffdna", "\ufffdna"), ("\ufffd", None)]
)
def test_half_a_character_at_a_cut_is_not_taught(
    tokenizer: Any, tmp_path: Path, text: str, taught: str | None
) -> None:
    rows, report = retokenized(tokenizer, tmp_path, {"content": text}, cut=True)
    by_id = {row.id: row for row in rows}
    if taught is None:
        assert report.rejects.counts == {"no_answer": 1}
        assert set(by_id) == {"plain"}
    else:
        assert [tokenizer.decode(span) for span in spans(by_id["x"])] == [taught]
        assert by_id["x"].messages[-1]["content"] == taught


def test_calls_are_read_in_both_forms() -> None:
    typed = 'Let me.\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": 2}}\n</tool_call>'
    for text, head in ((typed, "Let me."), (MADE.removeprefix("</think>"), "")):
        before, calls = split_calls(text)
        assert before == head
        assert calls is not None
        assert same_calls(given_calls(CALL), calls)
    assert split_calls("no call") == ("no call", [])
    for broken in ("<tool_call>{]</tool_call>", "<tool_call></tool_call>", "<tool_call>{}"):
        assert split_calls(broken)[1] is None
    # a form without types cannot tell 3 from "3"; one with types can
    three = Call("f", {"x": 3})
    assert not same_calls([three], [Call("f", {"x": "3"})])
    assert same_calls([three], [Call("f", {"x": "3"}, typed=False)])
    assert not same_calls([Call("f", {"x": 1})], [Call("f", {"x": True})])
    assert not same_calls([three], [three, three])


def test_a_failure_in_a_later_turn_is_the_whole_rows(tokenizer: Any, tmp_path: Path) -> None:
    def fault(number: int, ids: list[int]) -> str | None:
        return "400" if tokenizer.decode(ids).count("assistant\n") == 2 else None

    rows, report, _ = sample(
        tokenizer, tmp_path, [{"id": "c", "messages": THREE}], engine={"fault": fault}
    )
    assert (rows, report.written, report.errors) == ([], 0, {"refused": 1})


def test_a_prompt_is_rejected_by_its_first_turn_only(tokenizer: Any) -> None:
    from dspark.corpus.sampling import tasks_of

    target = Remote("tiny", None, len(tokenizer), 2048, frozenset({tokenizer.eos_token_id}))
    first = len(generation_prompt_ids(tokenizer, THREE[:1]))
    settings = SampleSettings(max_prompt_tokens=first, regenerate="all")
    prompt = Prompt("c", THREE[:-1], "m")
    for until, count in ((True, 1), (False, 0)):
        report = SampleReport()
        tasks = tasks_of(
            target, tokenizer, [prompt], settings, set(), report, until_first_answer=until
        )
        assert (len(list(tasks)), report.rejects.rejected) == (count, 1 - count)
