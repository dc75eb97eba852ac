"""`dspark prepare`: what of a row is compared, with excluded texts and with near prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus.overlap import Overlap, strings
from dspark.corpus.prepare import PrepareSettings
from dspark.corpus.prepared import prepare
from dspark.errors import DataError

DUCKS = (
    "Janet has sixteen ducks that lay eggs every single day and she eats three for breakfast "
    "every morning and bakes muffins with four"
)
ZH = "小明有十六只鸭子每天都会下蛋她早餐吃三个然后用四个做松饼剩下的全部拿去市场卖掉"
LINES = "A short line one\nanother short line two\nthe third\na fourth\nthe last line, five words"


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def goes_on(answer: dict[str, Any]) -> dict[str, Any]:
    """A row in which ``answer`` is history."""
    turns = [{"role": "user", "content": "solve it"}, {"role": "assistant", "content": "ok"}]
    turns[1].update(answer)
    return {"messages": [*turns, {"role": "user", "content": "go on"}]}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reasons(place: Path, rows: list[Any], excluded: list[Any], **more: Any) -> dict[str, int]:
    """Why rows are rejected; a last one that is fine is added."""
    source = write(place / "in.jsonl", *rows, asks("tell me about horses"))
    names = (write(place / "e.jsonl", *excluded),) if excluded else ()
    settings = PrepareSettings(sources=(source,), exclude=names, heldout="0", **more)
    found: dict[str, int] = prepare(settings, place / "out")[0]["reasons"]
    return found


def test_what_a_json_string_holds_is_excluded_too(tmp_path: Path) -> None:
    texts = [DUCKS, ZH, LINES]
    written = [{"messages": json.dumps(asks(text)["messages"])} for text in texts]
    twice = {"row": json.dumps({"inner": json.dumps([ZH[::-1]])})}
    assert list(strings({"a": ' {"b": ["c", 1]}', "d": "[e"})) == [' {"b": ["c", 1]}', "c", "[e"]
    rows = [asks(text) for text in [*texts, ZH[::-1]]]
    assert reasons(tmp_path, rows, [*written, twice]) == {"overlap": 4}


def test_strings_of_deep_values_are_found_without_a_traceback() -> None:
    deep: Any = "bottom"
    for _ in range(5000):
        deep = [deep]
    assert list(strings(deep)) == ["bottom"]
    assert list(strings("[" * 100_000)) == ["[" * 100_000]


CALL = {"function": {"name": "f", "arguments": {"deep": [{"q": DUCKS}]}}}
TOOL = {"type": "function", "function": {"name": "f", "description": DUCKS}}


@pytest.mark.parametrize(
    "row",
    [
        goes_on({"reasoning_content": DUCKS}),
        goes_on({"thinking": DUCKS}),
        goes_on({"content": "", "tool_calls": [CALL]}),
        goes_on({"content": json.dumps({"found": ZH})}),
        asks("help", tools=[TOOL]),
        asks("help", tools=json.dumps([TOOL])),
        asks("help", category=DUCKS),
        asks(DUCKS.replace("a", "a\u200b").replace("e", "\u2060e\ufeff")),
        asks(DUCKS.replace("c", "c\u00ad").replace("s", "\u200c\u200ds")),
        asks(DUCKS.replace(" ", " _")),
        asks("__" + DUCKS.replace(" ", "__ __") + "__é"),
    ],
    ids=range(11),
)
def test_no_text_that_is_written_hides_an_excluded_one(tmp_path: Path, row: Any) -> None:
    assert reasons(tmp_path, [row], [{"turns": [DUCKS, ZH]}]) == {"overlap": 1}


def test_names_and_words_that_every_set_has_are_no_leak(tmp_path: Path) -> None:
    """Excluded rows of the same shape hold the same roles, types and labels."""
    excluded = asks(DUCKS, id="q1", category="math", tools=[TOOL], reference="", source="a.jsonl")
    other = {"type": "function", "function": {"name": "f", "description": "Other."}}
    rows = [
        asks("help me", tools=[other], category="math", source="a.jsonl"),
        goes_on({"content": "", "tool_calls": [{"function": {"name": "f"}}]}),
        asks("🎉🎉"),
    ]
    assert reasons(tmp_path, rows, [excluded]) == {}


def test_a_text_without_words_is_equal_to_none() -> None:
    overlap = Overlap(["", "?!", "🎉"])
    assert [overlap.kind_of(text) for text in ("", "🎉", " ", "...", "word")] == [None] * 5
    # how short a text may be that is told by the whole of it
    named = Overlap(["weather in Rome"])
    assert named.find("Weather in Rome!") == ("same text", "excluded")
    assert named.find("Weather in Rome!", short=False) is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], "tokens_only 1"),
        ([asks(DUCKS), {"id": "r1", "input_ids": [1], "source": "s"}], "tokens_only 1"),
        ([{"n": 1}, {"text": ""}], "its rows hold no text"),
    ],
    ids=["tokens", "some", "none"],
)
def test_rows_that_say_nothing_cannot_be_excluded(
    tmp_path: Path, rows: list[Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"e\.jsonl' cannot be excluded whole: .*{said}"):
        reasons(tmp_path, [], rows)


def test_exercises_that_differ_in_a_sign_are_all_kept(tmp_path: Path) -> None:
    moulds = ["Compute 12 {} 7 now please, step by step.", "Is a {} b or not"]
    rows = [asks(mould.format(sign)) for mould in moulds for sign in "+-*<>="]
    rows += [asks("What is x if x = -5 ?"), asks("What is x if x = 5 ?")]
    rows += [asks("2² = what"), asks("22 = what"), asks("2^2 = What?")]
    assert reasons(tmp_path, rows, []) == {"near_duplicate": 1}


LONG = " ".join(f"rule{n}" for n in range(200))


def told(system: str, question: str, **more: Any) -> dict[str, Any]:
    row = asks(question, **more)
    row["messages"].insert(0, {"role": "system", "content": system})
    return row


def test_all_that_the_target_sees_decides_whether_prompts_are_near(tmp_path: Path) -> None:
    question = " ".join(f"word{n}" for n in range(60))
    rows = [
        told(LONG, "Why is the sky blue?"),
        told(LONG, "Why is the sea salty?"),  # a long prompt before it makes them no nearer
        told(LONG + " more", "Why is the sky blue?"),
        told(LONG, question),
        told(LONG, question + " indeed"),  # near
        told(LONG.upper(), question + "!"),  # near
        asks(question),
        asks(question, tools=[TOOL]),
        goes_on({"content": "one"}),
        goes_on({"content": "two"}),
        goes_on({"content": "two!"}),  # near
    ]
    assert reasons(tmp_path, rows, []) == {"near_duplicate": 3}
