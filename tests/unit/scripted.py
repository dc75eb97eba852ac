"""Engine processes and whole servers over a scripted decode, forked so that they start at once.

A real one is spawned; `test_serve_process` has that. Whatever is counted is counted in the engine
process, in memory that it shares with the test.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import pytest

from dspark.cli import main
from dspark.decoding import Commit, DecodeParams
from dspark.serving import loading, process
from dspark.serving.card import ModelCard
from dspark.serving.process import EngineProcess
from dspark.serving.server import serving
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_tokenizer

FORK = get_context("fork")
TOKENIZER = tiny_tokenizer()
A: int = TOKENIZER("a")["input_ids"][0]
CARD = ModelCard(
    name="scripted",
    vocab_size=len(TOKENIZER),
    max_position_embeddings=512,
    context=512,
    num_draft_tokens=4,
    prefill_rows=10,
)


@dataclass
class Scripted:
    """A model whose step takes ``step_s``. ``before``: called with the step's number before it.

    ``pieces``: of a prompt, each of which takes as long.
    """

    step_s: float = 0.01
    pieces: int = 1
    before: Callable[[int], None] = lambda step: None
    card: ModelCard = CARD
    pid: Any = field(default_factory=lambda: FORK.Value("i", 0))
    steps: Any = field(default_factory=lambda: FORK.Value("i", 0))
    """Of all decodes; the prompt is step 0 and counts as one."""

    def load(self) -> "Scripted":
        self.pid.value = os.getpid()
        return self

    def check(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def stream(
        self,
        prompt_ids: Sequence[int],
        params: DecodeParams,
        go_on: Callable[[], bool] = lambda: True,
        /,
    ) -> Iterator[Commit]:
        """Letters in order, the first of them the prompt's first id."""
        for _ in range(self.pieces - 1):
            self.steps.value += 1
            time.sleep(self.step_s)
            if not go_on():
                return
        limit = params.max_new_tokens
        for step in range(limit):
            self.steps.value += 1
            self.before(step)
            time.sleep(self.step_s)
            reason = "length" if step == limit - 1 else None
            token = A + (prompt_ids[0] - A + step) % 26
            yield Commit([token], reason, 4 if step else None, 0, self.step_s)

    def signal(self, number: int) -> None:
        os.kill(self.pid.value, number)


def letters(first: str, count: int) -> str:
    """What a request whose prompt begins so is answered."""
    return "".join(chr(97 + (ord(first) - 97 + step) % 26) for step in range(count))


def body(prompt: str, count: int) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}


@contextmanager
def served(
    monkeypatch: pytest.MonkeyPatch, model: Scripted, **settings: Any
) -> Iterator[httpx.Client]:
    """The HTTP front on a thread of the test, the model in a process."""
    monkeypatch.setattr(process, "_METHOD", "fork")
    chosen = ServeSettings(**settings)
    with (
        EngineProcess(model.load, chosen) as engine,
        serving(engine, TOKENIZER, settings=chosen) as address,
        httpx.Client(base_url=address, timeout=30) as http,
    ):
        yield http


@dataclass
class Server:
    """`dspark serve` in a process."""

    http: httpx.Client
    process: Any

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def code(self, within_s: float = 10.0) -> int | None:
        """Of its end; None: it has not ended."""
        self.process.join(within_s)
        code: int | None = self.process.exitcode
        return code


@contextmanager
def command(
    monkeypatch: pytest.MonkeyPatch, model: Scripted, target: Path, log: str, *options: str
) -> Iterator[Server]:
    """The command as a whole, its output in the file ``log``."""
    monkeypatch.setattr(process, "_METHOD", "fork")
    monkeypatch.setattr(loading, "load_model", lambda *_: model.load())
    port = free_port()
    words = ["dspark", "serve", "--target", str(target), "--port", str(port), *options]
    server = FORK.Process(target=_run, args=(words, log))
    server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            until(lambda: healthy(http) or not server.is_alive())
            yield Server(http, server)
    finally:
        server.kill()
        server.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _run(words: list[str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = words
    # what pytest has installed holds on to its own files
    logging.getLogger().handlers.clear()
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    main()


def healthy(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/health").status_code == 200
    return False


def until(done: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until it is so; how long that took."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < within_s, "it did not come about"
        time.sleep(0.01)
    return time.monotonic() - begun


def alive(pid: int) -> bool:
    """A process that has ended but was not waited for is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


KILL, STOP, GO_ON = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
