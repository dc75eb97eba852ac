"""Talk to a running server; behind each answer stands what the draft contributed.

    python serve/chat_client.py [--address http://127.0.0.1:8000] [--temperature 0.7]

Reasoning is shown dim. An empty line or Ctrl-D ends it, Ctrl-C cuts an answer short.
DSPARK_API_KEY is sent if it is set.
"""

import argparse
import json
import os
import sys
from typing import Any

import httpx


def answer(client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Print the answer as it comes; its text and the server's figures."""
    text, thinking, plain = "", False, not sys.stdout.isatty()
    figures: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            raise SystemExit(response.json()["error"]["message"])
        try:
            for line in response.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise SystemExit(chunk["error"]["message"])
                delta = chunk["choices"][0]["delta"]
                if thought := delta.get("reasoning_content"):
                    print(thought if plain else f"\x1b[2m{thought}\x1b[0m", end="", flush=True)
                    thinking = True
                elif new := delta.get("content"):
                    print("\n\n" * thinking + new, end="", flush=True)
                    text, thinking = text + new, False
                figures = chunk.get("dspark", figures)
        except KeyboardInterrupt:
            print(" [cut short]", end="")
    return text, figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a running `dspark serve`.")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--temperature", type=float, default=None, help="default: the model's own")
    parser.add_argument("--max-tokens", type=int, default=None)
    args = parser.parse_args()
    key = os.environ.get("DSPARK_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens, "stream": True}
    messages: list[dict[str, str]] = []
    timeout = httpx.Timeout(600, connect=5)
    with httpx.Client(base_url=args.address, headers=headers, timeout=timeout) as client:
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
