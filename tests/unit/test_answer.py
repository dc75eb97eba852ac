"""Reasoning and what is said: the same parts however the text arrives."""

import itertools
import random
from collections.abc import Iterator

import pytest

from dspark.serving.answer import Answer, AnswerParser, Part, gather

CASES = [
    # text, opened by the prompt, content, reasoning
    ("Hello", False, "Hello", ""),
    ("<think>a</think>b", False, "b", "a"),
    (" \n<think>\na\n\n</think>\n\nb\n", False, "b\n", "a"),
    ("a</think>b", True, "b", "a"),
    ("\na\nb\n</think>", True, "", "a\nb"),
    ("<think>a</think>b", True, "b", "a"),
    ("a", True, "", "a"),
    ("a\n", True, "", "a"),
    ("a</thin", True, "", "a</thin"),
    ("</think>b", True, "b", ""),
    ("<think>a", False, "", "a"),
    ("<thin", False, "<thin", ""),
    ("<thinking>", False, "<thinking>", ""),
    ("\n", False, "\n", ""),
    ("b <think>a</think>", False, "b <think>a</think>", ""),
    ("a</think>b</think>", True, "b</think>", "a"),
    ("a<</think>\nb", True, "b", "a<"),
    ("", False, "", ""),
    ("", True, "", ""),
]


def parts_of(pieces: list[str], parser: AnswerParser) -> list[Part]:
    return [part for piece in pieces for part in parser.push(piece)] + parser.flush()


def cuts(text: str, most: int) -> Iterator[list[str]]:
    """Every way to cut a text in up to ``most`` places, and letter by letter."""
    yield list(text)
    for count in range(most + 1):
        for places in itertools.combinations(range(1, len(text)), count):
            ends = [0, *places, len(text)]
            yield [text[one:other] for one, other in itertools.pairwise(ends)]


@pytest.mark.parametrize(("text", "opened", "content", "reasoning"), CASES)
def test_the_parts_do_not_depend_on_the_pieces(
    text: str, opened: bool, content: str, reasoning: str
) -> None:
    for pieces in cuts(text, 2):
        parser = AnswerParser(opened=opened)
        parts = parts_of(pieces, parser)
        assert gather(parts) == Answer(content, reasoning), pieces
        assert all(part.text for part in parts)
        kinds = [part.kind for part in parts]
        assert kinds == sorted(kinds, reverse=True), "reasoning comes first"


def test_random_texts_of_marks_and_breaks_are_read_alike_in_any_pieces() -> None:
    rng = random.Random(0)
    bits = ["<think>", "</think>", "\n", "a", "<", "</", "think>", " "]
    for _ in range(300):
        text = "".join(rng.choices(bits, k=rng.randrange(1, 8)))
        opened = rng.random() < 0.5
        whole = AnswerParser(opened=opened)
        wanted = gather(parts_of([text], whole))
        for _ in range(8):
            places = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
            ends = [0, *places, len(text)]
            pieces = [text[one:other] for one, other in itertools.pairwise(ends)]
            parser = AnswerParser(opened=opened)
            assert gather(parts_of(pieces, parser)) == wanted, (text, pieces)
            assert parser.reasoning_chars == whole.reasoning_chars


def test_text_is_sent_as_soon_as_it_is_no_mark() -> None:
    parser = AnswerParser(opened=True)
    assert parser.push("a <") == [Part("reasoning", "a ")]
    assert parser.push("b") == [Part("reasoning", "<b")]
    assert parser.push("c\n") == [Part("reasoning", "c")]
    assert parser.push("</think>d") == [Part("content", "d")]
    assert parser.push(" <\n") == [Part("content", " <\n")]


def test_marks_stay_where_they_are_not_to_be_separated() -> None:
    parser = AnswerParser(separate=False, opened=True)
    assert parts_of(["\na\n</th", "ink>\nb"], parser) == [
        Part("content", "\na\n</th"),
        Part("content", "ink>\nb"),
    ]
    assert parser.reasoning_chars == 0
