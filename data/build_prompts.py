"""Build a file of training prompts: generated ones and, if asked for, ones from code and packages.

Example:
    PYTHONPATH=. python data/build_prompts.py --out outputs/prompts.jsonl --count 20000 --seed 0 \\
        --stdlib --exclude 'eval/*.jsonl' data/prompts/heldout.jsonl

The same arguments give the same file (with --stdlib: on the same Python version). Where the other
sources come from, and under which licences, is in data/README.md.
"""

import argparse
import glob
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dspark.corpus import tasks
from dspark.corpus.harvest import stdlib_prompts, wheel_prompts
from dspark.corpus.overlap import Overlap, read_texts
from dspark.corpus.tasks import Task
from dspark.errors import ConfigError, DataError, DSparkError
from dspark.provenance import write_text

MAX_CHARACTERS = 1200
MAX_FOREIGN = 0.4
"""At most this share of a category comes from outside the generators."""


class Selection:
    """The prompts taken so far, and why others were not."""

    def __init__(self, overlap: Overlap) -> None:
        self.chosen: list[Task] = []
        self.drops: Counter[str] = Counter()
        self._overlap = overlap
        self._seen: set[str] = set()

    def take(self, candidates: Iterable[Task], count: int) -> int:
        """Add up to ``count`` usable candidates; returns how many it were."""
        before = len(self.chosen)
        for task in candidates:
            if len(self.chosen) - before >= count:
                break
            if reason := self._unusable(task.text):
                self.drops[f"{task.kind.split(':')[0]}: {reason}"] += 1
            else:
                self._seen.add(" ".join(task.text.split()))
                self.chosen.append(task)
        return len(self.chosen) - before

    def _unusable(self, text: str) -> str | None:
        if not text.strip():
            return "empty"
        if len(text) > MAX_CHARACTERS:
            return "too long"
        if sum(not c.isascii() for c in text) > 0.05 * len(text):
            return "not English"
        if " ".join(text.split()) in self._seen:
            return "duplicate"
        return self._overlap.kind_of(text)


def build(args: argparse.Namespace) -> Selection:
    rng = random.Random(f"{args.seed}:foreign")
    foreign: list[Task] = []
    if args.stdlib:
        foreign += stdlib_prompts(rng)
    if args.wheels:
        foreign += wheel_prompts(args.wheels, rng)
    rng.shuffle(foreign)

    selection = Selection(Overlap(read_texts(matching(args.exclude))))
    for category, share in tasks.SHARES.items():
        count = round(args.count * share)
        others = [task for task in foreign if task.category == category]
        count -= selection.take(others, int(count * MAX_FOREIGN))
        # A tenth more than needed, so that drops can be made up for.
        made = tasks.generate(count + count // 10 + 50, args.seed, shares={category: 1.0})
        taken = selection.take(made, count)
        if taken < count:
            raise DataError(f"only {taken} of {count} generated {category} prompts were usable")
    rng.shuffle(selection.chosen)
    return selection


def matching(patterns: list[str]) -> list[Path]:
    """Files of some globs; a glob without a file is an error, since it would exclude nothing."""
    found: list[Path] = []
    for pattern in patterns:
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise ConfigError(f"--exclude {pattern} matches no file")
        found += [Path(path) for path in paths]
    return found


def row(task: Task) -> dict[str, object]:
    harvested = task.kind not in tasks.KINDS
    return {
        "id": hashlib.sha256(task.text.encode()).hexdigest()[:16],
        "messages": [{"role": "user", "content": task.text}],
        "category": task.category,
        "source": task.kind if harvested else f"tasks:{task.kind}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=20000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--stdlib", action="store_true", help="add functions of Python's standard library"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="add prompts of downloaded wheels (README.md)"
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], metavar="GLOB",
        help="JSON-lines files whose text must not appear: evaluation and held-out prompts",
    )  # fmt: skip
    args = parser.parse_args()
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        selection = build(args)
        lines = (json.dumps(row(task), ensure_ascii=False) + "\n" for task in selection.chosen)
        write_text(args.out, "".join(lines))
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: --out {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return ConfigError.exit_code
    for title, counts in (
        ("category", Counter(task.category for task in selection.chosen)),
        ("source", Counter(str(row(task)["source"]).split(":")[0] for task in selection.chosen)),
        ("dropped", selection.drops),
    ):
        print(f"{title}: " + (", ".join(f"{k} {n}" for k, n in sorted(counts.items())) or "none"))
    print(f"wrote {len(selection.chosen)} prompts, {args.out.stat().st_size:,} bytes: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
