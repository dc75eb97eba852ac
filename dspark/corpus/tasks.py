"""Seeded generators of prompts: word problems, formal mathematics, Python tasks and chat.

They give a corpus that may be shipped and rebuilt anywhere: no prompt is taken from a data set.
`task_math`, `task_code` and `task_grammar` build the prompts, `task_words` holds the words. Same
seed, same prompts, on every platform.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dspark.corpus import task_code, task_math
from dspark.corpus.task_grammar import grammar, join
from dspark.errors import ConfigError

__all__ = ["KINDS", "SHARES", "Task", "draw", "generate"]

SHARES: Mapping[str, float] = {"math": 0.35, "code": 0.25, "chat": 0.40}
"""Categories and their shares of a generated corpus."""


@dataclass(frozen=True)
class Task:
    """One single-turn prompt."""

    category: str
    """math, code or chat."""
    kind: str
    """Name of the generator, a key of `KINDS`."""
    text: str


def _chat(rng: random.Random) -> str:
    """An everyday request, sometimes with a rule for the form of the answer."""
    words = grammar()
    pattern = words.pick(rng, "chat")
    known: dict[str, str] = {}
    text = words.fill(rng, pattern, known)
    if "<length>" in pattern or "<tone>" in pattern:  # already has a rule
        return text
    return join(text, words.fill(rng, words.pick(rng, "chat_ask"), known), " ")


KINDS: Mapping[str, tuple[str, float, Callable[[random.Random], str]]] = {
    "word_problem": ("math", 0.40, task_math.word_problem),
    "story": ("math", 0.25, task_math.story),
    "formal_math": ("math", 0.25, task_math.formal_math),
    "polynomial": ("math", 0.06, task_math.polynomial),
    "expression": ("math", 0.04, task_math.expression),
    "function_task": ("code", 0.45, task_code.function_task),
    "described_function": ("code", 0.17, task_code.described_function),
    "snippet": ("code", 0.12, task_code.snippet),
    "output_question": ("code", 0.06, task_code.output_question),
    "code_chat": ("code", 0.20, task_code.code_chat),
    "chat": ("chat", 1.0, _chat),
}
"""Generators: category, share within the category, function."""


def draw(rng: random.Random, category: str) -> Task:
    """One prompt of ``category`` (math, code or chat).

    Raises:
        ConfigError: the category is unknown.
    """
    kinds = [(kind, share) for kind, (of, share, _) in KINDS.items() if of == category]
    if not kinds:
        raise ConfigError(f"category must be one of {', '.join(SHARES)}, got {category!r}")
    (kind,) = rng.choices([k for k, _ in kinds], [share for _, share in kinds])
    return Task(category, kind, KINDS[kind][2](rng))


def generate(count: int, seed: int, *, shares: Mapping[str, float] = SHARES) -> list[Task]:
    """``count`` different prompts in random order, the same for the same arguments.

    Categories get ``shares`` of the count, to the nearest prompt.

    Raises:
        ConfigError: a category is unknown, a share is negative, or the generators have no more
            different prompts.
    """
    total = sum(shares.values())
    if count < 0 or total <= 0 or min(shares.values()) < 0:
        raise ConfigError(f"count and shares must be positive, got {count} and {dict(shares)}")
    tasks: list[Task] = []
    seen: set[str] = set()
    edge, start = 0.0, 0
    for category, share in shares.items():
        edge += share
        end = round(count * edge / total)
        # A stream per category: changing one share leaves the other categories' prompts alone.
        rng = random.Random(f"{seed}:{category}")
        misses = 0
        while len(tasks) < end:
            task = draw(rng, category)
            if task.text in seen:
                misses += 1
                if misses > 1000 + 20 * (end - start):
                    raise ConfigError(f"no {end - start} different {category} prompts exist")
                continue
            seen.add(task.text)
            tasks.append(task)
        start = end
    random.Random(f"{seed}:order").shuffle(tasks)
    return tasks
