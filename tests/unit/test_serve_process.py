"""`dspark serve` as a process: signals, a full disk, a lost engine, and its exit code."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from dspark.errors import RunError
from dspark.testing import save_tiny_target
from tests.unit.scripted import (
    KILL,
    Scripted,
    Server,
    alive,
    body,
    command,
    free_port,
    healthy,
    letters,
    until,
)

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def texts(http: httpx.Client, prompt: str, count: int) -> Generator[str, None, None]:
    """Of a stream's events as they grow; of one that ends in an error, its message."""
    with http.stream("POST", "/generate", json={**body(prompt, count), "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                yield event["error"]["message"] if "error" in event else event["text"]


def test_sigterm_under_load_finishes_what_was_accepted(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    model, log = Scripted(), tmp_path / "log"
    with command(monkeypatch, model, target, str(log)) as server, ThreadPoolExecutor(8) as pool:
        answers = [
            pool.submit(lambda first: list(texts(server.http, first, 25))[-1], first)
            for first in "abcdefgh"
        ]
        until(lambda: server.http.get("/live").json()["waiting"] == 7)
        # a supervisor tells all processes of a service
        model.signal(signal.SIGTERM)
        server.signal(signal.SIGTERM)
        until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.post("/generate", json=body("z", 1)).status_code == 503
        assert [one.result() for one in answers] == [letters(first, 25) for first in "abcdefgh"]
        assert server.code() == 0
        assert not alive(model.pid.value)
    assert "finishing the requests in hand" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_second_signal_ends_even_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    model = Scripted(before=lambda step: time.sleep(60 if step == 1 else 0))
    with command(monkeypatch, model, target, str(tmp_path / "log")) as server:
        with closing(texts(server.http, "a", 5)) as stream:
            next(stream)
            server.signal(signal.SIGTERM)
            until(lambda: server.http.get("/health").status_code == 503)
            assert server.code(within_s=0.3) is None
            server.signal(signal.SIGTERM)
            assert server.code(within_s=2) == 0
        assert not alive(model.pid.value)


def test_a_server_that_lost_its_engine_says_so_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, target: Path, tmp_path: Path
) -> None:
    model, log = Scripted(), tmp_path / "log"
    with command(monkeypatch, model, target, str(log)) as server:
        stream = texts(server.http, "a", 400)
        next(stream)
        # one that does not say all it wants
        slow = socket.create_connection(("127.0.0.1", server.http.base_url.port))
        slow.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        model.signal(KILL)
        begun = time.monotonic()
        said = "the engine process was ended by SIGKILL, for lack of memory perhaps"
        assert list(stream)[-1] == said
        assert server.http.get("/health").json()["error"]["message"] == said
        assert server.code() == 1
        assert time.monotonic() - begun < 4
        slow.close()
    assert log.read_text().splitlines()[-1] == f"error: {said}"
    assert log.read_text().count("SIGKILL") == 1
    assert "Traceback" not in log.read_text()


def test_a_full_disk_under_the_log_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    def fail(step: int) -> None:
        if step == 3:
            raise RunError("said in the log as well")

    model = Scripted(before=fail)
    with command(monkeypatch, model, target, "/dev/full") as server:
        for _round in range(2):
            assert server.http.post("/generate", json=body("a", 9)).status_code == 500
            answer = server.http.post("/generate", json=body("a", 3))
            assert answer.json()["text"] == "abc"
        assert server.http.get("/health").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.code() == 0


@pytest.mark.slow
def test_the_command_spawns_its_engine_and_leaves_none_behind(target: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "dspark", "serve", "--target", str(target), "--port", str(port)]
    with (
        subprocess.Popen(
            words, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
        ) as it,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        until(lambda: healthy(http) or it.poll() is not None, within_s=60)
        assert http.post("/generate", json=body("a", 3)).status_code == 200
        children = Path(f"/proc/{it.pid}/task/{it.pid}/children").read_text().split()
        (engine,) = (
            int(one)
            for one in children
            if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()
        )
        it.kill()
        assert until(lambda: not alive(engine)) < 2
