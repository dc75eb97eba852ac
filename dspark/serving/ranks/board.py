"""Memory that the processes of all ranks share: what to do next, and what each has to say.

Rank 0 writes commands in a row, the others read them one by one; nobody waits for a socket or a
collective. Every message carries a check, so that a reader that comes in the middle of a write sees
that it has come too early, whatever order memory is written in.
"""

import struct
import time
import zlib
from enum import IntEnum
from multiprocessing.shared_memory import SharedMemory

from dspark.errors import RunError

__all__ = ["Board", "Command", "Topic"]

_RING = 64
"""Commands and digests that are held: far more than one rank is ever ahead of another."""
_WORDS = 1 << 14
"""Bytes of what a rank says about a topic."""
_PAYLOAD = 8 << 20
"""Bytes of a command, such as a prompt of a million tokens."""
_MARK = 0x5EED
_CELL = 8
_FEW = (1 << 62) - 1


class Command(IntEnum):
    """What rank 0 has the others do."""

    BEGIN = 1
    """A request; its prompt and parameters come with the command."""
    NEXT = 2
    """One more commit of it."""
    END = 3
    """No more of it."""
    FORGET = 4
    """Drop what is kept of earlier prompts."""
    READ_ON = 5
    """In the middle of a commit, between two pieces of a prompt: the next one."""
    GIVE_UP = 6
    """In its place: no more of this prompt, and no commit."""


class Topic(IntEnum):
    """What a rank may say once."""

    JOIN = 0
    """While it loads: what the others need of it."""
    LOADED = 1
    END = 2
    """Why it can not go on."""


class Board:
    """One process's view. Cells are int64: commands, then a block a rank; then bytes.

    Raises:
        RunError: there is no such memory, or none is left.
    """

    def __init__(self, ranks: int, name: str | None = None) -> None:
        """``name``: of a board that another process has made; None makes one."""
        self.ranks = ranks
        block = 2 + 3 * _RING
        cells = 5 * _RING + ranks * block
        talk = cells * _CELL
        size = talk + ranks * len(Topic) * (_CELL + _WORDS) + _PAYLOAD
        try:
            self._memory = _Memory(name, create=name is None, size=size)
        except OSError as error:
            raise RunError(f"no shared memory for {ranks} ranks: {error}") from error
        raw = self._memory.buf
        assert raw is not None
        self._cells = raw[:talk].cast("q")
        self._raw: memoryview = raw
        self._block, self._talk = block, talk
        self._payload = size - _PAYLOAD
        self._sequence = 0

    @property
    def name(self) -> str:
        return self._memory.name

    def close(self, *, last: bool = False) -> None:
        """Let go of it; ``last``: it is of no use to anybody any more."""
        self._cells.release()
        self._raw = memoryview(b"")
        self._memory.close()
        if last:
            self._memory.unlink()

    # signs of life

    def beat(self, rank: int) -> None:
        """``rank`` is there."""
        self._cells[self._of(rank)] += 1

    def beats(self, rank: int) -> int:
        return int(self._cells[self._of(rank)])

    # commands

    def order(self, command: Command, payload: bytes = b"") -> int:
        """The next command, of rank 0; its number.

        Waits while another rank has not taken what would be overwritten.

        Raises:
            RunError: the payload is too long.
        """
        if len(payload) > _PAYLOAD:
            raise RunError(f"a request of {len(payload)} bytes is more than {_PAYLOAD}")
        number = self._sequence + 1
        self.wait_for(number - 1 if payload else number - _RING)
        self._raw[self._payload : self._payload + len(payload)] = payload
        words = (number, int(command), len(payload), zlib.crc32(payload))
        self._write(5 * (number % _RING), words)
        self._sequence = number
        return number

    def next_order(self, rank: int) -> tuple[Command, bytes] | None:
        """What ``rank`` is to do next, None if there is nothing yet; `done` when it has done so."""
        number = self._sequence + 1
        words = self._read(5 * (number % _RING), 4)
        if words is None or words[0] != number:
            return None
        _, command, size, check = words
        payload = bytes(self._raw[self._payload : self._payload + size])
        if zlib.crc32(payload) != check:
            return None
        self._sequence = number
        return Command(command), payload

    def done(self, rank: int) -> None:
        """``rank`` has done the command it read last."""
        self._cells[self._of(rank) + 1] = self._sequence

    def wait_for(self, number: int) -> None:
        """Until all other ranks have done command ``number``. A rank that is lost is noticed by
        the server, which ends this process."""
        while any(self._cells[self._of(rank) + 1] < number for rank in range(1, self.ranks)):
            time.sleep(20e-6)

    # what a rank found at each step

    def post(self, rank: int, step: int, digest: int) -> None:
        """``rank`` has come to ``digest`` in ``step``."""
        self._write(self._of(rank) + 2 + 3 * (step % _RING), (step, digest))

    def posted(self, rank: int, step: int) -> int | None:
        """What it came to; None: it was not there yet, or is long past it."""
        words = self._read(self._of(rank) + 2 + 3 * (step % _RING), 2)
        return words[1] if words is not None and words[0] == step else None

    # words

    def say(self, rank: int, topic: Topic, words: bytes) -> None:
        """Once for each topic.

        Raises:
            RunError: it is too long.
        """
        if len(words) > _WORDS:
            raise RunError(f"rank {rank} has {len(words)} bytes to say, {_WORDS} at most")
        place = self._word(rank, topic)
        self._raw[place + _CELL : place + _CELL + len(words)] = words
        head = struct.pack("=iI", len(words) + 1, zlib.crc32(words))
        self._raw[place : place + _CELL] = head

    def said(self, rank: int, topic: Topic) -> bytes | None:
        """None: nothing yet."""
        place = self._word(rank, topic)
        size, check = struct.unpack("=iI", self._raw[place : place + _CELL])
        words = bytes(self._raw[place + _CELL : place + _CELL + max(0, size - 1)])
        return words if size > 0 and zlib.crc32(words) == check else None

    def all_said(self, topic: Topic, timeout_s: float) -> list[bytes]:
        """By rank, as soon as all have spoken.

        Raises:
            RunError: one did not in time.
        """
        end = time.monotonic() + timeout_s
        while True:
            every = [self.said(rank, topic) for rank in range(self.ranks)]
            found = [words for words in every if words is not None]
            if len(found) == self.ranks:
                return found
            if time.monotonic() > end:
                late = ", ".join(str(rank) for rank, words in enumerate(every) if words is None)
                raise RunError(f"rank {late} was not loaded within {timeout_s:g} s")
            time.sleep(0.01)

    def _of(self, rank: int) -> int:
        return 5 * _RING + rank * self._block

    def _write(self, first: int, words: tuple[int, ...]) -> None:
        for place, word in enumerate((*words, _sealed(words))):
            self._cells[first + place] = word

    def _read(self, first: int, count: int) -> tuple[int, ...] | None:
        """None: it is being written."""
        *words, seal = self._cells[first : first + count + 1].tolist()
        return tuple(words) if seal == _sealed(tuple(words)) else None

    def _word(self, rank: int, topic: Topic) -> int:
        return self._talk + (rank * len(Topic) + int(topic)) * (_CELL + _WORDS)


class _Memory(SharedMemory):
    """A mapping that lasts as long as the process: a thread may still write to it at the end."""

    def __del__(self) -> None:
        pass


def _sealed(words: tuple[int, ...]) -> int:
    seal = _MARK
    for word in words:
        seal = (seal * 1_000_003 ^ word) & _FEW
    return seal
