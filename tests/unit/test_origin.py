"""Which text of a stream accepted draft tokens made, and the terminal client that colours it."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.decoding import Commit
from dspark.serving import engine as engine_module
from dspark.serving.origin import Origins, Trace
from dspark.serving.request import Output
from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer
from tests.unit.served import CHAT, MESSAGES

TOKENIZER = tiny_tokenizer()
SETTINGS = ServeSettings(keepalive_s=0.02)
ROOT = Path(__file__).parents[2]
THOUGHT = "<think>why not?</think>so it is"
ROUNDS = (4, 1, 3, 0, 4, 2, 4, 4)
"""How many draft tokens each round accepts; one of the target's own follows."""
REASONED = ("reasoning_content", "content")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def play(*_: Any) -> Iterator[Commit]:
    """a | bcd, of which the target's own token is d | ef cut by the limit, all drafted."""
    yield Commit(ids("a"), None, None, 0, 0.001)
    yield Commit(ids("bcd"), None, 4, 2, 0.001)
    yield Commit(ids("e\x1b"), "length", 4, 2, 0.001)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    target = tiny_target()
    with (
        pytest.MonkeyPatch.context() as patch,
        running(target, tiny_draft(target), TOKENIZER, settings=SETTINGS, api_key="k") as where,
    ):
        patch.setattr(engine_module, "stream", play)
        yield where


def stream(address: str, path: str = "/v1/completions", **options: Any) -> list[dict[str, Any]]:
    body = {"stream": True, **({"prompt": "x"} if path == "/v1/completions" else {}), **options}
    headers = {"Authorization": "Bearer k"}
    answer = httpx.post(address + path, json=body, headers=headers, timeout=60)
    lines = [line for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_chunks_tell_tokens_accepted_ones_and_their_text(address: str) -> None:
    *chunks, last = stream(address, dspark_tokens=True)
    assert [chunk["dspark"] for chunk in chunks] == [
        {"num_tokens": 1, "num_accepted": 0, "pieces": [["a", False]]},
        {"num_tokens": 3, "num_accepted": 2, "pieces": [["bc", True], ["d", False]]},
        {"num_tokens": 2, "num_accepted": 2, "pieces": [["e\x1b", True]]},
    ]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["a", "bcd", "e\x1b"]
    assert "pieces" not in last["dspark"]


def test_nothing_is_told_unasked(address: str) -> None:
    assert not any("dspark" in chunk for chunk in stream(address)[:-1])


def thinks(*_: Any) -> Iterator[Commit]:
    """`THOUGHT`, in commits that end anywhere."""
    time.sleep(0.1)  # with a comment or two
    yield Commit(ids(THOUGHT[0]), None, None, 0, 0.001)
    at = 1
    for accepted in ROUNDS:
        begin, at = at, at + accepted + 1
        end = "length" if at == len(THOUGHT) else None
        yield Commit(ids(THOUGHT[begin:at]), end, 4, accepted, 0.001)


@pytest.mark.parametrize("interval", [None, 1, 3])
def test_origins_are_whole_beside_reasoning_intervals_and_held_back_text(
    address: str, monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    monkeypatch.setattr(engine_module, "stream", thinks)
    options = {"dspark_tokens": True, "stream_interval": interval, "stop": "it isn't"}
    *chunks, _ = stream(address, CHAT, messages=MESSAGES, **options)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    said = ["".join(delta.get(name) or "" for delta in deltas) for name in REASONED]
    assert said == ["why not?", "so it is"]
    told = [chunk["dspark"] for chunk in chunks if "dspark" in chunk]
    pieces = [(text, kept) for one in told for text, kept in one["pieces"]]
    assert "".join(text for text, _ in pieces) == THOUGHT
    wanted = "0" + "".join("1" * accepted + "0" for accepted in ROUNDS)
    assert "".join("01"[kept] * len(text) for text, kept in pieces) == wanted
    counts = [one["num_tokens"] for one in told]
    assert (sum(counts), sum(one["num_accepted"] for one in told)) == (len(THOUGHT), sum(ROUNDS))
    if interval is not None:
        assert set(counts[:-1]) == {interval}


def test_it_needs_a_stream(address: str) -> None:
    answer = httpx.post(
        f"{address}/v1/completions",
        json={"prompt": "x", "dspark_tokens": True},
        headers={"Authorization": "Bearer k"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "'dspark_tokens' needs 'stream': true"


def traced(stops: tuple[str, ...], *commits: Commit) -> tuple[Output, list[Trace]]:
    out = Output(TOKENIZER, stops, 4, trace=True)
    found = []
    for commit in commits:
        out.take(commit)
        for delta in out.unsent():
            assert delta.trace is not None
            assert "".join(text for text, _ in delta.trace.pieces) == delta.text
            found.append(delta.trace)
    return out, found


def test_a_code_point_belongs_to_the_token_that_completes_it() -> None:
    euro = ids("\u20ac")
    _, found = traced(
        (),
        Commit(ids("a"), None, None, 0, 0.0),
        Commit([*euro[:2]], None, 4, 1, 0.0),
        Commit([euro[2], *ids("b")], "length", 4, 1, 0.0),
    )
    # the two bytes without text of their own count with the next delta
    assert found == [
        Trace(1, 0, (("a", False),)),
        Trace(4, 2, (("\u20ac", True), ("b", False))),
    ]


def test_text_behind_a_stop_string_has_no_origin() -> None:
    out, found = traced(("cd",), Commit(ids("a"), None, None, 0, 0.0),
                        Commit(ids("bcdef"), None, 4, 4, 0.0))  # fmt: skip
    assert (out.text, out.stop) == ("ab", "cd")
    assert found[-1] == Trace(3, 3, (("b", True),))
    assert out.stats.accepted == 3


def test_origins_do_not_depend_on_where_deltas_are_cut() -> None:
    origins = Origins()
    for num_chars, accepted in ((1, False), (3, True), (3, True), (4, False)):
        origins.add(num_chars, accepted)
    # inside a token's text; behind the last token (a flush)
    assert origins.upto("ab", 2) == Trace(2, 1, (("a", False), ("b", True)))
    assert origins.upto("c", 3) == Trace(1, 1, (("c", True),))
    assert origins.upto("d?", 4) == Trace(1, 0, (("d?", False),))


def chat(address: str, *, tty: bool, **env: str) -> str:
    """What the client prints over one question."""
    address += "" if tty else "/v1"  # as OpenAI's clients are given it
    words = [sys.executable, "serve/chat_client.py", "--address", address]
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
    env = {**clean, "DSPARK_API_KEY": "k", "TERM": "xterm", **env}
    if not tty:
        done = subprocess.run(
            words, cwd=ROOT, env=env, input="hi\n", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE
    ) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(b"hi\n")
        process.stdin.close()
        told, end = b"", time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                try:
                    new = os.read(ours, 4096)
                except OSError:  # the other end is closed
                    break
                told += new
                if not new:
                    break
        os.close(ours)
        assert process.wait(60) == 0
    return told.decode()


def test_the_terminal_client_colours_what_the_draft_made(address: str) -> None:
    green, reset = "\x1b[32m", "\x1b[0m"
    told = chat(address, tty=True)
    # an escape of the model's own never reaches the terminal
    assert f"a{green}bc{reset}d{green}e\ufffd{reset}" in told


def test_the_terminal_client_dims_reasoning_and_colours_what_follows(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "stream", thinks)
    told = chat(address, tty=True)
    assert "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", told)) == "why not?"
    # beside the mark the tokens' text is not the chunk's: it stays plain
    assert "\r\n\r\nso \x1b[32mit i\x1b[0ms" in told


@pytest.mark.parametrize(("tty", "env"), [(False, {}), (True, {"NO_COLOR": "1"})])
def test_the_terminal_client_is_plain_elsewhere(
    address: str, tty: bool, env: dict[str, str]
) -> None:
    told = chat(address, tty=tty, **env)
    assert "abcde\ufffd" in told
    assert "\x1b" not in told
