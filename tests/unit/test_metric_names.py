"""Every figure in `metrics.jsonl` is explained where the README says so, and no other is."""

import json
import random
import re
from pathlib import Path

from dspark import config_io
from dspark.testing import save_tiny_target
from dspark.training import monitor, program

# on a GPU only; with target workers, or with features that are computed where shards lack them:
# their own tests look for these
_ELSEWHERE = {
    "perf/mem_gib",
    "perf/features_wait_s",
    *(f"perf/rows_{source}" for source in ("shards", "window", "generated")),
}


def documented(text: str) -> set[str]:
    """Names in double backquotes: {a,b} are two, and a name without a slash is of the section of
    the one before."""
    names, section = set(), ""
    for name in re.findall(r"``([^`]+)``", text):
        before, slash, rest = name.rpartition("/")
        section = before if slash else section
        whole = re.fullmatch(r"(.*)\{(.*)\}(.*)", rest)
        ends = [f"{whole[1]}{part}{whole[3]}" for part in whole[2].split(",")] if whole else [rest]
        names |= {f"{section}/{end}" for end in ends}
    return names


def written(directory: Path) -> set[str]:
    """Names in the lines of a short run with validation; numbers of slots as `@k`."""
    save_tiny_target(directory / "target")
    rng = random.Random(0)
    rows = []
    for number in range(4):
        ids = [rng.randrange(97, 107) for _ in range(30)]
        rows.append({"id": f"r{number}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * 26})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompt = {"messages": [{"role": "user", "content": "ab"}]}
    (directory / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    overrides = [
        "target.dtype=float32",
        "target.device=cpu",
        "draft.num_layers=1",
        "draft.block_size=3",
        "draft.num_taps=2",
        "draft.markov_rank=4",
        "train.steps=1",
        "train.ema_decay=0.9",
        "train.num_anchors=4",
        "train.validation_max_new_tokens=8",
        f"target.path={directory / 'target'}",
        f"data.responses=[{directory / 'rows.jsonl'}]",
        f"train.validation_prompts=[{directory / 'prompts.jsonl'}]",
        f"train.output_dir={directory / 'out'}",
    ]
    program.run(config_io.load(None, overrides))
    lines = (directory / "out" / "metrics.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)}
    return {re.sub(r"@\d+$", "@k", name) for name in names - {"step"}}


def test_every_figure_has_its_explanation_and_the_reverse(tmp_path: Path) -> None:
    told, found = documented(monitor.__doc__ or ""), written(tmp_path)
    assert {"train/accept_rate@k", "train/confidence_bias", "val/survival@k"} <= told & found
    assert found - told == set()
    assert told - found - _ELSEWHERE == set()
