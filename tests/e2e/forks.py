"""Runs the trainer or a command in forked processes, and kills trainers at an exact moment.

A program for `conftest.Forks`: Python, torch and the library are started once, and every request (a
JSON object a line on stdin) forks one process a rank, so that twenty killed runs take seconds.

What can be a moment is an event: before, after, and where a file is written in the middle of, each
call that a kill must not make a difference to. Events are counted from the start of a process.
"""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dspark.bench.evaluate  # what a run would import late
import dspark.export.hf
import dspark.testing  # noqa: F401
from dspark import cli, provenance
from dspark.training import engine, monitor, program


class Moments:
    """Counts events, and dies at number ``kill_at``."""

    def __init__(self, kill_at: int | None) -> None:
        self.seen: list[str] = []
        self._kill_at = kill_at

    def __call__(self, label: str) -> bool:
        """One event; true if it is the one to die in (for a caller that has half to do first)."""
        self.seen.append(label)
        return len(self.seen) - 1 == self._kill_at

    def around(self, owner: Any, name: str, label: str, half: Callable[..., None] | None) -> None:
        """Make events of each call of ``owner.name``; ``half`` does part of what it does."""
        whole = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if self(f"before {label}"):
                die()
            if half is not None and self(f"inside {label}"):
                half(*args)
                die()
            found = whole(*args, **options)
            if self(f"after {label}"):
                die()
            return found

        setattr(owner, name, watched)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_tensors(tensors: Any, path: Path, *_: Any) -> None:
    whole = Path(path).with_name("whole")
    _save_tensors(tensors, whole)
    Path(path).write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    whole.unlink()


def half_line(file: monitor.MetricsFile, step: int, figures: Any) -> None:
    line = json.dumps({"step": step, **figures})
    file._file.write(line[: len(line) // 2])
    file._file.flush()


def half_removed(path: Path, *_: Any) -> None:
    """Nothing where there is nothing: a save begins with clearing a place that is mostly empty."""
    for one in sorted(Path(path).glob("*"))[::2]:
        one.unlink()


_save_tensors = provenance.save_tensors


def watch(moments: Moments) -> None:
    moments.around(engine.Replicated, "step", "optimizer step", None)
    moments.around(monitor.MetricsFile, "write", "line of metrics", half_line)
    moments.around(provenance, "save_tensors", "tensors", half_tensors)
    moments.around(os, "fsync", "sync", None)
    moments.around(os, "replace", "rename", None)
    moments.around(os, "symlink", "link", None)
    moments.around(shutil, "rmtree", "removal", half_removed)


def run(request: dict[str, Any], rank: int, port: int) -> None:
    """The program in this process; what it says goes to a file."""
    with open(f"{request['log']}.{rank}", "w", encoding="utf-8") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    if request["command"]:
        sys.argv = ["dspark", *request["settings"]]
        cli.main()
    processes = request["processes"]
    if processes > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(processes),
            LOCAL_WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            ACCELERATE_USE_CPU="true",
        )
    provenance._git = lambda *_: None  # two more processes a checkpoint
    moments = Moments(request["kill_at"])
    if request["watched"]:
        watch(moments)
    program.main(request["settings"])
    if request["watched"] and rank == 0:
        Path(f"{request['log']}.events").write_text(json.dumps(moments.seen))


def fork(request: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(request, rank, port)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any]) -> list[int | None]:
    """Exit codes by rank: minus the signal of one that was killed, None where time ran out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = {fork(request, rank, port): rank for rank in range(request["processes"])}
    codes: list[int | None] = [None] * len(started)
    deadline = time.monotonic() + request["limit"]
    while started:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[started.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for late in started:
                os.kill(late, signal.SIGKILL)
                os.waitpid(late, 0)
            break
        else:
            time.sleep(0.005)
    return codes


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
