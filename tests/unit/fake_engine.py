"""A server of a target that answers at once, records what it was asked, and misbehaves on order.

The answer to a prompt is a function of its ids and seed. `fault(number, ids)` names what goes
wrong with the request of that number; None answers it.
"""

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from dspark.corpus.chat import generation_prompt_ids

Fault = Callable[[int, list[int]], str | None]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeEngine:
    """Use as a context manager; ``url`` is the base URL."""

    tokenizer: Any
    fault: Fault = lambda number, ids: None
    owner: str = "vllm"
    name: str = "served"
    say: Callable[[list[int]], str] | None = None
    """Text of the answer; None draws one from the prompt."""
    delay_s: float = 0.0
    gate: int = 0
    """The first answers wait until so many requests are in flight at once."""
    gives_ids: bool = True
    message: dict[str, Any] = field(default_factory=dict)
    """Fields of a chat answer's message, over its text."""
    first_message: dict[str, Any] = field(default_factory=dict)
    """The same, of answers to conversations without an assistant turn."""
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    keep: bool = True

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.asked = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [one.body for one in self.seen]

    def answer(self, ids: Sequence[int], seed: int) -> list[int]:
        """New ids, the end of the turn included."""
        new: list[int]
        if self.say is not None:
            new = self.tokenizer(self.say(list(ids)), add_special_tokens=False)["input_ids"]
        else:
            digest = hashlib.sha256(f"{list(ids)} {seed}".encode()).hexdigest()
            new = self.tokenizer.convert_tokens_to_ids(list(digest[: 3 + int(digest[0], 16)]))
        return [*new, self.tokenizer.eos_token_id]

    def _serve(self) -> None:
        async def main() -> None:
            self._stop = asyncio.Event()
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=512)
            self._port = server.sockets[0].getsockname()[1]
            self._ready.set()
            await self._stop.wait()
            server.close()

        self._loop.run_until_complete(main())
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {key.lower(): value for key, _, value in (one.partition(": ") for one in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = first.split()
        if method == "GET":
            listed = {"data": [{"id": self.name, "owned_by": self.owner}]}
            return await _send(writer, 200, json.dumps(listed))
        body = json.loads(data)
        if self.keep:
            self.seen.append(Seen(path, headers, body))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._reply(writer, path, body)
        finally:
            self.in_flight -= 1

    async def _reply(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        number, self.asked = self.asked, self.asked + 1
        if "messages" in body:
            mode = body.get("chat_template_kwargs", {}).get("enable_thinking")
            ids = generation_prompt_ids(
                self.tokenizer, _inwards(body["messages"]), mode, tools=body.get("tools")
            )
        else:
            ids = body["input_ids"] if path == "/generate" else body["prompt"]
        kind = self.fault(number, ids)
        while self.most_in_flight < self.gate:
            await asyncio.sleep(0.01)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if kind == "slow":
            await asyncio.sleep(0.5)
        key = self.seen[-1].headers.get("authorization", "") if self.seen else ""
        if kind == "moved_with_key":
            place = f"Location: http://elsewhere/v1?key={quote(key.removeprefix('Bearer '))}\r\n"
            return await _send(writer, 307, "", place)
        if kind in _STATUS:
            status, extra = _STATUS[kind]
            return await _send(writer, status, f'{{"error": "told to fail"}}{key}', extra)
        if kind == "drop":
            return False
        if kind == "stall":
            await asyncio.sleep(30)
            return False
        whole = self._object(path, body, ids, kind)
        if kind == "key_as_reason":
            whole["choices"][0]["finish_reason"] = key
        text = json.dumps(whole)
        if kind == "bad_json":
            text = text[:-9]
        if kind == "half":
            writer.write(_header(200, len(text), "") + text[: len(text) // 2].encode())
            await writer.drain()
            return False
        return await _send(writer, 200, text)

    def _object(self, path: str, body: dict[str, Any], ids: list[int], kind: str | None) -> Any:
        sampling = body.get("sampling_params", body)
        limit = sampling.get("max_new_tokens", sampling.get("max_tokens"))
        new = self.answer(ids, sampling.get("sampling_seed", sampling.get("seed")))
        reason = "stop"
        if kind == "length" or len(new) > limit:
            # the limit counts, unless the test wants a cut at once
            new, reason = new[: min(limit, len(new) - 1)], "length"
        if kind == "out_of_vocabulary":
            new = [100_000, *new[1:]]
        if kind == "no_end":
            new = new[:-1]
        if kind == "goes_on":
            new = [*new[:-1], self.tokenizer.eos_token_id, *new]
        if kind == "empty":
            new = []
        if kind == "aborted":
            reason = "abort"
        shown = new[:-1] if new[-1:] == [self.tokenizer.eos_token_id] else new
        text = self.tokenizer.decode([one for one in shown if one < len(self.tokenizer)])
        prompt = [*ids, 1] if kind == "other_prompt" else ids
        if path == "/generate":
            matched = {"matched": self.tokenizer.eos_token_id} if reason == "stop" else {}
            meta = {"prompt_tokens": len(prompt), "finish_reason": {"type": reason, **matched}}
            given = {"output_ids": new} if self.gives_ids else {}
            return {"text": text, "meta_info": meta, **given}
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.gives_ids:
            choice["token_ids"] = new
        if "messages" in body:
            begun = any(one["role"] == "assistant" for one in body["messages"])
            more = self.message if begun else {**self.message, **self.first_message}
            choice["message"] = {"role": "assistant", "content": text, **more}
        else:
            choice["text"] = text
        count = {"no_choice": 0, "two_choices": 2}.get(kind or "", 1)
        answer: dict[str, Any] = {
            "choices": [choice] * count,
            "usage": {"prompt_tokens": len(prompt)},
        }
        if self.gives_ids:
            (answer if "messages" in body else choice)["prompt_token_ids"] = prompt
        return answer


_STATUS = {
    "429": (429, "Retry-After: 0\r\n"),
    "later": (429, "Retry-After: 7\r\n"),
    "500": (500, ""),
    "400": (400, ""),
    "401": (401, ""),
    "404": (404, ""),
    "moved": (307, "Location: http://elsewhere/v1\r\n"),
}


def _inwards(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As engines read calls: arguments are parsed before the template sees them."""
    done = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(text)}}
            for call in message.get("tool_calls", [])
            if isinstance(text := call["function"]["arguments"], str)
        ]
        done.append({**message, "tool_calls": calls} if calls else message)
    return done


def _header(status: int, length: int, extra: str) -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{extra}\r\n"
    ).encode()


async def _send(writer: asyncio.StreamWriter, status: int, text: str, extra: str = "") -> bool:
    data = text.encode()
    writer.write(_header(status, len(data), extra) + data)
    await writer.drain()
    return True
