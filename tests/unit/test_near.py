# ruff: noqa: RUF001 - punctuation and digits of Chinese texts
"""Near duplicates on generated text, by their true Jaccard index."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dspark.corpus.near import RUN, NearDuplicates, shingles
from dspark.corpus.words import Hashes, hashes, length, runs, tokens

pytestmark = pytest.mark.slow

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "lnrst"]


def written(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(count)]


def runs_of(words: Sequence[str]) -> Hashes:
    return shingles(hashes(words))


def run_set(text: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(text[i : i + RUN]) for i in range(len(text) - RUN + 1)}


def jaccard(one: Sequence[str], two: Sequence[str]) -> float:
    a, b = run_set(one), run_set(two)
    return len(a & b) / len(a | b)


def changed(rng: random.Random, text: Sequence[str], wanted: float) -> tuple[list[str], float]:
    """``text`` with words replaced until its similarity is at most ``wanted``."""
    other = list(text)
    while (similarity := jaccard(text, other)) > wanted:
        other[rng.randrange(len(other))] = rng.choice(WORDS)
    return other, similarity


def shares_found(threshold: float, count: int = 200) -> tuple[float, float]:
    """Of pairs 0.1 above the threshold or more, and of pairs 0.3 below it or more."""
    rng = random.Random(int(threshold * 100))
    near = NearDuplicates(threshold)
    texts = [written(rng, rng.randrange(60, 250)) for _ in range(count)]
    assert sum(near.add(runs_of(text)) for text in texts) == count
    close, far = [], []
    for text in texts:
        other, similarity = changed(rng, text, min(threshold + 0.12, 1.0))
        if similarity >= threshold + 0.1:
            close.append(not near.add(runs_of(other)))
        other, similarity = changed(rng, text, threshold - 0.3)
        far.append(not near.add(runs_of(other)))
    assert len(close) > count / 4
    return sum(close) / len(close), sum(far) / len(far)


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9])
def test_near_texts_are_found_and_others_are_kept(threshold: float) -> None:
    found, wrongly = shares_found(threshold)
    assert found >= 0.95
    assert wrongly <= 0.01


def test_short_texts_are_near_only_when_all_words_are_equal() -> None:
    near = NearDuplicates(0.8)
    for text in ("Why is the sky blue?", "Why is the sea blue?", "Why?", "Why not?"):
        assert near.add(runs_of(tokens(text)))
    assert not near.add(runs_of(tokens("why is the sky: BLUE")))
    assert not near.add(runs_of(tokens("why")))


def test_texts_without_spaces_are_compared_by_characters() -> None:
    one = "请解释为什么天空是蓝色的，并且用一个简单的比喻帮助小学生理解这个现象的原因和意义所在。"
    assert len(tokens(one)) == 41
    near = NearDuplicates(0.8)
    assert near.add(runs_of(tokens(one)))
    assert not near.add(runs_of(tokens(one.replace("在。", "处！"))))
    assert near.add(runs_of(tokens(one[:20] + "并且告诉我海水为什么尝起来是咸的而湖水不是")))
    assert length(tokens(one)) == pytest.approx(41 * 0.65)
    assert tokens("ＡＢＣ 小明有3个apple") == ["abc", "小", "明", "有", "3", "个", "apple"]


def test_answers_are_those_of_a_search_that_forgets_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables that grow many times, and the same texts compared with every one kept before."""
    rng = random.Random(5)
    moulds = [written(rng, 40) for _ in range(30)]
    texts = [
        changed(rng, rng.choice(moulds), rng.choice([1, 0.9, 0.8, 0.6]))[0] for _ in range(400)
    ]
    make_room = NearDuplicates._make_room
    first_sizes, sizes = [4], []

    def sized(self: Any, size: int) -> None:
        sizes.append(first_sizes.pop() if first_sizes else size)
        make_room(self, sizes[-1])

    monkeypatch.setattr(NearDuplicates, "_make_room", sized)
    near, agree = NearDuplicates(0.8), 0
    kept: list[list[str]] = []
    sets: list[set[tuple[str, ...]]] = []
    for text in texts:
        own = run_set(text)
        first = all(len(own & other) < 0.8 * len(own | other) for other in sets)
        answer = near.add(runs_of(text))
        agree += answer == first
        if answer:
            kept.append(text)
            sets.append(own)
    assert len(sizes) > 5
    assert len(near) == len(kept) > 100
    first_sizes.append(sizes[-1])
    large = NearDuplicates(0.8)
    for text in kept:
        assert large.add(runs_of(text))
    assert np.array_equal(near._heads, large._heads)
    assert np.array_equal(near._next, large._next)
    # the estimate errs within some 0.04 of the threshold; a lost chain would keep every repetition
    assert agree / len(texts) > 0.9
    assert not any(near.add(runs_of(text)) for text in kept)


def test_texts_that_fall_into_one_slot_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(self: NearDuplicates, signatures: Any) -> Any:
        return np.zeros((len(signatures), self._bands), dtype=np.int64)

    monkeypatch.setattr(NearDuplicates, "_slots", one)
    rng = random.Random(2)
    near, texts = NearDuplicates(0.8), [written(rng, 30) for _ in range(200)]
    assert all(near.add(runs_of(text)) for text in texts)
    assert not any(near.add(runs_of(text)) for text in texts)


def test_hashes_are_the_same_in_every_process() -> None:
    numbers = hashes(["the", "sky", "蓝"])
    assert numbers.tolist() == [1011183078, 103183599, 2355260970]
    assert runs(numbers, 2).tolist() == [2779069472822122997, 15870756958361716205]
    signature = NearDuplicates._signature(runs_of(["the", "sky"]))
    assert signature[:6].tolist() == [171, 92, 210, 77, 19, 73]
    assert len(runs(numbers, 4)) == 0
    assert not hashes([]).tolist()
