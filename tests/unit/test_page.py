"""The live page: what it may load and do, its counters, and a walk through it in a real browser."""

import hashlib
import re
import tomllib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dspark
from dspark.decoding import Commit
from dspark.serving import engine as engine_module
from dspark.serving.metrics import Metrics
from dspark.serving.server import running
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer
from tests.unit.browser import CHROMIUM, Browser

TOKENIZER = tiny_tokenizer()
HTML = (Path(dspark.__file__).parent / "serving" / "page.html").read_text(encoding="utf-8")
KEY = {"Authorization": "Bearer k&y"}
NASTY = "a<i>bc</i>d"


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def play(*_: Any) -> Iterator[Commit]:
    """An answer that would be markup; all but a round's last token was drafted."""
    yield Commit(ids("a"), None, None, 0, 0.5)
    yield Commit(ids("<i>bc"), None, 4, 4, 0.25)
    yield Commit(ids("</i>d"), "length", 4, 4, 0.25)


def think(*_: Any) -> Iterator[Commit]:
    """An answer with reasoning."""
    yield from (Commit(ids(one), None, None, 0, 0.01) for one in "<think>")
    yield Commit(ids("why?!"), None, 4, 4, 0.01)
    yield from (Commit(ids(one), None, None, 0, 0.01) for one in "</think>s")
    yield Commit(ids("o."), "length", 4, 1, 0.01)


def scripted() -> Any:
    target = tiny_target()
    return running(target, tiny_draft(target), TOKENIZER, api_key="k&y", model_name=NASTY)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with scripted() as where:
        yield where


def test_the_page_is_open_and_may_only_run_itself(address: str) -> None:
    answer = httpx.get(address)
    assert answer.status_code == 200
    assert answer.text == HTML
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(
        one.strip().split(" ", 1) for one in answer.headers["content-security-policy"].split(";")
    )
    hashes = [
        f"'sha256-{b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
        for tag in ("script", "style")
        for part in re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    ]
    assert [rules.pop(name) for name in ("script-src", "style-src")] == hashes
    assert rules == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_one_small_file_that_writes_text_only() -> None:
    assert len(HTML.encode()) < 24_000
    # the name space of SVG is no address that is loaded
    plain = HTML.replace("http://www.w3.org/2000/svg", "")
    for outside in ("http:", "https:", "//www", "src=", "@import", "url(", "import("):
        assert outside not in plain, outside
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                   "Function(", " style=", " onclick", " onload"):  # fmt: skip
        assert unsafe not in HTML, unsafe
    for kept in ("localStorage", "sessionStorage", "indexedDB", "cookie"):
        assert kept not in HTML, kept


def test_files_beside_the_code_are_packaged() -> None:
    package = Path(dspark.__file__).parent
    settings = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8"))
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found == set(settings["tool"]["setuptools"]["package-data"]["dspark"])


def test_what_the_page_reads_needs_the_key(address: str) -> None:
    for path in ("/live", "/server_info"):
        assert httpx.get(address + path).status_code == 401
    info = httpx.get(f"{address}/server_info", headers=KEY).json()
    assert info["settings"]["max_queue"] == 32
    assert "k&y" not in str(info)
    live = httpx.get(f"{address}/live", headers=KEY).json()
    assert live["clock_s"] > 0
    assert (live["running"], live["waiting"], live["healthy"]) == (0, 0, True)


def test_live_counters_only_grow_and_shares_start_anew() -> None:
    metrics = Metrics(4)
    metrics.first_token(1.0)
    metrics.step(0.5, proposed=4, accepted=2, emitted=3)
    metrics.flush()
    metrics.step(0.25, proposed=4, accepted=0, emitted=1)
    live = metrics.live()
    flushed = live.pop("flushed")
    assert live == {"tokens": 5, "emitted": 4, "rounds": 2, "step_s": 0.75}
    assert flushed["rounds"] == 1
    assert flushed["histogram"] == [0, 1, 0, 0, 0, 0]


def fill(browser: Browser, **values: str) -> None:
    for name, value in values.items():
        browser.run(f"document.getElementById('{name}').value = {value!r}")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_walk_through_the_page_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    state = "document.getElementById('state').textContent"
    told = "document.getElementById('told').textContent"
    with Browser(width=360, dark=True) as browser:
        with scripted() as address:
            monkeypatch.setattr(engine_module, "stream", play)
            browser.open(address)
            browser.wait(f"{state} === 'a key is needed'")
            fill(browser, key="wrong")
            browser.run("document.getElementById('lock').requestSubmit()")
            browser.wait(f"{state} === 'this key is not accepted'")
            fill(browser, key="k&y")
            browser.run("document.getElementById('lock').requestSubmit()")
            browser.wait(f"{state} === 'live'")
            assert browser.run("document.getElementById('model').textContent") == NASTY
            assert "max_queue32" in browser.run("document.getElementById('config').textContent")
            fill(browser, prompt="hi", kind="text")
            browser.run("document.getElementById('ask').requestSubmit()")
            browser.wait(f"{told}.includes('first token')")
            answer = browser.run(
                "[...document.getElementById('answer').children].map((e) => [e.nodeName, "
                "e.textContent])"
            )
            assert answer == [
                ["SPAN", "a"], ["MARK", "<i>b"], ["SPAN", "c"], ["MARK", "</i>"], ["SPAN", "d"],
            ]  # fmt: skip
            assert browser.run(told).startswith(
                "8 of 11 tokens came from the draft; accept length 5.00, 2 steps"
            )
            monkeypatch.setattr(engine_module, "stream", think)
            fill(browser, kind="chat")
            browser.run("document.getElementById('ask').requestSubmit()")
            browser.wait(f"{told}.startsWith('5 of 23 tokens') && {told}.includes('first token')")
            answer = browser.run("document.getElementById('answer').innerHTML")
            assert answer == (
                "<i><mark>why?</mark><span>!</span></i><span>s</span><mark>o</mark><span>.</span>"
            )
            # narrow: nothing sticks out
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
            kept = browser.run("[document.cookie, localStorage.length, sessionStorage.length]")
            assert kept == ["", 0, 0]
            monkeypatch.setattr(engine_module.Engine, "healthy", False)
            browser.wait(f"{state} === 'shutting down, or the worker makes no progress'")
            unexpected = [text for text in browser.problems if "401" not in text]
            assert unexpected == []
        browser.wait(f"{state}.startsWith('no answer from the server')")
        assert browser.run("document.getElementById('queue').textContent") == ""
        browser.run("document.getElementById('ask').requestSubmit()")
        browser.wait(f"{told} === 'the server is gone'")
