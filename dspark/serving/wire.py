"""What the server and its engine process say to each other, over a pair of sockets.

The server asks for one decode at a time; the process answers by commits and, in any case, by one
`Ended`. A commit is taken when the server asks for the next one, and at most `AHEAD` of them may be
untaken: nothing piles up, and a request that is stopped costs at most two more steps.
"""

import pickle
import select
import socket
from contextlib import suppress
from typing import Any, NamedTuple

from dspark.decoding import Commit, DecodeParams
from dspark.serving.card import ModelCard

__all__ = [
    "AHEAD",
    "Broken",
    "Committed",
    "Decode",
    "Ended",
    "Forget",
    "Gone",
    "Ping",
    "Pong",
    "Ready",
    "Stop",
    "Taken",
    "Wire",
]

AHEAD = 2
"""Commits that may be on their way."""
_HEADER = 4
_CHUNK = 1 << 16


class Decode(NamedTuple):
    """To the process: decode this prompt."""

    prompt_ids: list[int]
    params: DecodeParams


class Taken(NamedTuple):
    """To the process: one commit was taken."""


class Stop(NamedTuple):
    """To the process: no further step of this decode."""


class Forget(NamedTuple):
    """To the process, while it decodes nothing: drop what is kept of earlier prompts."""


class Ping(NamedTuple):
    """To the process, while it decodes nothing: are you there?"""


class Pong(NamedTuple):
    """From the process: yes."""


class Ready(NamedTuple):
    """From the process, first: the model is loaded."""

    card: ModelCard


class Committed(NamedTuple):
    """From the process: tokens became final."""

    commit: Commit


class Broken(NamedTuple):
    """From the process: this decode failed; the next one may well succeed."""

    message: str


class Ended(NamedTuple):
    """From the process: this decode is over and the device is quiet."""


class Gone(NamedTuple):
    """From the process, last: it can not begin, or not go on. ``kind``: the error's class."""

    kind: str
    message: str


class Wire:
    """One end: pickled messages, each behind its length. Both ends run the same program."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Hand a message over; None waits for ever.

        Raises:
            TimeoutError: the other end does not read; the wire is of no use afterwards.
            EOFError: the other end is closed.
        """
        raw = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        rest = memoryview(len(raw).to_bytes(_HEADER) + raw)
        while rest:
            try:
                rest = rest[self._sock.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                _wait(self._writable, timeout_s)
            except ConnectionError:
                raise EOFError from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; None waits for ever, 0 not at all.

        Raises:
            TimeoutError: there is none yet.
            EOFError: the other end is closed.
        """
        while True:
            end = _HEADER + int.from_bytes(self._read[:_HEADER])
            if len(self._read) >= end > _HEADER:
                message = pickle.loads(self._read[_HEADER:end])
                del self._read[:end]
                return message
            if timeout_s != 0:
                _wait(self._readable, timeout_s)
            try:
                chunk = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                raise TimeoutError from None
            except ConnectionError:
                raise EOFError from None
            if not chunk:
                raise EOFError
            self._read += chunk

    def close(self) -> None:
        """The other end sees it at its next message, whoever else holds this one's socket."""
        with suppress(OSError):  # the other end closed first
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _wait(event: select.poll, timeout_s: float | None) -> None:
    if not event.poll(None if timeout_s is None else 1000 * timeout_s):
        raise TimeoutError
