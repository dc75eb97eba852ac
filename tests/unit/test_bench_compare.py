"""Two sides of one benchmark run: pairs, their intervals, and the draft switched by the request."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dspark.bench import serving_html
from dspark.bench.serving_client import Client
from dspark.bench.serving_compare import NO_DRAFT, compare, paired
from dspark.bench.serving_report import RequestTiming
from dspark.errors import ConfigError, RunError
from dspark.serving.server import running
from dspark.testing import tiny_tokenizer

PROMPTS = ["abc", "de", "fgh", "i"]


@pytest.fixture(scope="module")
def plain(pair: tuple[Any, Any]) -> Iterator[str]:
    with running(pair[0], None, tiny_tokenizer()) as where:
        yield where


def timing(tpot_s: float, histogram: list[int], decode_ms: float) -> RequestTiming:
    tokens = 11
    figures = {
        "rounds": sum(histogram),
        "accept_histogram": histogram,
        "decode_ms": decode_ms,
    }
    return RequestTiming(
        0.0, 0.5 + 10 * tpot_s, [(0.5, 1)], 3, tokens, text="same", figures=figures
    )


def test_intervals_are_over_pairs() -> None:
    # the sides differ by 1 ms in every pair, the pairs among each other by much more
    pairs = [
        (timing(0.010 * n, [0, 0, 5], 50.0), timing(0.010 * n + 0.001, [0, 10], 80.0))
        for n in range(1, 9)
    ]
    tpot, ttft, length, step = paired(pairs)
    assert [tpot.measured, tpot.base] == pytest.approx([45, 46])
    assert tpot.difference_interval == pytest.approx((-1, -1))
    assert tpot.ratio == pytest.approx(46 / 45)
    assert tpot.ratio_interval is not None
    # the ratio varies with the pairs drawn: 11/10 of the fastest pair, 81/80 of the slowest
    assert 81 / 80 < tpot.ratio_interval[0] < tpot.ratio < tpot.ratio_interval[1] < 11 / 10
    assert [ttft.measured, ttft.ratio] == pytest.approx([500, 1])
    assert (length.measured, length.base, length.ratio) == (2, 1, 2)
    assert length.difference_interval == (1, 1)
    assert [step.measured, step.base, step.ratio] == pytest.approx([10, 8, 0.8])


def test_one_pair_has_no_interval_and_foreign_servers_no_steps() -> None:
    pair = (timing(0.01, [0, 5], 1.0), replace(timing(0.02, [], 0.0), figures={}))
    tpot, ttft = paired([pair])
    assert (tpot.name, ttft.name) == ("mean TPOT", "mean TTFT")
    assert tpot.ratio == pytest.approx(2)
    assert tpot.difference_interval is None
    assert tpot.ratio_interval is None


def test_requests_alternate_between_draft_and_none_on_one_server(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Any, bool]] = []
    send = Client.send

    async def noted(self: Client, prompt: Any, options: dict[str, Any]) -> RequestTiming:
        sent.append((prompt, options.get("dspark_draft", True)))
        timing = await send(self, prompt, options)
        if sent[-1] == ("de", False):
            timing.text += " and another word"
        return timing

    monkeypatch.setattr(Client, "send", noted)
    done = compare(address, NO_DRAFT, PROMPTS, max_tokens=12, ignore_eos=True)
    warm = [("abc", False), ("abc", True)]
    order = [(True, False), (False, True)] * 2
    assert sent == warm + [
        (prompt, draft) for prompt, sides in zip(PROMPTS, order, strict=True) for draft in sides
    ]
    assert (done.pairs, done.same_output) == (4, 3)
    assert done.base.accept_length == 1.0
    assert done.base.num_draft_tokens == 0
    assert done.measured.num_draft_tokens == 4
    # the prefill yields the first of the twelve tokens
    histogram = done.measured.accept_histogram
    assert histogram is not None
    assert sum(n * count for n, count in enumerate(histogram)) == 4 * 11
    assert done.measured.accept_length == pytest.approx(4 * 11 / sum(histogram))
    state = httpx.get(f"{address}/server_info").json()["internal_states"][0]
    assert done.measured.accept_rate == state["accept_rate"]
    assert done.measured.survival == state["survival"]
    assert done.base.accept_rate is None
    assert done.base.survival is None
    assert done.base.step_ms is not None
    assert done.base.ceiling == pytest.approx(1000 / done.base.step_ms["mean"])
    assert [one.name for one in done.figures] == [
        "mean TPOT", "mean TTFT", "accept length", "mean step",
    ]  # fmt: skip
    assert "3 of 4 pairs have the same output" in serving_html.page(done.measured, {}, done)
    assert json.loads(json.dumps(done.to_dict()))["figures"][0]["unit"] == "ms"
    done.check()
    with pytest.raises(RunError, match="too fast"):
        replace(done, base=replace(done.base, above_ceiling="too fast")).check()


def test_two_servers_are_compared(address: str, plain: str) -> None:
    done = compare(address, plain, PROMPTS[:2], max_tokens=8, ignore_eos=True)
    assert (done.pairs, done.same_output, done.base_name) == (2, 2, plain)
    assert done.base.num_draft_tokens == 0
    assert done.measured.accept_length == pytest.approx(done.figures[2].measured)


@pytest.mark.parametrize("shared", [True, False])
def test_tokens_of_another_client_are_noticed(
    address: str, plain: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = Client.info

    async def one_more(self: Client) -> dict[str, Any]:
        told = await info(self) or {}
        told["internal_states"][0]["emitted"] += 1
        return told

    monkeypatch.setattr(Client, "info", one_more)
    with pytest.raises(RunError, match="another client was served in between"):
        compare(address, NO_DRAFT if shared else plain, ["abc"], max_tokens=2, ignore_eos=True)


def test_a_server_without_a_draft_cannot_turn_it_off(plain: str) -> None:
    with pytest.raises(ConfigError, match="has no draft to turn off"):
        compare(plain, NO_DRAFT, PROMPTS)


def test_a_base_that_is_no_address_is_named_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match="--compare must be no-draft or begin with http://"):
        compare("http://127.0.0.1:9", "nodraft", ["abc"])


def test_the_graph_engine_is_compared_with_a_second_server(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = Client.info

    async def captured(self: Client) -> dict[str, Any] | None:
        return {**(await info(self) or {}), "engine": "graph"}

    monkeypatch.setattr(Client, "info", captured)
    with pytest.raises(ConfigError, match="start a second server without --draft"):
        compare(address, NO_DRAFT, PROMPTS)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_a_request_can_do_without_the_draft(address: str, options: dict[str, Any]) -> None:
    body = {"prompt": "ab", "max_tokens": 10, "ignore_eos": True, **options}
    one, other = (
        httpx.post(f"{address}/v1/completions", json={**body, **more}, timeout=60).json()
        for more in ({}, {"dspark_draft": False})
    )
    assert one["choices"][0]["text"] == other["choices"][0]["text"]
    assert other["dspark"]["rounds"] == 9
    rejected, none = (
        answer["usage"]["completion_tokens_details"]["rejected_prediction_tokens"]
        for answer in (one, other)
    )
    assert rejected > 0
    assert none == 0
    assert 0 < other["dspark"]["decode_ms"] < other["dspark"]["total_ms"]
