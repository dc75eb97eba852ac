"""Aborting, probing, events of a token, comments in silence, and tokens of a text."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark import __version__
from dspark.decoding import Commit
from dspark.errors import ConfigError
from dspark.serving import engine as engine_module
from dspark.serving import upkeep
from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from tests.unit.served import (
    CHAT,
    MESSAGES,
    THINKING,
    answer,
    chunks_of,
    client_of,
    refusal,
    says,
    tokenizer_of,
)

TOKENIZER = tokenizer_of()
TEXT = ("/v1/completions", {"prompt": "a"})
ENDLESS = {"text": "a", "sampling_params": {"max_new_tokens": 400}}


@pytest.fixture(scope="module")
def client(pair: tuple[Any, Any]) -> Iterator[httpx.Client]:
    with client_of(*pair, TOKENIZER, ServeSettings(keepalive_s=0)) as http:
        yield http


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """All requests run until they are aborted; set once one has begun."""
    begun = threading.Event()

    def play(*_: Any) -> Iterator[Commit]:
        yield Commit([65], None, None, 0, 0.01)
        while True:
            begun.set()
            time.sleep(0.01)
            yield Commit([66], None, 4, 0, 0.01)

    monkeypatch.setattr(engine_module, "stream", play)
    return begun


def waits_for(client: httpx.Client, count: int) -> None:
    while f"dspark:requests_waiting {count}.0" not in client.get("/metrics").text:
        time.sleep(0.01)


def test_a_request_is_aborted_by_the_name_its_caller_gave_it(
    client: httpx.Client, endless: threading.Event
) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(answer, client, "/generate", {**ENDLESS, "rid": "one"})
        assert endless.wait(10)
        second = pool.submit(answer, client, CHAT, {"messages": MESSAGES, "rid": "two"})
        waits_for(client, 1)
        error = refusal(client, "/generate", {**ENDLESS, "rid": "one"})
        assert error["param"] == "rid"
        assert answer(client, "/abort_request", {"rid": "none such"}) == {"aborted": []}
        # one that waits has nothing to show
        assert answer(client, "/abort_request", {"rid": "two"}) == {"aborted": ["two"]}
        whole = second.result()
        assert whole["id"] == "two"
        assert whole["choices"][0]["finish_reason"] == "abort"
        assert whole["choices"][0]["message"]["content"] == ""
        assert whole["usage"]["completion_tokens"] == 0
        assert not first.done()
        assert answer(client, "/abort_request", {"rid": "one"}) == {"aborted": ["one"]}
        info = first.result()["meta_info"]
        assert (info["id"], info["finish_reason"]["type"]) == ("one", "abort")
        assert info["completion_tokens"] > 1


def test_all_requests_are_aborted_and_an_id_we_gave_is_a_name_too(
    client: httpx.Client, endless: threading.Event
) -> None:
    with client.stream("POST", "/generate", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        made = response.headers["x-request-id"]
        assert answer(client, "/abort_request", {"rid": made}) == {"aborted": [made]}
        last = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line][-1]
        assert last["meta_info"]["finish_reason"] == {"type": "abort"}
    endless.clear()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(answer, client, "/generate", ENDLESS) for _ in range(2)]
        assert endless.wait(10)
        waits_for(client, 1)
        aborted = answer(client, "/abort_request", {"rid": "", "abort_all": True})["aborted"]
        assert len(aborted) == 2
        for one in both:
            assert one.result()["meta_info"]["finish_reason"] == {"type": "abort"}


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), TEXT])
def test_the_id_of_an_answer_is_a_name_of_its_request(
    client: httpx.Client, endless: threading.Event, path: str, prompt: dict[str, Any]
) -> None:
    with client.stream("POST", path, json={**prompt, "stream": True}) as response:
        lines = response.iter_lines()
        made = json.loads(next(lines)[6:])["id"]
        taken = refusal(client, path, {**prompt, "rid": response.headers["x-request-id"]})
        assert taken["param"] == "rid"
        # of an abort, SGLang's clients send both; all is all
        nothing: list[dict[str, Any]] = [
            {},
            {"rid": ""},
            {"rid": "", "abort_all": False},
            {"rid": made[:-1]},
        ]
        for body in nothing:
            assert answer(client, "/abort_request", body) == {"aborted": []}
        assert answer(client, "/abort_request", {"rid": made}) == {"aborted": [made]}
        list(lines)
    assert made.endswith(response.headers["x-request-id"])


def test_all_are_aborted_whatever_the_name(client: httpx.Client, endless: threading.Event) -> None:
    with client.stream("POST", "/generate", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        body = {"rid": "none such", "abort_all": True}
        assert len(answer(client, "/abort_request", body)["aborted"]) == 1
        list(lines)


def test_a_probe_generates(client: httpx.Client) -> None:
    assert client.get("/health_generate").json() == {"status": "ok"}


def test_a_busy_server_is_alive_by_its_progress_and_dead_without(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, step = threading.Event(), threading.Semaphore(0)

    def play(*_: Any) -> Iterator[Commit]:
        yield Commit([65], None, None, 0, 0.01)
        while True:
            begun.set()
            step.acquire()
            yield Commit([66], None, 4, 0, 0.01)

    monkeypatch.setattr(engine_module, "stream", play)
    monkeypatch.setattr(upkeep, "_PROBE_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(answer, client, "/generate", ENDLESS)
        assert begun.wait(10)
        response = client.get("/health_generate")
        assert response.status_code == 503
        assert "0.2 s" in response.json()["error"]["message"]
        monkeypatch.setattr(upkeep, "_PROBE_S", 20)
        threading.Timer(0.1, step.release).start()
        assert client.get("/health_generate").status_code == 200
        answer(client, "/abort_request", {"abort_all": True})
        step.release(2)
        one.result()


def test_a_probe_tells_that_decoding_fails(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Iterator[Commit]:
        raise ZeroDivisionError
        yield

    monkeypatch.setattr(engine_module, "stream", breaks)
    response = client.get("/health_generate")
    assert response.status_code == 503
    assert "ZeroDivisionError" in response.json()["error"]["message"]


def test_the_head_of_a_route_is_that_of_its_get(client: httpx.Client) -> None:
    for path in ("/health", "/ping", "/metrics", "/v1/models", "/"):
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head("/nowhere").status_code == 404
    refused = client.head("/generate")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_small_routes(client: httpx.Client) -> None:
    assert client.get("/ping").json() == {"status": "ok"}
    assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
@pytest.mark.parametrize("interval", [1, 3])
def test_events_have_the_tokens_asked_for(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, interval: int
) -> None:
    text = "a é\nbcdef"  # ten bytes, each a token
    says(monkeypatch, TOKENIZER, text, (4,))
    options: dict[str, Any] = {"stream_interval": interval}
    usage = {"stream_options": {"continuous_usage_stats": True}}
    if path == "/generate":
        chunks = chunks_of(client, path, {"text": "a", "sampling_params": options})
        counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks[:-1]]
        said = chunks[-1]["text"]
    else:
        prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
        chunks = chunks_of(client, path, {**prompt, **options, **usage})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[path == CHAT : -1]]
        pieces = [chunk["choices"][0] for chunk in chunks[path == CHAT : -1]]
        said = "".join(
            piece["delta"]["content"] if path == CHAT else piece["text"] for piece in pieces
        )
    assert counts == (list(range(1, 11)) if interval == 1 else [3, 6, 9, 10])
    assert said == text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_events_of_a_token_are_the_same_with_and_without_the_draft(
    pair: tuple[Any, Any], options: dict[str, Any]
) -> None:
    body = {"messages": MESSAGES, **options, "max_tokens": 20, "stop": "\x03x"}
    events = []
    for draft in (pair[1], None):
        with client_of(pair[0], draft, tokenizer_of(THINKING)) as http:
            chunks = chunks_of(http, CHAT, {**body, "stream_interval": 1})
        events.append([chunk["choices"] for chunk in chunks])
    assert events[0] == events[1]
    assert len(events[0]) >= 20


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": MESSAGES, "stream_interval": 1}, "stream_interval"),
        (CHAT, {"messages": MESSAGES, "stream_interval": 0, "stream": True}, "stream_interval"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"stream_interval": 1}},
            "sampling_params.stream_interval",
        ),
    ],
)
def test_an_interval_without_a_stream_or_of_nothing_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(client, path, body)["param"] == param


@pytest.fixture
def hesitant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Requests are silent for a while at the start and once more behind a token."""

    def begin(problem: Exception | None) -> None:
        def play(*_: Any) -> Iterator[Commit]:
            time.sleep(0.15)
            if problem is not None:
                raise problem
            yield Commit([65], None, None, 0, 0.01)
            time.sleep(0.15)
            yield Commit([66], "length", 4, 0, 0.01)

        monkeypatch.setattr(engine_module, "stream", play)

    return begin


def raw_lines(client: httpx.Client, path: str, body: dict[str, Any]) -> list[str]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        return [line for line in response.iter_lines() if line]


def test_silence_is_broken_by_comments(
    pair: tuple[Any, Any], hesitant: Callable[[Exception | None], None]
) -> None:
    hesitant(None)
    with client_of(*pair, TOKENIZER, ServeSettings(keepalive_s=0.04)) as http:
        lines = raw_lines(http, CHAT, {"messages": MESSAGES})
        kinds = [line.startswith(":") for line in lines]
        assert set(lines) & {": keep-alive"}
        assert kinds[0], "before the first token"
        assert any(kinds[kinds.index(False) :]), "and behind it"
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in data) == (
            TOKENIZER.decode([65, 66])
        )
        assert not any(line.startswith(":") for line in raw_lines(http, "/generate", ENDLESS))
        hesitant(ZeroDivisionError())
        lines = raw_lines(http, CHAT, {"messages": MESSAGES})
        assert json.loads(lines[-2][6:])["error"]["type"] == "server_error"
    hesitant(None)
    with client_of(*pair, TOKENIZER, ServeSettings(keepalive_s=0)) as http:
        lines = raw_lines(http, CHAT, {"messages": MESSAGES})
        assert not any(line.startswith(":") for line in lines)


def test_a_bad_keepalive_is_refused() -> None:
    for value in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="keepalive_s"):
            ServeSettings(keepalive_s=value)


def test_tokens_of_a_text_and_back(client: httpx.Client) -> None:
    counted = answer(client, "/tokenize", {"prompt": "aé", "return_token_strs": True})
    ids = TOKENIZER("aé")["input_ids"]
    assert counted == {
        "count": 3,
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": TOKENIZER.convert_ids_to_tokens(ids),
    }
    assert answer(client, "/detokenize", {"tokens": ids}) == {"prompt": "aé"}
    for begun in (True, False):
        chat = answer(client, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": begun})
        text = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=begun, tokenize=False)
        assert answer(client, "/detokenize", {"tokens": chat["tokens"]}) == {"prompt": text}
    used = answer(client, CHAT, {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True})
    assert (
        answer(client, "/tokenize", {"messages": MESSAGES})["tokens"] == (used["prompt_token_ids"])
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(client, path, body)["param"] == param


def test_all_routes_ask_for_the_key_but_those_that_the_readme_names(pair: tuple[Any, Any]) -> None:
    readme = Path(__file__).parents[2].joinpath("serve/README.md").read_text(encoding="utf-8")
    said = (
        " ".join(readme.split()).partition("Bearer KEY` on every route but ")[2].partition(". ")[0]
    )
    with running(*pair, TOKENIZER, api_key="k") as address, httpx.Client(base_url=address) as http:
        routes = http.get("/openapi.json").json()["paths"]
        open_to_all = {
            path
            for path, methods in routes.items()
            for method in methods
            if http.request(method, path).status_code != 401
        }
    assert {*open_to_all, "/openapi.json"} == set(re.findall("`(.*?)`", said))
    assert len(routes) > 15
