"""What the server and its engine process say to each other, over a pair of sockets.

The server asks for one decode at a time; the process answers by commits and, in any case, by one
`Ended`. A commit is taken when the server asks for the next one, and at most `AHEAD` of them may be
untaken: nothing piles up, and a request that is stopped costs at most two more steps.
"""

import pickle
import socket
from dataclasses import dataclass
from typing import Any

from dspark.decoding import Commit, DecodeParams
from dspark.serving.card import ModelCard

__all__ = [
    "AHEAD",
    "Broken",
    "Committed",
    "Decode",
    "Ended",
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


@dataclass(frozen=True, slots=True)
class Decode:
    """To the process: decode this prompt."""

    prompt_ids: list[int]
    params: DecodeParams


@dataclass(frozen=True, slots=True)
class Taken:
    """To the process: one commit was taken."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the process: no further step of this decode."""


@dataclass(frozen=True, slots=True)
class Ping:
    """To the process, while it decodes nothing: are you there?"""


@dataclass(frozen=True, slots=True)
class Pong:
    """From the process: yes."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From the process, first: the model is loaded."""

    card: ModelCard


@dataclass(frozen=True, slots=True)
class Committed:
    """From the process: tokens became final."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Broken:
    """From the process: this decode failed; the next one may well succeed."""

    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """From the process: this decode is over and the device is quiet."""


@dataclass(frozen=True, slots=True)
class Gone:
    """From the process, last: it can not begin, or not go on. ``kind``: the error's class."""

    kind: str
    message: str


class Wire:
    """One end: pickled messages, each behind its length. Both ends run the same program."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._read = bytearray()

    def send(self, message: object, timeout_s: float | None = None) -> None:
        """Hand a message over.

        Raises:
            TimeoutError: the other end does not read; the wire is of no use afterwards.
            EOFError: the other end is closed.
        """
        raw = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.sendall(len(raw).to_bytes(_HEADER) + raw)
        except ConnectionError:
            raise EOFError from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message; None waits for ever, 0 not at all.

        Raises:
            TimeoutError: there is none yet.
            EOFError: the other end is closed.
        """
        self._sock.settimeout(timeout_s)
        while True:
            end = _HEADER + int.from_bytes(self._read[:_HEADER])
            if len(self._read) >= max(end, _HEADER + 1):
                message = pickle.loads(self._read[_HEADER:end])
                del self._read[:end]
                return message
            try:
                chunk = self._sock.recv(_CHUNK)
            except BlockingIOError:
                raise TimeoutError from None
            except ConnectionError:
                raise EOFError from None
            if not chunk:
                raise EOFError
            self._read += chunk

    def close(self) -> None:
        """The other end sees it at its next message."""
        self._sock.close()
