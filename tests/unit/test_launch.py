"""A launch that would silently train alone, or apart, is refused with the command that works."""

import pytest

from dspark.config import TrainSettings
from dspark.errors import ConfigError
from dspark.training.launch import check_environment, check_started, start

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


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")],
)
def test_sharded_trainings_are_refused(variable: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        check_environment({variable: "true"}, TrainSettings(), has_gpu=True)


def test_fp16_from_the_launcher_is_refused() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    with pytest.raises(ConfigError, match="fp16"):
        check_environment(environ, TrainSettings(), has_gpu=True)
    check_environment(environ, TrainSettings(mixed_precision="bf16"), has_gpu=True)


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
