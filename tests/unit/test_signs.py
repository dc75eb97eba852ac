# ruff: noqa: RUF001 - signs of many kinds
"""Which signs make two exercises different, and which only lay out a text."""

import pytest

from dspark.corpus.signs import signed_tokens
from dspark.corpus.words import tokens


@pytest.mark.parametrize(
    "different",
    [
        *(("Compute 12 7", f"Compute 12 {sign} 7") for sign in "+-*/×÷±^%&|~→"),
        ("Compute 12 + 7", "Compute 12 - 7", "Compute 12 * 7", "Compute 12 / 7", "Compute 12 × 7"),
        ("If x = -5", "If x = 5"),
        ("a < b", "a > b", "a = b", "a ≤ b", "a≠b", "a != b"),
        ("2² is", "22 is", "2₂ is"),
        ("3½ cups", "31/2 cups"),
        ("2*(3+4)", "(2*3)+4"),
        ("2 * (3 * 4) * 5", "(2 * 3) * 4 * 5", "2 * 3 * 4 * 5"),
        ("1.5 m", "1,5 m", "15 m"),
        ("x - y", "x + y", "x * y", "x y"),
        # a sign counts with a letter on one side of it, and with room on one
        ("2-x", "2 x"),
        ("x-2", "x 2"),
        ("2* 3", "2 3"),
        ("(a + b) / c", "a + b / c"),
        ("a/(b + c)", "a/b + c"),
        ("a / (b + c)", "a / b + c"),
        ("5! is", "5 is"),
        ("p & q", "p | q", "p → q", "¬p & q"),
        ("5% of", "5 of"),
    ],
)
def test_exercises_that_differ_in_a_sign_differ(different: tuple[str, ...]) -> None:
    assert len({tuple(signed_tokens(text)) for text in different}) == len(different)


@pytest.mark.parametrize(
    "alike",
    [
        ("12 + 7", "12+7", "１２ ＋ ７"),
        ("x = -5", "x = −5", "x=–5"),
        ("5 - 3", *(f"5 {dash} 3" for dash in "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d")),
        ("3½ cups", "3 1/2 cups"),
        ("2²", "2^2", "2 ^ 2"),
        ("a well-known man", "a well known man", "a well‐known man", "a well\u200b-known man"),
        ("- eggs\n- milk", "* eggs\n* milk", "eggs, milk"),
        ("this **word** (and _that_)", "This word and that."),
        ("cof\u00adfee and\u200b tea", "coffee and tea"),
    ],
)
def test_what_is_laid_out_in_another_way_is_alike(alike: tuple[str, ...]) -> None:
    assert len({tuple(signed_tokens(text)) for text in alike}) == 1


@pytest.mark.parametrize(
    "text", ["Why is the sky BLUE?", "snake_case __init__ ____", "小明有3个apple_"]
)
def test_without_signs_the_tokens_are_the_words(text: str) -> None:
    assert signed_tokens(text) == tokens(text)
    assert not any(word.startswith("_") or word.endswith("_") for word in tokens(text))
