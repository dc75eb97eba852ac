"""Rows that cannot be used: why, how many, and where the first few stand.

A row is either used or rejected for exactly one reason, so ``accepted + rejected == read`` holds
for every file. A bad row never ends a run; a source without a single good row does.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dspark.errors import DataError

__all__ = ["Reason", "Rejects", "RowError"]


class Reason(StrEnum):
    """Why a row was rejected."""

    INVALID_UTF8 = "invalid_utf8"
    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_MESSAGES = "no_messages"
    BAD_MESSAGES = "bad_messages"
    UNKNOWN_ROLE = "unknown_role"
    SYSTEM_NOT_FIRST = "system_not_first"
    ASSISTANT_FIRST = "assistant_first"
    NO_USER_TURN = "no_user_turn"
    EMPTY_CONTENT = "empty_content"
    BAD_CONTENT = "bad_content"
    BAD_UNICODE = "bad_unicode"
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_TOOLS = "bad_tools"
    TOOLS_UNSUPPORTED = "tools_unsupported"
    TOKENS_ONLY = "tokens_only"
    DUPLICATE_ID = "duplicate_id"
    EXACT_DUPLICATE = "exact_duplicate"
    NEAR_DUPLICATE = "near_duplicate"
    OVERLAP = "overlap"
    NO_ANSWER = "no_answer"
    BAD_TOKEN_IDS = "bad_token_ids"
    MASK_LENGTH = "mask_length"
    ID_OUT_OF_VOCABULARY = "id_out_of_vocabulary"
    UNKNOWN_FORMAT = "unknown_format"
    TEMPLATE_ERROR = "template_error"
    UNSTABLE_PREFIX = "unstable_prefix"
    REASONING_LOST = "reasoning_lost"
    CALLS_LOST = "calls_lost"
    PROMPT_TOO_LONG = "prompt_too_long"
    NO_END_OF_TURN = "no_end_of_turn"
    OTHER_PROMPT = "other_prompt"
    TOO_FEW_SUPERVISED = "too_few_supervised"


class RowError(DataError):
    """One row cannot be used. Where rows are read it is caught and counted in `Rejects`."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.replace('_', ' ')}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass
class Rejects:
    """Counts by reason over the rows read, and the first places of each reason."""

    read: int = 0
    counts: Counter[Reason] = field(default_factory=Counter)
    places: dict[Reason, list[str]] = field(default_factory=dict)
    kept_places: int = 5
    """Places remembered per reason."""
    _here: "Rejects | None" = field(default=None, repr=False, compare=False)
    _before: int = field(default=0, repr=False, compare=False)

    @property
    def rejected(self) -> int:
        return sum(self.counts.values())

    @property
    def accepted(self) -> int:
        return self.read - self.rejected

    def begin(self) -> None:
        """A source begins: `explained_here` tells of its rows alone."""
        self._here = Rejects(kept_places=1)
        self._before = self.read

    def add(self, error: RowError, place: str) -> None:
        """Count one rejected row; ``place`` is `file:line`, or the row's id."""
        if self._here is not None:
            self._here.add(error, place)
        self.counts[error.reason] += 1
        places = self.places.setdefault(error.reason, [])
        if len(places) < self.kept_places:
            places.append(f"{place} ({error.detail})" if error.detail else place)

    def summary(self) -> str:
        """`3 of 10 rows rejected: invalid_json 2, no_messages 1`, or an empty string."""
        if not self.rejected:
            return ""
        parts = ", ".join(f"{reason} {count}" for reason, count in self.counts.most_common())
        return f"{self.rejected} of {self.read} rows rejected: {parts}"

    def explained(self) -> str:
        """`summary` and the first place of the commonest reason: what a run without rows says."""
        if not self.rejected:
            return ""
        ((reason, _),) = self.counts.most_common(1)
        return f"{self.summary()}; first: {self.places[reason][0]}"

    def explained_here(self) -> str:
        """`explained` of the rows since `begin`; `it is empty` without a rejected one."""
        assert self._here is not None
        self._here.read = self.read - self._before
        return self._here.explained() or "it is empty"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {
            "read": self.read,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "reasons": {str(reason): count for reason, count in self.counts.most_common()},
            "places": {str(reason): places for reason, places in self.places.items()},
        }
