"""Many clients, a fifth of which hang up: is any request lost or mixed up, does memory grow?

    python benchmarks/serving_soak.py [--requests 1000] [--clients 16] [--leave 0.2] [--seed 0]

Serves a tiny random target with its draft in a process of its own. Each request is another: route,
prompt, streamed or not, greedy or seeded, length, stop string. Those that hang up do so before the
first byte, after an event, or while a whole answer is awaited. Every answer is held against the
same request sent alone before, and the server's counters against what was sent. Exit code 1: an
answer is missing or another, a place was not freed, or memory grew by more than 20 MB.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dspark.serving.engine import LocalModel
from dspark.serving.server import serve
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MOST_GROWTH_MB = 20.0


@dataclass(frozen=True)
class Case:
    """One request and what its client does."""

    path: str
    body: dict[str, Any]
    stream: bool
    leaves: int | None = None
    """Hangs up after so many events; without a stream after so many hundredths of a second."""


@dataclass(frozen=True)
class Answer:
    """What a client that stayed has got."""

    text: str
    num_tokens: int
    reason: str | None


def cases(count: int, *, leave: float, longest: int, seed: int = 0) -> list[Case]:
    """Requests of which no two are alike."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        path, stream = rng.choice((CHAT, TEXT, NATIVE)), rng.random() < 0.6
        text = f"{number}: {'word ' * rng.randrange(8)}"
        sampling: dict[str, Any] = {"temperature": 0.0}
        if rng.random() < 0.5:
            seed_name = "sampling_seed" if path == NATIVE else "seed"
            sampling = {"temperature": 1.0, "top_k": 50, seed_name: number}
        if rng.random() < 0.3:
            sampling["stop"] = [chr(rng.randrange(97, 123))]
        limit = "max_new_tokens" if path == NATIVE else "max_tokens"
        sampling |= {limit: rng.randint(1, longest), "ignore_eos": rng.random() < 0.5}
        if path == NATIVE:
            body: dict[str, Any] = {"text": text, "sampling_params": sampling}
        elif path == TEXT:
            body = {"prompt": text, **sampling}
        else:
            body = {"messages": [{"role": "user", "content": text}], **sampling}
        leaves = rng.randrange(5) if rng.random() < leave else None
        made.append(Case(path, body, stream, leaves))
    return made


async def send(client: httpx.AsyncClient, case: Case) -> Answer | None:
    """None: hung up. A client that leaves after the end of its answer has got it whole."""
    if not case.stream:
        patience = None if case.leaves is None else 0.01 * case.leaves
        try:
            response = await asyncio.wait_for(client.post(case.path, json=case.body), patience)
        except TimeoutError:
            return None
        response.raise_for_status()
        return _whole(case.path, response.json())
    events: list[Any] = []
    async with client.stream("POST", case.path, json={**case.body, "stream": True}) as response:
        response.raise_for_status()
        if case.leaves == 0:
            return None
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return _streamed(case.path, events)
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == case.leaves:
                    return None
    raise RuntimeError("a stream ended without [DONE]")


def _whole(path: str, body: dict[str, Any]) -> Answer:
    if path == NATIVE:
        info = body["meta_info"]
        return Answer(body["text"], info["completion_tokens"], info["finish_reason"]["type"])
    choice = body["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    return Answer(text, body["usage"]["completion_tokens"], choice["finish_reason"])


def _streamed(path: str, events: Sequence[Any]) -> Answer:
    if "error" in events[-1]:
        raise RuntimeError(str(events[-1]["error"]))
    if path == NATIVE:
        return _whole(path, events[-1])
    choices = [event["choices"][0] for event in events]
    text = "".join(
        one["delta"].get("content", "") if path == CHAT else one["text"] for one in choices
    )
    assert len({event["id"] for event in events}) == 1, "events of two requests"
    # chunks have no count; the histogram of the last one and the prompt's token make it
    histogram = events[-1]["dspark"]["accept_histogram"]
    tokens = 1 + sum(emitted * steps for emitted, steps in enumerate(histogram))
    return Answer(text, tokens, choices[-1]["finish_reason"])


async def play(
    address: str, todo: Sequence[Case], *, clients: int
) -> list[Answer | Exception | None]:
    """Answers in the order of the cases, ``clients`` requests at a time."""
    found: list[Answer | Exception | None] = [None] * len(todo)
    waiting: Iterator[tuple[int, Case]] = iter(enumerate(todo))

    async def work() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            for index, case in waiting:
                try:
                    found[index] = await send(client, case)
                except (httpx.HTTPError, RuntimeError, AssertionError) as error:
                    found[index] = error

    await asyncio.gather(*(work() for _ in range(clients)))
    return found


def alone(todo: Sequence[Case]) -> list[Case]:
    """The same requests, whole, from clients that stay."""
    return [Case(case.path, case.body, stream=False) for case in todo]


def faults(
    todo: Sequence[Case],
    expected: Sequence[Answer | Exception | None],
    found: Sequence[Answer | Exception | None],
) -> list[str]:
    """Answers that are missing, broken, or not those of the same request alone."""
    wrong = []
    for number, (case, one, other) in enumerate(zip(todo, expected, found, strict=True)):
        if other is None and case.leaves is not None:
            continue
        if not isinstance(other, Answer) or other != one:
            wrong.append(f"request {number} ({case.path}): {other!r} instead of {one!r}")
    return wrong


def counters(address: str) -> dict[str, float]:
    """Figures of the server that tell of requests."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    names = {
        "running": "dspark:requests_running ",
        "waiting": "dspark:requests_waiting ",
        "ended": "dspark:e2e_request_latency_seconds_count ",
        "aborted": "dspark:aborted_requests_total ",
        "failed": "dspark:failed_requests_total ",
    }
    return {
        key: float(next(line for line in lines if line.startswith(name)).split()[-1])
        for key, name in names.items()
    }


def settled(address: str, within_s: float = 10.0) -> dict[str, float]:
    """The counters once nothing runs or waits, or as they are when that takes too long."""
    end = time.monotonic() + within_s
    while True:
        now = counters(address)
        if not (now["running"] or now["waiting"]) or time.monotonic() > end:
            return now
        time.sleep(0.02)


def tiny_model() -> LocalModel:
    """What the server's engine process loads."""
    target = tiny_target()
    return LocalModel(target, tiny_draft(target))


def main() -> int:
    parser = argparse.ArgumentParser(description="Many clients, some of which hang up.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--leave", type=float, default=0.2, help="share that hangs up")
    parser.add_argument("--longest", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8016)
    parser.add_argument("--serve", action="store_true", help="be the server")
    args = parser.parse_args()
    if args.serve:
        settings = ServeSettings(max_queue=args.clients)
        serve(tiny_model, tiny_tokenizer(), port=args.port, settings=settings)
        return 0
    command = [sys.executable, __file__, "--serve", "--port", str(args.port)]
    server = subprocess.Popen([*command, "--clients", str(args.clients)])
    try:
        address = f"http://127.0.0.1:{args.port}"
        _wait(address, server)
        return _soak(address, server.pid, args)
    finally:
        server.terminate()
        server.wait(60)


def _soak(address: str, pid: int, args: argparse.Namespace) -> int:
    todo = cases(args.requests, leave=args.leave, longest=args.longest, seed=args.seed)
    # alone first: it warms up all that a server keeps for good
    expected = asyncio.run(play(address, alone(todo), clients=1))
    before, resident = settled(address), _resident_mb(pid)
    begun = time.perf_counter()
    found = asyncio.run(play(address, todo, clients=args.clients))
    took = time.perf_counter() - begun
    after = settled(address)
    growth = _resident_mb(pid) - resident
    wrong = faults(todo, expected, found)
    left = sum(one is None for one in found)
    ended, aborted, failed = (after[key] - before[key] for key in ("ended", "aborted", "failed"))
    print(f"{args.requests} requests of {args.clients} clients in {took:.1f} s, seed {args.seed}")
    print(f"hung up: {left}; answered: {sum(isinstance(one, Answer) for one in found)}")
    print(f"different from the same request alone, or lost: {len(wrong)}")
    print(f"server: {ended:.0f} ended, of which {aborted:.0f} aborted and {failed:.0f} failed;")
    print(f"        {after['running']:.0f} running and {after['waiting']:.0f} waiting afterwards")
    print(f"memory: {resident:.1f} MB before, {growth:+.1f} MB")
    if after["running"] or after["waiting"]:
        wrong.append("a place was not freed")
    if failed or not args.requests - left <= ended <= args.requests:
        wrong.append("the server's counters do not fit what was sent")
    if growth > MOST_GROWTH_MB:
        wrong.append(f"memory grew by {growth:.1f} MB")
    for one in wrong[:20]:
        print(f"WRONG: {one}")
    return bool(wrong)


def _wait(address: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


def _resident_mb(pid: int) -> float:
    """Of the server and its engine process; libraries that both map count twice."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for one in (str(pid), *children):
        lines = Path(f"/proc/{one}/status").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
    return total / 1024


if __name__ == "__main__":
    raise SystemExit(main())
