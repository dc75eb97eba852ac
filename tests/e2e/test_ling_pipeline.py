"""The main job on a Ling-3.0 checkpoint through the command line, with SYNTHETIC weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from dspark import target as targets
from dspark.config import TargetSettings
from dspark.export.load import load_draft
from dspark.serving.server import running
from dspark.testing import TINY_LING


@pytest.fixture
def dspark(forks: Any) -> Callable[..., dict[str, Any]]:
    def command(*words: object) -> dict[str, Any]:
        ended = forks.run([*map(str, words), "--json"], command=True)
        assert ended.codes == [0], ended.said
        report: dict[str, Any] = json.loads(ended.said[0].splitlines()[-1])
        return report

    return command


@pytest.mark.slow
def test_from_a_checkpoint_to_a_served_draft(
    dspark: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config, target = tmp_path / "config.json", tmp_path / "ling"
    config.write_text(json.dumps(TINY_LING["flash"]))
    made = dspark("make-checkpoint", "--config", config, "--out", target, "--shard-mb", 1)
    assert made["synthetic"] is True
    held = sum(
        values.numel()
        for file in target.glob("*.safetensors")
        for values in load_file(file).values()
    )
    assert dspark("inspect", target)["parameters"] == held

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(4)))
    responses, run, draft = tmp_path / "responses.jsonl", tmp_path / "run", tmp_path / "draft"
    dspark(
        "sample", "--target", target, "--prompts", prompts, "--out", responses,
        "sample.settings=[{temperature: 0}]", "sample.max_new_tokens=24", "target.dtype=float32",
    )  # fmt: skip
    assert dspark("doctor", responses, "--target", target)["rows"]["accepted"] == 4
    trained = dspark(
        "train", f"target.path={target}", "target.dtype=float32", f"data.responses=[{responses}]",
        f"train.output_dir={run}", "draft.num_layers=2", "draft.target_layer_ids=[0,2,4]",
        "draft.block_size=4", "draft.markov_rank=32", "train.steps=80", "train.batch_size=4",
        "train.num_anchors=16", "train.lr=0.01", "loss.ce_weight=1.0",
        f"train.validation_prompts=[{prompts}]", "train.validation_max_new_tokens=16",
    )  # fmt: skip
    best = trained["best_accept_length"]
    assert isinstance(best, float)
    assert best > 2.5, best
    dspark("export", run, draft, "--target", target, "--dtype", "float32")
    assert json.loads((draft / "config.json").read_text())["architectures"] == ["LingDSparkModel"]
    report = dspark(
        "eval", "--target", target, "--draft", draft, "--prompts", prompts,
        "--max-new-tokens", 16, "target.dtype=float32",
    )  # fmt: skip
    assert report["lossless"] is True
    assert report["accept_length"] == pytest.approx(best, rel=0.05)

    of = TargetSettings(path=str(target), dtype="float32")
    loaded, tokenizer = targets.load(of), targets.load_tokenizer(of)
    with running(loaded, load_draft(draft, target=loaded), tokenizer) as address:
        answer = httpx.post(
            f"{address}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "say 0"}], "max_tokens": 16},
        ).json()
    assert answer["usage"]["completion_tokens"] >= 1
