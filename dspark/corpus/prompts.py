"""Prompts: what the target is asked, from rows of any known shape.

Shapes: `messages`, `conversations` (role/content or ShareGPT's from/value), `turns` (the user's
turns; the first is the prompt), `text` (one user message). `messages.conversation` holds the
rules. Pre-tokenised rows (`input_ids`) are training data, not prompts: `tokens_only`.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.messages import Message, Tool, conversation, tools_of, user_turns
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.seen import Seen
from dspark.errors import DataError

__all__ = ["Prompt", "content_id", "given_id", "iterate_prompts", "parse_prompt", "read_prompts"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A conversation whose next message is the assistant's."""

    id: str
    """The row's own `id`, else a hash of the messages."""
    messages: list[Message]
    source: str
    category: str | None = None
    followups: tuple[str, ...] = ()
    """Later user turns of a `turns` row; each is asked after the answer to the one before."""
    tools: list[Tool] | None = None
    """What the template is given as `tools`."""


def read_prompts(
    sources: Sequence[str],
    limit: int | None = None,
    rejects: Rejects | None = None,
    *,
    with_tools: bool = False,
) -> list[Prompt]:
    """The first ``limit`` usable prompts of ``sources``, in the order of files and rows.

    Rows that list tools are rejected unless the caller says that it renders `Prompt.tools`.

    Raises:
        DataError: a source does not exist, cannot be read, or holds no usable row.
        MissingPackageError: a source needs `dspark[data]`.
    """
    rejects = Rejects() if rejects is None else rejects
    prompts = list(iterate_prompts(sources, limit, rejects, with_tools=with_tools))
    if rejects.rejected:
        log.warning("%s", rejects.explained())
    if prompts and (later := sum(bool(p.followups) for p in prompts)):
        log.info("%d of %d prompts have further user turns", later, len(prompts))
    return prompts


def iterate_prompts(
    sources: Sequence[str], limit: int | None, rejects: Rejects, *, with_tools: bool = False
) -> Iterator[Prompt]:
    """`read_prompts`, each row read when it is taken; only the ids of all are kept."""
    most = None if limit is None else min(limit, sys.maxsize)
    return islice(_prompts(sources, rejects, with_tools), most)


def _prompts(sources: Sequence[str], rejects: Rejects, with_tools: bool) -> Iterator[Prompt]:
    seen = Seen()
    for source in expand(sources):
        good = False
        rejects.begin()
        for row in read_rows(source, rejects):
            try:
                prompt = parse_prompt(row)
                if prompt.tools and not with_tools:
                    raise RowError(Reason.TOOLS_UNSUPPORTED, "the row lists tools")
                good = True
                if not seen.add(prompt.id):
                    raise RowError(Reason.DUPLICATE_ID, prompt.id[:40])
            except RowError as error:
                rejects.add(error, row.place)
                continue
            yield prompt
        if not good:
            raise DataError(f"'{source}' holds no usable prompt: {rejects.explained_here()}")


def parse_prompt(row: RawRow) -> Prompt:
    """The prompt of one row: everything up to the last message that is not the assistant's.

    Raises:
        RowError: the row cannot be used as a prompt.
    """
    turns = user_turns(row.value)
    if turns is not None:
        messages: list[Message] = [{"role": "user", "content": turns[0]}]
    else:
        messages = conversation(row.value)
        while messages[-1]["role"] == "assistant":
            messages.pop()
    tools = tools_of(row.value)
    return Prompt(
        id=given_id(row.value) or content_id(messages, *(turns or ())[1:], *(tools or ())),
        tools=tools,
        messages=messages,
        source=row.source,
        category=_plain_text(row.value.get("category")),
        followups=tuple(turns[1:]) if turns else (),
    )


def given_id(row: dict[str, Any]) -> str | None:
    """The row's own id as text, if it has one."""
    return _plain_text(row.get("id"))


def _plain_text(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).encode("utf-8", "replace").decode().strip() or None


def content_id(messages: Sequence[Message], *more: str | Tool) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of ``messages``, later turns and tools."""
    value = [*messages, *more]
    canonical = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
