"""`dspark serve` for the time of a measurement, and a command whose last line is JSON."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import RunError
from dspark.provenance import write_json

__all__ = ["dspark", "figures", "serving"]


def dspark(*words: object) -> list[str]:
    """The command, by this Python."""
    return [sys.executable, "-m", "dspark", *map(str, words)]


def figures(file: Path | None, *words: object) -> dict[str, Any]:
    """Run a command to its end; with a ``file`` it is told --json, and its object is kept there.

    Raises:
        RunError: it failed; with the last line it said.
    """
    done = subprocess.run(
        dspark(*words, *(["--json"] if file else [])), capture_output=True, text=True
    )
    if done.returncode:
        raise RunError(
            f"dspark {' '.join(map(str, words[:2]))} ended with exit code {done.returncode}: "
            f"{_last(done.stderr)}"
        )
    if file is None:
        return {}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    write_json(file, found)
    return found


@contextmanager
def serving(log: Path, port: int, start_s: float, *options: object) -> Iterator[str]:
    """A server that answers; its address.

    Raises:
        RunError: it ends before, or does not answer after ``start_s``.
    """
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as said:
        server = subprocess.Popen(
            dspark("serve", "--port", port, *options),
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + start_s
        while not _answers(address):
            if server.poll() is not None:
                last = _last(log.read_text(errors="replace"))
                raise RunError(f"the server of {log.name} did not start: {last}")
            if time.monotonic() > end:
                raise RunError(f"no server after {start_s:g} s; {log} may say why")
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False


def _last(text: str) -> str:
    last = (text.strip().splitlines() or ["it said nothing"])[-1]
    return last.removeprefix("error: ")
