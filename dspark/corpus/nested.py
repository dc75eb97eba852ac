"""Values that are nested deeper than the code behind can follow."""

from typing import Any

__all__ = ["MOST", "too_deep"]

MOST = 200
"""Levels; templates, hashes and writers need a few calls of Python's bounded stack for each."""


def too_deep(value: Any) -> bool:
    """Whether lists and objects stand inside one another more than `MOST` levels deep."""
    level = [value]
    for _ in range(MOST + 1):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True
