"""Ten thousand rows from a server that fails one request in twenty, and a client that is killed."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus.endpoint import errors_file
from dspark.corpus.responses import read_responses
from dspark.testing import tiny_tokenizer, write_rows
from tests.e2e.endpoint_client import run
from tests.unit.fake_engine import FakeEngine

Client = Any  # a process of the fork server
ROWS = 10_000
TOO_LONG = 25
FAULTS = ("429", "500", "drop", "half", "bad_json", "no_choice", "two_choices", "other_prompt")


@pytest.fixture
def start() -> Iterator[Callable[[Path], Client]]:
    """Starts clients that have imported everything before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.e2e.endpoint_client"])
    started: list[Client] = []

    def begin(folder: Path) -> Client:
        started.append(context.Process(target=run, args=(folder,)))
        started[-1].start()
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.join()


@pytest.mark.slow
@pytest.mark.timeout(550)
def test_every_row_ends_exactly_once(tmp_path: Path, start: Callable[[Path], Client]) -> None:
    rng = random.Random(11)
    out = tmp_path / "rows.jsonl"
    texts = [f"{i}" + ("x" * 200 if i % (ROWS // TOO_LONG) == 7 else "") for i in range(ROWS)]
    rows = [{"id": f"p{i}", "text": text} for i, text in enumerate(texts)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    # some prompts never get an answer, and of some no answer can be used
    never = {str(i) for i in rng.sample(range(ROWS), 30)}
    strange = {str(i) for i in rng.sample(range(ROWS), 30)} - never
    tokenizer: Any = tiny_tokenizer()

    def fault(number: int, ids: list[int]) -> str | None:
        name = tokenizer.decode(ids).split("\n")[1].removesuffix("<|im_end|>")
        if name in never:
            return "400" if int(name) % 2 else "500"
        if name in strange:
            return "out_of_vocabulary"
        return rng.choice(FAULTS) if rng.random() < 0.05 else None

    with FakeEngine(tokenizer, fault=fault, keep=False, gate=64) as engine:
        settings: dict[str, Any] = {
            "endpoint": engine.url,
            "endpoint_api": "vllm",
            "concurrency": 64,
            "max_retries": 4,
            "max_new_tokens": 12,
            "max_prompt_tokens": 100,
        }
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        marks = sorted(rng.sample(range(300, ROWS - 1500), 3))
        for mark in marks:
            child = start(tmp_path)
            while engine.asked < mark and child.is_alive():
                time.sleep(0.01)
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
        kept = out.read_bytes().count(b"\n")
        assert 0 < kept < marks[-1]
        last = start(tmp_path)
        last.join(240)
        assert last.exitcode == 0
        assert engine.most_in_flight == 64
    report = json.loads((tmp_path / "report.json").read_text())

    written = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    failed = [json.loads(line) for line in errors_file(out).read_text().splitlines()]
    names = {row["id"] for row in failed}
    assert len(set(written)) == len(written)
    assert len(names) == len(failed)
    assert not names & set(written)
    assert {f"p{name}" for name in never} == names
    assert {row["reason"] for row in failed} == {"refused", "server_error"}
    assert all(row["attempts"] == (1 if row["reason"] == "refused" else 5) for row in failed)
    reasons = report["rows"]["reasons"]
    assert set(reasons) == {"prompt_too_long", "id_out_of_vocabulary"}
    assert reasons["prompt_too_long"] == TOO_LONG
    assert report["rows"]["read"] == ROWS
    # a line may have got there without its line feed
    assert kept <= report["resumed"] <= kept + 1
    assert len(written) == report["written"] + report["resumed"]
    assert sum(report["errors"].values()) == len(failed)
    parts = (report["written"], report["resumed"], report["rows"]["rejected"], len(failed))
    assert sum(parts) == ROWS
    # and what stands there can be trained on
    assert sum(1 for _ in read_responses([str(out)], vocab_size=len(tokenizer))) == len(written)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupt_keeps_what_was_answered(
    tmp_path: Path, start: Callable[[Path], Client]
) -> None:
    out = tmp_path / "rows.jsonl"
    write_rows(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "text": f"{i}"} for i in range(200)])
    with FakeEngine(tiny_tokenizer(), delay_s=0.05) as engine:
        settings = {"endpoint": engine.url, "concurrency": 4}
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        child = start(tmp_path)
        while engine.asked < 30 and child.is_alive():
            time.sleep(0.01)
        engine.delay_s = 1.0  # it is not through before the signal reaches it
        os.kill(child.pid, signal.SIGINT)
        child.join(60)
        assert child.exitcode == 1
        kept = [json.loads(line)["id"] for line in out.read_text().splitlines()]
        assert 30 - 4 <= len(kept) < 200
        engine.delay_s = 0
        last = start(tmp_path)
        last.join(100)
        assert last.exitcode == 0
        # only what was on its way is asked a second time
        assert engine.asked <= 200 + 4
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["resumed"], report["written"]) == (len(kept), 200 - len(kept))
