"""Trainings and commands in processes of their own that start in a moment; see `forks`."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Ended:
    """A run of the trainer's program in one or more processes, or of a command."""

    codes: list[int | None]
    """Exit codes by rank: minus the signal of one that was killed, None where time ran out."""
    said: list[str]
    """What each rank wrote to stdout and stderr."""
    events: list[str]
    """Those of a run that was watched and came to its end."""


class Forks:
    """Starts `forks` and asks it for runs."""

    def __init__(self, directory: Path) -> None:
        self._log = directory
        self._numbers = itertools.count()
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forks.py"))],
            env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **_NO_GPU},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        settings: list[str],
        *,
        processes: int = 1,
        watched: bool = False,
        kill_at: int | None = None,
        limit: float = 120,
        command: bool = False,
    ) -> Ended:
        """`train.py` with ``settings``; killed at event ``kill_at``, or after ``limit`` seconds.

        With ``command`` the words are those of `dspark`.
        """
        log = self._log / f"{next(self._numbers)}"
        request = {
            "settings": settings,
            "processes": processes,
            "watched": watched or kill_at is not None,
            "kill_at": kill_at,
            "limit": limit,
            "command": command,
            "log": str(log),
        }
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        codes = json.loads(self.server.stdout.readline())
        events = Path(f"{log}.events")
        return Ended(
            codes,
            [Path(f"{log}.{rank}").read_text(encoding="utf-8") for rank in range(processes)],
            json.loads(events.read_text()) if events.exists() else [],
        )


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    started = Forks(tmp_path_factory.mktemp("forks"))
    yield started
    assert started.server.stdin is not None
    started.server.stdin.close()
    started.server.wait(30)
