"""A launch that would silently train alone, or apart, is refused with the command that works."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dspark.config import TrainSettings
from dspark.errors import ConfigError, MissingPackageError
from dspark.training import program, zero
from dspark.training.launch import check_environment, check_started, start

ROOT = Path(__file__).resolve().parents[2]

# What `accelerate launch --cpu --num_processes 2` leaves in the one process it starts.
ALONE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_accelerate_launch_of_two_that_starts_one_names_torchrun() -> None:
    with pytest.raises(ConfigError, match=r"ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2"):
        check_environment(ALONE, TrainSettings(), has_gpu=False)


def test_one_process_is_fine_when_it_is_asked_for() -> None:
    check_environment(ALONE, TrainSettings(num_processes=1), has_gpu=False)
    check_environment({"MASTER_ADDR": "node0"}, TrainSettings(), has_gpu=False)
    check_environment(ALONE | {"WORLD_SIZE": "2"}, TrainSettings(), has_gpu=False)


def test_megatron_is_refused() -> None:
    with pytest.raises(ConfigError, match="Megatron-LM"):
        check_environment({"ACCELERATE_USE_MEGATRON_LM": "true"}, TrainSettings(), has_gpu=True)


def test_deepspeed_that_is_not_installed_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'dspark\[train\]'"):
        check_environment({"ACCELERATE_USE_DEEPSPEED": "true"}, TrainSettings(), has_gpu=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params is true: set it to false"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, r"train.gradient_checkpointing=true"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, "every process needs the target"),
    ],
)
def test_a_kind_of_fsdp_that_is_not_done_is_refused(change: dict[str, str], message: str) -> None:
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    check_environment(environ, TrainSettings(), has_gpu=True)
    with pytest.raises(ConfigError, match=message):
        check_environment(environ | change, TrainSettings(), has_gpu=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_optimization": {"stage": 1}}, r"stage is 1: this trainer knows 2 and 3"),
        ({"zero_optimization": {}}, r"stage is 0"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer is cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "offload_param is nvme",
        ),
        ({"fp16": {"enabled": True}}, "fp16 is enabled: use bf16"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is false but the trainer's precision is bf16"),
        ({"optimizer": {"type": "AdamW"}}, "a section 'optimizer'"),
        ({"scheduler": {"type": "WarmupLR"}}, "a section 'scheduler'"),
        ({"gradient_clipping": 0.3}, r"gradient_clipping is 0.3, .* train.max_grad_norm \(1.0\)"),
        ({"gradient_accumulation_steps": 8}, r"is 8, which is not train.grad_accumulation \(4\)"),
        ({"train_micro_batch_size_per_gpu": 16}, r"train.batch_size \(2\)"),
        ({"train_batch_size": 48}, r"batch_size x grad_accumulation x processes \(24\)"),
    ],
)
def test_deepspeed_settings_that_contradict_the_trainer_are_refused(
    change: dict[str, Any], message: str
) -> None:
    settings = TrainSettings(batch_size=2, grad_accumulation=4)
    given = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    zero.check_settings(given, settings, precision="bf16", num_processes=3)
    with pytest.raises(ConfigError, match=message):
        zero.check_settings(given | change, settings, precision="bf16", num_processes=3)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_deepspeed_files_of_the_repository_fit(stage: int) -> None:
    given = json.loads((ROOT / f"configs/deepspeed/zero{stage}.json").read_text())
    settings = TrainSettings(batch_size=2, grad_accumulation=4, max_grad_norm=0.7)
    for precision in ("no", "bf16"):
        zero.check_settings(given, settings, precision=precision, num_processes=8)
    zero.fill_settings(given, settings, num_processes=8)
    # the window is the trainer's: DeepSpeed must not divide by its length
    assert given["gradient_accumulation_steps"] == 1
    assert given["train_batch_size"] == 16
    assert given["gradient_clipping"] == 0.7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "stage is 1"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offload_optimizer is cpu"),
        ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"}, "'nowhere.json' is not a file"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16: use bf16"),
        ({"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_FSDP": "true"}, "fsdp_version"),
    ],
)
def test_a_wrong_sharded_launch_is_one_sentence_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str],
    message: str,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in ({"ACCELERATE_USE_DEEPSPEED": "true"} | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        program.main(["train.steps=1"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [["--plan"], ["train.steps=1"]])
@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "-1"), ("LOCAL_RANK", ""), ("WORLD_SIZE", "2.5"), ("WORLD_SIZE", "0")],
)
def test_a_rank_that_is_none_is_one_sentence_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        program.main(words)
    assert exit_.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: the environment says {name}={value}, which must be a whole")
    assert told.count("\n") == 1


def slurm(place: Path, *given: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`train/slurm.sh` as the batch step of a job on two nodes, where srun starts both in turn."""
    programs = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "accelerate": 'echo "$@"',
    }
    for name, text in programs.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (place / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "41"}
    command = ["bash", str(ROOT / "train/slurm.sh"), *given]
    path = f"{place}:{os.environ['PATH']}"
    return subprocess.run(
        command, env={"PATH": path} | job | environ, capture_output=True, text=True, check=False
    )


def test_slurm_starts_one_launcher_a_node(tmp_path: Path) -> None:
    done = slurm(tmp_path, "my.yaml", "train.tracker.name=a b", SLURM_GPUS_ON_NODE="4")
    assert done.returncode == 0, done.stderr
    for rank, line in enumerate(done.stdout.splitlines()):
        assert line == (
            "launch --config_file configs/accelerate/zero2.yaml --num_machines 2 "
            f"--num_processes 8 --machine_rank {rank} --main_process_ip node7 "
            "--main_process_port 20041 train.py --config my.yaml train.num_processes=8 "
            "train.tracker.name=a b"
        )
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ([], {"SLURM_GPUS_ON_NODE": "4"}, "usage: sbatch"),
        (["my.yaml"], {}, "pass --gpus-per-node"),
        (["my.yaml"], {"SLURM_JOB_NODELIST": "", "GPUS_PER_NODE": "4"}, "usage: sbatch"),
    ],
)
def test_slurm_says_what_is_missing(
    tmp_path: Path, given: list[str], environ: dict[str, str], message: str
) -> None:
    done = slurm(tmp_path, *given, **environ)
    assert done.returncode == 2
    assert message in done.stderr


def test_fsdp_of_one_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="shards nothing"):
        check_started(
            num_processes=1,
            distributed_type="NO",
            environ={},
            settings=TrainSettings(),
            strategy="fsdp",
        )


def test_a_launch_that_lost_its_deepspeed_is_refused() -> None:
    with pytest.raises(ConfigError, match="as MULTI_GPU"):
        check_started(
            num_processes=2,
            distributed_type="MULTI_GPU",
            environ={"WORLD_SIZE": "2"},
            settings=TrainSettings(),
            strategy="zero",
        )


def test_fp16_from_the_launcher_is_refused() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    with pytest.raises(ConfigError, match="fp16"):
        check_environment(environ, TrainSettings(), has_gpu=True)
    check_environment(environ, TrainSettings(mixed_precision="bf16"), has_gpu=True)


def test_a_compiler_of_the_launcher_is_refused() -> None:
    environ = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    with pytest.raises(ConfigError, match=r"dynamo_backend INDUCTOR: .* train.compile=true"):
        check_environment(environ, TrainSettings(), has_gpu=True)
    check_environment({"ACCELERATE_DYNAMO_BACKEND": "NO"}, TrainSettings(), has_gpu=True)


def test_what_accelerate_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("MASTER_ADDR was not set\nand more")

    monkeypatch.setattr("dspark.training.launch.Accelerator", refuse)
    with pytest.raises(ConfigError, match=r"what the launcher set: MASTER_ADDR was not set$"):
        start(TrainSettings(), device="cpu")


def test_accumulation_has_one_source_of_truth() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    with pytest.raises(ConfigError, match=r"steps 4 and train.grad_accumulation is 2"):
        check_environment(environ, TrainSettings(grad_accumulation=2), has_gpu=False)
    check_environment(environ, TrainSettings(grad_accumulation=4), has_gpu=False)


def test_unsynchronised_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2 but accelerate sees 1"):
        check_started(
            num_processes=1,
            distributed_type="NO",
            environ={"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            settings=TrainSettings(),
        )


def test_the_number_of_processes_is_held_to_the_settings() -> None:
    with pytest.raises(ConfigError, match="num_processes is 4 but 2"):
        check_started(
            num_processes=2,
            distributed_type="MULTI_CPU",
            environ={"WORLD_SIZE": "2"},
            settings=TrainSettings(num_processes=4),
        )
    check_started(
        num_processes=2,
        distributed_type="MULTI_CPU",
        environ={"WORLD_SIZE": "2"},
        settings=TrainSettings(num_processes=2),
    )


def test_processes_without_data_parallelism_are_refused() -> None:
    with pytest.raises(ConfigError, match="as NO"):
        check_started(
            num_processes=2,
            distributed_type="NO",
            environ={"WORLD_SIZE": "2"},
            settings=TrainSettings(),
        )


def test_a_training_process_does_not_choose_its_gpu_by_number() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        start(TrainSettings(), device="cuda:1")
