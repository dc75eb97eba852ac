# ruff: noqa: RUF001 - punctuation and digits of Chinese texts
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


LANTERNS = "每年秋天村里的老人都会沿着河岸点亮三百盏纸灯笼，等待远行的年轻人回到家中。"


def test_twenty_shared_characters_overlap_where_words_have_no_spaces() -> None:
    overlap = Overlap([LANTERNS])
    part = LANTERNS[3:23]
    assert len(part) == 20
    assert overlap.kind_of("翻译这句话：" + part + "！谢谢") == "13-gram"
    assert overlap.kind_of("翻译这句话：" + part[:19] + "！谢谢") is None
    # whatever stands between the characters, and in whatever width digits are written
    assert overlap.kind_of("请看" + "、".join(part)) == "13-gram"
    mixed = Overlap(["小明在Python里写了25个函数然后用其中7个来计算矩阵的行列式"])
    assert mixed.kind_of("问：小明在python里写了２５个函数然后用其中7个来计算") == "13-gram"


def test_thirteen_words_count_as_before_beside_characters() -> None:
    overlap = Overlap(["日本 " + RIVER])
    words = RIVER.split()
    assert overlap.kind_of("中文：" + " ".join(words[1:14])) == "13-gram"
    assert overlap.kind_of("中文：" + " ".join(words[1:13])) is None


def test_sentences_without_spaces_are_found_and_stock_questions_are_no_leak() -> None:
    overlap = Overlap(["小红有12支铅笔送走5支。还剩多少支？三角形的内角和等于多少度呢？"])
    assert overlap.kind_of("请解答：小红有12支铅笔送走5支。写出步骤。") == "same text"
    assert overlap.kind_of("苹果卖掉一半。还剩多少支？") is None
    assert overlap.kind_of("我想知道三角形的周长。三角形的内角和等于多少度呢？") == "same text"


def test_the_set_that_was_excluded_first_is_named() -> None:
    overlap = Overlap()
    overlap.add("one", [RIVER])
    overlap.add("two", ["Prove that the square root of seven is irrational, briefly.", RIVER])
    assert overlap.find("so: " + RIVER) == ("13-gram", "one")
    asked = "Prove that the square root of seven is irrational, briefly."
    assert overlap.find("First. " + asked) == ("same text", "two")
    assert overlap.find("Name three rivers.") is None
    # added after something was looked up
    overlap.add("three", ["Name three rivers."])
    assert overlap.find("name three rivers") == ("same text", "three")


def test_sorting_in_by_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{RIVER} on day {n} of the year, says ferry man number {n}." for n in range(40)]
    whole, pieces = Overlap(), Overlap()
    for n, text in enumerate(texts):
        whole.add(f"{n}", [text])
        pieces.add(f"{n}", [text])
        pieces._runs._sort_in()
        pieces._units._sort_in()
    for text in texts:
        found = whole.find(text[30:])
        assert found == pieces.find(text[30:])
        assert found is not None
    assert whole.find(texts[7][60:]) == ("13-gram", "7")
