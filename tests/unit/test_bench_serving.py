"""The serving benchmark: definitions by hand, a real run, and what it refuses to print."""

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rich.console import Console

from dspark.bench.serving import measure
from dspark.bench.serving_client import Client
from dspark.bench.serving_report import RequestTiming, ServingReport, above_ceiling, summarise
from dspark.errors import ConfigError, RunError
from dspark.target import base

CHAT = [{"role": "user", "content": "hi"}]


def by_hand() -> list[RequestTiming]:
    """Two requests, one after the other, of 5 and 3 tokens."""
    return [
        RequestTiming(10.0, 10.9, [(10.2, 1), (10.6, 3), (10.8, 5)], 4, 5),
        RequestTiming(11.0, 11.5, [(11.1, 1), (11.3, 3)], 6, 3),
    ]


def info(mean_ms: float = 150.0, min_ms: float = 100.0, **state: Any) -> dict[str, Any]:
    return {
        "num_draft_tokens": 2,
        "device": "cpu",
        "internal_states": [
            {
                "avg_spec_accept_length": 2.0,
                "accept_histogram": [0, 0, 3, 0],
                "emitted": 6,
                "step_ms": {"mean": mean_ms, "min": min_ms, "p50": mean_ms, "p99": mean_ms},
                **state,
            }
        ],
    }


def test_figures_by_hand() -> None:
    report = summarise(by_hand(), 2.0, model="m", info=info())
    assert report.mean_ttft_ms == pytest.approx(150)
    assert report.mean_e2e_ms == pytest.approx(700)
    # (0.9 - 0.2) / 4 and (0.5 - 0.1) / 2
    assert report.mean_tpot_ms == pytest.approx((175 + 200) / 2)
    assert report.median_tpot_ms == pytest.approx(187.5)
    # 0.4 s over 2 tokens, 0.2 s over 2, 0.2 s over 2
    assert report.mean_itl_ms == pytest.approx((200 * 2 + 100 * 2 + 100 * 2) / 6)
    assert report.median_itl_ms == pytest.approx(100)
    assert report.output_throughput == pytest.approx(4)
    assert report.total_throughput == pytest.approx(9)
    assert report.concurrency == pytest.approx(0.7)
    # five tokens before 11.0, three behind it
    assert report.peak_throughput == 5
    assert report.accept_length == 2.0
    assert report.ceiling == pytest.approx(3 / 0.150)
    assert (report.completed, report.failed) == (2, 0)


@pytest.mark.parametrize(
    ("told", "title"),
    [
        ({}, "2 requests"),
        ({"synthetic_weights": False, "settings": {"simulate_accept_length": None}}, "2 requests"),
        ({"synthetic_weights": True}, "2 requests, SYNTHETIC weights"),
        ({"settings": {"simulate_accept_length": 3.0}}, "2 requests, SIMULATED acceptance"),
    ],
)
def test_made_up_weights_and_acceptance_are_called_so(told: dict[str, Any], title: str) -> None:
    report = summarise(by_hand(), 2.0, model="m", info={**info(), **told})
    assert report.table().title == f"serving m, {title}"


def test_the_peak_places_tokens_inside_the_gap_before_their_chunk() -> None:
    # 8 tokens arrive together at 11.5 over a gap of 1 s: half of them belong to each second
    timing = RequestTiming(10.0, 11.5, [(10.5, 1), (11.5, 9)], 1, 9)
    assert summarise([timing], 2.0, model="m", info=None).peak_throughput == 5


def test_without_counts_by_chunk_all_chunks_count_alike() -> None:
    timing = RequestTiming(0.0, 0.6, [(0.2, None), (0.4, None), (0.6, None)], 1, 6)
    assert [count for _, count, _ in timing.tokens()] == [2, 2, 2]
    report = summarise([timing], 1.0, model="m", info=None)
    assert report.mean_itl_ms == pytest.approx(100)
    assert report.ceiling is None


def test_what_was_reused_of_the_prompts_is_a_row() -> None:
    one, other = by_hand()
    assert summarise([one, other], 2.0, model="m", info=None).cached_tokens is None
    report = summarise([replace(one, num_cached_tokens=0), other], 2.0, model="m", info=None)
    assert report.cached_tokens == 0
    both = [replace(one, num_cached_tokens=4), replace(other, num_cached_tokens=1200)]
    report = summarise(both, 2.0, model="m", info=None)
    assert [one["cached_tokens"] for one in report.requests] == [4, 1200]
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report.table())
    shown = " ".join(console.export_text().split())
    assert "reused prompt tokens │ 1,204 tokens" in shown


def test_a_server_tells_what_it_reused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", 16)
    prompt = "x" * 40
    report = measure(address, [prompt, prompt + "y", "z" * 40], max_tokens=2, ignore_eos=True)
    assert [one["cached_tokens"] for one in report.requests] == [0, 32, 0]
    assert report.cached_tokens == 32


def test_one_token_has_no_tpot() -> None:
    report = summarise([RequestTiming(0.0, 0.1, [(0.1, 1)], 1, 1)], 0.2, model="m", info=None)
    assert report.mean_tpot_ms is None
    assert report.mean_itl_ms is None


def test_a_failed_request_is_counted_and_spoils_no_figure() -> None:
    failed = RequestTiming(11.0, error="500: broken")
    report = summarise([*by_hand(), failed], 2.0, model="m", info=None)
    assert (report.completed, report.failed) == (2, 1)
    assert report.mean_ttft_ms == pytest.approx(150)
    with pytest.raises(RunError, match="500: broken"):
        summarise([failed], 2.0, model="m", info=None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"accept_length": 3.01}, "accept length"),
        ({"output_throughput": 20.5}, "output throughput"),
        ({"peak_throughput": 60.0}, "peak output throughput"),
    ],
)
def test_a_figure_above_the_ceiling_is_an_error(change: dict[str, Any], name: str) -> None:
    report = summarise(by_hand(), 2.0, model="m", info=info())
    assert above_ceiling(report, by_hand()) is None
    report.check()
    said = above_ceiling(replace(report, **change), by_hand())
    assert said is not None
    assert said.startswith(f"{name} ")
    assert "above its ceiling" in said
    with pytest.raises(RunError, match=f"^{name} .* above its ceiling"):
        replace(report, above_ceiling=said).check()


def test_a_decode_faster_than_its_steps_is_an_error() -> None:
    # 8 tokens in 1.1 s of decoding cannot come from steps of 3 tokens that take 1 s
    report = summarise(by_hand(), 8.0, model="m", info=info(mean_ms=1000, min_ms=1000))
    with pytest.raises(RunError, match=r"decode throughput .* above its ceiling"):
        report.check()


def test_a_run_reports_the_published_rows_and_the_servers_own(address: str) -> None:
    report = measure(address, ["abc", CHAT, "def"], max_tokens=12, ignore_eos=True)
    assert (report.completed, report.failed, report.output_tokens) == (3, 0, 36)
    assert report.model == "tiny"
    assert report.num_draft_tokens == 4
    assert report.accept_length is not None
    assert report.step_ms is not None
    ceiling = 5000 / report.step_ms["mean"]
    assert report.ceiling == pytest.approx(ceiling)
    # the warm-up is not among them: three prefills, all other tokens from counted steps
    assert report.accept_histogram is not None
    assert sum(n * count for n, count in enumerate(report.accept_histogram)) == 33
    assert 0 < report.output_throughput <= ceiling
    assert 0 < report.concurrency <= 1.0
    assert report.mean_tpot_ms is not None
    assert report.to_dict()["mean_tpot_ms"] == report.mean_tpot_ms
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report.table())
    shown = console.export_text()
    for row in ("mean TPOT", "median TPOT", "output throughput", "peak", "accept length"):
        assert row in shown
    for row in ("mean step", "ceiling", "steps that emitted 5"):
        assert row in shown


@pytest.mark.slow
def test_requests_may_overlap(address: str) -> None:
    report = measure(address, [CHAT] * 4, max_tokens=8, concurrency=4, ignore_eos=True)
    assert report.output_tokens == 32
    assert report.concurrency > 1.5


def test_an_address_may_end_as_that_of_an_openai_client(address: str) -> None:
    assert measure(f"{address}/v1/", ["abc"], max_tokens=2, ignore_eos=True).failed == 0


def test_another_clients_tokens_are_noticed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = Client.flush

    async def flush_and_be_late(self: Client) -> bool:
        done = await flush(self)
        httpx.post(
            f"{address}/v1/completions",
            json={"prompt": "other", "max_tokens": 5, "ignore_eos": True},
            timeout=60,
        )
        return done

    monkeypatch.setattr(Client, "flush", flush_and_be_late)
    with pytest.raises(RunError, match="another client was served in between"):
        measure(address, ["abc"], max_tokens=4, ignore_eos=True)


def test_a_request_the_server_refuses_is_told_in_its_words(address: str) -> None:
    with pytest.raises(RunError, match=r"warm-up request failed: 404: .*does not exist here"):
        measure(address, ["abc"], model="other")
    with pytest.raises(ConfigError, match=r"warm-up request failed: 400: .*temperature"):
        measure(address, ["abc"], temperature=3.0)


def told(text: str | Exception) -> RequestTiming:
    """A request to a server that streams ``text`` or breaks off."""

    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(text, Exception):
            raise text
        return httpx.Response(200, text=text)

    async def ask() -> RequestTiming:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await Client(http, "m").send(CHAT, {})

    return asyncio.run(ask())


def test_a_stream_that_breaks_off_fails_one_request() -> None:
    assert told(httpx.ReadError("reset")).error == "ReadError: reset"
    wrong = told('data: {"choices": [{}]}\n\ndata: [1\n\n').error
    assert wrong is not None
    assert wrong.startswith("an event of the stream is none of OpenAI's")
    assert told('data: {"choices": []}\n\n').error == "the stream ended without a token count"


@pytest.mark.parametrize(
    ("delta", "text"), [({"reasoning_content": "hm"}, "hm"), ({"tool_calls": [{"index": 0}]}, "")]
)
def test_reasoning_and_calls_are_chunks_of_the_output(delta: dict[str, Any], text: str) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    chunk = {"choices": [{"delta": delta}], "usage": usage}
    timing = told(f": keep-alive\n\ndata: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")
    assert (timing.error, timing.text, timing.num_output_tokens) == (None, text, 2)
    assert [count for _, count in timing.chunks] == [2]


@pytest.mark.parametrize("where", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_a_missing_server_is_one_clear_sentence(where: str) -> None:
    with pytest.raises(RunError, match=r"no answer from .*dspark serve"):
        measure(where, ["abc"])


def test_a_server_that_speaks_something_else_is_refused(address: str) -> None:
    with pytest.raises(RunError, match="names no model"):
        measure(f"{address}/health", ["abc"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"max_tokens": 0}, "--max-tokens must be >= 1, got 0"),
        ({"concurrency": 0}, "--concurrency must be >= 1, got 0"),
        ({"address": "127.0.0.1:9"}, "as in http://127.0.0.1:9"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(**{"address": "http://127.0.0.1:9", "prompts": ["abc"], **arguments})


def test_a_report_survives_json() -> None:
    report = summarise(by_hand(), 2.0, model="m", info=info())
    assert ServingReport(**json.loads(json.dumps(report.to_dict()))) == report
