"""Files that others are meant to read."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dspark.errors import ConfigError, unwritable
from dspark.provenance import LOCK, claimed, collect, free_bytes, save_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_tensors_are_as_readable_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
        assert os.umask(umask) == umask  # it was put back
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == mode
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], torch.ones(3))


@pytest.mark.parametrize("program", ["/x/bin/dspark", "/x/dspark/__main__.py"])
def test_a_command_reads_as_a_person_gives_it(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.argv", [program, "export", "run"])
    assert collect()["command"] == ["dspark", "export", "run"]


def test_room_is_that_of_the_disk_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(total=10, free=3)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert free_bytes(tmp_path / "not" / "yet") == 3
    assert asked == [tmp_path]
    # a place that takes no files is not full, whatever its disk says
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PermissionError) as caught:
        free_bytes(tmp_path / "not" / "yet")
    refused = unwritable(caught.value)
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith(f"cannot write {tmp_path}: it is read-only here; give a place")


def test_a_directory_is_one_runs_alone(tmp_path: Path) -> None:
    place = tmp_path / "out"
    with claimed(place):
        with pytest.raises(BlockingIOError) as raised, claimed(place):
            pass
        refused = unwritable(raised.value)
        assert isinstance(refused, ConfigError)
        assert f"{place / LOCK}: another run is writing there; wait" in str(refused)
        assert (place / LOCK).exists()  # the loser took nothing away
    assert not place.exists()
    with claimed(place / "deeper"):
        (place / "kept").touch()
    assert [one.name for one in place.iterdir()] == ["kept"]


def test_a_disk_that_refuses_tensors_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "Error while serializing: I/O error: No space left on device (os error 28)"

    def full(*_: object, **__: object) -> None:
        raise SafetensorError(said)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left") as raised:
        save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    assert "a.safetensors: no space left on device" in str(unwritable(raised.value))
    said = "invalid dtype"
    with pytest.raises(SafetensorError):
        save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
