"""Thousands of requests made from the server's own OpenAPI document: no 5xx, no hang.

    pip install schemathesis
    python benchmarks/openapi_cases.py [--cases 200] [--seed 1]

Serves a tiny random target with its draft on a free port and has `schemathesis run` play up to
``--cases`` requests for each operation, valid and invalid ones, against it. Fails (exit code 1) on
a status of 500 or more, an answer that takes over 20 s, one that the document does not describe, or
an invalid body that is accepted. A valid body may still be refused with a 4xx: that a prompt must
not be empty, or that `top_logprobs` needs `logprobs`, is not in the document. Without schemathesis
it says so and ends with 0.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from dspark.serving.server import running
from dspark.serving.settings import ServeSettings
from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer

_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)
"""A template that has a place for everything."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Play the OpenAPI document against a tiny server.")
    parser.add_argument("--cases", type=int, default=200, help="for each operation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    beside = Path(sys.executable).with_name("schemathesis")
    program = str(beside) if beside.exists() else shutil.which("schemathesis")
    if program is None:
        print("schemathesis is not installed (pip install schemathesis); nothing was checked")
        return 0
    target, tokenizer = tiny_target(), tiny_tokenizer()
    tokenizer.chat_template = _TOOLS
    settings = ServeSettings(default_max_tokens=8, max_output_tokens=16, max_body_bytes=100_000)
    with (
        running(target, tiny_draft(target), tokenizer, settings=settings) as address,
        TemporaryDirectory() as scratch,  # it keeps a cache where it runs
    ):
        command = [program, "run", f"{address}/openapi.json", "--phases", "coverage,fuzzing"]
        command += ["--exclude-checks", "positive_data_acceptance", "--request-timeout", "20"]
        command += ["--max-examples", str(args.cases), "--seed", str(args.seed)]
        command += ["--suppress-health-check", "all"]
        return subprocess.run(command, cwd=scratch).returncode


if __name__ == "__main__":
    raise SystemExit(main())
