"""Roughly which language a text is in: by its script, and for Latin letters by a few small words.

For the shares of a data set, not for single texts: short answers in Latin letters are often
`other`.
"""

import re
from collections import Counter

__all__ = ["language"]

_LOOKED_AT = 1000  # characters; the beginning of an answer tells enough
_SCRIPTS = {
    "kana": re.compile("[\u3040-\u30ff\uff66-\uff9f]"),
    "ko": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "zh": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ffff]"),
    "ru": re.compile("[\u0400-\u052f]"),
    "ar": re.compile("[\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff]"),
    "he": re.compile("[\u0590-\u05ff]"),
    "hi": re.compile("[\u0900-\u097f]"),
    "th": re.compile("[\u0e00-\u0e7f]"),
    "el": re.compile("[\u0370-\u03ff]"),
    "latin": re.compile("[A-Za-z\u00c0-\u024f]"),
}
# a Chinese or Japanese letter says as much as several Latin ones
_WEIGHT = {"kana": 3, "zh": 3, "ko": 3}
_WORDS = {
    "en": "the and is of to in that it for with you are this on as be can not your or from",
    "de": "der die das und ist nicht ein eine zu den mit von für auf sich auch wird sie im dem",
    "fr": "le la les et est une des dans pour que qui sur pas vous par avec ce cette au du",
    "es": "el los las es una que por para con del como se su más está son lo al pero y",
    "pt": "o os as é uma que para com não do da em dos mais como seu por são um ao",
    "it": "il lo gli è una che per con non di del della sono più come questo nel si alla le",
    "nl": "het een van en dat niet voor met zijn op te aan die ook wordt bij er naar maar is",
    "pl": "nie się na jest że do z w to jak oraz dla przez od są po ale być który czy",
    "tr": "bir ve bu için ile olarak da de çok daha gibi olan en ne kadar sonra ama var değil",
}
_SPEAK: dict[str, list[str]] = {}
for _name, _line in _WORDS.items():
    for _word in _line.split():
        _SPEAK.setdefault(_word, []).append(_name)
_LETTERS = re.compile(r"[^\W\d_]+")
_FENCED = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_SYMBOLS = re.compile(r"[{}()\[\];=<>_#\\|&*+/$^]")
_CODE_SHARE = 0.12
_FEW_WORDS = 0.08  # share of the words that must be a language's small words


def language(text: str) -> str:
    """`en`, `zh`, `ja`, … , `code` (or formulas), `other`, or `none` for a text without letters."""
    text = text[:_LOOKED_AT]
    scripts = {"latin": _SCRIPTS["latin"]} if text.isascii() else _SCRIPTS
    counts = {name: len(kind.findall(text)) for name, kind in scripts.items()}
    script = max(counts, key=lambda name: counts[name] * _WEIGHT.get(name, 1))
    if not counts[script]:
        return "none"
    if script in ("kana", "zh"):
        # Japanese mixes both; Chinese knows no kana
        return "ja" if 20 * counts["kana"] >= counts["zh"] else "zh"
    if script != "latin":
        return script
    return "code" if _is_code(text) else _latin(text)


def _is_code(text: str) -> bool:
    fenced = sum(len(block) for block in _FENCED.findall(text))
    written = len("".join(text.split()))
    return 2 * fenced > len(text) or len(_SYMBOLS.findall(text)) > _CODE_SHARE * written


def _latin(text: str) -> str:
    words = _LETTERS.findall(text.lower())
    hits = Counter(name for word in words for name in _SPEAK.get(word, ()))
    ((best, count),) = hits.most_common(1) or [("other", 0)]
    return best if count > _FEW_WORDS * len(words) else "other"
