import errno
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.corpus import row_file
from dspark.corpus.row_file import RowFile
from dspark.corpus.seen import Seen
from dspark.errors import RunError


def test_rows_come_back_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_BUFFER", 300)  # some rows on disk, some not yet
    rng = random.Random(3)
    given = []
    rows = RowFile()
    for number in range(40):
        length = rng.randint(1, 30)
        ids = [rng.choice((0, 7, 49151, 2**31 - 1)) for _ in range(length)]
        mask = [rng.randint(0, 1) for _ in range(length)]
        given.append((f"ü{number}\ud800" if number % 9 == 0 else f"r{number}", ids, mask))
        rows.append(*given[-1])
    for index in (*range(40), -1, -40):
        name, tokens, on = rows.read(index)
        assert (name, tokens.tolist(), on.int().tolist()) == given[index]
    assert (tokens.dtype, on.dtype) == (torch.int64, torch.bool)
    assert list(rows.lengths) == [len(ids) for _, ids, _ in given]
    assert rows.num_tokens == sum(rows.lengths)
    assert rows.used == {one for _, ids, _ in given for one in ids}
    with pytest.raises(IndexError):
        rows.read(40)
    # what is read is the reader's own
    rows.read(3)[1][:] = 5
    rows.read(3)[2][:] = False
    assert rows.read(3)[1].tolist() == given[3][1]
    assert rows.read(3)[2].int().tolist() == given[3][2]


def test_the_file_has_no_name_and_a_fork_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(row_file, "_BUFFER", 1)
    rows = RowFile()
    rows.append("a", [1, 2], [0, 1])
    assert list(tmp_path.iterdir()) == []
    child = os.fork()
    if not child:
        os._exit(0 if rows.read(0)[1].tolist() == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_file, "_BUFFER", 64)
    rows = RowFile()
    rows._file = Full()  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"do not fit into .*no space left.*set TMPDIR"):
        rows.append("a", [1] * 20, [1] * 20)


def test_no_place_for_temporary_files_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with pytest.raises(RunError, match="set TMPDIR to a directory"):
        RowFile()


def test_keys_are_remembered_in_a_few_bytes() -> None:
    seen = Seen()
    keys = [f"row-{number}" for number in range(20_000)]
    assert all(seen.add(key) for key in keys)
    assert not any(seen.add(key) for key in keys)
    assert len(seen) == 20_000
    assert "row-19999" in seen
    assert "row-20000" not in seen
    assert seen.add(b"row-20000")
    assert seen.nbytes <= 20_001 * 32


GROWTH = """
import json, sys
from dspark.config import DataSettings
from dspark.corpus.dataset import ResponseRows
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "VmRSS" in line)
found = []
for path in sys.argv[1:]:
    rows = ResponseRows(DataSettings(responses=(path,)))
    found.append(resident())
print(json.dumps([found, len(rows), rows.num_tokens]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident size from /proc")
def test_twenty_times_the_rows_take_hardly_more_memory(tmp_path: Path) -> None:
    def write(name: str, rows: int) -> str:
        ids = list(range(1000, 1400))
        lines = (
            json.dumps({"id": f"{name}{i}", "input_ids": ids, "loss_mask": [1] * 400}) + "\n"
            for i in range(rows)
        )
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(lines))
        return str(path)

    small, large = write("small", 300), write("large", 6000)
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, small, large],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": "."},
    )
    (first, second), rows, tokens = json.loads(done.stdout)
    assert (rows, tokens) == (6000, 2_400_000)
    # in memory these rows would be 12 MB of ids and masks
    assert second - first < 6 * 1024


def test_a_tmpdir_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself would take another place."""
    monkeypatch.setenv("TMPDIR", "/nowhere/at all")
    with pytest.raises(RunError, match="TMPDIR is '/nowhere/at all', which is no directory"):
        RowFile()
