"""Texts as tokens in which the signs of an exercise count: 12 + 7 is not 12 - 7.

`words.tokens` knows words only. Here operators, relations, signs of numbers and decimal points are
tokens too, raised and lowered characters stay apart from the digits before them (2² reads like
2^2, not like 22), and a bracket counts where an operator stands next to it. No sign is what only
lays out a text: a hyphen inside a word, the bullet of a list, asterisks around a word.
"""

import re
import unicodedata

from dspark.corpus.words import MARK, tokens, visible

__all__ = ["signed_tokens"]

_LETTER = r"[^\W\d_]"
_BULLET = re.compile(rf"^[ \t]*[-*+>][ \t]+(?={_LETTER}{{2}})", re.MULTILINE)
_OPERATOR = r"[-+/^=<>]"
# every branch begins with the sign itself, so that the search passes quickly over all else; what
# must stand before it is looked up behind it
_SIGN = re.compile(
    "("
    + "|".join(
        (
            r"[+=<>^%/&|~\u00ac\u00b1\u00d7\u00f7\u2190-\u22ff\u27c0-\u27ef\u2900-\u2aff]",
            rf"-(?<!{_LETTER}-)|-(?!{_LETTER})",
            r"\*(?<=[\w)\]]\*)\**(?=[\w(\[-])|\*(?<=\s\*)\**(?=\s)|\*(?<=\d\*)\**(?=\s*\d)",
            r"!(?<=\d!)|!(?==)",
            r"\.(?=\d)",
            rf"[()](?=\s?{_OPERATOR})|[()](?<={_OPERATOR}[()])|[()](?<={_OPERATOR}\s[()])",
            # an asterisk may be the end of an emphasis
            r"\)(?=\*+[\w(]|\s\*+\s)|\((?<=[\w)]\*\()|\((?<=\s\*\s\()",
        )
    )
    + ")"
)
_DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"


class _Apart(dict[int, str]):
    """For `str.translate`: dashes are minus signs; what NFKC would make a plain digit is marked."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.decomposition(char).partition(" ")[0]
        plain = unicodedata.normalize("NFKC", char).replace("\u2212", "-").replace("\u2044", "/")
        if char in _DASHES:
            result = "-"
        elif kind == "<super>":
            result = f" ^{plain} "
        elif kind == "<sub>":
            result = f" \u2193{plain} "
        elif unicodedata.category(char) == "No":
            result = f" {plain} "
        else:
            result = char
        self[code] = result
        return result


_APART = _Apart()


def signed_tokens(text: str) -> list[str]:
    """`words.tokens`, and signs."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", visible(text).translate(_APART))
    parts = _SIGN.split(_BULLET.sub("", text.replace(MARK, " ")))
    if len(parts) == 1:
        return tokens(parts[0])
    signs = iter(parts[1::2])
    words = tokens(f" {MARK} ".join(parts[::2]), marks=True)
    return [next(signs) if word == MARK else word for word in words]
