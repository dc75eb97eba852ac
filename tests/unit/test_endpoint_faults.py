"""A server that misbehaves: what may pass is asked again, the rest is listed, nothing is lost."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.config import SampleSettings
from dspark.corpus import client
from dspark.corpus.endpoint import errors_file, sample_endpoint
from dspark.corpus.prompts import Prompt
from dspark.corpus.response_file import ResponseWriter
from dspark.corpus.responses import Response, read_responses
from dspark.corpus.sampling import SampleReport
from dspark.errors import ConfigError, RunError
from dspark.target.remote import Remote
from dspark.testing import tiny_tokenizer
from tests.unit.fake_engine import FakeEngine, Fault

PASSING = {
    "429": "rate_limited",
    "500": "server_error",
    "drop": "connection",
    "half": "connection",
    "stall": "timed_out",
    "bad_json": "invalid_json",
    "no_choice": "bad_answer",
    "two_choices": "bad_answer",
    "other_prompt": "bad_answer",
    "aborted": "bad_answer",
}
"""Faults that are asked again, and what they are called when they stay."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def run(tokenizer: Any, tmp_path: Path) -> Callable[..., SampleReport]:
    target = Remote("tiny", None, len(tokenizer), 512, frozenset({tokenizer.eos_token_id}))

    def sample(engine: FakeEngine, count: int, **changes: Any) -> SampleReport:
        values = {
            "endpoint": engine.url,
            "max_new_tokens": 40,
            "concurrency": 8,
            "max_retries": 2,
            "request_timeout_s": 20,
            **changes,
        }
        prompts = [
            Prompt(f"p{i}", [{"role": "user", "content": f"{i}"}], "m") for i in range(count)
        ]
        return sample_endpoint(
            target, tokenizer, prompts, SampleSettings(**values), tmp_path / "r.jsonl"
        )

    return sample


def ids_in(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def first(kind: str, count: int) -> Fault:
    """Every prompt fails ``count`` times."""
    asked: Counter[tuple[int, ...]] = Counter()

    def fault(number: int, ids: list[int]) -> str | None:
        asked[tuple(ids)] += 1
        return kind if asked[tuple(ids)] <= count else None

    return fault


@pytest.mark.slow
@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_asked_again_and_what_stays_is_listed(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport], kind: str
) -> None:
    out = tmp_path / "r.jsonl"
    limit = {"request_timeout_s": 0.3} if kind == "stall" else {}
    with FakeEngine(tokenizer, fault=first(kind, 3)) as engine:
        report = run(engine, 3, **limit)
        # three attempts each, and then it is an error
        assert report.errors == {PASSING[kind]: 3}
        assert (report.written, report.retries, len(engine.seen)) == (0, 6, 9)
        lines = [json.loads(line) for line in errors_file(out).read_text().splitlines()]
        assert sorted(line["id"] for line in lines) == ["p0", "p1", "p2"]
        assert all(line["reason"] == PASSING[kind] and line["detail"] for line in lines)
        assert all((line["attempts"], line["sample"]) == (3, 0) for line in lines)
        # what failed is asked again, and its entry does not stay beside its row
        report = run(engine, 3, **limit)
        assert (report.written, report.resumed, report.errors.total()) == (3, 0, 0)
        assert not errors_file(out).exists()
    assert sorted(ids_in(out)) == ["p0", "p1", "p2"]
    bodies = [json.dumps(body, sort_keys=True) for body in engine.bodies]
    assert set(Counter(bodies).values()) == {4}


@pytest.mark.parametrize("kind", PASSING)
def test_a_fault_that_passes_leaves_no_trace(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport], kind: str
) -> None:
    limit = {"request_timeout_s": 0.3} if kind == "stall" else {}
    with FakeEngine(tokenizer, fault=first(kind, 1)) as engine:
        report = run(engine, 4, **limit)
    assert (report.written, report.errors.total(), report.retries) == (4, 0, 4)
    assert not errors_file(tmp_path / "r.jsonl").exists()


def test_other_4xx_are_final(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport]
) -> None:
    with FakeEngine(tokenizer, fault=first("400", 1)) as engine:
        report = run(engine, 3)
        assert (report.errors, report.retries, len(engine.seen)) == ({"refused": 3}, 0, 3)
    (line, *_) = errors_file(tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(line)["detail"] == "400 told to fail"


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("401", "answers /v1/completions with 401 .*DSPARK_API_KEY"),
        ("404", r"with 404 .*sample\.endpoint_api"),
        ("moved", r"redirects \(307\) to 'http://elsewhere/v1'"),
    ],
)
def test_what_is_wrong_with_every_request_ends_the_run(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport], kind: str, sentence: str
) -> None:
    with FakeEngine(tokenizer, fault=lambda n, ids: kind if n >= 2 else None) as engine:
        with pytest.raises(ConfigError, match=sentence):
            run(engine, 30, concurrency=1)
        assert len(engine.seen) == 3
    # what was answered before is there
    assert ids_in(tmp_path / "r.jsonl") == ["p0", "p1"]


def test_retry_after_is_kept_to(
    tokenizer: Any, run: Callable[..., SampleReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client, "sleep", sleep)
    with FakeEngine(tokenizer, fault=first("later", 1)) as engine:
        report = run(engine, 2)
    assert (report.written, len(slept)) == (2, 2)
    assert all(7 <= seconds < 7.1 for seconds in slept)
    assert len(set(slept)) == 2


def test_pauses_grow_and_differ(
    tokenizer: Any, run: Callable[..., SampleReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(client, "sleep", sleep)
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.5)
    with FakeEngine(tokenizer, fault=first("500", 9)) as engine:
        assert run(engine, 1, max_retries=9, concurrency=1).written == 1
    assert len(set(slept)) == 9
    for number, seconds in enumerate(slept):
        base = min(60.0, 0.5 * 2**number)
        assert base / 2 <= seconds <= base * 1.5


def test_a_dead_server_ends_the_run_before_every_row_is_an_error(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport]
) -> None:
    with FakeEngine(tokenizer, fault=lambda n, ids: "drop" if n >= 5 else None) as engine:
        with pytest.raises(RunError, match="failed to answer 20 rows one behind the other"):
            run(engine, 400, concurrency=1, max_retries=0)
        assert len(engine.seen) == 25
    assert len(ids_in(tmp_path / "r.jsonl")) == 5


def test_a_server_that_is_not_there_is_a_sentence(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport]
) -> None:
    with FakeEngine(tokenizer, fault=first("400", 1)) as engine:
        run(engine, 3)
    with pytest.raises(RunError, match=r"does not list its models after 3 attempts: connection"):
        run(engine, 3)
    # nothing was asked, so what failed before still stands
    assert len(ids_in(errors_file(tmp_path / "r.jsonl"))) == 3


def test_a_resumed_run_asks_for_what_is_missing(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport]
) -> None:
    out = tmp_path / "r.jsonl"
    with FakeEngine(tokenizer) as engine:
        run(engine, 20)
        whole = {row.key: row for row in read_responses([str(out)])}
        out.write_bytes(out.read_bytes()[:-90])
        engine.seen.clear()
        report = run(engine, 25)
        assert (report.resumed, report.written, len(engine.seen)) == (19, 6, 6)
    again = {row.key: row for row in read_responses([str(out)])}
    assert len(again) == 25
    assert {key: again[key] for key in whole} == whole


@pytest.mark.slow
def test_many_faults_at_once_lose_and_double_nothing(
    tokenizer: Any, tmp_path: Path, run: Callable[..., SampleReport]
) -> None:
    out = tmp_path / "r.jsonl"
    rng = random.Random(3)
    kinds = [*(kind for kind in PASSING if kind != "stall"), "400", "out_of_vocabulary"]

    def fault(number: int, ids: list[int]) -> str | None:
        return rng.choice(kinds) if rng.random() < 0.4 else None

    with FakeEngine(tokenizer, fault=fault) as engine:
        report = run(engine, 300, concurrency=32, max_retries=1)
    written, failed = ids_in(out), ids_in(errors_file(out))
    assert len(set(written)) == len(written) == report.written
    assert len(set(failed)) == len(failed) == report.errors.total() > 0
    assert not set(written) & set(failed)
    assert report.rejects.rejected > 0
    assert report.written + report.errors.total() + report.rejects.rejected == 300
    places = [place for some in report.rejects.places.values() for place in some]
    assert not {re.split(r"\s", place)[0] for place in places} & {*written, *failed}


def part(number: int, parts: int, name: str = "p") -> Response:
    return Response(
        id=f"{name}/{number}" if number else name,
        input_ids=[1, 2],
        loss_mask=[0, 1],
        part=number,
        parts=parts,
    )


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("tail", ["", '{"format": "dsp'])
def test_half_a_conversation_at_the_end_of_a_file_is_dropped(
    tmp_path: Path, kept: int, tail: str
) -> None:
    path = tmp_path / "r.jsonl"
    rows = [part(0, 1, "whole"), *(part(number, 3) for number in range(kept))]
    path.write_text("".join(row.to_json() + "\n" for row in rows) + tail)
    with ResponseWriter(path):
        pass
    assert ids_in(path) == (["whole", "p", "p/1", "p/2"] if kept == 3 else ["whole"])


def test_the_last_sequence_without_its_line_feed_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(part(number, 2).to_json() for number in range(2)))
    with ResponseWriter(path) as writer:
        writer.write([part(0, 1, "next")])
    assert ids_in(path) == ["p", "p/1", "next"]
    path.write_text(part(0, 2).to_json())
    with ResponseWriter(path) as writer:
        writer.write([part(0, 1, "next")])
    assert ids_in(path) == ["next"]
