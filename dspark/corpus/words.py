"""Texts as tokens that can be compared, and hashes of runs of them.

A token is a word; in a script that puts no spaces between words (Chinese, Japanese, Thai, Lao,
Khmer, Burmese) it is one character, since a whole sentence would be one "word" there. Case,
punctuation, underscores around a word, characters without width and compatibility forms (NFKC:
full-width letters, ligatures) make no difference. Hashes are the same in every process.
"""

import re
import unicodedata
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHARACTER",
    "MARK",
    "Hashes",
    "hashes",
    "length",
    "runs",
    "spaceless",
    "tokens",
    "visible",
]

Hashes = npt.NDArray[np.uint64]

MARK = "\x01"
"""Stands in a text for a token that a caller knows already."""
CHARACTER = 0.65
"""What a character of a spaceless script counts for, in words: 20 characters are 13 words."""

_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # Japanese
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
_WORD = f"[^\\W_{_SPACELESS}](?:[^\\W{_SPACELESS}]*[^\\W_{_SPACELESS}])?"
_TOKEN = re.compile(f"[{_SPACELESS}]|{_WORD}")
_TOKEN_OR_MARK = re.compile(f"{MARK}|[{_SPACELESS}]|{_WORD}")
_ONE = re.compile(f"[{_SPACELESS}]")
_UNSEEN = re.compile(
    "[\u00ad\u034f\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]"
)
_ASCII = {code: " " for code in range(128) if not (chr(code).isalnum() or chr(code) == "_")}
_ASCII_BUT_MARK = {code: space for code, space in _ASCII.items() if chr(code) != MARK}
_FACTORS = np.random.Generator(np.random.PCG64(20)).integers(
    1, 2**64 - 1, size=64, dtype=np.uint64
) | np.uint64(1)


def tokens(text: str, *, marks: bool = False) -> list[str]:
    """Words in lower case, and single characters of spaceless scripts.

    With ``marks`` every `MARK` is a token as well; it must stand between spaces.
    """
    if not text.isascii():
        token = _TOKEN_OR_MARK if marks else _TOKEN
        return token.findall(unicodedata.normalize("NFKC", visible(text)).lower())
    words = text.lower().translate(_ASCII_BUT_MARK if marks else _ASCII).split()
    if "_" not in text:
        return words
    return [word for word in (one.strip("_") for one in words) if word]


def visible(text: str) -> str:
    """``text`` without what takes no room: soft hyphens, joiners, marks of direction or variant."""
    return _UNSEEN.sub("", text)


def spaceless(words: Sequence[str]) -> npt.NDArray[np.bool_]:
    """[tokens] which of them are characters of a spaceless script."""
    if "".join(words).isascii():
        return np.zeros(len(words), dtype=np.bool_)
    found = (len(word) == 1 and _ONE.match(word) is not None for word in words)
    return np.fromiter(found, dtype=np.bool_, count=len(words))


def length(words: Sequence[str]) -> float:
    """How much text it is, in words."""
    return len(words) - (1 - CHARACTER) * float(spaceless(words).sum())


def hashes(words: Sequence[str]) -> Hashes:
    """[tokens] one number for each."""
    parts = " ".join(words).encode("utf-8", "surrogatepass").split(b" ") if words else []
    return np.fromiter(map(zlib.crc32, parts), dtype=np.uint64, count=len(words))


def runs(numbers: Hashes, size: int) -> Hashes:
    """[tokens - size + 1] one number for each run of ``size`` tokens (at most 64); may be empty.

    Their high bits are the good ones.
    """
    if len(numbers) < size:
        return np.empty(0, dtype=np.uint64)
    return np.correlate(numbers, _FACTORS[:size], "valid") + np.uint64(size)
