"""Word problems and formal questions of school mathematics.

The prompts only have to be sensible: the answers come from the target. So stories keep their counts
above zero, but nobody checks that every division comes out even.
"""

import random
from collections.abc import Callable

from dspark.corpus.task_grammar import grammar, join

__all__ = ["expression", "formal_math", "polynomial", "story", "word_problem"]


def _asked(rng: random.Random, problem: str) -> str:
    """A problem with one of many wordings of "show your work" around it."""
    words = grammar()
    between = rng.choice(["\n", "\n", " ", "\n\n"])
    text = join(problem, words.pick(rng, "math_ask"), between)
    return join(words.pick(rng, "math_lead"), text, rng.choice([" ", "\n", "\n\n"]))


def word_problem(rng: random.Random) -> str:
    """One of the written problems with its own names and numbers."""
    return _asked(rng, grammar().fill(rng, "<word_problem>"))


def formal_math(rng: random.Random) -> str:
    """Algebra, number theory, geometry, counting or a little calculus, in LaTeX."""
    return _asked(rng, grammar().fill(rng, "<formal_math>"))


# Sentence, and how the count n changes.
_EVENTS: list[tuple[str, Callable[[int, int], int]]] = [
    ("<Person> gives {k} of them to <person2>.", lambda n, k: n - k),
    ("On <day>, <person> finds {k} more.", lambda n, k: n + k),
    ("<Person> loses {k} on the way to the <place>.", lambda n, k: n - k),
    ("Then <person3> brings {k} extra <thing>.", lambda n, k: n + k),
    ("<Person> sells {k} of the <thing> at the <shop>.", lambda n, k: n - k),
    ("After that, <person> buys {k} packs with 6 <thing> in each pack.", lambda n, k: n + 6 * k),
    ("The next day the number of <thing> doubles.", lambda n, k: 2 * n),
    ("Half of the <thing>, rounded down, are given away.", lambda n, k: n - n // 2),
    ("<Person2> takes {k} <thing> and returns 2 of them.", lambda n, k: n - k + 2),
    ("Each of 4 friends adds {k} <thing>.", lambda n, k: n + 4 * k),
    ("A third of them, rounded down, turn out to be broken.", lambda n, k: n - n // 3),
    ("In <month>, <person> trades {k} <thing> for 1 rare one.", lambda n, k: n - k + 1),
    ("<Person> puts {k} into a <container> for later and does not count them any more.",
     lambda n, k: n - k),
    ("At the <event>, <person> wins {k} <thing>.", lambda n, k: n + k),
]  # fmt: skip

_OPENINGS = (
    "<Person> has {n} <thing>.",
    "<Person> starts the week with {n} <thing>.",
    "There are {n} <thing> in <person>'s <container>.",
    "<Person> collects {n} <thing> in <month>.",
    "For the <event>, <person> prepares {n} <thing>.",
    "A <shop> has {n} <thing> on its shelf, and <person> counts them every day.",
)

_CLOSINGS = (
    "How many <thing> are there in the end?",
    "How many <thing> does <person> have now?",
    "How many <thing> are left?",
    "What is the final number of <thing>?",
    "If the remaining <thing> sell for ${p} each, how much money does <person> get?",
    "How many more <thing> does <person> need to reach {goal}?",
    "The rest is shared equally by {q} people. How many <thing> does each one get, and how many "
    "are left over?",
    "What is the difference between the number of <thing> at the start and at the end?",
    "What percentage of the <thing> at the start is that?",
)


def story(rng: random.Random) -> str:
    """A count that two to five events change, in an order and a wording of its own."""
    start = count = rng.randint(40, 240)
    sentences = [rng.choice(_OPENINGS)]
    for sentence, change in rng.sample(_EVENTS, rng.choice([2, 2, 3, 3, 4, 5])):
        # At most a third goes at a time, once a half: the fifth event still finds six of forty.
        k = rng.randint(2, min(40, count // 3))
        count = change(count, k)
        sentences.append(sentence.format(k=k))
    closing = rng.choice(_CLOSINGS).format(
        p=rng.randint(2, 12), q=rng.randint(3, 9), goal=count + rng.randint(10, 90)
    )
    text = " ".join([*sentences, closing]).replace("{n}", str(start))
    return _asked(rng, grammar().fill(rng, text))


def expression(rng: random.Random) -> str:
    """Arithmetic with two to five operations, bare or with an instruction."""
    parts = [str(rng.randint(2, 99))]
    times = rng.choice(["*", r"\times"])
    for _ in range(rng.randint(2, 5)):
        operand = str(rng.randint(2, 60))
        if rng.random() < 0.3:
            operand = f"({operand} {rng.choice('+-')} {rng.randint(1, 30)})"
        parts += [rng.choice(["+", "-", times]), operand]
    text = " ".join(parts)
    text = f"${text}$" if r"\times" in text or rng.random() < 0.3 else text
    verb = rng.choice(["Calculate", "Compute", "What is", "Evaluate", "Find the value of"])
    return _asked(rng, f"{verb} {text}{'?' if verb == 'What is' else '.'}")


def polynomial(rng: random.Random) -> str:
    """A question about a polynomial of degree two to four."""
    degree = rng.randint(2, 4)
    terms: list[str] = []
    for power in range(degree, -1, -1):
        factor = rng.choice([-1, 1]) * rng.randint(1, 12)
        if power < degree and rng.random() < 0.2:
            continue
        shown = "" if abs(factor) == 1 and power else str(abs(factor))
        sign = ("-" if factor < 0 else "") if not terms else (" - " if factor < 0 else " + ")
        terms.append(f"{sign}{shown}" + {0: "", 1: "x"}.get(power, f"x^{power}"))
    poly = "".join(terms)
    question = rng.choice(
        [
            "What is the value of ${p}$ when $x = {a}$?",
            "Let $p(x) = {p}$. Find $p({a}) - p({b})$.",
            "Find the derivative of $f(x) = {p}$ and evaluate it at $x = {a}$.",
            "Let $f(x) = {p}$. What is the remainder when $f(x)$ is divided by $x - {a}$?",
            "What is the degree of the polynomial ${p}$, and what is the sum of its coefficients?",
            "Simplify $({p}) - ({a}x^2 + {b}x)$.",
            "Multiply ${p}$ by $(x + {a})$ and collect like terms.",
            "Find the antiderivative of $f(x) = {p}$.",
            "If $g(x) = {p}$, compute $g(-{a})$.",
        ]
    )
    question = question.replace("{p}", poly).replace("{a}", str(rng.randint(2, 9)))
    return _asked(rng, question.replace("{b}", str(rng.randint(2, 9))))
