from pathlib import Path

import pytest

from dspark.corpus.overlap import Overlap, read_texts
from dspark.errors import DataError

RIVER = (
    "the old ferry crosses the river nine times a day and carries at most forty people each time"
)


def test_thirteen_shared_words_overlap_and_twelve_do_not() -> None:
    overlap = Overlap([RIVER])
    words = RIVER.split()
    assert overlap.kind_of("Tell me: " + " ".join(words[2:15]).upper() + "?") == "13-gram"
    assert overlap.kind_of("Tell me: " + " ".join(words[2:14]) + "?") is None


def test_a_short_text_overlaps_when_it_is_equal_up_to_case_and_punctuation() -> None:
    overlap = Overlap(["What is 7 times 8?"])
    assert overlap.kind_of("what is 7 times 8") == "same text"
    assert overlap.kind_of("What is 7 times 9?") is None


def test_an_excluded_question_is_found_beside_another_instruction() -> None:
    overlap = Overlap(["How many positive divisors does 196 have?\nReason and box the answer."])
    asked = "Solve this: How many positive divisors does 196 have? Think step by step."
    assert overlap.kind_of(asked) == "same text"
    assert overlap.kind_of(asked.replace("196", "195")) is None


def test_stock_questions_are_no_leak() -> None:
    overlap = Overlap(["Ann has 9 pears and eats 2. How many pears are left?"])
    assert overlap.kind_of("Bo has 30 pears and sells half. How many pears are left?") is None


def test_every_string_of_a_row_is_read_whatever_the_shape(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text('{"turns": ["one", {"content": "two"}], "n": 3}\n\n{"text": "three"}\n')
    assert list(read_texts([file])) == ["one", "two", "three"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "eval.jsonl"
    file.write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(DataError, match=r"eval\.jsonl line 2 is not JSON"):
        list(read_texts([file]))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_texts([tmp_path / "missing.jsonl"]))
