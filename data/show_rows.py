"""Look at rows of a prompt or response file: what is asked, what was said, what is supervised.

Examples:
    PYTHONPATH=. python data/show_rows.py data/prompts/demo.jsonl --limit 5 --category code
    PYTHONPATH=. python data/show_rows.py outputs/responses.jsonl --target smollm2-135m

With --target, rows that have token ids are decoded, and the supervised tokens (loss mask 1) are
shown green on a terminal and between the marks [[ ]] elsewhere.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.messages import conversation, user_turns
from dspark.corpus.rejects import Rejects, RowError
from dspark.corpus.responses import parse_responses
from dspark.errors import DSparkError

MARKS = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
FACTS = ("id", "sample", "category", "source", "finish_reason", "sampling", "seed", "thinking")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="files, globs or folders")
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="rows to show")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="rows to pass over first")
    parser.add_argument("--category", metavar="NAME", help="only rows of this category")
    parser.add_argument("--target", metavar="T", help="decode token ids with this tokenizer")
    args = parser.parse_args()
    rejects = Rejects()
    try:
        tokenizer = None
        if args.target:
            from dspark.target import load_tokenizer

            tokenizer = load_tokenizer(args.target)
        rows = (
            raw
            for file in expand(args.files)
            for raw in read_rows(file, rejects)
            if args.category in (None, raw.value.get("category"))
        )
        for raw in islice(rows, args.skip, args.skip + args.limit):
            known = (f"{name}={raw.value[name]}" for name in FACTS if name in raw.value)
            print(f"--- {raw.place}  " + "  ".join(known))
            try:
                print("\n".join(shown(raw, tokenizer)) + "\n")
            except RowError as error:
                rejects.add(error, raw.place)
                print(f"unusable: {error}\n")
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if rejects.rejected:
        print(rejects.summary(), file=sys.stderr)
    return 0


def shown(raw: RawRow, tokenizer: Any) -> Iterator[str]:
    """Lines for a row: decoded ids where there are ids and a tokenizer, else the messages."""
    row = raw.value
    if "input_ids" in row:
        (response,) = parse_responses(raw)
        yield f"tokens={len(response.input_ids)} supervised={response.num_supervised}"
        if tokenizer is not None:
            pairs = zip(response.input_ids, response.loss_mask, strict=True)
            text = ""
            for supervised, run in groupby(pairs, key=lambda pair: pair[1]):
                part = tokenizer.decode([token for token, _ in run])
                text += f"{MARKS[0]}{part}{MARKS[1]}" if supervised else part
            yield text
            return
    if turns := user_turns(row):
        yield from (f"user: {turn}" for turn in turns)
    elif "messages" in row or "input_ids" not in row:
        yield from (f"{m['role']}: {m['content']}" for m in conversation(row))


if __name__ == "__main__":
    sys.exit(main())
