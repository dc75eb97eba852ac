"""The engine process: loads the model, then decodes what it is asked to, one prompt at a time.

It lives no longer than the server. The kernel ends it with the server, even in the middle of a
step, where it has such a service (Linux); elsewhere it ends when it next looks at the wire.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dspark.errors import DSparkError
from dspark.progress import quiet_transformers
from dspark.serving.engine import Model
from dspark.serving.wire import (
    AHEAD,
    Broken,
    Committed,
    Decode,
    Ended,
    Forget,
    Gone,
    Ping,
    Pong,
    Ready,
    Stop,
    Taken,
    Wire,
)

__all__ = ["STOPS", "Load", "main"]

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Meant for the server, which lets open requests finish; a terminal or a supervisor sends them to
all its processes."""
Load = Callable[[], Model]
_PR_SET_PDEATHSIG = 1


class _Stuck(Exception):
    """The device answers no more."""


def main(load: Load, sock: socket.socket, server: int, levels: Mapping[str, int]) -> None:
    """Serve the wire until the server, process ``server``, closes it. ``levels``: of loggers."""
    _end_with(server)
    for one in STOPS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    quiet_transformers()
    wire = Wire(sock)
    try:
        try:
            model = load()
            wire.send(Ready(model.card))
            _serve(wire, model)
        except DSparkError as error:
            wire.send(Gone(type(error).__name__, str(error)))
        except _Stuck as error:
            wire.send(Gone("RunError", f"the device fails: {error}"))
    except EOFError:
        log.debug("the server has closed the wire")


def _end_with(server: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it ended before the kernel was told
        os._exit(1)


def _serve(wire: Wire, model: Model) -> None:
    while True:
        message = wire.receive()
        if isinstance(message, Decode):
            _decode(wire, model, message)
            wire.send(Ended())
        elif isinstance(message, Forget):
            model.forget()
        elif isinstance(message, Ping):
            wire.send(Pong())
        # what else comes belongs to a decode that was over before it arrived


def _decode(wire: Wire, model: Model, asked: Decode) -> None:
    commits: Any = None
    try:
        commits = model.stream(
            asked.prompt_ids, asked.params, lambda: _taken(wire, wait=False) is not None
        )
        untaken = 0
        for commit in commits:
            wire.send(Committed(commit))
            untaken += 1
            if commit.finish_reason is not None:
                break
            taken = _taken(wire, wait=untaken == AHEAD)
            if taken is None:
                break
            untaken -= taken
    except EOFError:
        raise
    # Whatever goes wrong in one request, the next ones are served.
    except Exception as error:
        log.exception("a decode failed")
        known = isinstance(error, DSparkError)
        message = str(error) if known else f"{type(error).__name__} while decoding"
        _check_device(model.card.device)
        wire.send(Broken(message))
    finally:
        # steps may be queued behind the last commit, and must be over before the next request
        if (close := getattr(commits, "close", None)) is not None:
            close()


def _taken(wire: Wire, *, wait: bool) -> int | None:
    """How many commits were taken since; None: stop."""
    taken = 0
    while True:
        try:
            message = wire.receive(None if wait and not taken else 0)
        except TimeoutError:
            return taken
        if isinstance(message, Stop):
            return None
        taken += isinstance(message, Taken)


def _check_device(device: str) -> None:
    """After an illegal access a GPU's context refuses all that follows.

    Raises:
        _Stuck: it does.
    """
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise _Stuck(str(error).splitlines()[0]) from error
