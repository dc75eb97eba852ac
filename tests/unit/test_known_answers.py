"""Greedy answers to prompts of token ids, as benchmarks/reproduce_ling3.py asks for them."""

import json
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark.target.config import LingConfig
from dspark.testing import TINY_LING

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return runpy.run_path(str(ROOT / "benchmarks" / "reproduce_ling3.py"))


class Parrot(BaseHTTPRequestHandler):
    """Knows the answers, but for those to the prompts in ``wrong``."""

    known: dict[tuple[int, ...], list[int]]
    wrong: tuple[int, ...] = ()

    def do_GET(self) -> None:
        self._say({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["temperature"] == 0
        assert asked["model"] == "m"
        prompt = tuple(asked["prompt"])
        answer = list(self.known[prompt])[: asked["max_tokens"]]
        if prompt == self.wrong:
            answer[-1] += 1
        self._say({"choices": [{"token_ids": answer}]})

    def _say(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def address(script: dict[str, Any]) -> Iterator[str]:
    Parrot.known = {tuple(prompt): answer for prompt, answer in script["KNOWN"]}
    Parrot.wrong = ()
    server = HTTPServer(("127.0.0.1", 0), Parrot)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_one_other_token_is_noticed(address: str, script: dict[str, Any]) -> None:
    check = script["known_answers"](address)
    assert (check.found, check.verdict) == ("3 equal", "as known")
    Parrot.wrong = tuple(script["KNOWN"][1][0])
    check = script["known_answers"](address)
    assert check.found == "2 equal"
    assert check.verdict.startswith("OTHER TOKENS")


def test_only_the_released_model_is_asked(script: dict[str, Any]) -> None:
    flash = LingConfig.from_file(ROOT / "configs" / "targets" / "ling-3.0-flash.json")
    assert script["is_flash"](flash)
    tiny = LingConfig.from_file(ROOT / "configs" / "targets" / "ling-3.0-tiny.json")
    for other in (tiny, LingConfig.from_dict(TINY_LING["flash"]), None):
        assert not script["is_flash"](other)
