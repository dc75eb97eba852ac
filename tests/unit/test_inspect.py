"""`dspark inspect` and `make-checkpoint`: the published counts and bytes, and wrong use."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.bench.inspect import inspect
from dspark.cli import main
from dspark.errors import TargetError
from dspark.export.hf import export_draft
from dspark.target.config import LingConfig
from dspark.target.sizes import Routing, rank_bytes, step_bytes
from dspark.target.synthetic import make_checkpoint
from dspark.testing import TINY_LING, save_tiny_target, tiny_draft, tiny_target

ROOT = Path(__file__).parents[2]
FLASH = ROOT / "configs/targets/ling-3.0-flash.json"
TINY = ROOT / "configs/targets/ling-3.0-tiny.json"
DRAFT = ROOT / "configs/drafts/ling-3.0-flash-dspark.json"
CONFIG = LingConfig.from_file(FLASH)


def dspark(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    before = sys.argv
    sys.argv = ["dspark", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as left:
            main()
    finally:
        sys.argv = before
    out = capsys.readouterr()
    return int(left.value.code or 0), out.out, out.err


def test_the_counts_of_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dspark(capsys, "inspect", FLASH, "--tp", 4, "--json")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert code == 0
    assert report["parameters"] == 127_486_405_600
    assert report["main_parameters"] == 124_414_211_552
    assert report["tensors"] == 63_783
    assert report["float32_values"] == 165_472
    assert report["active_parameters"] == 5_103_302_112
    held = report["bytes_per_rank"]
    assert held["main_model"] / 1e6 == pytest.approx(62_301.7, abs=0.05)
    assert held["kda"] / 1e6 == pytest.approx(1_103.452, abs=5e-4)
    assert held["nextn"] / 1e6 == pytest.approx(1_560.0, abs=0.05)
    assert held["kda_state"] / 1e6 == pytest.approx(18.350, abs=5e-4)
    assert held["latent_per_token"] == 8_064
    assert inspect(ROOT / "configs/targets/ling-3.0-tiny.json")["parameters"] == 7_893_392_800


@pytest.mark.parametrize(
    ("tokens", "routing", "experts", "routed", "total"),
    [
        (1, "uniform", 8.00, 943.7, 2_750),
        (6, "uniform", 46.16, 5_445.7, 7_252),
        (9, "uniform", 67.66, 7_981.5, 9_788),
        (16, "uniform", 114.04, 13_452.7, 15_259),
        (6, "overlap:0.5", 28, 3_303.0, 5_110),
        (9, "overlap:0.5", 40, 4_718.6, 6_525),
        (16, "overlap:0.5", 68, 8_021.6, 9_828),
    ],
)
def test_bytes_of_a_verify_step(
    tokens: int, routing: str, experts: float, routed: float, total: float
) -> None:
    step = step_bytes(CONFIG, 4, tokens, Routing.parse(routing))
    assert step.experts_per_layer == pytest.approx(experts, abs=0.005)
    assert step.fixed_weights / 1e6 == pytest.approx(1_702.5, abs=0.05)
    assert step.routed_experts / 1e6 == pytest.approx(routed, abs=0.5)
    assert step.kda_state / 1e6 == pytest.approx(36.70, abs=0.005)
    assert step.convolution_tails / 1e6 == pytest.approx(1.29, abs=0.005)
    assert step.latent_cache / 1e6 == pytest.approx(66.06, abs=0.005)
    assert step.state_per_row / 1e6 == pytest.approx(18.35 * tokens, abs=0.1)
    assert step.replay_records / 1e6 == pytest.approx(0.288 * tokens, abs=0.01)
    assert step.total / 1e6 == pytest.approx(total, abs=0.6)
    assert step.floor_us(4.8) == pytest.approx(total / 4.8, abs=1)


def test_ranks_share_what_is_split_and_repeat_the_rest() -> None:
    one, four = rank_bytes(CONFIG, 1), rank_bytes(CONFIG, 4)
    assert four["expert"] * 4 == one["expert"]
    assert four["router"] == one["router"]
    assert four["latent_per_token"] == one["latent_per_token"]
    assert four["kda_state"] * 4 == one["kda_state"]


def test_fp8_blocks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a name that no table is wide enough for, with what rich takes for markup
    path = tmp_path / ("long-" * 30 + "[bold].json")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path.write_text(json.dumps({**TINY_LING["flash"], "quantization_config": fp8}))
    code, out, err = dspark(capsys, "inspect", path, "--json")
    assert code == 0
    assert "fp8 blocks; bytes are those of bf16" in json.loads(out.splitlines()[-1])["note"]
    assert str(path) in err.splitlines()[0]
    assert "note" not in inspect(FLASH)


def test_the_memory_plan_stands_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", FLASH, "--tp", 4, "--plan", "--context", 65536, "--draft", DRAFT, "--json"]
    code, out, err = dspark(capsys, *words)
    assert code == 0
    plan = json.loads(out.splitlines()[-1])["memory_plan"]
    assert (plan["context"], plan["ranks"]) == (65536, 4)
    assert plan["target_weights"] / 1e6 == pytest.approx(62_905.3, abs=0.1)
    assert plan["total"] == sum(plan.values()) - plan["total"] - 65536 - 4
    assert "memory plan, context 65536" in err
    assert f"{plan['total'] / 1e6:,.3f}" in err
    report = inspect(FLASH, ranks=4)
    more = plan["target_weights"] - report["bytes_per_rank"]["main_model"]
    assert f"whole embedding on every rank, {more / 1e6:.1f} MB more" in report["note"]
    alone = inspect(FLASH, plan=True)["memory_plan"]
    assert (alone["context"], alone["draft_weights"]) == (32768, 0)


def test_the_memory_plan_knows_a_nextn_draft(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", FLASH, "--tp", 4, "--plan", "--draft", "nextn:3", "--json"]
    code, out, _ = dspark(capsys, *words)
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    plan = report["memory_plan"]
    assert plan["draft_weights"] == report["bytes_per_rank"]["nextn"]
    assert plan["draft_weights"] / 1e6 == pytest.approx(1_560.0, abs=0.05)
    alone = inspect(FLASH, ranks=4, plan=True)["memory_plan"]
    assert plan["caches"] - alone["caches"] == (32768 + 32) * 576 * 2


def test_other_models_are_counted(tmp_path: Path) -> None:
    report = inspect(save_tiny_target(tmp_path / "llama"))
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["parameters"] > 100_000


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": 3}, "no model that can be inspected"),
        ({"architectures": True, "model_type": None}, "no model that can be inspected"),
        ({"architectures": ["Other"], "model_type": "bailing_moe_linear"}, "bailing_moe_linear."),
    ],
)
def test_what_is_no_model_is_said_shortly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY_LING["flash"], "model_type": "x", **keys}))
    code, _, err = dspark(capsys, "inspect", path)
    assert code == 2
    assert message in err
    assert len(err) < 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "nowhere.json"], "nowhere.json"),
        (["inspect", str(FLASH), "--tp", "3"], "num_attention_heads 32 cannot be shared by 3"),
        (
            ["inspect", str(FLASH), "--verify-tokens", "9", "--routing", "overlap:2"],
            "overlap:SHARE (0..1) or experts:N (N >= 1), got 'overlap:2'",
        ),
        (["inspect", "ling-4"], "'ling-4' is neither a config.json nor a shipped one (ling-3.0-"),
        (["inspect", str(FLASH), "--verify-tokens", "0"], "verify-tokens"),
        (["inspect", str(FLASH), "--verify-tokens", "17"], "verify-tokens"),
        (["inspect", str(FLASH), "--routing", "uniform"], "give --verify-tokens too"),
        (["inspect", str(FLASH), "--context", "0"], "context 0 says what a verify step reads"),
        (
            ["inspect", str(FLASH), "--verify-tokens", "9", "--context", "99999999"],
            "context 99999999 is more than the model's",
        ),
        (["inspect", str(FLASH), "--draft", str(DRAFT)], "is for the memory plan; give --plan too"),
        (
            ["inspect", str(FLASH), "--plan", "--draft", "nextn:99"],
            "nextn:N with N in 1..15, got 'nextn:99'",
        ),
        (["inspect", str(FLASH), "--plan", "--context", "1"], "context must lie in 2..262144"),
        (["inspect", str(FLASH), "--plan", "--draft", "none"], "(none: leave it out), got 'none'"),
        (["inspect", str(FLASH), "--plan", "--tp", "32"], "a width of 24 is no multiple of 16"),
        (
            ["inspect", str(TINY), "--plan", "--draft", str(DRAFT)],
            "target_layer_ids [1, 11, 23, 29, 35] does not fit",
        ),
        (
            ["inspect", str(FLASH), "--verify-tokens", "9", "--routing", "experts:73"],
            "must lie in 8..72 for 9 rows with 8 experts each, got 73",
        ),
        (["inspect", str(FLASH), "--plan", "--draft", str(FLASH)], "but a DSpark draft says"),
        (["inspect", str(DRAFT), "--plan"], "leave --plan out"),
        (["inspect", str(DRAFT), "--tp", "2"], "DSparkModel; leave --tp and --verify-tokens out"),
        (["inspect", str(DRAFT), "--verify-tokens", "9"], "known for Ling-3.0 targets only"),
        (["make-checkpoint", "--config", "nowhere.json", "--out", "x"], "nowhere.json"),
        (["make-checkpoint", "--config", str(FLASH), "--out", str(ROOT / "tests")], "holds"),
        (["make-checkpoint", "--config", str(FLASH), "--out", str(FLASH)], "is a file"),
    ],
)
def test_wrong_use_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, err = dspark(capsys, *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_shipped_target_is_known_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = dspark(capsys, "inspect", "ling-3.0-flash", "--verify-tokens", "16", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == inspect(FLASH, verify_tokens=[16])


def test_a_checkpoint_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_LING["tiny"]))
    words = ["make-checkpoint", "--config", config, "--out", tmp_path / "made", "--json"]
    code, out, _ = dspark(capsys, *words)
    assert code == 0
    assert json.loads(out.splitlines()[-1])["synthetic"] is True
    assert inspect(tmp_path / "made")["tensors"] > 100
    # a directory names its config.json
    code, _, _ = dspark(capsys, *words[:2], tmp_path / "made", "--out", tmp_path / "again")
    assert code == 0
    assert (tmp_path / "again" / "config.json").is_file()
    code, _, err = dspark(capsys, *words)
    assert code == 2
    assert "already holds config.json" in err


def test_an_interrupted_checkpoint_is_made_anew(tmp_path: Path) -> None:
    config = LingConfig.from_dict(TINY_LING["tiny"])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    make_checkpoint(config, whole)
    made = {one.name: one.read_bytes() for one in whole.iterdir()}
    broken.mkdir()
    # all but the last file, and shards that were cut otherwise
    cut = ("model.safetensors.index.json", "model-00001-of-00002.safetensors")
    for name in (*made, *cut, ".model.safetensors.7.tmp", ".config.json.7.tmp"):
        (broken / name).write_bytes(b"half")
    (broken / "config.json").unlink()
    make_checkpoint(config, broken)
    assert {one.name: one.read_bytes() for one in broken.iterdir()} == made


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=5000, free=1000))
    with pytest.raises(TargetError, match=r"needs 1,\d{3},\d{3} bytes .* 1,000 free"):
        make_checkpoint(LingConfig.from_dict(TINY_LING["tiny"]), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_draft_in_the_layout_of_speculators_is_counted(tmp_path: Path) -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    export_draft(draft, tmp_path / "a", target, format="vllm", check=False)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    del config["num_target_layers"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    report = inspect(tmp_path / "a")
    assert report["own_parameters"] == sum(one.numel() for _, one in draft.trainable())
    assert (report["architecture"], report["target_layer_ids"]) == ("DSparkSpeculator", [1, 2, 3])


def test_a_dense_target_has_a_plan_with_its_released_draft() -> None:
    target = ROOT / "configs/targets/qwen3-8b.json"
    draft = ROOT / "configs/drafts/qwen3-8b-dspark-block7.json"
    report = inspect(target, plan=True, context=32768, draft=draft)
    assert report["parameters"] == 8_190_735_360
    plan = report["memory_plan"]
    assert plan["target_weights"] == 2 * report["parameters"]
    assert plan["draft_weights"] == 2 * 1_126_422_017
    assert plan["caches"] == (32768 + 32) * (147_456 + 20_480)
    assert 24e9 < plan["total"] < 40e9
    for options, message in (
        ({"ranks": 2, "plan": True}, "leave --plan out"),
        ({"verify_tokens": [8]}, "leave --tp and --verify-tokens out"),
    ):
        with pytest.raises(TargetError, match=message):
            inspect(target, **options)  # type: ignore[arg-type]
