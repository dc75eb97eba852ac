"""What HTTP and detokenising add to the engine's own time of a token.

    python benchmarks/http_overhead.py [--tokens-per-s 2000] [--tokens 4] [--limit 4000]

`stub_server.py` runs on one core, the client on another. Its engine waits ``--tokens`` over
``--tokens-per-s`` a step; the same waits without a server are the engine's own time. Prints the
time of a token with both, by route and by what the engine does while tokens are sent, and the
processor time that the server took for a token.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import httpx
from stub_server import stub

from dspark.decoding import DecodeParams, SamplingParams

ROUTES = {
    "/generate": {"text": "a", "sampling_params": {"ignore_eos": True}},
    "/v1/completions": {"prompt": "a", "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a token costs beside the engine.")
    parser.add_argument("--tokens-per-s", type=float, default=2000.0)
    parser.add_argument("--tokens", type=int, default=4, help="of a step")
    parser.add_argument("--limit", type=int, default=4000, help="tokens of a request")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--port", type=int, default=8017)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    step_s = args.tokens / args.tokens_per_s
    print(f"{'route':24}{'engine':>10}{'own us/token':>14}{'served':>10}{'adds':>8}{'cpu us':>9}")
    for overlap in (False, True):
        command = [sys.executable, str(Path(__file__).with_name("stub_server.py"))]
        command += ["--port", str(args.port), "--step-ms", str(1000 * step_s)]
        command += ["--tokens", str(args.tokens), "--core", str(cores[-1])]
        server = subprocess.Popen([*command, *(["--overlap"] if overlap else [])])
        try:
            os.sched_setaffinity(0, {cores[0]})
            with httpx.Client(base_url=f"http://127.0.0.1:{args.port}", timeout=120) as client:
                _wait(client, server)
                for path in ROUTES:
                    row = [
                        _once(client, server, path, args, step_s, overlap) for _ in range(args.runs)
                    ]
                    own, served, cpu = (median(one) for one in zip(*row, strict=True))
                    print(
                        f"{path:24}{'queued' if overlap else 'in turn':>10}{1e6 * own:14.1f}"
                        f"{1e6 * served:10.1f}{served / own - 1:+8.2%}{1e6 * cpu:9.1f}",
                        flush=True,
                    )
        finally:
            server.kill()
            server.wait()
            os.sched_setaffinity(0, set(cores))


def _wait(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.ConnectError:
            pass
        if server.poll() is not None or time.monotonic() > end:
            raise SystemExit("the stub server did not start")
        time.sleep(0.2)


def _once(
    client: httpx.Client,
    server: subprocess.Popen[bytes],
    path: str,
    args: argparse.Namespace,
    step_s: float,
    overlap: bool,
) -> tuple[float, float, float]:
    """Seconds a token of the engine alone, of the server, and of its processor."""
    params = DecodeParams(max_new_tokens=args.limit, sampling=SamplingParams())
    commits = stub(step_s, args.tokens, 40_000, overlap=overlap)([], params)
    next(commits)
    begun = time.perf_counter()
    for _ in commits:
        pass
    own = (time.perf_counter() - begun) / (args.limit - 1)
    body = json.loads(json.dumps(ROUTES[path]))
    (body["sampling_params"] if path == "/generate" else body)[
        "max_new_tokens" if path == "/generate" else "max_tokens"
    ] = args.limit
    used = _processor_s(server.pid)
    first = last = 0.0
    # raw lines: a client that parses JSON would be the slower half of /generate's growing events
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        for chunk in response.iter_raw():
            if chunk:
                last = time.perf_counter()
                first = first or last
    return own, (last - first) / (args.limit - 1), (_processor_s(server.pid) - used) / args.limit


def _processor_s(pid: int) -> float:
    """Of the server and its engine process; the stub's engine itself takes next to nothing."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks = 0
    for one in (str(pid), *children):
        fields = Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
