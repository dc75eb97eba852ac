"""Python tasks: functions with a docstring and true examples, and questions around code.

A function is one expression, either listed in `task_functions` or composed of a filter, a map
and a reducer; its examples are computed by running it.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import prod

from dspark.corpus.task_functions import FUNCTIONS
from dspark.corpus.task_grammar import grammar, join
from dspark.corpus.task_words import WORDS

__all__ = ["code_chat", "described_function", "function_task", "output_question", "snippet"]

# Each part: word for the name, English, Python. Filters and maps read one item, reducers the
# sequence Y. K and L are replaced by numbers (or by a letter, for words).
_NUMBERS: tuple[tuple[tuple[str, str, str], ...], ...] = (
    (
        ("", "", ""),
        ("even", "even", "x % 2 == 0"),
        ("odd", "odd", "x % 2 == 1"),
        ("positive", "positive", "x > 0"),
        ("negative", "negative", "x < 0"),
        ("large", "greater than K", "x > K"),
        ("small", "less than K", "x < K"),
        ("divisible", "divisible by K", "x % K == 0"),
        ("not_divisible", "not divisible by K", "x % K != 0"),
        ("in_range", "between K and 4K inclusive", "K <= x <= 4K"),
        ("ending", "ending in the digit K", "abs(x) % 10 == K"),
        ("two_digit", "two-digit", "10 <= abs(x) <= 99"),
        ("square", "that are perfect squares", "x >= 0 and int(x**0.5) ** 2 == x"),
        ("far", "at least K away from zero", "abs(x) >= K"),
    ),
    (
        ("", "", "x"),
        ("squares", "squares", "x * x"),
        ("cubes", "cubes", "x**3"),
        ("doubles", "doubles", "2 * x"),
        ("shifted", "values increased by L", "x + L"),
        ("scaled", "values multiplied by L", "x * L"),
        ("distances", "absolute distances from L", "abs(x - L)"),
        ("remainders", "remainders after division by L", "x % L"),
        ("digit_sums", "digit sums", "sum(int(d) for d in str(abs(x)))"),
        ("last_digits", "last digits", "abs(x) % 10"),
        ("negated", "negated values", "-x"),
        ("clipped", "values capped at L", "min(x, L)"),
        ("lengths", "numbers of digits", "len(str(abs(x)))"),
        ("halves", "halves, rounded down,", "x // 2"),
    ),
    (
        ("list", "a list of", "[*Y]"),
        ("sum", "the sum of", "sum(Y)"),
        ("sorted", "a sorted list of", "sorted(Y)"),
        ("descending", "a list, from largest to smallest, of", "sorted(Y, reverse=True)"),
        ("largest", "the largest (None if there is none) of", "max(Y, default=None)"),
        ("smallest", "the smallest (None if there is none) of", "min(Y, default=None)"),
        ("distinct", "a sorted list without duplicates of", "sorted(set(Y))"),
        ("reversed", "a list in reverse order of", "[*Y][::-1]"),
        ("running", "a list of the running totals of", "[*accumulate(Y)]"),
        ("first_two", "a list of the first two of", "[*Y][:2]"),
        ("last_two", "a list of the last two of", "[*Y][-2:]"),
        ("every_other", "a list of every second one of", "[*Y][::2]"),
        ("count", "the number of different values among", "len(set(Y))"),
        ("spread", "the difference between the largest and smallest of", "max(Y) - min(Y)"),
        ("indexed", "a list of (index, value) pairs of", "[*enumerate(Y)]"),
        ("any_repeated", "whether any value occurs twice among", "len([*Y]) != len(set(Y))"),
        ("average", "the average, rounded to two decimals, of", "round(sum(Y) / len([*Y]), 2)"),
    ),
)
_WORDS: tuple[tuple[tuple[str, str, str], ...], ...] = (
    (
        ("", "", ""),
        ("long", "longer than K letters", "len(x) > K"),
        ("short", "of at most K letters", "len(x) <= K"),
        ("with_letter", "that contain the letter 'C'", "'C' in x"),
        ("without_letter", "that do not contain the letter 'C'", "'C' not in x"),
        ("vowel", "that start with a vowel", "x[0] in 'aeiou'"),
        ("consonant", "that start with a consonant", "x[0] not in 'aeiou'"),
        ("ending", "that end with the letter 'C'", "x.endswith('C')"),
        ("even", "with an even number of letters", "len(x) % 2 == 0"),
        ("double", "with two equal letters in a row", "any(a == b for a, b in zip(x, x[1:]))"),
        ("unique", "in which no letter repeats", "len(set(x)) == len(x)"),
    ),
    (
        ("", "", "x"),
        ("upper", "in upper case", "x.upper()"),
        ("capitalized", "with a capital first letter", "x.capitalize()"),
        ("reversed", "spelled backwards", "x[::-1]"),
        ("initials", "reduced to its first letter", "x[0]"),
        ("cut", "cut after L letters", "x[:L]"),
        ("no_vowels", "without its vowels", "''.join(c for c in x if c not in 'aeiou')"),
        ("swapped", "with first and last letter exchanged",
         "x[-1] + x[1:-1] + x[0] if len(x) > 1 else x"),
        ("starred", "with '*' on both sides", "'*' + x + '*'"),
        ("sorted_letters", "with its letters sorted", "''.join(sorted(x))"),
        ("doubled", "written twice", "x + x"),
    ),
    (
        ("list", "a list of the words", "[*Y]"),
        ("joined", "one string, joined by single spaces, of the words", "' '.join(Y)"),
        ("dashed", "one string, joined by dashes, of the words", "'-'.join(Y)"),
        ("sorted", "an alphabetical list of the words", "sorted(Y)"),
        ("by_length", "a list, from shortest to longest, of the words", "sorted(Y, key=len)"),
        ("longest", "the first longest (or '') of the words", "max(Y, key=len, default='')"),
        ("reversed", "a list, last one first, of the words", "[*Y][::-1]"),
        ("distinct", "a sorted list without duplicates of the words", "sorted(set(Y))"),
        ("lengths", "a dictionary with the length of each of the words", "{y: len(y) for y in Y}"),
        ("numbered", "a list of (position, word) pairs, from 1, of the words",
         "[*enumerate(Y, 1)]"),
        ("last", "the last (or None) of the words", "([*Y] or [None])[-1]"),
    ),
)  # fmt: skip
_SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "all apples in our little green garden are sweet",
    "seven small boats sail slowly past the old harbor",
    "every evening an owl calls across the silent valley",
    "please bring three yellow balloons to the summer party",
    "good books open a door and never close it again",
    "some letters arrive late but all of them arrive",
    "the baker sells warm rolls before the sun is up",
    "an honest answer is better than a clever excuse",
    "rain fell on the tin roof until early morning",
)
_BUILTINS = {
    f.__name__: f
    for f in (
        *(abs, all, any, bin, chr, divmod, enumerate, int, len, max, min, next, ord, range),
        *(reversed, round, set, sorted, str, sum, zip, accumulate, groupby, prod),
    )
}


def _evaluate(expression: str, arguments: Mapping[str, object]) -> object:
    # eval: the expressions are this package's own constants, and an example that was really
    # computed cannot be wrong.
    return eval(expression, {"__builtins__": _BUILTINS, **arguments})


@dataclass(frozen=True)
class _Function:
    name: str
    arguments: tuple[str, ...]
    doc: str
    """A sentence."""
    expression: str
    examples: list[tuple[str, str]]
    """Arguments as they stand in a call, and the result; never empty."""

    def signature(self, hints: bool) -> str:
        shown = (f"{a}: {_HINTS[a]}" if hints else a for a in self.arguments)
        return f"def {self.name}({', '.join(shown)}):"


_HINTS = {
    "text": "str", "word": "str", "other": "str", "items": "list[int]", "others": "list[int]",
    "n": "int", "k": "int", "prices": "dict[str, int]", "matrix": "list[list[int]]",
}  # fmt: skip


def _argument(rng: random.Random, name: str) -> object:
    """A random value of the kind that an argument of this name has."""
    if name in ("items", "others"):
        return _number_items(rng)
    if name == "text":
        return " ".join(_word_items(rng))
    if name in ("word", "other"):
        return rng.choice(" ".join(_SENTENCES).split())
    if name == "prices":
        things = rng.sample(WORDS["single"].split("|"), rng.randint(2, 4))
        return dict(zip(things, rng.sample(range(2, 60), len(things)), strict=True))
    if name == "matrix":
        width = rng.randint(2, 3)
        return [[rng.randint(0, 12) for _ in range(width)] for _ in range(rng.randint(2, 3))]
    return rng.randint(2, 5) if name == "k" else rng.randint(4, 40)


def _known_function(rng: random.Random) -> _Function:
    """One of the functions listed in `task_functions`, with fresh examples."""
    head, doc, expression = rng.choice(FUNCTIONS.strip().split("\n")).split("|", 2)
    name, _, inside = head.rstrip(")").partition("(")
    arguments = tuple(inside.split(", "))
    examples = []
    for _ in range(rng.choice([1, 2, 2, 3])):
        values = {a: _argument(rng, a) for a in arguments}
        shown = ", ".join(repr(v) for v in values.values())
        examples.append((shown, repr(_evaluate(expression, values))))
    return _Function(name, arguments, doc, expression, examples)


def _function(rng: random.Random) -> _Function:
    return _known_function(rng) if rng.random() < 0.45 else _compose(rng)


def _number_items(rng: random.Random) -> list[int]:
    low = rng.choice([0, -20, 1])
    return [rng.randint(low, rng.choice([12, 30, 120])) for _ in range(rng.randint(3, 7))]


def _word_items(rng: random.Random) -> list[str]:
    words = rng.choice(_SENTENCES).split()
    start = rng.randint(0, 3)
    return words[start : start + rng.randint(4, 7)]


def _compose(rng: random.Random) -> _Function:
    """A function that filters, maps and reduces a list of numbers or the words of a text."""
    while True:
        numbers = rng.random() < 0.6
        chosen, mapped, reduced = (rng.choice(parts) for parts in (_NUMBERS if numbers else _WORDS))
        argument, source = ("items", "items") if numbers else ("text", "text.split()")
        sequence = f"({mapped[2]} for x in {source}" + (f" if {chosen[2]})" if chosen[2] else ")")
        doc = (_numbers_doc if numbers else _words_doc)(chosen[1], mapped[1], reduced[1])
        low, other, letter = rng.randint(2, 9), rng.randint(2, 9), rng.choice("aeorstln")
        values = {"4K": str(4 * low), "K": str(low), "L": str(other), "'C'": f"'{letter}'"}
        doc = _replace(doc, values)
        expression = _replace(re.sub(r"\bY\b", sequence, reduced[2]), values)
        examples: list[tuple[str, str]] = []
        for _ in range(rng.choice([1, 2, 2, 3])):
            value = _argument(rng, argument)
            try:
                result = _evaluate(expression, {argument: value})
            except (ValueError, ZeroDivisionError):  # nothing left to reduce: not an example
                continue
            examples.append((repr(value), repr(result)))
        if examples and (chosen[0] or mapped[0]):
            name = "_".join(part for part in (chosen[0], mapped[0], reduced[0]) if part)
            return _Function(name, (argument,), f"Return {doc}.", expression, examples)


def _replace(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\b4K\b|\b[KL]\b|'C'", lambda found: values[found[0]], text)


def _numbers_doc(chosen: str, mapped: str, reduced: str) -> str:
    what = f"the numbers {chosen}" if " " in chosen else f"the {chosen} numbers"
    of = f"the {mapped} of " if mapped else ""
    return f"{reduced} {of}{what if chosen else 'all numbers'} in items"


def _words_doc(chosen: str, mapped: str, reduced: str) -> str:
    return f"{reduced} of the text {chosen}".rstrip() + (f", each {mapped}" if mapped else "")


def function_task(rng: random.Random) -> str:
    """Signature, docstring and true examples; the body is asked for."""
    task = _function(rng)
    quotes = rng.choice(['"""', '"""', "'''"])
    lines = [task.signature(rng.random() < 0.5), f"    {quotes}{task.doc}"]
    style = rng.choice(["doctest", "doctest", "arrow", "assert", "plain"])
    if style in ("doctest", "arrow"):
        lines.append("")
        for shown, result in task.examples:
            call = f"{task.name}({shown})"
            lines += (
                [f"    >>> {call}", f"    {result}"]
                if style == "doctest"
                else [f"    {call} -> {result}"]
            )
    if len(lines) == 2:
        lines[1] += quotes
    else:
        lines.append(f"    {quotes}")
    if style == "assert":
        lines += ["", *(f"assert {task.name}({s}) == {r}" for s, r in task.examples)]
    code = "\n".join(lines)
    ask = grammar().pick(rng, "code_ask")
    fence = rng.choice(["```python\n{}\n```", "```python\n{}\n```", "```\n{}\n```", "{}"])
    shown = fence.format(code)
    return f"{ask}\n{shown}" if rng.random() < 0.8 else f"{shown}\n\n{ask}"


def described_function(rng: random.Random) -> str:
    """The same kind of task in prose, with examples as calls."""
    task = _compose(rng)
    shown, result = task.examples[0]
    doc = task.doc.removeprefix("Return ").rstrip(".")
    pattern = rng.choice(
        [
            "Write a Python function `{name}({arg})` that returns {doc}.\n"
            "For example, `{name}({x})` should return `{y}`.",
            "Write a function named {name} in Python. Given {arg}, it returns {doc}. "
            "Example: {name}({x}) -> {y}",
            "I need a Python function that returns {doc}. With {arg} = {x} the result is {y}.",
            "Write a solution in Python: return {doc}. Your code should pass this test:\n"
            "```python\nassert {name}({x}) == {y}\n```",
            "Task: return {doc}.\nInput: {x}\nOutput: {y}\nWrite Python code that does this.",
            "What does this function have to look like?\n`{name}({x})` gives `{y}`; in general it "
            "returns {doc}.",
        ]
    )
    return pattern.format(name=task.name, arg=task.arguments[0], doc=doc, x=shown, y=result)


def snippet(rng: random.Random) -> str:
    """A finished function with a request about it."""
    task = _function(rng)
    body = f"    return {task.expression}"
    if rng.random() < 0.5:
        body = f"    result = {task.expression}\n    return result"
    name = task.name if rng.random() < 0.6 else rng.choice(["f", "process", "compute", "run", "g"])
    code = f"def {name}({', '.join(task.arguments)}):\n{body}"
    ask = grammar().pick(rng, "snippet_ask")
    shown = f"```python\n{code}\n```"
    return f"{ask}\n{shown}" if rng.random() < 0.7 else f"{shown}\n{ask}"


def output_question(rng: random.Random) -> str:
    """What does this print?"""
    task = _compose(rng)
    argument = task.examples[0][0]
    code = f"{task.arguments[0]} = {argument}\nprint({task.expression})"
    ask = rng.choice(
        [
            "What does this Python code print?",
            "What is the output of this program? Go through it step by step.",
            "Predict the output and explain it.",
            "Run this code in your head. What appears on the screen?",
        ]
    )
    return f"{ask}\n```python\n{code}\n```"


def code_chat(rng: random.Random) -> str:
    """A request around programming that shows no code of ours."""
    words = grammar()
    return join(words.fill(rng, "<code_chat>"), words.pick(rng, "code_chat_ask"), " ")
