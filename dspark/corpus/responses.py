"""responses.jsonl: what the target said, token for token, and everything needed to repeat it.

A row (`"format": "dspark.responses/1"`) holds ids exactly as they were sampled; nothing here
tokenises an answer again. A row that was stopped by length ends without an end-of-turn token, so
none is taught. Readers also take foreign rows: `input_ids` with `loss_mask`, and conversations
with an assistant turn, which are rendered with the target's template (a `finish_reason` of theirs
counts too).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dspark.config import DataSettings
from dspark.corpus.chat import render_turns, template_hash
from dspark.corpus.files import RawRow, expand, read_rows
from dspark.corpus.messages import Message, Tool, conversation, tools_of, user_turns
from dspark.corpus.prompts import content_id, given_id
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.seen import Seen
from dspark.errors import DataError

__all__ = ["FORMAT", "Response", "parse_responses", "read_responses", "row_key", "too_few"]

FORMAT = "dspark.responses/1"


def row_key(name: str, sample: int) -> str:
    """`Response.key` of a row."""
    return f"{name}#{sample}" if sample else name


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sequence with its supervision. Fields that a foreign row does not tell are None."""

    id: str
    """Id of the prompt, or of the row it was read from."""
    sample: int = 0
    """Number of this answer among the answers to the same prompt."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, the sampled answer included; empty for pre-tokenised rows."""
    tools: list[Tool] | None = None
    """What the template was given as `tools`."""
    input_ids: list[int]
    loss_mask: list[int]
    """1 where the target produced the token; same length as `input_ids`."""
    finish_reason: str | None = None
    """`stop`: ends with the target's end-of-turn token; `length`: it was cut."""
    setting_index: int | None = None
    """Position of `sampling` in `sample.settings`."""
    sampling: dict[str, Any] | None = None
    """temperature, top_p, top_k, min_p and max_new_tokens."""
    seed: int | None = None
    thinking: bool | None = None
    """What the template was given as `enable_thinking`."""
    target: str | None = None
    target_revision: str | None = None
    target_fingerprint: str | None = None
    template_hash: str | None = None
    settings_hash: str | None = None
    """Hash of everything that must agree for rows to stand in one file (`sampler`)."""
    source: str | None = None
    category: str | None = None
    part: int = 0
    """Number of this sequence among those of one conversation (its id then ends in `/part`)."""
    parts: int = 1
    """Sequences of the conversation, which stand behind one another in the file."""
    engine: str | None = None
    """Where it was sampled: `vllm:NAME`, `sglang:NAME`, `openai:NAME` or `dspark:NAME` (servers);
    None: in process."""
    retokenized: bool = False
    """The engine returned text only; `input_ids` are the tokenizer's."""

    @property
    def key(self) -> str:
        """Unique name of the row: `id`, and `id#n` for further answers to the same prompt."""
        return row_key(self.id, self.sample)

    @property
    def switch(self) -> str:
        """`thinking` in a word: on, off or unset."""
        return {True: "on", False: "off", None: "unset"}[self.thinking]

    @property
    def num_supervised(self) -> int:
        return sum(self.loss_mask)

    def to_json(self) -> str:
        """One line, without the line feed."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False)


def read_responses(
    sources: Sequence[str],
    tokenizer: Any = None,
    *,
    rejects: Rejects | None = None,
    thinking: bool | None = None,
    vocab_size: int | None = None,
) -> Iterator[Response]:
    """Rows of files, globs, folders or hub ids that can be trained on, in order.

    A conversation may give several rows (`chat.render_turns`); it is counted as that many.

    Args:
        tokenizer: needed for conversations that are not tokenised yet.
        rejects: counts of rows read and rejected are added here.
        thinking: how conversations that are not tokenised yet are rendered.
        vocab_size: rows with an id at or above it are rejected.

    Raises:
        DataError: a source cannot be read, holds no usable row, or holds conversations while
            no tokenizer was given.
    """
    rejects = Rejects() if rejects is None else rejects
    seen = Seen()
    for source in expand(sources):
        good = False
        rejects.begin()
        for raw in read_rows(source, rejects):
            try:
                rows = parse_responses(raw, tokenizer, thinking=thinking, vocab_size=vocab_size)
                good = True
                if any(row.key in seen for row in rows):
                    raise RowError(Reason.DUPLICATE_ID, rows[0].key[:40])
            except RowError as error:
                rejects.add(error, raw.place)
                continue
            for row in rows:
                seen.add(row.key)
            rejects.read += len(rows) - 1
            yield from rows
        if not good:
            raise DataError(f"'{source}' holds no usable response: {rejects.explained_here()}")


def parse_responses(
    raw: RawRow,
    tokenizer: Any = None,
    *,
    thinking: bool | None = None,
    vocab_size: int | None = None,
) -> list[Response]:
    """Training rows of one row of any shape.

    Raises:
        RowError: it cannot be trained on.
        DataError: it has to be rendered and ``tokenizer`` is None.
    """
    row = raw.value
    if row.get("input_ids") is not None:
        return [_tokenised(raw, vocab_size)]
    if user_turns(row) is not None:
        raise RowError(Reason.NO_ANSWER)
    messages = conversation(row)
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError(Reason.NO_ANSWER)
    if tokenizer is None:
        raise DataError(f"{raw.place} is a conversation: reading it needs the target's tokenizer")
    given = row.get("thinking")
    thinking = given if isinstance(given, bool) else thinking
    finish = row.get("finish_reason")
    tools = tools_of(row)
    rendered = render_turns(
        tokenizer, messages, thinking=thinking, cut=finish == "length", tools=tools
    )
    name = given_id(row) or content_id(messages, *(tools or ()))
    category = row.get("category")
    return [
        Response(
            id=name if turn == 0 else f"{name}/{turn}",
            messages=messages,
            tools=tools,
            input_ids=one.input_ids,
            loss_mask=one.loss_mask,
            # it tells of the last answer
            finish_reason=finish if finish in _FINISHED and one is rendered[-1] else None,
            thinking=thinking,
            template_hash=template_hash(tokenizer),
            source=raw.source,
            category=category if isinstance(category, str) else None,
        )
        for turn, one in enumerate(rendered)
    ]


def too_few(row: Response, data: DataSettings) -> RowError | None:
    """Why a row cut to `max_length` has not enough to teach, if it has not."""
    kept, wanted = sum(row.loss_mask[: data.max_length]), data.min_supervised_tokens
    if kept >= wanted:
        return None
    if row.num_supervised >= wanted:
        return RowError(
            Reason.PROMPT_TOO_LONG,
            f"{kept} of {row.num_supervised} supervised tokens within max_length {data.max_length}",
        )
    return RowError(Reason.TOO_FEW_SUPERVISED, f"{kept} of {wanted}")


def _tokenised(raw: RawRow, vocab_size: int | None) -> Response:
    row = raw.value
    if "format" in row and row["format"] != FORMAT:
        raise RowError(Reason.UNKNOWN_FORMAT, f"{row['format']!r}, this version reads {FORMAT}")
    ids, mask = row["input_ids"], row.get("loss_mask")
    # whole lists at once: most of the time of reading a large file is spent here
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or min(ids) < 0:
        raise RowError(Reason.BAD_TOKEN_IDS, "input_ids must be a list of ids")
    if not isinstance(mask, list) or not set(map(type, mask)) <= {int, bool} or set(mask) - {0, 1}:
        raise RowError(Reason.BAD_TOKEN_IDS, "loss_mask must be a list of 0 and 1")
    if len(mask) != len(ids):
        raise RowError(Reason.MASK_LENGTH, f"{len(ids)} ids, {len(mask)} mask entries")
    # ids are kept in 32 bits
    limit = 2**31 if vocab_size is None else vocab_size
    if max(ids) >= limit:
        raise RowError(Reason.ID_OUT_OF_VOCABULARY, f"{max(ids)}, vocabulary {limit}")
    known = {name: row[name] for name in _OWN_FIELDS if row.get(name) is not None}
    if not all(isinstance(known.get(name, kind()), kind) for name, kind in _FIELD_TYPES.items()):
        raise RowError(Reason.UNKNOWN_FORMAT, "a field has the wrong type")
    for name, value in known.items():
        if isinstance(value, str):  # a lone surrogate can be neither logged nor written
            known[name] = value.encode("utf-8", "replace").decode()
    known.update(input_ids=ids, loss_mask=list(map(int, mask)))
    known.setdefault("source", raw.source)
    known["id"] = given_id(row) or content_id([{"input_ids": ids}])
    return Response(**known)


_FINISHED = ("stop", "length")
_OWN_FIELDS = tuple(Response.__dataclass_fields__)
_FIELD_TYPES: dict[str, type] = {
    "sample": int,
    "messages": list,
    "tools": list,
    "finish_reason": str,
    "setting_index": int,
    "sampling": dict,
    "seed": int,
    "thinking": bool,
    "target": str,
    "target_revision": str,
    "target_fingerprint": str,
    "template_hash": str,
    "settings_hash": str,
    "source": str,
    "category": str,
    "part": int,
    "parts": int,
    "engine": str,
    "retokenized": bool,
}
