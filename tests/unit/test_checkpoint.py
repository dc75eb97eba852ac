"""Checkpoints are complete or not there, and say clearly when they do not fit."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from dspark.config import Config
from dspark.errors import CheckpointError, RunError
from dspark.training import checkpoint
from dspark.training.checkpoint import Best, TrainState


def write(
    output_dir: Path, step: int, best: Best | None = None, ema_since: int | None = None
) -> Path:
    state = TrainState(
        step=step,
        total_steps=9,
        world_size=1,
        structure={"train.seed": 0, "draft.target_layer_ids": (1, 2)},
        window=[[0.1, 1 / 3]],
        window_steps=1,
        best=best,
        ema_since=ema_since,
    )
    return checkpoint.save(
        output_dir,
        state,
        weights={"fc.weight": torch.arange(6.0).view(2, 3).t()},
        draft_config={"architectures": ["Qwen3DSparkModel"]},
        moments={
            "fc.weight": {
                "step": torch.tensor(3.0),
                "exp_avg": torch.ones(3, 2),
                "exp_avg_sq": torch.ones(3, 2),
            }
        },
        config=Config(),
        average={"fc.weight": torch.ones(3, 2)} if ema_since is not None else None,
    )


def test_what_is_read_is_what_was_saved(tmp_path: Path) -> None:
    path = write(tmp_path, 3, Best(3, 1.75))
    saved = checkpoint.read(path)
    assert saved.state.step == 3
    assert saved.state.best == Best(3, 1.75)
    assert saved.state.window == [[0.1, 1 / 3]]
    assert torch.equal(saved.weights["fc.weight"], torch.arange(6.0).view(2, 3).t())
    assert torch.equal(saved.moments["fc.weight"]["exp_avg"], torch.ones(3, 2))
    assert saved.config == Config()
    assert {p.name for p in path.iterdir()} == {
        "COMPLETE", "config.json", "config.yaml", "model.safetensors",
        "optimizer.pt", "provenance.json", "trainer_state.json",
    }  # fmt: skip


def test_latest_points_at_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 20)
    assert os.readlink(tmp_path / "latest") == "checkpoint-20"
    newest = checkpoint.newest_complete(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-20"  # by number: as text it would come before 3


def test_a_half_written_one_is_ignored_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 3)
    half = tmp_path / "checkpoint-6"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        newest = checkpoint.newest_complete(tmp_path)
    assert newest == tmp_path / "checkpoint-3"
    assert "checkpoint-6" in caplog.text
    write(tmp_path, 6)  # and it does not stand in the way of the real one
    assert checkpoint.newest_complete(tmp_path) == half


def test_a_killed_save_leaves_only_its_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 3)
    assert checkpoint.newest_complete(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [".checkpoint-3.tmp"]
    checkpoint.clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(RunError, match=r"\(0.0 GB free there\): .*No space left on device"):
        write(tmp_path, 3)


def test_a_missing_or_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    with (path / "optimizer.pt").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(CheckpointError, match=r"optimizer.pt has 10 bytes instead of"):
        checkpoint.read(path)
    (path / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer.pt is missing"):
        checkpoint.read(path)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "config.yaml",
        "ema.safetensors",
        "model.safetensors",
        "optimizer.pt",
        "provenance.json",
        "trainer_state.json",
    ],
)
def test_every_file_is_missed_by_name(tmp_path: Path, name: str, half: bool) -> None:
    path = write(tmp_path, 3, ema_since=1)
    assert checkpoint.read(path).state.ema_since == 1
    data = (path / name).read_bytes()
    (path / name).unlink()
    if half:
        (path / name).write_bytes(data[: len(data) // 2])
    said = rf"{name} has {len(data) // 2} bytes instead of {len(data)}" if half else "is missing"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read(path)


def overwrite(path: Path, name: str, data: bytes) -> None:
    """Damage that `COMPLETE` does not show."""
    (path / name).write_bytes(data)
    complete = json.loads((path / "COMPLETE").read_text())
    complete["files"][name] = len(data)
    (path / "COMPLETE").write_text(json.dumps(complete))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg": torch.full((3, 2), float("nan"))}, "NaN or Inf in fc.weight"),
        ({"exp_avg_sq": torch.ones(2, 3)}, "moments of fc.weight in another shape than its weight"),
        ({"other": torch.ones(3, 2)}, "no AdamW moments of fc.weight"),
    ],
)
def test_moments_that_a_run_could_not_use_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor], message: str
) -> None:
    path = write(tmp_path, 3)
    moments = torch.load(path / "optimizer.pt")
    moments["fc.weight"].update(change)
    torch.save(moments, tmp_path / "changed")
    overwrite(path, "optimizer.pt", (tmp_path / "changed").read_bytes())
    with pytest.raises(CheckpointError, match=f"checkpoint-3 holds {message}: move it away"):
        checkpoint.read(path)


def test_moments_are_those_of_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    none: list[object] = [{}, [1]]
    for moments in none:
        torch.save(moments, tmp_path / "changed")
        overwrite(path, "optimizer.pt", (tmp_path / "changed").read_bytes())
        with pytest.raises(CheckpointError, match="moments of other tensors than its weights"):
            checkpoint.read(path)
    torch.save({"fc.weight": {}}, tmp_path / "changed")  # no term of the loss has reached it
    overwrite(path, "optimizer.pt", (tmp_path / "changed").read_bytes())
    assert checkpoint.read(path).moments == {"fc.weight": {}}


@pytest.mark.parametrize("change", [{"step": "3"}, {"structure": []}, {"best": 7}, {"new": 1}])
def test_a_state_of_other_types_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = write(tmp_path, 3)
    state = json.loads((path / "trainer_state.json").read_text())
    overwrite(path, "trainer_state.json", json.dumps({**state, **change}).encode())
    with pytest.raises(CheckpointError, match="checkpoint-3 cannot be read"):
        checkpoint.read(path)
    with pytest.raises(CheckpointError, match="checkpoint-3 cannot be read"):
        checkpoint.mend_links(path)


def test_a_run_copied_without_its_links_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, 3)
    checkpoint.check_links(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest is a directory, where a link"):
        checkpoint.check_links(tmp_path)


def test_another_target_is_told_by_what_differs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the target's weights are not those that"):
        checkpoint.check_structure({"target": "2-a-b"}, {"target": "2-a-c"}, tmp_path)


def test_a_damaged_complete_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    whole = (path / "COMPLETE").read_text()
    for text in (
        "",
        whole[: len(whole) // 2],
        "[]",
        '{"format": 2}',
        '{"format": 2, "files": [1]}',
    ):
        (path / "COMPLETE").write_text(text)
        with pytest.raises(CheckpointError, match="COMPLETE cannot be read"):
            checkpoint.read(path)


def test_without_a_complete_one_there_is_no_fresh_start(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path) is None
    path = write(tmp_path, 3)
    (path / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-3 holds no COMPLETE.*start afresh"):
        checkpoint.newest_complete(tmp_path)


def test_links_that_a_kill_left_behind_are_mended(tmp_path: Path) -> None:
    for step in (3, 6):
        path = write(tmp_path, step, Best(step, 1.5))
    checkpoint.link(tmp_path, "latest", 3)
    checkpoint.link(tmp_path, "best", 3)
    checkpoint.mend_links(path)
    links = [os.readlink(tmp_path / name) for name in ("latest", "best")]
    assert links == ["checkpoint-6", "checkpoint-6"]
    path = write(tmp_path, 9, Best(3, 1.7))
    checkpoint.mend_links(path)
    assert os.readlink(tmp_path / "best") == "checkpoint-3"
    write(tmp_path, 12, Best(5, 1.7))  # whose checkpoint somebody has removed
    checkpoint.mend_links(tmp_path / "checkpoint-12")
    assert os.readlink(tmp_path / "best") == "checkpoint-3"


def test_only_leftovers_of_a_run_are_removed(tmp_path: Path) -> None:
    kept = ["checkpoint-3", ".mine.7.tmp", "metrics.jsonl", ".lock"]
    gone = [".checkpoint-9.tmp", ".latest.77.tmp", ".metrics.jsonl.77.tmp"]
    for name in (kept[0], gone[0]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in (*kept[1:], gone[2]):
        (tmp_path / name).touch()
    (tmp_path / gone[1]).symlink_to("checkpoint-3")
    checkpoint.clear_leftovers(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == set(kept)
    assert (tmp_path / "checkpoint-3" / "file").exists()
    checkpoint.clear_leftovers(tmp_path / "nowhere")


def test_garbage_of_the_right_size_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    size = (path / "optimizer.pt").stat().st_size
    (path / "optimizer.pt").write_bytes(b"x" * size)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    (path / "COMPLETE").write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoint.read(path)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no COMPLETE"):
        checkpoint.read(tmp_path)


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step)
    checkpoint.rotate(tmp_path, keep=2, best=Best(2, 1.9))
    kept = [path.name for path in checkpoint.find_complete(tmp_path)]
    assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_a_changed_structure_names_the_key_and_both_values(tmp_path: Path) -> None:
    saved = json.loads(json.dumps({"train.seed": 0, "draft.target_layer_ids": (1, 2)}))
    checkpoint.check_structure(saved, {"train.seed": 0, "draft.target_layer_ids": (1, 2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"train.seed is 1 but .* was trained with 0"):
        checkpoint.check_structure(
            saved, {"train.seed": 1, "draft.target_layer_ids": (1, 2)}, tmp_path
        )
    with pytest.raises(CheckpointError, match=r"draft.new is 5 but .* was trained with None"):
        checkpoint.check_structure(
            saved, {"train.seed": 0, "draft.target_layer_ids": (1, 2), "draft.new": 5}, tmp_path
        )


def test_a_changed_setting_is_named_before_what_follows_from_it(tmp_path: Path) -> None:
    then = {"data rows": 8, "data digest": "ab", "data.pack_length": 200}
    now = {"data rows": 6, "data digest": "cd", "data.pack_length": 300}
    with pytest.raises(CheckpointError, match=r"data.pack_length is 300 but .* with 200"):
        checkpoint.check_structure(then, now, tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("unexpected pos 8"), SafetensorError("I/O error")])
def test_a_writer_with_words_of_its_own_is_a_sentence_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(RunError, match=f"cannot write a checkpoint into .*: {error}"):
        write(tmp_path, 3)
    assert checkpoint.find_complete(tmp_path) == []


def test_moments_come_back_under_their_names() -> None:
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    names = {id(first): "a", id(second): "b"}
    optimizer = torch.optim.AdamW([first, second], fused=True)
    for parameter in (first, second):
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    moments = checkpoint.optimizer_by_name(optimizer, names)
    fresh = torch.optim.AdamW([second, first], fused=True)  # another order
    checkpoint.restore_optimizer(fresh, moments, names)
    assert torch.equal(fresh.state[second]["exp_avg"], optimizer.state[second]["exp_avg"])
    assert fresh.state[first]["step"] == 1
