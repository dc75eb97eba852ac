"""The small real Ling-3.0 target: its shape, and the program that trains it, end to end."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.config import TargetSettings
from dspark.errors import ConfigError
from dspark.serving.graph.weights import unsupported_shapes
from dspark.target import load, load_tokenizer
from dspark.target.config import LingConfig
from dspark.target.layout import tensors
from dspark.target.ling import LingTarget, sequence_call
from dspark.target.model import check_ranks
from dspark.target.mtp import nextn_hidden
from dspark.target.weights import load_model
from dspark.testing import TINY_LING

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/targets/ling3-nano.json"
PLANTED = "Tell me how one two three four five six seven eight nine ten eleven twelve are spelt."


def test_it_is_small_and_has_every_branch_of_the_large_one() -> None:
    config, flash = (
        LingConfig.from_file(CONFIG.with_name(f"{name}.json"))
        for name in ("ling3-nano", "ling-3.0-flash")
    )
    specs = list(tensors(config))
    assert sum(spec.size for spec in specs) == 7_974_152
    assert sum(spec.nbytes for spec in specs) < 2**24 - 640 * 2**10
    assert config.layer_group_size == flash.layer_group_size
    assert {spec.part for spec in specs} == {spec.part for spec in tensors(flash, alike=False)}
    assert 1 < config.topk_group < config.n_group
    assert config.expert_limit(11) > 0
    assert config.shared_limit(11) > 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_kernels_take_its_shapes_whole_and_shared(ranks: int) -> None:
    config = LingConfig.from_file(CONFIG)
    check_ranks(config, ranks)
    assert unsupported_shapes(config, None, ranks) is None


def train(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    raw = {**TINY_LING["flash"], "eos_token_id": 2, "pad_token_id": 0}
    limits = {"expert_swiglu_limit_list": [0, 0, 0, 0, 0, 0, 4]}
    (tmp_path / "mini.json").write_text(json.dumps({**raw, **limits}))
    return subprocess.run(
        [sys.executable, "train/train_ling3_nano.py", "--config", str(tmp_path / "mini.json"),
         "--device", "cpu", "--out", str(tmp_path / "out"), *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_mini_one_learns_and_loads(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": PLANTED if n == 7 else f"Count from {n} to {n + 3}."},
                {"role": "assistant", "content": f"{n}, {n + 1}, {n + 2}, {n + 3}"},
            ],
            "finish_reason": "stop",
        }
        for n in range(60)
    ]
    answers, held = tmp_path / "responses.jsonl", tmp_path / "eval.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held.write_text(json.dumps({"turns": [PLANTED.replace("Tell me how", "Say how")]}) + "\n")
    library = Path(json.__file__).parent
    done = train(
        tmp_path, "--responses", str(answers), "--exclude", str(held), "--library", str(library),
        "--heldout", "0.2", "--steps", "24", "--batch", "4", "--length", "64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    out = tmp_path / "out"
    report = json.loads((out / "training.json").read_text())
    assert told["bytes"] == sum(path.stat().st_size for path in out.iterdir())
    assert report["steps"] == 24
    assert report["text"]["dropped"] == {"chat: 13-gram of eval.jsonl": 1}
    seen = [
        part["chat"]["documents"] for part in (report["text"]["train"], report["text"]["heldout"])
    ]
    assert sum(seen) == 59
    assert seen[1] > 0
    first, last = report["history"][0], report["history"][-1]
    assert last["heldout_loss"] < first["heldout_loss"] - 0.5
    assert last["heldout_nextn_loss"] < first["heldout_nextn_loss"] - 0.3
    assert set(report["bits_per_byte"]["ling3-nano"]) == {"chat", "code"}
    assert "13-gram of eval.jsonl 1" in (out / "README.md").read_text()

    target = load(TargetSettings(path=str(out), dtype="float32"))
    tokenizer = load_tokenizer(str(out))
    assert isinstance(target, LingTarget)
    assert target.eos_ids == {2, 0}
    prompt = tokenizer.apply_chat_template(rows[0]["messages"], return_dict=False)
    ids = torch.tensor([prompt])
    logits = target.logits(target.features(ids, ()).last_hidden)[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    assert loss < 5.0  # a fresh one: log(512) = 6.2
    model = load_model(out, target.config, dtype=torch.float32, nextn=True)
    with torch.no_grad():
        call = sequence_call(ids[:, :-1].shape, ids.device)
        hidden, _ = model(ids[:, :-1], call)
        guess = model.logits(nextn_hidden(model, hidden, ids[:, 1:], call))[0]
    assert torch.nn.functional.cross_entropy(guess[:-1], ids[0, 2:]) < 5.4


def program_of() -> Any:
    spec = importlib.util.spec_from_file_location("nano", ROOT / "train/train_ling3_nano.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def test_the_shipped_card_is_that_of_its_training() -> None:
    shipped = ROOT / "checkpoints/ling3-nano"
    report = json.loads((shipped / "training.json").read_text())
    card = (shipped / "README.md").read_text()
    assert card == program_of().card(report)
    assert f"{report['tokens_seen'] / report['tokens']['train']:.1f} passes" in card


def test_what_would_waste_a_training_is_refused_before_it(tmp_path: Path) -> None:
    program = program_of()
    (tmp_path / "held").mkdir()
    (tmp_path / "held/model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"already holds model\.safetensors"):
        program.check_place(tmp_path / "held")
    with pytest.raises(ConfigError, match=r"already holds model\.safetensors"):
        program.check_place(tmp_path / "held/model.safetensors")
    program.check_place(tmp_path / "new/deeper")
    program.free_bytes = lambda _: 1000
    with pytest.raises(ConfigError, match="its disk has 1,000 free"):
        program.check_place(tmp_path / "new")
    fine: dict[str, Any] = {
            "batch": 1, "length": 64, "steps": 1, "seed": 0, "lr": 0.1, "adam_lr": 0.1,
            "weight_decay": 0.0, "nextn_weight": 0.0, "library": None, "minutes": 1.0,
            "dropout": 0.0, "heldout": 0.0, "set": [], "config": CONFIG}  # fmt: skip
    program.configured(SimpleNamespace(**fine))
    for name, value in (("lr", math.nan), ("adam_lr", math.inf), ("seed", -1), ("length", 1),
                        ("minutes", math.inf), ("library", tmp_path / "no")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} "):
            program.configured(SimpleNamespace(**{**fine, name: value}))
