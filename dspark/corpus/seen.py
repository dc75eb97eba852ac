"""Which keys were met already, in a few bytes a key.

Millions of ids as Python strings take a hundred bytes each. Here a key is 8 bytes of its SHA-256 in
a table of at most two thirds full. Two different keys look alike with a chance of n**2 / 2**65: one
in 37 million for a million rows.
"""

import hashlib
from array import array

__all__ = ["Seen"]

_FIRST = 1 << 10


class Seen:
    """A set of texts or bytes that can only grow."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _FIRST))  # 0: free
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def __contains__(self, key: str | bytes) -> bool:
        digest = _digest(key)
        return self._slots[self._slot(digest)] == digest

    def add(self, key: str | bytes) -> bool:
        """Remember ``key``; True if it is new."""
        digest = _digest(key)
        slot = self._slot(digest)
        if self._slots[slot] == digest:
            return False
        self._slots[slot] = digest
        self._held += 1
        if 3 * self._held > 2 * len(self._slots):
            self._grow()
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return 8 * len(self._slots)

    def _slot(self, digest: int) -> int:
        """Where ``digest`` stands, or the free slot where it would."""
        slots, last = self._slots, len(self._slots) - 1
        slot = digest & last
        while slots[slot] and slots[slot] != digest:
            slot = (slot + 1) & last
        return slot

    def _grow(self) -> None:
        old = self._slots
        self._slots = array("Q", bytes(16 * len(old)))
        for digest in old:
            if digest:
                self._slots[self._slot(digest)] = digest


def _digest(key: str | bytes) -> int:
    text = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
    # 0 marks a free slot
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") or 1
