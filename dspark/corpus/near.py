"""Near duplicates: MinHash signatures, found again through bands of them.

The similarity of two texts is the Jaccard index of their sets of five-token runs (a shorter text is
one run). Which tokens these are, and what of a prompt takes part, is `signs` and `identity`. Of 128
hash functions each keeps its smallest value over a text's runs; two texts agree in a value with the
probability of their similarity. A text is compared with those kept before that agree with it in all
values of one of the bands, and is a duplicate when the share of equal values says that the
similarity is at least the threshold. The first of several near texts is kept.
Broder, "On the resemblance and containment of documents", 1997; b-bit values: Li and König, 2010.

Memory per kept text: 128 bytes of signature and 8 to 12 a band; at 0.8 with its 16 bands 0.3
to 0.5 GB for a million texts.
"""

import numpy as np
import numpy.typing as npt

from dspark.corpus.words import Hashes, runs

__all__ = ["RUN", "NearDuplicates", "shingles"]

RUN = 5
_VALUES = 128
_CHAIN = 256
"""Texts looked at per band, the latest first: a bound on the time that a set of many texts from
one mould may take."""
_PIECE = 4096
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_random = np.random.Generator(np.random.PCG64(1997))
_FACTOR = _random.integers(0, 2**32, size=(_VALUES, 1), dtype=np.uint32) | np.uint32(1)
_OFFSET = _random.integers(0, 2**32, size=(_VALUES, 1), dtype=np.uint32)


def shingles(numbers: Hashes) -> Hashes:
    """[runs] hashes of the five-token runs of a text of one token or more, given the tokens' own;
    one of the whole if it is shorter.
    """
    return runs(numbers, min(len(numbers), RUN))


def _bands(threshold: float) -> tuple[int, int]:
    """(bands, values of each): the widest that find 98% of the pairs 0.05 above the threshold."""
    similarity = min(threshold + 0.05, 1.0)
    for width in range(16, 1, -1):
        bands = min(_VALUES // width, 32)
        if (1 - similarity**width) ** bands <= 0.02:
            return bands, width
    return 32, 2


class NearDuplicates:
    """The texts kept so far. The same texts in the same order give the same answers."""

    def __init__(self, threshold: float) -> None:
        self._bands, self._width = _bands(threshold)
        # values are kept as bytes, of which unequal ones agree once in 256
        self._enough = _VALUES * (threshold + (1 - threshold) / 256)
        self._powers = np.uint64(257) ** np.arange(self._width, dtype=np.uint64)
        self._each = np.arange(self._bands)
        self._kept = 0
        self._signatures = np.empty((0, _VALUES), dtype=np.uint8)
        self._make_room(1024)

    def __len__(self) -> int:
        return self._kept

    def add(self, runs_of_text: Hashes) -> bool:
        """Keep the text unless it is near to one kept before; whether it was kept."""
        signature = self._signature(runs_of_text)
        slots = self._slots(signature[None])[0]
        if self._near(signature, slots):
            return False
        self._kept += 1
        if self._kept == len(self._signatures):
            self._make_room(2 * self._kept)
            slots = self._slots(signature[None])[0]
        self._signatures[self._kept] = signature
        self._next[self._kept] = self._heads[self._each, slots]
        self._heads[self._each, slots] = self._kept
        return True

    def _near(self, signature: npt.NDArray[np.uint8], slots: npt.NDArray[np.int64]) -> bool:
        at = self._heads[self._each, slots]
        found = []
        for _ in range(_CHAIN):
            if not at.any():
                break
            found.append(at)
            at = self._next[at, self._each]
        if not found:
            return False
        others = np.concatenate(found)
        equal = np.count_nonzero(self._signatures[others[others > 0]] == signature, axis=1)
        return bool((equal >= self._enough).any())

    @staticmethod
    def _signature(numbers: Hashes) -> npt.NDArray[np.uint8]:
        high = (numbers >> np.uint64(32)).astype(np.uint32)
        least = (high[:_PIECE] * _FACTOR + _OFFSET).min(axis=1)
        for start in range(_PIECE, len(high), _PIECE):
            values = high[start : start + _PIECE] * _FACTOR + _OFFSET
            np.minimum(least, values.min(axis=1), out=least)
        # the high bits of a smallest value are mostly zero, those of a product depend on all
        spread: npt.NDArray[np.uint32] = least * _FACTOR[0]
        return (spread >> np.uint32(24)).astype(np.uint8)

    def _slots(self, signatures: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """[texts, bands] where the chain of a band of a signature, or of single bands, begins."""
        used = signatures[:, : self._bands * self._width].astype(np.uint64)
        keys = used.reshape(len(used), -1, self._width) @ self._powers
        bits = self._heads.shape[1].bit_length() - 1
        return (keys * _SPREAD >> np.uint64(64 - bits)).astype(np.int64)

    def _make_room(self, size: int) -> None:
        """Tables for ``size`` texts, a power of two; entry 0 stands for none."""
        old = self._signatures
        self._signatures = np.zeros((size, _VALUES), dtype=np.uint8)
        self._signatures[: len(old)] = old
        self._next = np.zeros((size, self._bands), dtype=np.int32)
        self._heads = np.zeros((self._bands, size), dtype=np.int32)
        kept = np.arange(1, len(old))
        for band in range(self._bands if len(old) else 0):
            values = slice(band * self._width, (band + 1) * self._width)
            slots = self._slots(self._signatures[kept, values])[:, 0]
            order = np.argsort(slots, kind="stable")
            same = slots[order][1:] == slots[order][:-1]
            self._next[kept[order][1:], band] = np.where(same, kept[order][:-1], 0)
            # the latest of a slot stands last, and is the one that stays
            self._heads[band, slots[order]] = kept[order]
