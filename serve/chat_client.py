"""Talk to a running server; what the draft contributed is green, and stands behind each answer.

    python serve/chat_client.py [--address http://127.0.0.1:8000] [--temperature 0.7]

Reasoning is dim. An empty line or Ctrl-D ends it, Ctrl-C cuts an answer short. DSPARK_API_KEY is
sent if it is set. Without a terminal, or with NO_COLOR set, the text is plain.
"""

import argparse
import json
import os
import re
import sys
from typing import Any

import httpx

DIM, GREEN, RESET = "\x1b[2m", "\x1b[32m", "\x1b[0m"
# a model must not be able to steer the terminal
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def colored() -> bool:
    """As no-color.org asks for."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def shown(text: str, chunk: dict[str, Any], color: bool) -> str:
    """The new text of a chunk for the terminal; accepted draft tokens in green."""
    pieces = (chunk.get("dspark") or {}).get("pieces") or []
    if not color or "".join(piece for piece, _ in pieces) != text:
        pieces = [(text, False)]
    return "".join(clean(piece, GREEN if kept else "") for piece, kept in pieces)


def clean(text: str, style: str) -> str:
    """For the terminal."""
    text = CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    return f"{style}{text}{RESET}" if style else text


def answer(client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Print the answer as it comes; its text and the server's figures."""
    text, thinking, color = "", False, colored()
    figures: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise SystemExit(problem(response))
        try:
            for line in response.iter_lines():
                # a comment keeps a silent stream open
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise SystemExit(chunk["error"]["message"])
                if not chunk["choices"]:
                    continue
                delta = chunk["choices"][0]["delta"]
                if thought := delta.get("reasoning_content"):
                    print(clean(thought, DIM if color else ""), end="", flush=True)
                    thinking = True
                elif new := delta.get("content"):
                    print("\n\n" * thinking + shown(new, chunk, color), end="", flush=True)
                    text, thinking = text + new, False
                if "rounds" in (chunk.get("dspark") or {}):
                    figures = chunk["dspark"]
        except KeyboardInterrupt:
            print(" [cut short]", end="")
    return text, figures


def problem(response: httpx.Response) -> str:
    """What the server says is wrong."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answers {response.status_code}: {response.text[:200]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a running `dspark serve`.")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--temperature", type=float, default=None, help="default: the model's own")
    parser.add_argument("--max-tokens", type=int, default=None)
    args = parser.parse_args()
    key = os.environ.get("DSPARK_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens, "stream": True}
    if colored():
        options["dspark_tokens"] = True
    messages: list[dict[str, str]] = []
    timeout = httpx.Timeout(600, connect=5)
    base = args.address.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
        while True:
            try:
                said = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                said = ""
            if not said:
                return
            messages.append({"role": "user", "content": said})
            text, figures = answer(client, {**options, "messages": messages})
            messages.append({"role": "assistant", "content": text})
            print()
            if figures:
                print(
                    f"[accept length {figures['accept_length']:.2f}, {figures['rounds']} steps, "
                    f"first token {figures['ttft_ms']:.0f} ms, all {figures['total_ms']:.0f} ms]",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    try:
        main()
    except httpx.HTTPError as error:
        raise SystemExit(
            f"no answer from the server ({error}); start it with serve/serve.sh"
        ) from None
