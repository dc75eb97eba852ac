"""For tests of the HTTP surface: servers of a scripted decode, and what a stream says."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from dspark.decoding import Commit
from dspark.serving import engine as engine_module
from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_tokenizer

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}<think>{% endif %}{% endif %}"
)
"""Opens the reasoning in the prompt, as Ling's template does."""


def tokenizer_of(template: str | None = None, *, special: bool = False) -> Any:
    """The tiny tokenizer with another template; ``special``: marks are special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def says(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
    text: str,
    sizes: Sequence[int] = (1, 3),
    reason: str = "length",
) -> None:
    """Every request is answered by this text, in commits of these sizes in turn."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if reason == "stop":
        ids.append(tokenizer.eos_token_id)

    def play(*_: Any) -> Iterator[Commit]:
        at = turn = 0
        while at < len(ids):
            block = ids[at : at + (sizes[turn % len(sizes)] if turn else 1)]
            at, turn = at + len(block), turn + 1
            # as if read from the prompt: a block of any size is no round of the draft's
            yield Commit(block, reason if at >= len(ids) else None, None, 0, 0.01)

    monkeypatch.setattr(engine_module, "stream", play)


@contextmanager
def client_of(
    target: Any, draft: Any, tokenizer: Any, settings: ServeSettings | None = None
) -> Iterator[httpx.Client]:
    with (
        running(target, draft, tokenizer, settings=settings) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        yield http


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A whole response."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def chunks_of(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a stream before [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def deltas_of(chunks: list[Any]) -> dict[str, Any]:
    """Deltas of a chat put together as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                one = message["tool_calls"].setdefault(call["index"], {"arguments": ""})
                one |= {key: call[key] for key in ("id", "type") if key in call}
                one |= {"name": call["function"]["name"]} if "name" in call["function"] else {}
                one["arguments"] += call["function"].get("arguments", "")
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message


def refusal(client: httpx.Client, path: str, body: dict[str, Any], status: int = 400) -> Any:
    """The error of a request that is turned away."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()["error"]
