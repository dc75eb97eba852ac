"""The engine in a process of its own: the same tokens, and nothing that befalls it is silent."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import pytest

from dspark.decoding import DecodeParams, SamplingParams
from dspark.errors import ConfigError, RunError
from dspark.serving import process
from dspark.serving.engine import Engine, EngineLost, LocalModel
from dspark.serving.process import EngineProcess
from dspark.serving.request import GenerateParams
from dspark.serving.settings import ServeSettings
from dspark.target import base
from tests.unit.scripted import (
    FORK,
    GO_ON,
    KILL,
    STOP,
    TOKENIZER,
    A,
    Scripted,
    alive,
    body,
    letters,
    served,
    until,
)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_METHOD", "fork")


def events(http: httpx.Client, prompt: str, count: int) -> Iterator[dict[str, Any]]:
    """Of a stream, the last one too if it is an error."""
    with http.stream("POST", "/generate", json={**body(prompt, count), "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def params(count: int) -> DecodeParams:
    return DecodeParams(max_new_tokens=count, sampling=SamplingParams(), ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_another_process_gives_the_same_answers(pair: tuple[Any, Any], temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    wanted = GenerateParams(max_new_tokens=24, sampling=sampling, top_logprobs=2)
    local = LocalModel(*pair)
    with EngineProcess(lambda: local, ServeSettings()) as remote:
        assert remote.card == local.card
        ends = []
        for model in (local, remote):
            engine = Engine(model, TOKENIZER)
            ends.append([engine.generate(ids, wanted) for ids in ([65, 66], list(range(70, 90)))])
            engine.close()
    for here, there in zip(*ends, strict=True):
        assert here.token_ids == there.token_ids
        assert here.likelihoods == there.likelihoods
        assert here.stats.histogram == there.stats.histogram
        assert (here.text, here.finish_reason) == (there.text, there.finish_reason)


def test_a_flush_reaches_the_process(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", 32)
    local, wanted = LocalModel(*pair), GenerateParams(max_new_tokens=2, sampling=SamplingParams())
    with EngineProcess(lambda: local, ServeSettings()) as remote:
        engine = Engine(remote, TOKENIZER)
        counts = []
        for flush in (False, True, False):
            counts.append(engine.generate([65] * 40, wanted).num_cached_tokens)
            if flush:
                engine.flush()
        engine.close()
    assert counts == [0, 32, 0]


def test_the_process_is_never_more_than_two_commits_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scripted(step_s=0)
    with EngineProcess(model.load, ServeSettings()) as engine:
        commits = engine.stream([A], params(50))
        for taken in (1, 2, 5):
            list(islice(commits, taken))
            time.sleep(0.1)
            # the one in hand counts as untaken
            assert model.steps.value == {1: 2, 2: 4, 5: 9}[taken]
        commits.close()  # type: ignore[attr-defined]
        assert model.steps.value == 9
        assert len(list(engine.stream([A], params(5)))) == 5
    assert not alive(model.pid.value)
    assert "is killed" not in caplog.text, "it ends by itself"


def test_a_client_that_leaves_costs_at_most_two_more_steps(monkeypatch: Any) -> None:
    model = Scripted(step_s=0.04)
    with served(monkeypatch, model) as http:
        list(islice(events(http, "a", 400), 3))
        left = model.steps.value
        until(lambda: http.get("/live").json()["running"] == 0)
        assert model.steps.value - left <= 2
        time.sleep(0.1)
        assert model.steps.value - left <= 2
        answer = http.post("/generate", json=body("k", 5)).json()
        assert answer["text"] == letters("k", 5)


@pytest.mark.parametrize("how", ["leaves", "aborts", "is late"])
def test_a_prompt_that_nobody_wants_any_more_frees_the_place(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(process, "_SLICE_S", 0.05)
    model = Scripted(step_s=0.05, pieces=100)
    with served(monkeypatch, model, deadline_s=0.3 if how == "is late" else 60) as http:
        asked = {**body("a", 5), "rid": "one"}
        with ThreadPoolExecutor(1) as pool:
            wait_s = 0.3 if how == "leaves" else 30
            answer = pool.submit(http.post, "/generate", json=asked, timeout=wait_s)
            until(lambda: model.steps.value > 1)
            if how == "aborts":
                assert http.post("/abort_request", json={"rid": "one"}).json()["aborted"]
            if how == "leaves":
                with pytest.raises(httpx.ReadTimeout):
                    answer.result()
            else:
                info = answer.result().json()["meta_info"]
                assert (info["finish_reason"], info["completion_tokens"]) == ({"type": "abort"}, 0)
        until(lambda: http.get("/live").json()["running"] == 0)
        read = model.steps.value
        assert read < 20
        time.sleep(0.15)
        assert model.steps.value == read


def test_a_killed_process_is_told_to_all_within_a_second(monkeypatch: Any) -> None:
    model, answers = Scripted(), []
    with served(monkeypatch, model) as http:
        stream = events(http, "a", 400)
        next(stream)
        waiting = threading.Thread(
            target=lambda: answers.append(http.post("/generate", json=body("b", 5)))
        )
        waiting.start()
        until(lambda: http.get("/live").json()["waiting"] == 1)
        begun = time.monotonic()
        model.signal(KILL)
        *_, last = stream
        waiting.join(5)
        health, after = http.get("/health"), http.post("/generate", json=body("c", 5))
        assert time.monotonic() - begun < 1
        for answer in (*answers, health, after):
            assert answer.status_code == 503
            last.setdefault("also", []).append(answer.json()["error"])
        also = last.pop("also")
        assert also == [last["error"]] * 3
        assert "engine process was ended by SIGKILL" in last["error"]["message"]
        assert last["error"]["code"] == "unavailable"
        assert "dspark:failed_requests_total 2.0" in http.get("/metrics").text


def test_an_idle_process_that_dies_is_noticed(monkeypatch: Any) -> None:
    model = Scripted()
    with served(monkeypatch, model) as http:
        assert http.get("/health").status_code == 200
        model.signal(KILL)
        assert until(lambda: http.get("/health").status_code == 503) < 0.7
        assert "SIGKILL" in http.get("/health").text


def test_an_idle_process_that_hangs_is_noticed(monkeypatch: Any) -> None:
    monkeypatch.setattr(process, "_QUIET_S", 0.1)
    model = Scripted()
    with served(monkeypatch, model, step_timeout_s=0.8) as http:
        time.sleep(1.0)
        assert http.get("/health").status_code == 200
        model.signal(STOP)
        until(lambda: "waiting for a request" in http.get("/health").text)
        until(lambda: not alive(model.pid.value))


def hang(step: int) -> None:
    if step == 2:
        time.sleep(60)


def stop(step: int) -> None:
    if step == 2:
        os.kill(os.getpid(), STOP)


@pytest.mark.parametrize("befalls", [hang, stop])
def test_a_step_that_hangs_ends_the_requests_and_the_process(
    monkeypatch: Any, befalls: Any
) -> None:
    model = Scripted(before=befalls)
    with served(monkeypatch, model, step_timeout_s=0.4) as http:
        begun = time.monotonic()
        *told, last = events(http, "a", 400)
        assert 0.4 < time.monotonic() - begun < 1.4
        assert [one["text"] for one in told] == ["a", "ab"]
        assert "no sign of life for 0.4 s (--step-timeout-s) in a step" in last["error"]["message"]
        assert http.get("/health").json() == last
        until(lambda: not alive(model.pid.value))


def test_a_process_that_was_stopped_for_a_while_loses_nothing(monkeypatch: Any) -> None:
    model = Scripted(before=stop)
    with served(monkeypatch, model) as http:
        resume = threading.Timer(0.5, lambda: model.signal(GO_ON))
        resume.start()
        *_, last = events(http, "q", 20)
        assert last["text"] == letters("q", 20)


def test_a_long_prompt_may_take_the_time_of_its_pieces(monkeypatch: Any) -> None:
    model = Scripted(before=lambda step: time.sleep(0.5 if step == 0 else 0))
    with served(monkeypatch, model, step_timeout_s=0.25) as http:
        answer = http.post("/generate", json=body("a" * 31, 3))
        assert answer.json()["text"] == "abc"
        answer = http.post("/generate", json=body("a" * 10, 3))
        assert "reading a prompt of 10 tokens" in answer.json()["error"]["message"]


def test_a_decode_that_fails_ends_one_request(monkeypatch: Any) -> None:
    calls = []

    def fail(step: int) -> None:
        calls.append(step)
        if len(calls) == 2:
            raise RunError("the device gave NaN")
        if len(calls) == 4:
            raise KeyError("secret")

    with served(monkeypatch, Scripted(before=fail)) as http:
        for said in ("the device gave NaN; request", "KeyError while decoding; request"):
            answer = http.post("/generate", json=body("a", 5))
            assert answer.status_code == 500
            assert answer.json()["error"]["message"].startswith(said)
        assert http.post("/generate", json=body("a", 5)).json()["text"] == "abcde"


def test_the_process_ends_with_the_server_even_in_a_step() -> None:
    model = Scripted(before=hang)

    def server() -> None:
        with EngineProcess(model.load, ServeSettings()) as engine:
            list(engine.stream([A], params(9)))

    parent = FORK.Process(target=server)
    parent.start()
    until(lambda: model.steps.value == 3)
    assert alive(model.pid.value)
    parent.kill()
    parent.join()
    assert until(lambda: not alive(model.pid.value)) < 2


def refuse() -> Any:
    raise ConfigError("the context does not fit")


def fail_to_load() -> Any:
    raise KeyError("weights")


def kill_itself() -> Any:
    os.kill(os.getpid(), KILL)


def sleep() -> Any:
    time.sleep(60)


@pytest.mark.parametrize(
    ("load", "kind", "said"),
    [
        (refuse, ConfigError, "^the context does not fit$"),
        (fail_to_load, RunError, "^loading the model: the engine process ended with exit code 1;"),
        (kill_itself, RunError, "^loading the model: the engine process was ended by SIGKILL, for"),
        (sleep, RunError, r"^the model was not loaded within 0.2 s \(--load-timeout-s\)$"),
    ],
)
def test_what_goes_wrong_at_the_start_is_one_sentence(load: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        EngineProcess(load, ServeSettings(load_timeout_s=0.2 if load is sleep else 20))


def test_a_lost_process_serves_nobody_any_more() -> None:
    model = Scripted()
    with EngineProcess(model.load, ServeSettings()) as engine:
        model.signal(KILL)
        for _attempt in range(2):
            with pytest.raises(EngineLost, match="SIGKILL"):
                list(engine.stream([A], params(3)))
            with pytest.raises(EngineLost, match="SIGKILL"):
                engine.check()
