"""What users of the `openai` package do, against a running server. Called by `foreign_clients.py`.

    PYTHON benchmarks/openai_calls.py ADDRESS < prompts.json > records.json

Needs nothing but `openai`, so that it runs where dspark is not installed. ``prompts.json`` has
``messages`` of each request and ``max_tokens``. Prints the version, times and tokens of each
streamed chat, and what went otherwise than OpenAI's documentation says.
"""

import json
import sys
import time
from typing import Any

import openai


def main() -> int:
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    task = json.load(sys.stdin)
    model = client.models.list().data[0].id
    wrong: list[str] = []
    first = {"model": model, "messages": task["messages"][0], "max_tokens": 8}
    _whole(client, first, wrong)
    _errors(client, first, wrong)
    begun = time.perf_counter()
    records = [
        _streamed(client, model, messages, task["max_tokens"]) for messages in task["messages"]
    ]
    wall_s = time.perf_counter() - begun
    for messages, record in zip(task["messages"][:2], records, strict=False):
        whole = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=task["max_tokens"],
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        if whole.choices[0].message.content != record["text"]:
            wrong.append("a streamed answer differs from the whole one")
        if whole.usage is None or whole.usage.completion_tokens != record["output_tokens"]:
            wrong.append("the usage of a stream differs from that of the whole answer")
    json.dump(
        {"version": openai.__version__, "records": records, "wall_s": wall_s, "wrong": wrong},
        sys.stdout,
    )
    return 0


def _streamed(client: Any, model: str, messages: Any, max_tokens: int) -> dict[str, Any]:
    chunks: list[float] = []
    text, usage, ended = "", None, 0.0
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    for chunk in stream:
        now = time.perf_counter()
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ended = now
            if choice.delta.content:
                chunks.append(now)
                text += choice.delta.content
    return {
        "started": started,
        "chunks": chunks,
        "ended": ended,
        "text": text,
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _whole(client: Any, first: dict[str, Any], wrong: list[str]) -> None:
    """The calls that stream nothing."""
    chat = client.chat.completions.create(**first, seed=5, temperature=1, stop=["\u2603"])
    if chat.choices[0].finish_reason not in ("stop", "length") or chat.usage.total_tokens < 2:
        wrong.append("a chat has no usage or no finish reason")
    again = client.chat.completions.create(**first, seed=5, temperature=1, stop=["\u2603"])
    if again.choices[0].message.content != chat.choices[0].message.content:
        wrong.append("the same seed gave another answer")
    text = client.completions.create(model=first["model"], prompt="Once", max_tokens=4)
    if text.usage.completion_tokens > 4:
        wrong.append("a completion is longer than max_tokens")
    likely = client.chat.completions.create(**first, logprobs=True, top_logprobs=2)
    tokens = likely.choices[0].logprobs.content
    if len(tokens) != likely.usage.completion_tokens or len(tokens[0].top_logprobs) != 2:
        wrong.append("logprobs are not those of every token")
    raw = client.chat.completions.with_raw_response.create(**first)
    if not raw.headers.get("x-request-id"):
        wrong.append("an answer has no x-request-id")


def _errors(client: Any, first: dict[str, Any], wrong: list[str]) -> None:
    """Errors come as the classes that callers catch."""
    for changes, kind in (
        ({"model": "gpt-4"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
        ({"n": 2}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{**first, **changes})
            wrong.append(f"{changes} was accepted")
        except kind as error:
            if not error.message or error.body is None:
                wrong.append(f"{changes}: the error says nothing")
        except openai.OpenAIError as error:
            wrong.append(f"{changes}: {type(error).__name__} instead of {kind.__name__}")


if __name__ == "__main__":
    raise SystemExit(main())
