"""Other people's clients against our server: do they work, and do they print our figures?

    python -m venv clients
    clients/bin/pip install --no-deps 'sglang==0.5.9'
    clients/bin/pip install openai aiohttp datasets jinja2 numpy pillow pybase64 requests tqdm \
        'transformers>=5'
    serve/serve.sh &
    python benchmarks/foreign_clients.py --python clients/bin/python

`sglang.bench_serving` is run unmodified, as a program of its own; up to 0.5.9 it is a single file
that needs no engine. It plays the prompts over /generate and /v1/chat/completions, as does `dspark
bench serving`, one after the other in turn. Two comparisons:

- same records: the figures that sglang prints, beside ours computed from the times that it wrote
  down for the same run. Further apart than ``--within`` (2%): exit code 1.
- other run: the figures of our own client for the same prompts. They differ by what the machine
  did in between, too; token counts and greedy accept lengths may not differ.

The `openai` package makes the calls of `openai_calls.py` and streams the chats. A client that is
not installed is named and left out.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from dspark.bench.prompt_sets import read_sets
from dspark.bench.serving import measure
from dspark.bench.serving_report import RequestTiming, ServingReport, summarise

FIGURES = {
    "mean TTFT, ms": ("mean_ttft_ms", "mean_ttft_ms"),
    "median TTFT, ms": ("median_ttft_ms", "median_ttft_ms"),
    "mean TPOT, ms": ("mean_tpot_ms", "mean_tpot_ms"),
    "median TPOT, ms": ("median_tpot_ms", "median_tpot_ms"),
    "mean ITL, ms": ("mean_itl_ms", "mean_itl_ms"),
    "mean E2E, ms": ("mean_e2e_latency_ms", "mean_e2e_ms"),
    "output throughput, tok/s": ("output_throughput", "output_throughput"),
    "total throughput, tok/s": ("total_throughput", "total_throughput"),
    "peak throughput, tok/s": ("max_output_tokens_per_s", "peak_throughput"),
    "concurrency": ("concurrency", "concurrency"),
    "accept length": ("accept_length", "accept_length"),
    "output tokens": ("total_output_tokens", "output_tokens"),
}
"""By row: the key in sglang's file and the one in ours."""
ITL, PEAK = "mean ITL, ms", "peak throughput, tok/s"
"""Not held to ``--within``: over chats sglang counts the tokens of each chunk's text by itself, and
the one-second buckets of the peak hang on the starts, which it does not write down."""
# with transformers 5 sglang takes the number of fields of a tokenised chat for its length


def main() -> int:
    parser = argparse.ArgumentParser(description="Other people's clients against our server.")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--python", default=sys.executable, help="where the clients are installed")
    parser.add_argument("--prompts", default="data/prompts/heldout.jsonl")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each client, in turn")
    parser.add_argument("--within", type=float, default=0.02)
    args = parser.parse_args()
    every = [one for rows in read_sets([args.prompts]).values() for one in rows]
    chats = [list(one) for one in every[: args.limit]]
    wrong: list[str] = []
    program = _bench_serving(args.python)
    if program is None:
        print("sglang is not installed (pip install --no-deps sglang): left out")
    else:
        for backend in ("sglang", "sglang-oai-chat"):
            wrong += _sglang(args, program, backend, chats)
    if not _has(args.python, "openai"):
        print("openai is not installed (pip install openai): left out")
    else:
        wrong += _openai(args, chats)
    for one in wrong:
        print(f"WRONG: {one}")
    return bool(wrong)


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _bench_serving(python: str) -> list[str] | None:
    """The command of SGLang's client, run from its file where that needs no engine."""
    if not _has(python, "sglang"):
        return None
    code = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    file = Path(found.stdout.strip()) / "bench_serving.py"
    single = "def calculate_metrics" in file.read_text()
    return [python, str(file)] if single else [python, "-m", "sglang.bench_serving"]


def _sglang(
    args: argparse.Namespace, program: list[str], backend: str, chats: list[list[Any]]
) -> list[str]:
    is_chat = backend == "sglang-oai-chat"
    texts = ["\n\n".join(str(message["content"]) for message in chat) for chat in chats]
    theirs: list[dict[str, Any]] = []
    again: list[ServingReport] = []
    ours: list[ServingReport] = []
    for _ in range(args.rounds):
        result = _play(args, program, backend, chats, texts)
        info = httpx.get(f"{args.address}/server_info").json()
        theirs.append(result)
        records = list(_records(result, by_token=not is_chat))
        again.append(summarise(records, result["duration"], model=backend, info=info))
        ours.append(
            measure(
                args.address,
                chats if is_chat else texts,
                max_tokens=args.max_tokens,
                ignore_eos=True,
            )
        )
    print(f"\n{backend}, {len(chats)} requests x {args.rounds}; medians of the runs")
    print(f"{'figure':28}{'sglang':>12}{'ours, same records':>20}{'ours, other run':>20}")
    wrong = []
    for name, (their_key, our_key) in FIGURES.items():
        if is_chat and name == ITL:
            continue
        their = [one[their_key] for one in theirs]
        same = [one.to_dict()[our_key] for one in again]
        other = [one.to_dict()[our_key] for one in ours]
        if None in (*their, *same):
            continue
        worst = max((s / t - 1 for s, t in zip(same, their, strict=True)), key=abs)
        apart = median(other) / median(their) - 1
        print(
            f"{name:28}{median(their):12.3f}{median(same):12.3f} {worst:+7.2%}"
            f"{median(other):12.3f} {apart:+7.2%}"
        )
        if abs(worst) > args.within and name != PEAK:
            wrong.append(f"{backend}: {name} is {worst:+.2%} apart on the same records")
        if name in ("accept length", "output tokens") and len({*their, *other}) > 1:
            wrong.append(f"{backend}: {name} of greedy runs differs: {their} and {other}")
    return wrong


def _play(
    args: argparse.Namespace,
    program: list[str],
    backend: str,
    chats: list[list[Any]],
    texts: list[str],
) -> dict[str, Any]:
    """One run of SGLang's client; its file with the details of each request."""
    with TemporaryDirectory() as scratch:
        rows, out = Path(scratch, "rows.jsonl"), Path(scratch, "out.jsonl")
        if backend == "sglang-oai-chat":
            options, lines = ["--dataset-name", "openai"], [{"messages": chat} for chat in chats]
        else:
            options = ["--dataset-name", "custom"]
            # the second turn only tells a length, which --sharegpt-output-len overrides
            lines = [{"conversations": [{"content": t}, {"content": "so it is"}]} for t in texts]
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
        model = httpx.get(f"{args.address}/model_info").json()
        command = [*program, "--backend", backend, "--base-url", args.address, *options]
        command += ["--dataset-path", str(rows), "--num-prompts", str(len(chats))]
        command += ["--sharegpt-output-len", str(args.max_tokens), "--max-concurrency", "1"]
        command += ["--model", httpx.get(f"{args.address}/v1/models").json()["data"][0]["id"]]
        command += ["--tokenizer", model["tokenizer_path"], "--flush-cache", "--disable-tqdm"]
        command += ["--output-file", str(out), "--output-details"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise SystemExit(f"{' '.join(command)}\nfailed:\n{done.stdout}\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    if any(result["errors"]):
        raise SystemExit(f"requests of sglang's client failed: {result['errors']}")
    return result


def _records(result: dict[str, Any], *, by_token: bool) -> Iterator[RequestTiming]:
    """Requests one after the other, as SGLang's client wrote them down.

    ``by_token``: its gaps are of tokens, else of chunks. It does not write when the stream ended,
    only when its last text came.
    """
    started = 0.0
    rows = zip(
        result["input_lens"], result["output_lens"], result["ttfts"], result["itls"], strict=True
    )
    for prompt, output, ttft, gaps in rows:
        times = list(accumulate([started + ttft, *gaps]))
        first = output - len(gaps)
        counts: Sequence[int | None] = range(first, output + 1) if by_token else [None] * len(times)
        yield RequestTiming(
            started=started,
            ended=times[-1],
            chunks=list(zip(times, counts, strict=True)),
            num_prompt_tokens=prompt,
            num_output_tokens=output,
        )
        started = times[-1]


def _openai(args: argparse.Namespace, chats: list[list[Any]]) -> list[str]:
    command = [args.python, str(Path(__file__).with_name("openai_calls.py")), args.address]
    theirs, ours, wrong, version = [], [], [], ""
    for _ in range(args.rounds):
        done = subprocess.run(
            command,
            input=json.dumps({"messages": chats, "max_tokens": args.max_tokens}),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return [f"openai_calls.py ended with {done.returncode}: {done.stderr[-4000:]}"]
        result = json.loads(done.stdout)
        version = result["version"]
        wrong += [f"openai: {one}" for one in result["wrong"]]
        records = [
            RequestTiming(
                started=one["started"],
                ended=one["ended"],
                chunks=[(when, None) for when in one["chunks"]],
                num_prompt_tokens=one["prompt_tokens"],
                num_output_tokens=one["output_tokens"],
            )
            for one in result["records"]
        ]
        theirs.append(summarise(records, result["wall_s"], model="openai", info=None).to_dict())
        ours.append(
            measure(args.address, chats, max_tokens=args.max_tokens, ignore_eos=True).to_dict()
        )
    print(f"\nopenai {version}, {len(chats)} chats x {args.rounds}; medians of the runs")
    print(f"{'figure':28}{'openai':>12}{'ours, other run':>20}")
    for name, (_, key) in FIGURES.items():
        if name in (ITL, PEAK, "accept length"):
            continue
        their, our = (median(one[key] for one in runs) for runs in (theirs, ours))
        print(f"{name:28}{their:12.3f}{our:12.3f} {our / their - 1:+7.2%}")
        if name == "output tokens" and their != our:
            wrong.append(f"openai: {name} differs: {their} and {our}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
