"""How much memory reading a responses.jsonl takes, and how little of it grows with the file.

    PYTHONPATH=. python benchmarks/read_memory.py --mb 1 200 2000

Makes a file of each size in a temporary directory (rows of about 2 KB of text with their ids and
masks), reads it in a process of its own as `dspark doctor`, the trainer and `dspark sample` do, and
prints each process's peak resident size. The first size, a small one, is what the libraries and
the tokenizer take by themselves.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_TRAINER = """
import sys
from dspark.config import DataSettings
from dspark.corpus.dataset import ResponseRows
from dspark.corpus.ids import id_limit
from dspark.target import load_tokenizer
tokenizer = load_tokenizer("smollm2-135m")
data = DataSettings(responses=(sys.argv[1],))
rows = ResponseRows(data, tokenizer, vocab_size=id_limit(tokenizer))
for index in range(0, len(rows), 7):
    rows[index]
rows.used_ids(), max(rows.lengths())
"""
_PROMPTS = """
import sys
from dspark.corpus.prompts import iterate_prompts
from dspark.corpus.rejects import Rejects
for prompt in iterate_prompts([sys.argv[1]], None, Rejects()):
    pass
"""
READERS = {
    "dspark doctor": ["-m", "dspark", "doctor", "FILE", "--target", "smollm2-135m", "--show", "0"],
    "the trainer's rows": ["-c", _TRAINER, "FILE"],
    "dspark sample's prompts": ["-c", _PROMPTS, "FILE"],
}


def make(path: Path, size: int) -> int:
    """Write rows until the file has ``size`` bytes; returns how many."""
    rng = random.Random(7)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(4000)]
    texts = [" ".join(rng.choices(words, k=310)) for _ in range(64)]
    rows = written = 0
    with open(path, "w") as file:
        while written < size:
            text = texts[rows % len(texts)]
            ids = [rng.randrange(1000, 48000) for _ in range(24)] * 20
            messages = [
                {"role": "user", "content": text[:300]},
                {"role": "assistant", "content": text[300:]},
            ]
            row = {
                "format": "dspark.responses/1",
                "id": f"{rng.getrandbits(64):016x}",
                "messages": messages,
                "input_ids": ids,
                "loss_mask": [0] * 80 + [1] * 400,
                "finish_reason": "stop",
                "sampling": {"temperature": rng.choice([0.7, 1.0]), "top_p": 0.95},
                "thinking": False,
            }
            written += file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def peak(words: list[str], path: Path) -> tuple[float, float]:
    """Peak resident MiB and seconds of a child process; this one is small, so that it shows."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, *(str(path) if word == "FILE" else word for word in words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    said = child.stderr.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{words}: exit {os.waitstatus_to_exitcode(status)}\n{said}")
    return usage.ru_maxrss / 1024, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 200, 2000], help="file sizes")
    parser.add_argument("--dir", help="where the files go; TMPDIR without it")
    options = parser.parse_args()
    print("| file | rows | " + " | ".join(READERS) + " |")
    print("|---|---|" + "---|" * len(READERS))
    for size in options.mb:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            path = Path(folder) / "responses.jsonl"
            rows = make(path, round(size * 1e6))
            cells = [peak(words, path) for words in READERS.values()]
        told = " | ".join(f"{mib:.0f} MiB, {seconds:.0f} s" for mib, seconds in cells)
        print(f"| {size:g} MB | {rows:,} | {told} |", flush=True)


if __name__ == "__main__":
    main()
