"""The published table on the GPUs of one host: Ling-3.0-flash's shapes, 8192 in and 1024 out.

    PYTHONPATH=. python benchmarks/tp4.py                # 4 GPUs; --ranks 2: two of them
    PYTHONPATH=. python benchmarks/tp4.py --ranks 1 --config configs/targets/ling-3.0-tiny.json
    PYTHONPATH=. python benchmarks/tp4.py --dry-run      # the commands, and nothing else

One stream. Times are real; weights are DRAWN on every GPU (no file) and acceptance is SIMULATED.
A row is a server of its own and a run of `dspark bench serving` against it. --out gets a JSON file
a row, the servers' logs, report.json and table.md, which is printed behind every row.
"""

import argparse
import hashlib
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from ending import run
from servers import figures, serving
from tp4_report import report, table

from dspark.decoding.proposer import MAX_PROPOSALS
from dspark.errors import ConfigError, RunError
from dspark.provenance import check_writable, write_json, write_text

ROWS = ("none,1", "nextn:5,3.25", "block8,5.29", "block8,6.6", "block16,9.95")
"""Draft and accept length: plain, the published pair's, the official draft's mean, block 16."""


class Bench:
    """The commands, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.begun = args, args.out, time.monotonic()
        self.pool: int | None = None

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self.begun

    def call(self, name: str | None, *words: object) -> dict[str, Any]:
        """Run to the end; with a ``name`` its figures are kept under it."""
        if self.args.dry_run:
            print(shlex.join(["dspark", *map(str, words), *(["--json"] if name else [])]))
            return {}
        return figures(self.out / f"{name}.json" if name else None, *words)

    def alone(self) -> None:
        """A rank without the others, and the exchange without a rank; both need a GPU."""
        target, ranks = self.args.config, self.args.ranks
        found = self.call(
            "step", "bench", "step", "--target", target, "--tp", ranks, "--steps", 500,
            "--routing", f"experts:{self.args.experts}", "--simulate-accept-length", 6.6,
        )  # fmt: skip
        self.pool = found.get("expert_pool")
        if ranks > 1:
            self.call("collectives", "bench", "collectives", "--tp", ranks)

    def make(self) -> None:
        """The target without weights, and a draft for each block that a row has."""
        made = ["make-checkpoint", "--config", self.args.config]
        pool = [] if self.pool is None else ["--expert-pool", self.pool]
        blocks = {draft.removeprefix("block") for draft, _ in self.args.rows if "block" in draft}
        wanted: dict[str, list[object]] = {"target": ["--without-weights", *pool]}
        wanted |= {f"block{block}": ["--draft-block", block] for block in sorted(blocks)}
        for name, options in wanted.items():
            if not (self.made(name) / "config.json").is_file():
                self.call(None, *made, "--out", self.made(name), *options)

    def made(self, name: str) -> Path:
        """Where the target or a draft of this config, and this pool, is or will be."""
        path = Path(self.args.config)
        text = (path / "config.json" if path.is_dir() else path).read_text()
        key = f"{text}{self.pool if name == 'target' else ''}"
        return self.out / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def row(self, number: int, draft: str, accept_length: float) -> None:
        """A server, and its figures."""
        args, name = self.args, f"row-{number}"
        serve: list[object] = [
            "--target", self.made("target"), "--tp", args.ranks, "--device", args.device,
            "--context", args.input + args.output + 64,
        ]  # fmt: skip
        if draft.startswith("block"):
            proposals = min(int(draft.removeprefix("block")), MAX_PROPOSALS)
            serve += ["--draft", self.made(draft), "--num-draft-tokens", proposals]
        elif draft != "none":
            serve += ["--draft", draft]
        if draft != "none":
            serve += ["--simulate-accept-length", accept_length]
        asked: list[object] = [
            "bench", "serving", "--address", f"http://127.0.0.1:{args.port}",
            "--workload", "random", "--random-input-len", args.input,
            "--random-output-len", args.output, "--random-range-ratio", 1,
            "--prompts", args.prompts,
            "--limit", args.plain_requests if draft == "none" else args.requests,
        ]  # fmt: skip
        if args.dry_run:
            print(shlex.join(["dspark", "serve", "--port", *map(str, [args.port, *serve])]))
            self.call(name, *asked)
            return
        with serving(self.out / f"{name}.log", args.port, args.start_s, *serve):
            found = self.call(name, *asked)
        found |= {"draft": draft, "asked_accept_length": accept_length, "config": args.config}
        write_json(self.out / f"{name}.json", found)


def _row(text: str) -> tuple[str, float]:
    draft, _, length = text.partition(",")
    kind = draft.rstrip("0123456789")
    try:
        value = float(length)
    except ValueError:
        value = 0.0
    if kind not in ("none", "nextn:", "block") or (kind == draft) != (kind == "none") or value < 1:
        raise argparse.ArgumentTypeError(
            f"a row is none,1 or nextn:N,LENGTH or blockN,LENGTH with a length >= 1, got '{text}'"
        )
    return draft, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--config", default="configs/targets/ling-3.0-flash.json")
    parser.add_argument("--rows", nargs="+", type=_row, default=[_row(one) for one in ROWS])
    parser.add_argument("--experts", type=int, default=44, help="a layer and DSpark step")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--plain-requests", type=int, default=5)
    parser.add_argument("--input", type=int, default=8192)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--prompts", default="data/prompts/heldout.jsonl")
    parser.add_argument("--device", default="auto", help="cpu: a rehearsal with a small config")
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--start-s", type=float, default=180.0, help="for a server to come up")
    parser.add_argument("--limit-s", type=float, default=400.0, help="behind it no row is begun")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    args.out = args.out or Path(f"outputs/tp{args.ranks}")
    for name in ("requests", "plain_requests", "input", "output"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if not Path(args.config).exists():
        raise ConfigError(f"--config '{args.config}' is neither a config.json nor its directory")
    bench = Bench(args)
    if not args.dry_run:
        check_writable(args.out / "report.json", "--out", ConfigError)
        args.out.mkdir(parents=True, exist_ok=True)
        for old in args.out.glob("row-*.json"):
            old.unlink()
    if args.device != "cpu":
        bench.alone()
    bench.make()
    failed = []
    for number, (draft, length) in enumerate(args.rows):
        if bench.passed_s > args.limit_s:
            failed.append(f"{draft} at {length:g}: left out, {bench.passed_s:.0f} s had passed")
            continue
        try:
            bench.row(number, draft, length)
        except RunError as error:
            failed.append(f"{draft} at {length:g}: {error}")
        if not args.dry_run:
            found = report(args.out)
            write_json(args.out / "report.json", found)
            write_text(args.out / "table.md", table(found))
            print(table(found), flush=True)
    for one in failed:
        print(one, file=sys.stderr)
    if failed:
        raise RunError(f"{len(failed)} of {len(args.rows)} rows have no figures")


if __name__ == "__main__":
    run(main)
