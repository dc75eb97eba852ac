"""The engine: one request at a time, in order, cut where it has to be cut, alive whatever comes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.decoding import Commit, DecodeParams, SamplingParams, decode, stream
from dspark.errors import ConfigError, RunError
from dspark.serving import engine as engine_module
from dspark.serving.engine import Decoder, Draining, Engine, LocalModel, QueueFull
from dspark.serving.request import Delta, Event, Failed, Finished, GenerateParams
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_draft, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = list(range(40, 52))


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def params(max_new_tokens: int = 24, **options: Any) -> GenerateParams:
    sampling = options.pop("sampling", SamplingParams())
    return GenerateParams(max_new_tokens=max_new_tokens, sampling=sampling, **options)


class FakeDraft:
    block_size = 4


SCRIPTED = SimpleNamespace(
    config=None,
    name="scripted",
    vocab_size=300,
    max_position_embeddings=512,
    eos_ids=frozenset(),
    device=torch.device("cpu"),
    dtype=torch.float32,
    prefill_rows=512,
    model=None,
)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Starts engines and ends them after the test."""
    started: list[Engine] = []

    def begin(
        target: Any = None, draft: Any = None, decoder: Decoder | None = None, **settings: Any
    ) -> Engine:
        if target is None:  # the steps are scripted
            target, draft = SCRIPTED, FakeDraft()
        chosen = ServeSettings(**settings)
        model = LocalModel(target, draft, chosen, decoder)
        started.append(Engine(model, TOKENIZER, chosen))
        return started[-1]

    yield begin
    for one in started:
        one.close()


def script(monkeypatch: pytest.MonkeyPatch, play: Callable[..., Iterator[Commit]]) -> None:
    monkeypatch.setattr(engine_module, "stream", play)


def rounds(*blocks: list[int], proposed: int = 4, reason: str = "length") -> Iterator[Commit]:
    """A prefill's token and then one round a block; all but a round's last token was drafted."""
    for index, block in enumerate(blocks):
        yield Commit(
            token_ids=block,
            finish_reason=reason if index == len(blocks) - 1 else None,
            num_proposed=None if index == 0 else proposed,
            num_accepted=0 if index == 0 else len(block) - 1,
            step_s=0.001,
        )


@pytest.mark.slow
@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, seed=7)]
)
def test_tokens_are_those_of_the_plain_loop(
    pair: tuple[Any, Any], start: Any, with_draft: bool, sampling: SamplingParams
) -> None:
    target, draft = pair
    end = start(target, draft if with_draft else None).generate(PROMPT, params(sampling=sampling))
    plain = decode(target, None, PROMPT, DecodeParams(max_new_tokens=24, sampling=sampling))
    assert end.token_ids == plain.token_ids
    assert end.finish_reason == plain.finish_reason
    assert end.stats.emitted + 1 == len(end.token_ids)
    assert (end.stats.proposed > 0) == with_draft


@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_the_output_has_exactly_the_tokens_asked_for(
    pair: tuple[Any, Any], start: Any, max_new_tokens: int
) -> None:
    end = start(*pair).generate(PROMPT, params(max_new_tokens, ignore_eos=True))
    assert len(end.token_ids) == max_new_tokens
    assert end.finish_reason == "length"


def test_zero_new_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens must be >= 1, got 0"):
        DecodeParams(max_new_tokens=0)


def reblocked(sizes: list[int]) -> Callable[..., Iterator[Commit]]:
    """The target's own tokens, committed in blocks of these sizes, as a good draft would do."""

    def play(
        target: Any, draft: Any, ids: Any, decode_params: DecodeParams, *_: Any
    ) -> Iterator[Commit]:
        commits = list(stream(target, None, ids, decode_params))
        tokens = [token for commit in commits for token in commit.token_ids]
        blocks, at = [tokens[:1]], 1
        for turn in range(len(tokens)):
            size = sizes[turn % len(sizes)]
            if tokens[at : at + size]:
                blocks.append(tokens[at : at + size])
            at += size
        yield from rounds(*blocks, reason=commits[-1].finish_reason or "length")

    return play


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([1], marks=pytest.mark.slow),
        pytest.param([5], marks=pytest.mark.slow),
        [2, 3],
        pytest.param([1, 5, 4], marks=pytest.mark.slow),
    ],
)
def test_a_stop_string_cuts_the_same_wherever_the_blocks_end(
    pair: tuple[Any, Any], start: Any, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    engine = start(pair[0], FakeDraft())
    script(monkeypatch, stream)
    whole = start(pair[0]).generate(PROMPT, params(30, ignore_eos=True))
    script(monkeypatch, reblocked(sizes))
    assert engine.generate(PROMPT, params(30, ignore_eos=True)).text == whole.text
    for length in (1, 2, 3):
        at = len(whole.text) // 2
        stop = whole.text[at : at + length]
        end = engine.generate(PROMPT, params(30, ignore_eos=True, stop=(stop,)))
        assert end.text == whole.text[: whole.text.index(stop)]
        assert (end.finish_reason, end.stop) == ("stop", stop)
        # the tokens that plain decoding would have made: none behind the one that completes it
        assert end.token_ids == whole.token_ids[: len(end.token_ids)]
        through = TOKENIZER.decode(end.token_ids, skip_special_tokens=True)
        short = TOKENIZER.decode(end.token_ids[:-1], skip_special_tokens=True)
        assert stop in through
        assert stop not in short
        assert end.stats.emitted + 1 == len(end.token_ids)


def test_accept_figures_are_cut_at_a_stop_string(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: rounds(ids_of("a"), ids_of("bcdef"), ids_of("ghi")))
    engine = start()
    end = engine.generate(PROMPT, params(stop=("d",)))
    assert end.text == "abc"
    assert end.token_ids == ids_of("abcd")
    # four were proposed and accepted, three stand before the cut
    assert (end.stats.rounds, end.stats.proposed) == (1, 4)
    assert (end.stats.accepted, end.stats.emitted) == (3, 3)
    assert engine.metrics.snapshot()["accept_histogram"] == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("blocks", "histogram", "accepted"),
    [
        ([[65], [66], [67], [68]], [0, 3, 0, 0, 0, 0], 0),  # all rejected
        ([[65], [66, 67, 68, 69, 70], [71, 72, 73, 74, 75]], [0, 0, 0, 0, 0, 2], 8),  # all kept
        ([[65], [66, 67, EOS]], [0, 0, 0, 1, 0, 0], 2),  # the end id inside a block
        ([[EOS]], [0, 0, 0, 0, 0, 0], 0),  # the prefill's token ends it: no round
    ],
)
def test_accept_figures_by_hand(
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    blocks: list[list[int]],
    histogram: list[int],
    accepted: int,
) -> None:
    reason = "stop" if blocks[-1][-1] == EOS else "length"
    script(monkeypatch, lambda *_: rounds(*blocks, reason=reason))
    end = start().generate(PROMPT, params())
    assert end.stats.histogram == histogram
    assert end.stats.accepted == accepted
    assert end.finish_reason == reason
    assert end.token_ids == [token for block in blocks for token in block]


def test_a_stop_id_that_is_ordinary_text_is_not_shown(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: rounds(ids_of("a"), ids_of("bc"), reason="stop"))
    end = start().generate(PROMPT, params())
    assert end.text == "ab"
    assert len(end.token_ids) == 3


def test_deltas_add_up_to_the_text(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a🚀 bcSTO"
    tokens = ids_of(text)
    script(monkeypatch, lambda *_: rounds(tokens[:1], tokens[1:3], tokens[3:7], tokens[7:]))
    events: SimpleQueue[Event] = SimpleQueue()
    start().submit("one", PROMPT, params(stop=("STOP",)), events.put)
    seen: list[Event] = []
    while not (seen and isinstance(seen[-1], Finished)):
        seen.append(events.get(timeout=10))
    deltas = [one for one in seen if isinstance(one, Delta)]
    assert "".join(one.text for one in deltas) == text
    assert [one.num_tokens for one in deltas] == [1, 7, 11]


class Gate:
    """A scripted decode that emits one token and then waits to be let through."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()
        self.order: list[int] = []

    def __call__(self, target: Any, draft: Any, ids: Any, *_: Any) -> Iterator[Commit]:
        self.order.append(ids[0])
        yield Commit([65], None, None, 0, 0.001)
        self.begun.set()
        assert self.open.wait(20)
        for _round in range(3):
            yield Commit([66], None, 4, 0, 0.001)
        yield Commit([67], "length", 4, 0, 0.001)


def finish(events: "SimpleQueue[Event]") -> Finished | Failed:
    while isinstance(event := events.get(timeout=20), Delta):
        pass
    return event


@pytest.mark.slow
def test_requests_are_served_in_order_and_as_if_alone(pair: tuple[Any, Any], start: Any) -> None:
    engine = start(*pair)
    prompts = [[10 + n, 20, 30, 40 + n] for n in range(4)]
    alone = [engine.generate(prompt, params(12)).token_ids for prompt in prompts]
    finished: SimpleQueue[tuple[int, Event]] = SimpleQueue()
    for index, prompt in enumerate(prompts):
        engine.submit(
            str(index), prompt, params(12), lambda event, n=index: finished.put((n, event))
        )
    ends: list[tuple[int, list[int]]] = []
    while len(ends) < len(prompts):
        index, event = finished.get(timeout=20)
        if isinstance(event, Finished):
            ends.append((index, event.token_ids))
    assert ends == list(enumerate(alone))


def test_a_full_queue_refuses(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    script(monkeypatch, gate)
    engine = start(max_queue=1)
    first: SimpleQueue[Event] = SimpleQueue()
    second: SimpleQueue[Event] = SimpleQueue()
    engine.submit("1", [1], params(), first.put)
    assert gate.begun.wait(10)
    waiting = engine.submit("2", [2], params(), second.put)
    with pytest.raises(QueueFull):
        engine.submit("3", [3], params(), print)
    # a client that leaves the queue makes room
    waiting.cancel()
    third: SimpleQueue[Event] = SimpleQueue()
    engine.submit("4", [4], params(), third.put)
    gate.open.set()
    assert isinstance(finish(third), Finished)
    left = finish(second)
    assert isinstance(left, Finished)
    assert (left.finish_reason, left.token_ids) == ("abort", [])
    assert gate.order == [1, 4]


def test_a_cancelled_request_ends_and_the_next_one_runs(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    script(monkeypatch, gate)
    engine = start()
    events: SimpleQueue[Event] = SimpleQueue()
    job = engine.submit("1", [1], params(), events.put)
    assert gate.begun.wait(10)
    job.cancel()
    gate.open.set()
    end = finish(events)
    assert isinstance(end, Finished)
    assert end.finish_reason == "abort"
    assert len(end.token_ids) <= 2, "no step runs for a client that has gone"
    assert engine.generate([2], params()).finish_reason == "length"


def test_a_deadline_ends_a_running_request_as_it_stands(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: Any) -> Iterator[Commit]:
        yield Commit([65], None, None, 0, 0.001)
        while True:
            time.sleep(0.01)
            yield Commit([66], None, 4, 0, 0.01)

    script(monkeypatch, endless)
    end = start(deadline_s=0.2).generate(PROMPT, params())
    assert end.finish_reason == "abort"
    assert end.token_ids[:2] == [65, 66]
    assert end.total_s < 5


def test_a_deadline_ends_a_waiting_request(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    script(monkeypatch, gate)
    engine = start(deadline_s=0.2)
    engine.submit("1", [1], params(), lambda event: None)
    assert gate.begun.wait(10)
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit("2", [2], params(), events.put)
    time.sleep(0.3)
    gate.open.set()
    end = finish(events)
    assert isinstance(end, Failed)
    assert end.reason == "deadline"


def test_an_exception_fails_its_request_only(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(target: Any, draft: Any, ids: Any, *_: Any) -> Iterator[Commit]:
        yield Commit([65], None, None, 0, 0.001)
        if ids[0] == 1:
            raise ZeroDivisionError("a bug in a step")
        yield Commit([66], "length", 4, 0, 0.001)

    script(monkeypatch, breaks)
    engine = start()
    with pytest.raises(RunError, match="ZeroDivisionError while decoding"):
        engine.generate([1], params())
    assert len(engine.generate([2], params()).token_ids) == 2
    assert engine.healthy


def test_an_error_for_people_is_told_as_it_is(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Iterator[Commit]:
        yield Commit([65], None, None, 0, 0.001)
        raise ConfigError("at most 8 stop ids are possible, got 9")

    script(monkeypatch, refuses)
    with pytest.raises(RunError, match="at most 8 stop ids are possible, got 9"):
        start().generate(PROMPT, params())


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop string", "to its end"])
def test_the_decoder_is_closed_before_the_next_request(start: Any, how: str) -> None:
    order: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def play(prompt_ids: Sequence[int], *_: Any) -> Iterator[Commit]:
        order.append(f"begin {prompt_ids[0]}")
        try:
            yield Commit([65], None, None, 0, 0.001)
            begun.set()
            assert goes_on.wait(10)
            if how == "deadline":
                time.sleep(0.3)
            yield Commit(ids_of("x"), None, 4, 0, 0.001)
            yield Commit([66], "length", 4, 0, 0.001)
        finally:
            order.append(f"end {prompt_ids[0]}")

    decoder = Decoder("scripted", play, 99)
    engine = start(decoder=decoder, deadline_s=0.2 if how == "deadline" else 60.0)
    assert engine.card.context == 99
    stop = ("x",) if how == "stop string" else ()
    first: SimpleQueue[Event] = SimpleQueue()
    second: SimpleQueue[Event] = SimpleQueue()

    def told(event: Event) -> None:
        if isinstance(event, Finished):
            order.append("told 1")
        first.put(event)

    job = engine.submit("1", [1], params(stop=stop), told)
    assert begun.wait(10)
    if how != "deadline":
        engine.submit("2", [2], params(), second.put)
    if how == "cancel":
        job.cancel()
    goes_on.set()
    end = finish(first)
    assert isinstance(end, Finished)
    wanted = {"cancel": "abort", "deadline": "abort", "stop string": "stop"}
    assert end.finish_reason == wanted.get(how, "length")
    assert order[:3] == ["begin 1", "end 1", "told 1"]
    if how != "deadline":
        assert isinstance(finish(second), Finished)
        assert order == ["begin 1", "end 1", "told 1", "begin 2", "end 2"]


def test_draining_finishes_what_was_accepted_and_refuses_the_rest(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    script(monkeypatch, gate)
    engine = start()
    events: SimpleQueue[Event] = SimpleQueue()
    engine.submit("1", [1], params(), events.put)
    assert gate.begun.wait(10)
    assert not engine.drain(0.05)
    assert not engine.healthy
    with pytest.raises(Draining):
        engine.submit("2", [2], params(), print)
    gate.open.set()
    assert engine.drain(10)
    end = finish(events)
    assert isinstance(end, Finished)
    assert end.finish_reason == "length"


@pytest.mark.slow
def test_health_fails_while_the_worker_is_stuck(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    script(monkeypatch, gate)
    engine = start(step_timeout_s=0.6)
    time.sleep(1.0)
    assert engine.healthy, "an idle worker is a healthy one"
    engine.submit("1", [1], params(), lambda event: None)
    assert gate.begun.wait(10)
    time.sleep(0.8)
    assert not engine.healthy
    gate.open.set()
    assert engine.drain(10)


def test_a_flush_starts_the_figures_anew(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, lambda *_: rounds(ids_of("a"), ids_of("bc"), ids_of("d")))
    engine = start()
    engine.generate(PROMPT, params())
    figures = engine.metrics.snapshot()
    assert figures["avg_spec_accept_length"] == 1.5
    assert figures["rounds"] == 2
    assert figures["step_ms"]["mean"] == pytest.approx(1.0)
    engine.flush()
    assert engine.metrics.snapshot()["rounds"] == 0
    assert engine.metrics.snapshot()["step_ms"] is None


def test_metrics_have_the_names_of_other_servers(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, lambda *_: rounds(ids_of("a"), ids_of("bc"), ids_of("d")))
    engine = start()
    engine.generate(PROMPT, params())
    lines = engine.metrics.render(running=0, waiting=3).decode().splitlines()
    for line in (
        "sglang:generation_tokens_total 4.0",
        "vllm:generation_tokens_total 4.0",
        "sglang:spec_accept_length 1.5",
        "sglang:num_queue_reqs 3.0",
        "vllm:spec_decode_num_draft_tokens_total 8.0",
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 1.0',
        'dspark:step_seconds_bucket{le="0.001"} 2.0',
        'dspark:step_seconds_bucket{le="0.00075"} 0.0',
    ):
        assert line in lines


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_threshold_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="confidence_threshold must be in 0"):
        ServeSettings(confidence_threshold=value)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_ends_of_the_threshold_change_no_token(
    pair: tuple[Any, Any], start: Any, value: float
) -> None:
    end = start(*pair, confidence_threshold=value).generate(PROMPT, params(12))
    plain = decode(pair[0], None, PROMPT, DecodeParams(max_new_tokens=12))
    assert end.token_ids == plain.token_ids


def test_more_proposals_than_the_draft_has_are_refused(pair: tuple[Any, Any], start: Any) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.4 .*got 5"):
        start(*pair, num_draft_tokens=5)
    for setting in ("num_draft_tokens", "confidence_threshold"):
        with pytest.raises(ConfigError, match=rf"serve\.{setting} is 1, but there is no draft"):
            start(pair[0], None, **{setting: 1})
    headless = tiny_draft(pair[0], enable_confidence_head=False)
    with pytest.raises(
        ConfigError, match=r"is 0\.5, but the draft has no confidence head; leave it"
    ):
        start(pair[0], headless, confidence_threshold=0.5)
    end = start(*pair, num_draft_tokens=2).generate(PROMPT, params(12))
    assert end.stats.block_size == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_queue", -1), ("deadline_s", 0.0), ("max_output_tokens", 0), ("num_draft_tokens", 0)],
)
def test_limits_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"serve.{name} must be"):
        ServeSettings(**{name: value})
