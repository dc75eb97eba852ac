import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, groupby
from math import prod

import pytest

from dspark.corpus import task_code, task_math, tasks
from dspark.corpus.task_grammar import Grammar
from dspark.errors import ConfigError


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    first = tasks.generate(300, seed=3)
    assert first == tasks.generate(300, seed=3)
    other = tasks.generate(300, seed=4)
    assert len({t.text for t in first} & {t.text for t in other}) < 15


def test_independent_draws_rarely_repeat() -> None:
    rng = random.Random(0)
    categories = rng.choices(list(tasks.SHARES), list(tasks.SHARES.values()), k=5000)
    texts = {tasks.draw(rng, category).text for category in categories}
    assert len(texts) >= 0.98 * 5000


def test_generated_prompts_are_distinct_in_their_shares_and_mixed() -> None:
    made = tasks.generate(2000, seed=1)
    assert len({t.text for t in made}) == 2000
    counts = Counter(t.category for t in made)
    assert {c: counts[c] for c in tasks.SHARES} == {
        c: round(2000 * share) for c, share in tasks.SHARES.items()
    }
    first = Counter(t.category for t in made[:200])
    assert min(first.values()) > 30
    assert {t.kind for t in made} == set(tasks.KINDS)


def test_a_changed_share_leaves_the_prompts_of_other_categories_alone() -> None:
    def of(category: str, shares: dict[str, float]) -> set[str]:
        made = tasks.generate(200, seed=5, shares=shares)
        return {t.text for t in made if t.category == category}

    assert of("code", {"math": 0.5, "code": 0.5}) == of("code", {"chat": 0.5, "code": 0.5})


def test_no_slot_stays_open_and_no_article_is_wrong() -> None:
    for task in tasks.generate(3000, seed=2):
        assert not re.search(r"<[A-Za-z]\w*(:\d+-\d+)?>", task.text), task.text
        if task.category == "chat":
            assert not re.search(
                r"\b[Aa] (apple|encouraging|enthusiastic|umbrella|astro)", task.text
            )


def test_examples_in_docstrings_are_true() -> None:
    rng = random.Random(7)
    for _ in range(400):
        function = task_code._function(rng)
        scope: dict[str, object] = {"accumulate": accumulate, "groupby": groupby, "prod": prod}
        arguments = ", ".join(function.arguments)
        exec(f"def {function.name}({arguments}):\n    return {function.expression}", scope)
        for shown, result in function.examples:
            assert repr(eval(f"{function.name}({shown})", scope)) == result


def test_counts_in_a_story_stay_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def watched(change: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def changed(count: int, k: int) -> int:
            counts.append(change(count, k))
            return counts[-1]

        return changed

    events = [(sentence, watched(change)) for sentence, change in task_math._EVENTS]
    monkeypatch.setattr(task_math, "_EVENTS", events)
    rng = random.Random(1)
    for _ in range(3000):
        task_math.story(rng)
    assert min(counts) > 0


def test_an_unknown_category_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="math, code, chat, got 'maths'"):
        tasks.draw(random.Random(0), "maths")


def test_running_out_of_different_prompts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "KINDS", {"one": ("math", 1.0, lambda rng: "always this")})
    with pytest.raises(ConfigError, match="no 2 different math prompts"):
        tasks.generate(2, seed=0, shares={"math": 1.0})


class TestGrammar:
    words = Grammar(
        {"who": "Ann|Bob|Ezra", "adj": "odd|big"}, {"line": "*3 <who> has <4-4>\n<who> ran\n*2"}
    )

    def test_a_repeated_slot_keeps_its_value_and_a_numbered_one_differs(self) -> None:
        for seed in range(50):
            filled = self.words.fill(random.Random(seed), "<who>,<who>,<who2>,<WHO>")
            first, again, other, capital = filled.split(",")
            assert first == again == capital != other

    def test_numbers_are_in_range_and_named_ones_repeat(self) -> None:
        for seed in range(50):
            filled = self.words.fill(random.Random(seed), "<a:20-40:5> <3-9> <a>")
            named, fresh, again = map(int, filled.split())
            assert named == again
            assert named in (20, 25, 30, 35, 40)
            assert 3 <= fresh <= 9

    def test_the_article_follows_the_value(self) -> None:
        seen = {self.words.fill(random.Random(seed), "a <adj> cup") for seed in range(30)}
        assert seen == {"an odd cup", "a big cup"}

    def test_weights_of_patterns_count_and_nested_slots_are_filled(self) -> None:
        rng = random.Random(0)
        seen = Counter(
            re.sub("Ann|Bob|Ezra", "X", self.words.fill(rng, "<line>")) for _ in range(3000)
        )
        assert set(seen) == {"X has 4", "X ran", ""}
        assert seen["X has 4"] == pytest.approx(1500, abs=120)
        assert seen[""] == pytest.approx(1000, abs=120)
