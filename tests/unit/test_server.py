"""The server over real HTTP on 127.0.0.1: what clients of OpenAI and SGLang get to see."""

import itertools
import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from dspark.decoding import Commit, DecodeParams, stream
from dspark.errors import ConfigError
from dspark.serving import engine as engine_module
from dspark.serving import server as server_module
from dspark.serving.engine import LocalModel
from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_target, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "text": ("/v1/completions", {"prompt": "ab"}),
}
LIMIT = 512
"""Positions of the tiny target."""


@pytest.fixture(scope="module")
def client(pair: tuple[Any, Any]) -> Iterator[httpx.Client]:
    """A client of a server with a draft."""
    settings = ServeSettings(
        max_queue=2, max_body_bytes=100_000, max_output_tokens=600, default_max_tokens=8
    )
    with (
        running(*pair, TOKENIZER, settings=settings) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def plain(pair: tuple[Any, Any]) -> Iterator[httpx.Client]:
    """A client of a server without a draft."""
    with (
        running(pair[0], None, TOKENIZER) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        yield http


def post(client: httpx.Client, kind: str, **options: Any) -> dict[str, Any]:
    path, body = PATHS[kind]
    response = client.post(path, json={**body, **options})
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def text_of(response: dict[str, Any]) -> str:
    choice = response["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream; the last one must be [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines), "clients take every line for JSON"
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_chat_answer_has_openais_shape(client: httpx.Client) -> None:
    whole = post(client, "chat", max_tokens=8, temperature=0, ignore_eos=True, model="tiny")
    assert whole["object"] == "chat.completion"
    assert whole["id"].startswith("chatcmpl-")
    assert whole["model"] == "tiny"
    choice = whole["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = whole["usage"]
    rendered = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert usage["prompt_tokens"] == len(TOKENIZER(rendered)["input_ids"])
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + whole["dspark"]["rounds"] == 7
    assert details["rejected_prediction_tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
def test_a_stream_adds_up_to_the_whole_answer(
    client: httpx.Client, kind: str, options: dict[str, Any]
) -> None:
    options = {**options, "max_tokens": 16, "stream_options": {"include_usage": True}}
    path, body = PATHS[kind]
    chunks = events(client, path, {**body, **options})
    del options["stream_options"]
    whole = post(client, kind, **options)
    if kind == "chat":
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        text = "".join(delta.get("content", "") for delta in deltas)
        assert all("role" not in delta for delta in deltas[1:])
    else:
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert text == text_of(whole)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == whole["choices"][0]["finish_reason"]
    assert set(reasons[:-1]) == {None}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_no_usage_chunk_unless_it_is_asked_for(client: httpx.Client) -> None:
    path, body = PATHS["chat"]
    chunks = events(client, path, {**body, "max_tokens": 4})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_usage_can_come_with_every_chunk(client: httpx.Client) -> None:
    path, body = PATHS["text"]
    options = {"continuous_usage_stats": True}
    body = {**body, "max_tokens": 12, "ignore_eos": True, "stream_options": options}
    counts = [chunk["usage"]["completion_tokens"] for chunk in events(client, path, body)]
    assert counts == sorted(counts)
    assert counts[-1] == 12


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}])
def test_the_draft_changes_no_answer(
    client: httpx.Client, plain: httpx.Client, options: dict[str, Any]
) -> None:
    for kind in PATHS:
        one, other = (post(http, kind, max_tokens=24, **options) for http in (client, plain))
        assert text_of(one) == text_of(other)
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [1, 5])
def test_an_answer_has_the_tokens_asked_for(client: httpx.Client, name: str, count: int) -> None:
    whole = post(client, "chat", ignore_eos=True, **{name: count})
    assert whole["usage"]["completion_tokens"] == count
    assert whole["choices"][0]["finish_reason"] == "length"


def test_two_different_limits_are_refused(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert "3" in error["message"]
    assert "4" in error["message"]


def test_the_context_limit_is_exact(client: httpx.Client) -> None:
    for spare in (0, 1):
        body = {"prompt": [65] * (LIMIT - 4 - spare), "max_tokens": 4, "ignore_eos": True}
        response = client.post("/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 4
    body = {"prompt": [65] * (LIMIT - 3), "max_tokens": 4}
    error = error_of(client.post("/v1/completions", json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT - 3} prompt tokens and 'max_tokens' 4 make {LIMIT + 1}" in error["message"]
    body = {"messages": MESSAGES, "max_completion_tokens": LIMIT}
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert f"'max_completion_tokens' {LIMIT}" in error["message"]
    body = {"text": "a", "sampling_params": {"max_new_tokens": LIMIT}}
    error = error_of(client.post("/generate", json=body), 400)
    assert f"'sampling_params.max_new_tokens' {LIMIT}" in error["message"]


def test_without_a_limit_the_answer_ends_where_the_context_does(client: httpx.Client) -> None:
    body = {"prompt": [65] * (LIMIT - 3), "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()
    assert whole["usage"]["completion_tokens"] == 3
    assert whole["choices"][0]["finish_reason"] == "length"
    error = error_of(client.post("/v1/completions", json={"prompt": [65] * LIMIT}), 400)
    # no field was sent, so none is blamed
    assert error["message"].startswith(f"'prompt' has {LIMIT} tokens and leaves no room")


def test_the_servers_own_output_limit_holds(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 601}), 400)
    assert error["param"] == "max_tokens"
    assert "600" in error["message"]
    body = {"messages": MESSAGES, "max_completion_tokens": 601}
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "max_completion_tokens"
    assert error["message"].startswith("'max_completion_tokens' is 601")


def test_a_stop_string_ends_text_and_usage(client: httpx.Client) -> None:
    whole = post(client, "text", max_tokens=40, temperature=0, ignore_eos=True)
    text = text_of(whole)
    stop = text[10:12]
    cut = post(client, "text", max_tokens=40, temperature=0, ignore_eos=True, stop=[stop, "zzz"])
    assert text_of(cut) == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["dspark"]["stop"] == stop
    assert cut["usage"]["completion_tokens"] < 40
    path, body = PATHS["text"]
    chunks = events(
        client, path, {**body, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": stop}
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(cut)


def test_a_drawn_seed_is_echoed_and_gives_the_same_answer_again(client: httpx.Client) -> None:
    first, second = (post(client, "chat", max_tokens=16, temperature=1.0) for _ in range(2))
    assert first["dspark"]["seed"] != second["dspark"]["seed"]
    assert text_of(first) != text_of(second)
    again = post(
        client, "chat", max_tokens=16, temperature=1.0, seed=first["dspark"]["seed"], top_k=-1
    )
    assert text_of(again) == text_of(first)


def test_the_effective_sampling_is_echoed(client: httpx.Client) -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 5}
    echoed = post(client, "chat", max_tokens=2, **given)["dspark"]
    assert {name: echoed[name] for name in given} == given
    echoed = post(client, "chat", max_tokens=2)["dspark"]
    assert (echoed["temperature"], echoed["top_p"], echoed["top_k"]) == (1.0, 1.0, -1)
    assert post(client, "chat", max_tokens=2, temperature=0)["dspark"]["seed"] is None


def test_min_p_with_greedy_decoding_is_refused(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "min_p": 0.1}
    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == "min_p"


def test_a_temperature_that_float32_cannot_hold_is_refused(client: httpx.Client) -> None:
    body = {"messages": MESSAGES, "temperature": 1e-40}
    said = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert said["param"] == "temperature"
    assert "must be 0 or >= 1e-06" in said["message"]


def test_defaults_come_from_the_models_generation_config() -> None:
    target = tiny_target()
    target.model.generation_config.update(do_sample=True, temperature=0.6, top_k=20)
    with running(target, None, TOKENIZER) as address, httpx.Client(base_url=address) as http:
        echoed = post(http, "chat", max_tokens=2)["dspark"]
    assert (echoed["temperature"], echoed["top_k"], echoed["top_p"]) == (0.6, 20, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -1, "temperature must lie in 0..100, got -1"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top_p", True, "top_p must be a number, got True"),
        ("top_k", 2.5, "top_k must be a whole number, got 2.5"),
    ],
)
def test_a_bad_default_of_the_model_names_its_file(key: str, value: Any, words: str) -> None:
    target = tiny_target()
    setattr(target.model.generation_config, key, value)
    with pytest.raises(ConfigError) as caught:
        LocalModel(target, None)
    assert str(caught.value) == f"generation_config.json of target 'tiny': {words}"


def test_developer_is_read_as_system(client: httpx.Client) -> None:
    texts = [
        text_of(post(client, "chat", max_tokens=8, temperature=0, messages=[one, *MESSAGES]))
        for one in (
            {"role": "developer", "content": "be brief"},
            {"role": "system", "content": "be brief"},
        )
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("enable_thinking", "has no effect: this model's chat template has no such variable"),
        ("a b", "has no effect: this model's chat template has no such variable"),
        ("tokenize", "cannot be set: the server gives the chat template its own"),
        ("add_generation_prompt", "cannot be set: the server gives the chat template its own"),
        ("messages", "its own; send 'messages' beside it"),
        ("tools", "its own; send 'tools' beside it"),
    ],
)
def test_a_template_variable_without_effect_is_refused(
    client: httpx.Client, name: str, words: str
) -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {name: True}}
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "chat_template_kwargs"
    assert error["message"].startswith(f"'chat_template_kwargs.{name}' ")
    assert error["message"].endswith(words)


@pytest.mark.parametrize(
    ("template", "words"),
    [(None, "no chat template"), ("{{ raise_exception('users first') }}", "users first")],
)
def test_a_missing_or_refusing_template_is_a_400(
    pair: tuple[Any, Any], template: str | None, words: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with running(*pair, tokenizer) as address, httpx.Client(base_url=address) as http:
        error = error_of(http.post("/v1/chat/completions", json={"messages": MESSAGES}), 400)
        assert words in error["message"]
        assert post(http, "text", max_tokens=2)["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    ("prompt", "words"), [("", "empty"), ([], "empty"), ([5, 260], "260"), ([-1], "-1")]
)
def test_a_prompt_that_cannot_be_run_is_refused(
    client: httpx.Client, prompt: Any, words: str
) -> None:
    error = error_of(client.post("/v1/completions", json={"prompt": prompt}), 400)
    assert words in error["message"]


def test_a_text_of_ids_behind_the_target_is_refused() -> None:
    short = tiny_target(vocab_size=258, pad_token_id=0, eos_token_id=0)
    with running(short, None, TOKENIZER) as address, httpx.Client(base_url=address) as http:
        error = error_of(http.post("/v1/chat/completions", json={"messages": MESSAGES}), 400)
        assert error["message"] == "'messages' holds the id 258; ids are 0..257"
        assert post(http, "text", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_the_engine_and_its_context_are_told(client: httpx.Client) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = client.get(path).json()
        assert (info["engine"], info["context"], info["max_model_len"]) == ("reference", 512, 512)


def test_an_engine_with_less_room_refuses_what_does_not_fit(pair: tuple[Any, Any]) -> None:
    settings = ServeSettings(context=40)
    with (
        running(*pair, TOKENIZER, settings=settings) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        info = http.get("/server_info").json()
        assert (info["context"], info["max_model_len"]) == (40, 40)
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 40
        long = http.post("/v1/completions", json={"prompt": "a" * 40})
        error = error_of(long, 400)
        assert error["code"] == "context_length_exceeded"
        assert "'prompt' has 40 tokens" in error["message"]
        assert "40 positions of the engine" in error["message"]
        much = http.post("/v1/completions", json={"prompt": "a" * 30, "max_tokens": 11})
        assert error_of(much, 400)["message"] == (
            "30 prompt tokens and 'max_tokens' 11 make 41, more than the engine's 40 positions"
        )
        # without a limit of its own a request gets what is left
        whole = post(http, "text", prompt="a" * 30, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] == 10
    with (
        pytest.raises(ConfigError, match=r"serve.context is 513, more than the target's 512"),
        running(*pair, TOKENIZER, settings=ServeSettings(context=513)),
    ):
        pass


def test_errors_outside_the_routes_have_openais_shape_too(client: httpx.Client) -> None:
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/chat/completions"), 405)
    body: dict[str, Any] = {"messages": MESSAGES, "model": "gpt-4"}
    error = error_of(client.post("/v1/chat/completions", json=body), 404)
    assert "gpt-4" in error["message"]
    assert "tiny" in error["message"]
    error_of(client.post("/v1/completions", json={"prompt": "a" * 100_000}), 413)
    parts = iter([b'{"prompt": "', b"a" * 100_000, b'"}'])
    error_of(client.post("/v1/completions", content=parts), 413)
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}}
    error_of(client.post("/v1/chat/completions", json=body), 400)


def test_a_key_is_needed_where_one_is_set(pair: tuple[Any, Any]) -> None:
    with (
        running(*pair, TOKENIZER, api_key="secret-é") as address,
        httpx.Client(base_url=address) as http,
    ):
        error_of(http.get("/v1/models"), 401)
        bearer = b"Bearer secret-\xc3\xa9"
        assert (
            error_of(
                http.post("/v1/completions", json={}, headers={"Authorization": "Bearer no"}), 401
            )["code"]
            == "invalid_api_key"
        )
        assert http.get("/v1/models", headers={b"Authorization": bearer}).status_code == 200
        # the name of a scheme has no case (RFC 9110); a key needs one
        for headers, status in ((bearer.lower(), 200), (bearer.partition(b" ")[2], 401)):
            answer = http.get("/v1/models", headers={b"Authorization": headers})
            assert answer.status_code == status
        assert http.get("/health").status_code == 200


def test_what_the_sglang_benchmark_asks_for(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["tiny"]
    assert client.get("/v1/models/tiny").json() == listed[0]
    assert "'a/b' does not exist here" in error_of(client.get("/v1/models/a/b"), 404)["message"]
    for path in ("/model_info", "/get_model_info"):
        assert client.get(path).json()["tokenizer_path"]
    assert client.post("/flush_cache").status_code == 200
    body = {
        "text": "abc",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True},
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    chunks = events(client, "/generate", body)
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    info = chunks[-1]["meta_info"]
    assert (info["prompt_tokens"], info["completion_tokens"]) == (3, 20)
    assert info["finish_reason"] == {"type": "length", "length": 20}
    assert info["spec_accept_length"] >= 1
    whole = client.post("/generate", json={**body, "stream": False}).json()
    assert whole["text"] == texts[-1]
    ids = client.post("/generate", json={**body, "text": None, "input_ids": [97, 98, 99]})
    for path in ("/server_info", "/get_server_info"):
        state = client.get(path).json()["internal_states"][0]
        # three requests of 20 tokens, one of each from the prefill
        assert state["emitted"] == 3 * 19, ids.text
        assert sum(state["accept_histogram"]) == state["rounds"]
        assert state["avg_spec_accept_length"] == pytest.approx(57 / state["rounds"])
        step = [state["step_ms"][name] for name in ("min", "p50", "p90", "p99")]
        assert 0 < step[0] <= step[1] <= step[2] <= step[3]


@pytest.mark.parametrize("body", [{}, {"text": "a", "input_ids": [1]}])
def test_generate_needs_exactly_one_prompt(client: httpx.Client, body: dict[str, Any]) -> None:
    error_of(client.post("/generate", json=body), 400)


@pytest.mark.slow
def test_concurrent_requests_get_the_answers_they_get_alone(client: httpx.Client) -> None:
    prompts = ["first", "second", "third"]

    def ask(prompt: str) -> str:
        return text_of(post(client, "text", prompt=prompt, max_tokens=20, temperature=0))

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, prompts)) == alone


class Endless:
    """A decode that never ends by itself; counts its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.ended = threading.Event()

    def __call__(self, *_: Any) -> Iterator[Commit]:
        try:
            yield Commit([65], None, None, 0, 0.01)
            while True:
                time.sleep(0.01)
                self.steps += 1
                yield Commit([66], None, 4, 0, 0.01)
        finally:
            self.ended.set()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Endless]:
    """Lets the server's next request run for ever, the ones after it as usual."""

    def begin() -> Endless:
        play, taken = Endless(), threading.Event()

        def once(*args: Any) -> Iterator[Commit]:
            if taken.is_set():
                return stream(*args)
            taken.set()
            return play()

        monkeypatch.setattr(engine_module, "stream", once)
        return play

    return begin


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_leaving_a_stream_frees_the_worker(
    client: httpx.Client, endless: Callable[[], Endless], path: str
) -> None:
    play = endless()
    body: dict[str, Any] = {"stream": True}
    body |= {"text": "a"} if path == "/generate" else {"messages": MESSAGES}
    with client.stream("POST", path, json=body) as response:
        next(response.iter_lines())
    assert play.ended.wait(10)
    assert post(client, "text", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_leaving_while_waiting_for_a_whole_answer_frees_the_worker(
    client: httpx.Client, endless: Callable[[], Endless]
) -> None:
    play = endless()
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(5, read=0.3))
    assert play.ended.wait(10)
    assert post(client, "text", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    client: httpx.Client, endless: Callable[[], Endless]
) -> None:
    endless()
    with client.stream("POST", "/generate", json={"text": "a", "stream": True}) as response:
        lines = response.iter_lines()  # held, for a dropped iterator closes the connection
        next(lines)
        with ThreadPoolExecutor(2) as pool:
            waiting = [
                pool.submit(post, client, "text", max_tokens=1, prompt=str(n)) for n in range(2)
            ]
            while "dspark:requests_waiting 2.0" not in client.get("/metrics").text:
                time.sleep(0.01)
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert error_of(refused, 429)["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) > 0
            assert "dspark:requests_running 1.0" in client.get("/metrics").text
            response.close()
            assert [one.result()["usage"]["completion_tokens"] for one in waiting] == [1, 1]


def test_an_error_in_a_step_is_a_500_with_an_id_and_the_server_lives_on(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(
        target: Any, draft: Any, ids: Any, decode: DecodeParams, *_: Any
    ) -> Iterator[Commit]:
        if decode.max_new_tokens == 2:
            yield Commit([65], None, None, 0, 0.01)
        raise ZeroDivisionError("a bug in a step")

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "stream", breaks)
        failed = client.post("/v1/completions", json={"prompt": "a"})
        error = error_of(failed, 500)
        assert failed.headers["x-request-id"] in error["message"]
        assert "a bug in a step" not in error["message"], "internals are for the log"
        # before the first token the status code still tells
        error_of(client.post("/v1/completions", json={"prompt": "a", "stream": True}), 500)
        # behind it only an event can
        chunks = events(client, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        assert chunks[0]["choices"][0]["text"] == TOKENIZER.decode([65])
        assert chunks[-1]["error"]["type"] == "server_error"
    assert client.get("/health").json() == {"status": "ok"}
    post(client, "text", max_tokens=1)


@pytest.mark.slow
def test_no_body_makes_a_500(client: httpx.Client) -> None:
    rng = random.Random(0)
    pieces: list[Any] = [None, 0, -1, 1e308, "", "\x00", "é", [], {}, [0], {"a": 1}, 2**70, True]
    names = ["messages", "prompt", "text", "input_ids", "temperature", "stop", "seed", "top_k"]
    names += ["sampling_params", "stream_options", "chat_template_kwargs", "max_tokens", "model"]
    paths = ["/v1/chat/completions", "/v1/completions", "/generate"]
    for turn in range(200):
        body: Any = {name: rng.choice(pieces) for name in rng.sample(names, rng.randrange(4))}
        raw = json.dumps(body if turn % 7 else rng.choice(pieces)).encode()
        if turn % 5 == 0:
            raw = raw[: rng.randrange(len(raw) + 1)] + bytes([rng.randrange(256)])
        for path in paths:
            response = client.post(path, content=raw)
            if response.status_code != 200:
                assert response.status_code in (400, 404), response.text
                assert response.json()["error"]["message"]


def test_connections_are_marked_as_tcp_so_that_small_chunks_leave_at_once() -> None:
    with server_module._listen("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_a_port_in_use_is_one_clear_sentence(pair: tuple[Any, Any], client: httpx.Client) -> None:
    port = client.base_url.port
    with (
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*choose another"),
        running(*pair, TOKENIZER, port=port or 0),
    ):
        pass


@contextmanager
def told_to_stop(
    pair: tuple[Any, Any], settings: ServeSettings
) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server on a thread, its address, and what a SIGTERM calls; ends when the server has."""
    with server_module._listen("127.0.0.1", 0) as sock:
        server = server_module._server(LocalModel(*pair, settings), TOKENIZER, None, settings, None)
        sock.listen(16)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield (
                f"http://127.0.0.1:{sock.getsockname()[1]}",
                lambda: server.handle_exit(signal.SIGTERM, None),
            )
        finally:
            thread.join(20)
        assert not thread.is_alive(), "the server has not ended"


def slow(*_: Any) -> Iterator[Commit]:
    """About a second of decoding."""
    yield Commit([65], None, None, 0, 0.01)
    for _round in range(50):
        time.sleep(0.02)
        yield Commit([66], None, 4, 0, 0.02)
    yield Commit([67], "length", 4, 0, 0.02)


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "stream", slow)
    with (
        told_to_stop(pair, ServeSettings(drain_s=20)) as (address, terminate),
        httpx.Client(base_url=address, timeout=30) as http,
        http.stream("POST", "/generate", json={"text": "a", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        terminate()
        while http.get("/health").status_code != 503:
            time.sleep(0.01)
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert error_of(refused, 503)["type"] == "server_error"
        assert refused.headers["retry-after"]
        rest = [line for line in lines if line]
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["meta_info"]["completion_tokens"] == 52
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert rest[-1] == "data: [DONE]"


def test_a_drain_that_takes_too_long_ends_the_stream_as_it_stands(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "stream", Endless())
    with (
        told_to_stop(pair, ServeSettings(drain_s=0.3)) as (address, terminate),
        httpx.Client(base_url=address, timeout=30) as http,
        http.stream("POST", "/generate", json={"text": "a", "stream": True}) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        terminate()
        rest = [line for line in lines if line]
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_line_separator_in_the_text_breaks_no_event(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\u2028b\u0085c\rd\ne"
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]

    def says(*_: Any) -> Iterator[Commit]:
        yield Commit(tokens[:1], None, None, 0, 0.01)
        for token in tokens[1:-1]:
            yield Commit([token], None, 4, 0, 0.01)
        yield Commit(tokens[-1:], "length", 4, 0, 0.01)

    monkeypatch.setattr(engine_module, "stream", says)
    chunks = events(client, "/v1/completions", {"prompt": "a"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
