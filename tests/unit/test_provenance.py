"""Files that others are meant to read."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark.provenance import save_tensors


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
