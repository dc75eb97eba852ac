"""`dspark prepare` killed at any moment: what is there is whole, or nothing, and can be made."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.corpus import prepared
from dspark.corpus.prepare import PrepareSettings
from dspark.corpus.prepared import prepare
from dspark.errors import unwritable
from dspark.provenance import claimed

NAMES = ["heldout.jsonl", "prepare.json", "train.jsonl"]
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def settings(tmp_path: Path) -> PrepareSettings:
    rows = [{"text": f"question number {n} about the number {n * n}"} for n in range(50)]
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PrepareSettings(sources=(str(tmp_path / "in"),), heldout="5")


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("train.jsonl", "heldout.jsonl")}


def die_at(moment: str, *, after: bool) -> None:
    """Replace a function of `prepared` by one that is the last to be called."""
    module: Any = os if moment == "replace" else prepared
    real: Callable[..., Any] = getattr(module, moment)

    def deadly(*args: Any, **options: Any) -> Any:
        if moment == "replace" and Path(args[1]).name != "out":
            return real(*args, **options)  # a file of the work
        if after:
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, moment, deadly)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "moment", ["row_of", "split", "_deal", "measured", "write_json", "replace"]
)
def test_a_kill_leaves_a_whole_directory_or_none(
    settings: PrepareSettings, tmp_path: Path, moment: str, after: bool
) -> None:
    # inside the folder that is read: what a kill leaves must not become a source
    out = tmp_path / "in/nested/out" if moment == "_deal" else tmp_path / "out"
    child = os.fork()
    if child == 0:
        try:
            die_at(moment, after=after)
            prepare(settings, out)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    finished = moment == "replace" and after
    assert out.exists() == finished
    if finished:
        assert sorted(path.name for path in out.iterdir()) == NAMES
    report, new = prepare(settings, out)
    assert new == (not finished)
    assert report["counts"] == {"read": 50, "train": 45, "heldout": 5, "rejected": 0}
    assert sorted(path.name for path in out.iterdir()) == NAMES
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []
    whole = tmp_path / "whole"
    prepare(PrepareSettings(sources=(str(tmp_path / "in/rows.jsonl"),), heldout="5"), whole)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("named", [("train.jsonl",), ()])
def test_an_error_leaves_nothing(
    settings: PrepareSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: tuple[str, ...],
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", *named)

    out = tmp_path / "made/out"
    monkeypatch.setattr(prepared, "_deal", full)
    with pytest.raises(OSError, match="No space left") as raised:
        prepare(settings, out)
    where = named[0] if named else str(out)
    assert str(unwritable(raised.value)) == f"cannot write {where}: no space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_two_at_once_do_not_meet(settings: PrepareSettings, tmp_path: Path) -> None:
    with claimed(tmp_path / ".out.preparing"), pytest.raises(BlockingIOError) as raised:
        prepare(settings, tmp_path / "out")
    assert "another run is writing there" in str(unwritable(raised.value))
    assert not (tmp_path / "out").exists()


def test_an_empty_directory_gives_way(settings: PrepareSettings, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert prepare(settings, tmp_path / "out")[1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == NAMES


@pytest.mark.slow
def test_hash_seeds_of_the_process_change_nothing(
    settings: PrepareSettings, tmp_path: Path
) -> None:
    done = []
    for seed in ("1", "2"):
        place = tmp_path / seed
        program = (
            "import sys; from pathlib import Path; from dspark.corpus.prepare import *; "
            "from dspark.corpus.prepared import prepare; place, source = sys.argv[1:]; "
            "prepare(PrepareSettings(sources=(source,), exclude=(source[:-2] + 'e.jsonl',), "
            "heldout='0.2', near='0.5'), Path(place))"
        )
        (tmp_path / "e.jsonl").write_text('{"q": "question number 7 about the number 49"}\n')
        subprocess.run(
            [sys.executable, "-c", program, str(place), settings.sources[0]],
            env={**os.environ, "PYTHONPATH": ".", "PYTHONHASHSEED": seed},
            check=True,
            timeout=50,
        )
        done.append(contents(place))
    assert done[0] == done[1]
    assert done[0] == contents(tmp_path / "1")
    assert 0 < len(done[0]["heldout.jsonl"]) < len(done[0]["train.jsonl"])
