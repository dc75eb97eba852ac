"""Ling-3.0 checkpoints: table of tensors, round trips, one rank's slice, what is refused."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import TargetError
from dspark.target import load
from dspark.target.config import LingConfig
from dspark.target.layout import is_quantised, tensors
from dspark.target.model import LingModel
from dspark.target.shards import INDEX_NAME
from dspark.target.synthetic import make_checkpoint
from dspark.target.weights import load_model, save_model
from dspark.testing import TINY_LING, save_tiny_ling

ROOT = Path(__file__).parents[2]
CONFIG = LingConfig.from_dict(TINY_LING["flash"])


def official(name: str) -> LingConfig:
    return LingConfig.from_file(ROOT / "configs" / "targets" / name)


def checkpoint(directory: Path, shard_bytes: int = 300_000) -> Path:
    make_checkpoint(CONFIG, directory, shard_bytes=shard_bytes)
    return directory


def test_the_table_has_the_released_counts() -> None:
    config = official("ling-3.0-flash.json")
    flash = list(tensors(config))
    assert sum(spec.size for spec in flash) == 127_486_405_600
    assert len(flash) == len({spec.name for spec in flash}) == 63_783
    assert sum(spec.size for spec in flash if spec.float32) == 165_472
    assert sum(is_quantised(config, spec.name) for spec in flash) == 63_332
    tiny = list(tensors(official("ling-3.0-tiny.json")))
    assert sum(spec.size for spec in tiny) == 7_893_392_800


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ling-3.0-flash.json", "ling-3.0-tiny.json"])
def test_the_modules_hold_what_the_table_says(name: str) -> None:
    config = official(name)
    with torch.device("meta"):
        model = LingModel(config, nextn=True)
    held = [*model.parameters(), *model.buffers()]
    assert sum(one.numel() for one in held) == sum(spec.size for spec in tensors(config))
    for ranks in (2, 4):
        with torch.device("meta"):
            part = LingModel(config, ranks=ranks, nextn=True)
        local = [*part.parameters(), *part.buffers()]
        wanted = sum(torch.Size(spec.local_shape(ranks)).numel() for spec in tensors(config))
        assert sum(one.numel() for one in local) == wanted


@pytest.mark.parametrize("shard_bytes", [300_000, 1 << 30])
def test_a_round_trip_changes_no_byte(tmp_path: Path, shard_bytes: int) -> None:
    source = checkpoint(tmp_path / "made", shard_bytes)
    files = sorted(p.name for p in source.glob("*.safetensors*"))
    assert len(files) == (1 if shard_bytes > 1 << 29 else 8)  # seven shards and the index
    save_model(load_model(source, CONFIG, nextn=True), tmp_path / "again", shard_bytes=shard_bytes)
    for name in [*files, "config.json"]:
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes(), name


def test_weights_follow_from_seed_and_name(tmp_path: Path) -> None:
    one, same, other = (
        {k: v for f in d.glob("*.safetensors") for k, v in load_file(f).items()}
        for d in (
            save_tiny_ling(tmp_path / "a"),
            checkpoint(tmp_path / "b"),
            save_tiny_ling(tmp_path / "c", seed=1),
        )
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_without_the_nextn_block_the_config_says_so(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "made")
    save_model(load_model(source, CONFIG), tmp_path / "main")
    config = LingConfig.from_file(tmp_path / "main" / "config.json")
    assert config.num_nextn_predict_layers == 0
    load_model(tmp_path / "main", config)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_slices_of_all_ranks_make_the_whole(tmp_path: Path, ranks: int) -> None:
    source = checkpoint(tmp_path / "made")
    whole = load_model(source, CONFIG, nextn=True)
    parts = [load_model(source, CONFIG, ranks=ranks, rank=r, nextn=True) for r in range(ranks)]
    held = [dict(part.state_dict()) for part in parts]
    for name, expected in whole.state_dict().items():
        pieces = [one[name] for one in held]
        if pieces[0].shape == expected.shape:
            assert all(torch.equal(piece, expected) for piece in pieces), name
            continue
        split = next(d for d in range(expected.dim()) if pieces[0].shape[d] != expected.shape[d])
        if name.endswith("experts.gate_up"):
            gates, ups = zip(*(piece.chunk(2, 1) for piece in pieces), strict=True)
            joined = torch.cat([*gates, *ups], 1)
        else:
            joined = torch.cat(pieces, split)
        assert torch.equal(joined, expected), name


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TargetError, match="num_attention_heads 4 cannot be shared by 3 ranks"):
        LingModel(CONFIG, ranks=3)


def quantise(directory: Path) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint as block fp8; what its weights then are, multiplied out."""
    expected = {}
    for file in directory.glob("*.safetensors"):
        held = load_file(file)
        for name in list(held):
            if not is_quantised(CONFIG, name):
                continue
            weight = held[name].float()
            rows, columns = weight.shape
            # neighbouring blocks get scales of their own
            weight = weight * 4.0 ** (torch.arange(rows) // 128)[:, None]
            scales = torch.zeros(-(-rows // 128), -(-columns // 128))
            exact = torch.zeros_like(weight)
            packed = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                    scales[i, j] = 2.0 ** (weight[block].abs().max() / 448).log2().ceil()
                    packed[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                    exact[block] = packed[block].float() * scales[i, j]
            held[name], held[name + "_scale_inv"] = packed, scales
            expected[name] = exact.bfloat16()
        save_file(held, file, metadata={"format": "pt"})
    (directory / INDEX_NAME).unlink(missing_ok=True)
    return expected


@pytest.mark.slow
def test_fp8_blocks_are_multiplied_out(tmp_path: Path) -> None:
    config = LingConfig.from_dict({**TINY_LING["flash"], "intermediate_size": 320})
    source = tmp_path / "fp8"
    make_checkpoint(config, source)
    expected = quantise(source)
    name = "model.layers.0.mlp.up_proj.weight"  # 320 rows: three blocks, cut by ranks
    model = load_model(source, config)
    assert torch.equal(model.state_dict()[name], expected[name])
    part = load_model(source, config, ranks=4, rank=2)
    assert torch.equal(part.state_dict()[name], expected[name][160:240])
    gate = "model.layers.2.attention.g_proj.weight"  # MLA's head gate stays bf16
    assert gate not in expected
    assert "model.layers.1.attention.g_proj.weight" in expected


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(file)
    change(held)
    save_file(held, file, metadata={"format": "pt"})


def first(directory: Path, name: str) -> Path:
    index = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    return directory / str(index[name])


EXPERT = "model.layers.3.mlp.experts.7.up_proj.weight"


def _nan(directory: Path) -> None:
    rewrite(first(directory, EXPERT), lambda held: held[EXPERT].view(-1)[5].fill_(float("nan")))


def _shape(directory: Path) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        held[EXPERT] = held[EXPERT][:31].clone()

    rewrite(first(directory, EXPERT), change)


def _dtype(directory: Path) -> None:
    def change(held: dict[str, torch.Tensor]) -> None:
        held[EXPERT] = held[EXPERT].half()

    rewrite(first(directory, EXPERT), change)


def _float32(directory: Path) -> None:
    name = "model.layers.0.attention.A_log"

    def change(held: dict[str, torch.Tensor]) -> None:
        held[name] = held[name].bfloat16()

    rewrite(first(directory, name), change)


def _missing(directory: Path) -> None:
    file = first(directory, EXPERT)
    rewrite(file, lambda held: held.__delitem__(EXPERT))
    index = json.loads((directory / INDEX_NAME).read_text())
    del index["weight_map"][EXPERT]
    (directory / INDEX_NAME).write_text(json.dumps(index))


def _lying(directory: Path) -> None:
    rewrite(first(directory, EXPERT), lambda held: held.__delitem__(EXPERT))


def _omitted(directory: Path) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    del index["weight_map"][EXPERT]
    (directory / INDEX_NAME).write_text(json.dumps(index))


def _outside(directory: Path) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    index["weight_map"][EXPERT] = f"../{directory.name}/{index['weight_map'][EXPERT]}"
    (directory / INDEX_NAME).write_text(json.dumps(index))


def _no_generation(directory: Path) -> None:
    (directory / "generation_config.json").write_text("{")


def _no_end(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": "x"}')


def _no_json(directory: Path) -> None:
    (directory / INDEX_NAME).write_text("{")


def _no_object(directory: Path) -> None:
    (directory / INDEX_NAME).write_text("[]")


def _no_map(directory: Path) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {EXPERT: 3}}))


def _surplus(directory: Path) -> None:
    file = sorted(directory.glob("*.safetensors"))[0]
    rewrite(file, lambda held: held.update({"model.layers.0.mlp.bonus": torch.zeros(1)}))


def _truncated(directory: Path) -> None:
    file = first(directory, EXPERT)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start = 8 + length + header[EXPERT]["data_offsets"][0]
    file.write_bytes(data[: start + 10])


def _no_file(directory: Path) -> None:
    first(directory, EXPERT).unlink()


def _no_header(directory: Path) -> None:
    first(directory, EXPERT).write_bytes(b"\xff" * 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_nan, [EXPERT, "NaN"]),
        (_shape, [EXPERT, "[31, 64]", "expected [32, 64]"]),
        (_dtype, [EXPERT, "F16", "BF16"]),
        (_float32, ["A_log", "BF16", "expected F32"]),
        (_missing, [EXPERT, "[32, 64]", "missing"]),
        (_lying, [EXPERT, "index", "does not"]),
        (_omitted, [EXPERT, INDEX_NAME, "does not list"]),
        (_outside, [INDEX_NAME, "files beside it", "../made/model-0000"]),
        (_no_generation, ["generation_config", "JSON"]),
        (_no_end, ["generation_config.json", "eos_token_id", "'x'"]),
        (_no_json, [INDEX_NAME, "it is not valid JSON: Expecting"]),
        (_no_object, [INDEX_NAME, "must hold a JSON object, not list"]),
        (_no_map, [INDEX_NAME, "must hold 'weight_map'"]),
        (_surplus, ["model.layers.0.mlp.bonus", "not expected"]),
        (_truncated, ["truncated", "model.layers.3.mlp.experts."]),
        (_no_file, ["lacks", "model-0000"]),
        (_no_header, ["model-0000", "not a safetensors file"]),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    directory = checkpoint(tmp_path / "made")
    damage(directory)
    with pytest.raises(TargetError) as caught:
        load(str(directory))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Error(" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_size": None}, ["missing hidden_size"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"kda_safe_gate": False}, ["kda_safe_gate", "False", "True"]),
        ({"num_key_value_heads": 2}, ["num_key_value_heads 2", "4"]),
        ({"n_group": 3}, ["num_experts 16", "n_group 3"]),
        ({"first_k_dense_replace": "1"}, ["first_k_dense_replace", ">= 0", "'1'"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", ">= 0", "-1"]),
        ({"rope_parameters": [1]}, ["rope_parameters", "object", "[1]"]),
        ({"qk_head_dim": 23}, ["qk_head_dim", "= 24", "23"]),
        ({"q_lora_rank": "x"}, ["q_lora_rank", "or null", "'x'"]),
        ({"num_shared_experts": "1"}, ["num_shared_experts", ">= 0", "'1'"]),
        ({"num_hidden_layers": 10**30}, ["num_hidden_layers", "at most 1024"]),
        ({"num_experts": 1 << 20}, ["num_experts", "at most 8192"]),
        ({"hidden_size": 10**12}, ["hidden_size", "at most"]),
        ({"partial_rotary_factor": "half"}, ["partial_rotary_factor", "(0, 1]", "'half'"]),
        ({"partial_rotary_factor": 2}, ["partial_rotary_factor", "got 2"]),
        ({"eos_token_id": "<end>"}, ["eos_token_id", "0..511", "list", "'<end>'"]),
        ({"eos_token_id": [3, 512]}, ["eos_token_id", "0..511", "512"]),
        ({"eos_token_id": True}, ["eos_token_id", "True"]),
        ({"pad_token_id": [1]}, ["pad_token_id must be an id in 0..511, got [1]"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "fp8", "gptq"]),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            ["weight_block_size [128, 128]", "[64, 64]"],
        ),
        ({"topk_group": 9}, ["topk_group 9"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok 9"]),
        ({"expert_swiglu_limit_list": [0, 4]}, ["expert_swiglu_limit_list", "2", "7 layers"]),
        ({"expert_swiglu_limit_list": 5}, ["expert_swiglu_limit_list", "list", "5"]),
        ({"expert_swiglu_limit_list": ["a"] * 7}, ["expert_swiglu_limit_list", "'a'"]),
        ({"kda_lower_bound": "x"}, ["kda_lower_bound", "below 0", "'x'"]),
        ({"rms_norm_eps": "tiny"}, ["rms_norm_eps", "'tiny'"]),
        ({"rope_theta": -1}, ["rope_theta", "above 0", "-1"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "YaRN", "[1]"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, ["rope_scaling", "YaRN"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "two"}},
            ["rope_scaling.factor", "'two'"],
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, ["rope_scaling.factor", "-2"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fst": 9}},
            ["beta_fst", "'rope_scaling.beta_fast'"],
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    keys: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(TargetError) as caught:
        LingConfig.from_dict({**TINY_LING["flash"], **keys})
    for word in words:
        assert word in str(caught.value)


def test_a_ragged_tail_and_other_depths_follow_from_the_config() -> None:
    flash, tiny = official("ling-3.0-flash.json"), official("ling-3.0-tiny.json")
    assert [i for i in range(42) if flash.is_mla(i)] == [5, 11, 17, 23, 29, 35, 41]
    assert [i for i in range(24) if tiny.is_mla(i)] == [3, 7, 11, 15, 19, 23]
    assert flash.is_mla(42)  # the NEXTN block
    assert [CONFIG.is_mla(i) for i in range(7)] == [False, False, True] * 2 + [True]
    larger = LingConfig.from_dict(
        {
            **flash.raw,
            "num_hidden_layers": 72,
            "layer_group_size": 8,
            "first_k_dense_replace": 4,
            "expert_swiglu_limit_list": None,
            "share_expert_swiglu_limit_list": None,
        }
    )
    assert sum(larger.is_mla(i) for i in range(72)) == 9


_MEASURE = """
import sys
from pathlib import Path
import torch
from dspark.target.config import LingConfig
from dspark.target.weights import load_model
def load(directory):
    config = LingConfig.from_file(directory / "config.json")
    return load_model(directory, config, ranks=4, rank=1)
load(Path(sys.argv[2]))  # what the libraries need once
def figure(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = figure("VmRSS")
model = load(Path(sys.argv[1]))
held = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
print(held, figure("VmHWM") - before)
"""


@pytest.mark.slow
def test_one_rank_needs_its_own_bytes_and_a_shard(tmp_path: Path) -> None:
    shard = 24_000_000
    keys = {"num_experts": 128, "hidden_size": 256, "moe_intermediate_size": 128, "n_group": 4}
    config = LingConfig.from_dict({**TINY_LING["tiny"], **keys})
    size = make_checkpoint(config, tmp_path / "big", shard_bytes=shard)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path / "big", save_tiny_ling(tmp_path / "small")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    held, grown = map(int, done.stdout.split())
    assert size > 5 * shard
    assert held < size / 3
    # the allocator's own growth is a few megabytes
    assert grown < held + shard + 8_000_000
    assert grown > held / 2  # it did measure
