"""What is published of Ling-3.0-flash and its DSpark draft, measured with the real weights.

    PYTHONPATH=. python benchmarks/reproduce_ling3.py MODEL DRAFT --gsm8k gsm8k.jsonl

Two servers, one behind the other: MODEL with DRAFT, then with its own NEXTN block. Of both: the
accept length on GSM8K and on real prompts beside plain decoding, request by request, and the
published workload (`random`, 8192 in and 1024 out, EOS ignored). Of the first also what the model
says to prompts of token ids whose greedy answers are known. --out gets the figures and verdict.md.
"""

import argparse
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ending import run
from servers import figures, serving
from tp4_report import PUBLISHED_MS

from dspark.config import TargetSettings
from dspark.errors import ConfigError, RunError
from dspark.provenance import check_writable, collect, write_json, write_text
from dspark.target import peek
from dspark.target.config import LingConfig

KNOWN = (
    (
        [678, 7706, 300, 11406, 341],
        [13997, 13, 363, 93740, 268, 9606, 409, 259, 3244, 6959, 198, 3517, 268, 7706, 300, 11406],
    ),
    (
        [5212, 283, 39043, 25, 810, 11, 1307, 11],
        [2274, 11, 3173, 11, 4428, 11, 5039, 11, 8897, 11, 8793, 11, 13097, 11, 6588, 13],
    ),
    (
        [1413, 13871, 66472, 3733, 3535, 198, 305, 9913, 9854, 268, 320, 10477, 97227, 1788, 1904,
         7980, 198],
        [305, 624, 320, 8664, 220, 15, 25, 198, 394, 944, 220, 15, 198, 305, 13918, 320],
    ),
)  # fmt: skip
"""Prompt and greedy answer of Ling-3.0-flash, token ids."""
FLASH = {"vocab_size": 157184, "hidden_size": 2560, "num_hidden_layers": 42, "num_experts": 512}
GSM8K_LENGTH = 6.40
"""Accept length on GSM8K on the official draft's card."""


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    what: str
    found: str
    beside: str
    verdict: str


def is_flash(config: LingConfig | None) -> bool:
    """Whether the known answers are this model's."""
    return config is not None and all(getattr(config, k) == v for k, v in FLASH.items())


def known_answers(address: str) -> Check:
    """Token for token, from the server."""
    equal = 0
    for prompt, answer in KNOWN:
        body = {
            "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "model": _model(address),
        }  # fmt: skip
        said = _post(f"{address}/v1/completions", body)["choices"][0]["token_ids"]
        equal += said == answer
    verdict = (
        "as known" if equal == len(KNOWN) else "OTHER TOKENS: is it this model, these weights?"
    )
    return Check(
        "greedy answers to prompts of token ids", f"{equal} equal", f"{len(KNOWN)}", verdict
    )


def _model(address: str) -> str:
    with urllib.request.urlopen(f"{address}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return dict(json.load(answer))
    except OSError as error:
        raise RunError(f"{url}: {error}") from None


class Reproduction:
    """Both servers' figures, and what they come to."""

    def __init__(self, args: argparse.Namespace, flash: bool) -> None:
        self.args, self.flash = args, flash
        self.found: dict[str, Any] = {}
        self.checks: list[Check] = []

    def of(self, kind: str, draft: str) -> None:
        """All figures of one draft; ``kind``: dspark or nextn."""
        args = self.args
        options: list[object] = [
            "--target", args.model, "--draft", draft, "--tp", args.ranks, "--device", args.device,
        ]  # fmt: skip
        with serving(args.out / f"{kind}.log", args.port, args.start_s, *options) as address:
            if kind == "dspark" and self.flash:
                self.checks.append(known_answers(address))
            base: list[object] = ["bench", "serving", "--address", address]
            real = [*base, "--limit", args.requests, "--max-tokens", args.max_tokens]
            if args.gsm8k:
                self._add(f"{kind}-gsm8k", *real, "--prompts", args.gsm8k)
            self._add(f"{kind}-real", *real, "--prompts", args.prompts, "--compare", "no-draft")
            self._add(
                f"{kind}-random", *base, "--workload", "random", "--prompts", args.prompts,
                "--random-input-len", args.input, "--random-output-len", args.output,
                "--random-range-ratio", 1, "--limit", args.requests,
            )  # fmt: skip
        self._judge(kind)

    def _add(self, name: str, *words: object) -> None:
        self.found[name] = figures(self.args.out / f"{name}.json", *words)

    def _judge(self, kind: str) -> None:
        shown = {"dspark": "DSpark", "nextn": self.args.nextn.upper()}[kind]
        if f"{kind}-gsm8k" in self.found:
            length = self.found[f"{kind}-gsm8k"]["accept_length"]
            card = kind == "dspark" and self.flash
            verdict = ""
            if card:
                verdict = "within 5%" if length > 0.95 * GSM8K_LENGTH else "BELOW the card"
            self.checks.append(
                Check(
                    f"{shown}: accept length on GSM8K, bonus included",
                    f"{length:.2f}",
                    f"{GSM8K_LENGTH} on the draft's card" if card else "",
                    verdict,
                )
            )
        pairs = self.found[f"{kind}-real"]
        same = pairs["same_output"] == pairs["pairs"]
        self.checks.append(
            Check(
                f"{shown}: real prompts, output with the draft and without",
                f"{pairs['same_output']} of {pairs['pairs']} equal",
                "all",
                "equal" if same else "DIFFERENT",
            )
        )
        tpot = next(one for one in pairs["figures"] if one["name"] == "mean TPOT")
        self._time(
            f"{shown}: real prompts", pairs["measured"], f"{tpot['base']:.3f} ms plain", tpot
        )
        row = {"dspark": "block16", "nextn": "nextn:5"}[kind]
        published = f"{PUBLISHED_MS[row]} ms on four B200" if self.flash else ""
        self._time(f"{shown}: random workload", self.found[f"{kind}-random"], published)

    def _time(
        self, what: str, one: dict[str, Any], beside: str, tpot: dict[str, Any] | None = None
    ) -> None:
        found = f"{one['mean_tpot_ms']:.3f} ms at {one['accept_length']:.2f} tokens a step"
        verdict = f"{tpot['ratio']:.2f} times faster" if tpot else ""
        self.checks.append(Check(f"{what}, mean TPOT", found, beside, verdict))

    def page(self) -> str:
        """Markdown."""
        args, record = self.args, collect()
        what = "" if self.flash else ", which is NOT Ling-3.0-flash: nothing published is beside it"
        lines = [
            f"# {args.model} with {args.draft}",
            "",
            f"Measured with {args.ranks} rank(s), {args.requests} requests a workload{what}. "
            f"{record.get('time', '')}, commit {record.get('git_commit') or 'unknown'}.",
            "",
            "| what | found | published or expected | verdict |",
            "|---|---|---|---|",
            *(f"| {c.what} | {c.found} | {c.beside} | {c.verdict} |" for c in self.checks),
            "",
            "Accept lengths are pooled over steps and count the target's own token. The published "
            "times are of 8192 tokens in and 1024 out; a draft with blocks of 8 adds at most 9 "
            "tokens a step, so that an accept length of 9.95 is none of such a draft.",
        ]
        return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nextn", default="nextn:5", help="the other draft; none: leave it out")
    parser.add_argument("--gsm8k", default=None, help="file of its prompts; none: leave it out")
    parser.add_argument("--prompts", default="data/prompts/heldout.jsonl", help="real prompts")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--input", type=int, default=8192)
    parser.add_argument("--output", type=int, default=1024)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--port", type=int, default=8138)
    parser.add_argument("--start-s", type=float, default=3600.0, help="for a server to come up")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce"))
    args = parser.parse_args()
    for name in ("requests", "max_tokens", "input", "output"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    check_writable(args.out / "verdict.md", "--out", ConfigError)
    config, _, _ = peek(TargetSettings(path=args.model, device=args.device))
    reproduction = Reproduction(args, is_flash(config))
    args.out.mkdir(parents=True, exist_ok=True)
    reproduction.of("dspark", args.draft)
    if args.nextn != "none":
        reproduction.of("nextn", args.nextn)
    write_json(args.out / "figures.json", reproduction.found)
    write_text(args.out / "verdict.md", reproduction.page())
    print(reproduction.page(), end="")


if __name__ == "__main__":
    run(main)
