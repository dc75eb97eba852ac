"""Conversations to token ids and loss mask, by the tokenizer's own chat template.

An assistant turn is trained in the context in which it would be served: its prefix must be, token
for token, what the template renders for the messages before it with `add_generation_prompt`. The
mask covers what the target itself has to produce: from the first token behind that prompt through
the turn's end-of-turn token. It is found by rendering prefixes, so templates need no
`{% generation %}` tags.

Not supervised although it stands behind the prompt: the closing part of an empty think pair.
Templates write the pair into the prompt when thinking is off; a turn without reasoning that was
rendered with thinking on (or unspecified) carries the same boilerplate, and no answer starts so.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.corpus.messages import Message, Tool
from dspark.corpus.rejects import Reason, RowError
from dspark.errors import TargetError

__all__ = [
    "Rendered",
    "check_template",
    "generation_prompt_ids",
    "render",
    "render_turns",
    "template_hash",
]

# How many tokens a template may need to close an empty think pair: `\n\n</think>\n\n` is 3 or 4.
_LONGEST_CLOSING = 8


@dataclass(frozen=True)
class Rendered:
    """A conversation as the target reads it."""

    input_ids: list[int]
    loss_mask: list[int]
    """1 where the target itself produces the token; same length as `input_ids`."""
    template_hash: str


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot render a prompt, before any weights are loaded.

    Raises:
        TargetError: there is no chat template, or it raises, or it renders nothing.
    """
    name = _name(tokenizer)
    try:
        ids = generation_prompt_ids(tokenizer, [{"role": "user", "content": "Hello?"}])
    except RowError as error:
        raise TargetError(
            f"the chat template of '{name}' cannot render a user message: {error.detail}; correct "
            "chat_template.jinja beside tokenizer.json"
        ) from error
    if not ids:
        raise TargetError(f"the chat template of '{name}' renders a user message to nothing")


def template_hash(tokenizer: Any) -> str:
    """16 hex digits of SHA-256 over the text of the chat template in use.

    Raises:
        TargetError: there is no chat template.
    """
    return hashlib.sha256(_template(tokenizer).encode()).hexdigest()[:16]


def generation_prompt_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None = None,
    *,
    vocab_size: int | None = None,
    tools: Sequence[Tool] | None = None,
) -> list[int]:
    """Ids of ``messages`` and the header of the assistant's next turn.

    ``thinking`` is passed to the template as `enable_thinking` unless it is None, and ``tools`` as
    they are. A tokenizer may know more ids than the target has rows for; ``vocab_size`` is the
    target's.

    Raises:
        RowError: the template refuses these messages or passes over the tools, or an id is not
            below ``vocab_size``.
        TargetError: there is no chat template.
    """
    ids = _ids(tokenizer, messages, thinking, tools, prompt=True)
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise RowError(Reason.ID_OUT_OF_VOCABULARY, f"{max(ids)}, vocabulary {vocab_size}")
    return ids


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = None,
    tools: Sequence[Tool] | None = None,
) -> Rendered:
    """Ids and mask of a conversation that ends with the assistant's turn.

    Earlier assistant turns are supervised too where this rendering shows them in the context in
    which they would be served; a template that strips earlier reasoning, for example, leaves them
    unsupervised here (`render_turns` gives them sequences of their own). ``tools`` are written
    where the template wants them, in front of every turn, and are never supervised.

    Raises:
        RowError: no answer at the end (`no_answer`); the last turn's prompt is not the beginning
            of its rendering (`unstable_prefix`); the template leaves its reasoning or its calls
            of tools out (`reasoning_lost`, `calls_lost`), passes over the tools
            (`tools_unsupported`) or raises (`template_error`).
    """
    return _render(tokenizer, messages, thinking, tools)[0]


def render_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool | None = None,
    cut: bool = False,
    tools: Sequence[Tool] | None = None,
) -> list[Rendered]:
    """The fewest sequences in which every assistant turn is supervised once, in served context.

    Messages behind the last assistant turn are left out. ``cut`` says that the last answer was
    stopped by length: its sequence then ends before the end-of-turn token, which the target has
    not produced. Raises as `render` does.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise RowError(Reason.NO_ANSWER)
    rendered = []
    left = set(turns)
    while left:
        last = max(left)
        sequence, spans = _render(tokenizer, messages[: last + 1], thinking, tools)
        for turn, (start, end) in spans.items():
            if turn not in left:
                sequence.loss_mask[start:end] = [0] * (end - start)
        left -= spans.keys()
        rendered.append(sequence)
    if cut and rendered[0].input_ids[-1] in _special_ids(tokenizer):
        del rendered[0].input_ids[-1], rendered[0].loss_mask[-1]
    return rendered[::-1]


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None,
    tools: Sequence[Tool] | None,
) -> tuple[Rendered, dict[int, tuple[int, int]]]:
    """The sequence, and the supervised [start, end) of each assistant turn that has one."""
    if not messages or messages[-1]["role"] != "assistant":
        raise RowError(Reason.NO_ANSWER)
    messages = [_split_inline_reasoning(tokenizer, dict(message)) for message in messages]
    full = _ids(tokenizer, messages, thinking, tools)
    spans: dict[int, tuple[int, int]] = {}
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        is_last = turn == len(messages) - 1
        served = full if is_last else _ids(tokenizer, messages[: turn + 1], thinking, tools)
        try:
            start, end = _span(tokenizer, messages[: turn + 1], served, thinking, tools)
        except RowError:
            if is_last:
                raise
            continue
        if full[:end] == served[:end]:
            spans[turn] = (start, end)
    mask = [0] * len(full)
    for start, end in spans.values():
        mask[start:end] = [1] * (end - start)
    # what follows the answer (a line feed, the next header) is never produced by the target
    keep = max(end for _, end in spans.values())
    return Rendered(full[:keep], mask[:keep], template_hash(tokenizer)), spans


def _span(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    served: list[int],
    thinking: bool | None,
    tools: Sequence[Tool] | None,
) -> tuple[int, int]:
    prompt = generation_prompt_ids(tokenizer, messages[:-1], thinking, tools=tools)
    if served[: len(prompt)] != prompt:
        raise RowError(Reason.UNSTABLE_PREFIX, "the prompt is not the beginning of the answer's")
    start = len(prompt)
    reasoning = messages[-1].get("reasoning_content")
    if reasoning:
        text = tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, **_variables(thinking, tools)
        )
        if reasoning.strip() not in text:
            raise RowError(Reason.REASONING_LOST, "the template does not render the reasoning")
    elif thinking is not False:
        start += _closing_length(tokenizer, messages[:-1], prompt, served, tools)
    if messages[-1].get("tool_calls") and _calls_lost(tokenizer, messages, served, thinking, tools):
        raise RowError(Reason.CALLS_LOST, "the template does not render the calls of tools")
    end = _end_of_turn(tokenizer, served, start)
    if start == end:
        raise RowError(Reason.NO_ANSWER, "the answer renders to nothing")
    return start, end


def _calls_lost(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    served: list[int],
    thinking: bool | None,
    tools: Sequence[Tool] | None,
) -> bool:
    """Whether the last turn is written alike without the last of its calls."""
    fewer = dict(messages[-1])
    calls = fewer.pop("tool_calls")[:-1]
    if calls:
        fewer["tool_calls"] = calls
    try:
        return _ids(tokenizer, [*messages[:-1], fewer], thinking, tools) == served
    except RowError:
        return False  # it looks at the calls: without them it raises


def _closing_length(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    prompt: list[int],
    served: list[int],
    tools: Sequence[Tool] | None,
) -> int:
    """Tokens at the start of the answer that the prompt would end with if thinking were off."""
    try:
        closed = generation_prompt_ids(tokenizer, messages, thinking=False, tools=tools)
    except RowError:
        return 0
    header = prompt[-4:]
    for extra in range(1, _LONGEST_CLOSING + 1):
        closing = closed[-extra:]
        same_header = closed[: len(closed) - extra][-len(header) :] == header
        if same_header and served[len(prompt) : len(prompt) + extra] == closing:
            return extra
    return 0


def _end_of_turn(tokenizer: Any, served: list[int], start: int) -> int:
    """End of the supervised span: behind the first token of the kind that closes this turn.

    A turn closes with the last special token of its rendering, if only white space follows. Where
    the answer's own text spells that token earlier, the served turn would end there.
    """
    special = _special_ids(tokenizer)
    at = next((i for i in range(len(served) - 1, start - 1, -1) if served[i] in special), None)
    if at is None or tokenizer.decode(served[at + 1 :]).strip():
        return len(served)
    return served.index(served[at], start) + 1


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def _split_inline_reasoning(tokenizer: Any, message: Message) -> Message:
    """`<think>…</think>answer` in the text becomes `reasoning_content` if the template reads it."""
    content = message.get("content") or ""
    inline = message["role"] == "assistant" and content.lstrip().startswith("<think>")
    if not inline or "</think>" not in content or message.get("reasoning_content"):
        return message
    if "reasoning_content" not in _template(tokenizer):
        return message
    reasoning, _, answer = content.lstrip().removeprefix("<think>").partition("</think>")
    split = {**message, "content": answer.lstrip("\n")}
    if reasoning.strip():
        split["reasoning_content"] = reasoning.strip("\n")
    return split


def _template(tokenizer: Any) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        raise TargetError(
            f"the tokenizer of '{_name(tokenizer)}' has no chat template; take the "
            "instruction-tuned model's tokenizer, or put its template into chat_template.jinja "
            "beside tokenizer.json"
        ) from error
    return template


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    thinking: bool | None,
    tools: Sequence[Tool] | None = None,
    *,
    prompt: bool = False,
) -> list[int]:
    _template(tokenizer)  # without one no row can be rendered, and that is no row's fault
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=prompt,
            tokenize=True,
            return_dict=False,
            **_variables(thinking, tools),
        )
    # a template is the model's own program and raises whatever it likes over its input
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RowError(Reason.TEMPLATE_ERROR, first[:200]) from error
    # a variable that a template does not know is passed over without a word
    if tools and list(ids) == _ids(tokenizer, messages, thinking, prompt=prompt):
        raise RowError(Reason.TOOLS_UNSUPPORTED, "the target's template does not render tools")
    return list(ids)


def _variables(thinking: bool | None, tools: Sequence[Tool] | None) -> dict[str, Any]:
    switch = {} if thinking is None else {"enable_thinking": thinking}
    return {**switch, "tools": list(tools)} if tools else switch
