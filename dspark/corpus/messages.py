"""One shape for conversations: a list of `{"role", "content", ...}` as templates read it.

Rules, in the order in which they are applied to a row:
- Where several shapes stand in one row, the first non-empty of `messages`, `conversations`,
  `turns`, `text` counts. A conversation given as a JSON string is parsed.
- A message names its author in `role` or `from`, its text in `content` or `value`. Roles:
  developer -> system; human -> user; gpt, model -> assistant; function, observation -> tool.
- Text parts of a content list are joined; any other part is `bad_content`.
- `thinking` and `reasoning` become `reasoning_content`.
- `tools` is a list of objects, or its JSON; `tools_of` reads it, for the template.
- Arguments of tool calls given as a JSON string become objects (templates iterate over them).
- An empty system message is dropped; an empty user message, or an assistant message with neither
  text, reasoning nor tool calls, is `empty_content`.
- Consecutive messages of one role stay as they are: whether that is allowed is the template's
  business.
"""

import json
from typing import Any

from dspark.corpus.nested import MOST, too_deep
from dspark.corpus.rejects import Reason, RowError

__all__ = ["Message", "Tool", "conversation", "tools_of", "user_turns"]

Message = dict[str, Any]
Tool = dict[str, Any]
"""A function that the target may call, as its template wants it described."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEPT = ("name", "tool_call_id")


def conversation(row: dict[str, Any]) -> list[Message]:
    """The normalised conversation of a row with `messages`, `conversations` or `text`.

    Raises:
        RowError: the row has none, or one that cannot be used.
    """
    raw: Any = next((row[key] for key in ("messages", "conversations") if row.get(key)), None)
    if raw is None:
        text = row.get("text")
        if not text:
            raise _missing(row)
        raw = [{"role": "user", "content": text}]
    if isinstance(raw, str):
        raw = _parsed(raw, Reason.BAD_MESSAGES, "a string that is not JSON")
    if not isinstance(raw, list):
        raise RowError(Reason.BAD_MESSAGES, f"a {type(raw).__name__}, not a list")
    messages = [message for item in raw if (message := _message(item)) is not None]
    _check_order(messages)
    _check_unicode(messages)
    return messages


def tools_of(row: dict[str, Any]) -> list[Tool] | None:
    """The tools that a row lists, None if it lists none.

    Raises:
        RowError: `tools` is not a list of objects.
    """
    tools: Any = row.get("tools")
    if isinstance(tools, str):
        tools = _parsed(tools or "null", Reason.BAD_TOOLS, "a string that is not JSON")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(Reason.BAD_TOOLS, "tools must be a list of objects")
    _check_unicode(tools)
    return tools


def user_turns(row: dict[str, Any]) -> list[str] | None:
    """The user's texts of a row with `turns` (and neither `messages` nor `conversations`).

    Raises:
        RowError: `turns` is not a list of non-empty texts.
    """
    turns = row.get("turns")
    if not turns or row.get("messages") or row.get("conversations"):
        return None
    if not isinstance(turns, list):
        raise RowError(Reason.BAD_MESSAGES, f"turns is a {type(turns).__name__}, not a list")
    texts = [_text(turn, "turns", required=True) for turn in turns]
    _check_unicode(texts)
    return texts


def _missing(row: dict[str, Any]) -> RowError:
    if row.get("input_ids"):
        return RowError(Reason.TOKENS_ONLY)
    said = "none of messages, conversations, turns and text"
    if isinstance(row.get("prompt"), str):
        return RowError(Reason.NO_MESSAGES, f"{said}; if 'prompt' is the question, name it text")
    for key, value in row.items():
        if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
            said += f"; if '{key}' holds the rows, write them as an array, or one a line"
            break
    return RowError(Reason.NO_MESSAGES, said)


def _parsed(text: str, reason: Reason, otherwise: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise RowError(reason, otherwise) from None
    if too_deep(value):
        raise RowError(reason, f"nested too deeply (more than {MOST} levels)")
    return value


def _message(item: Any) -> Message | None:
    if not isinstance(item, dict):
        raise RowError(Reason.BAD_MESSAGES, f"a message that is a {type(item).__name__}")
    name = item.get("role", item.get("from"))
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RowError(Reason.UNKNOWN_ROLE, repr(name)[:40])
    content = _text(item.get("content", item.get("value")), role, required=role in ("user", "tool"))
    if role == "system":
        return {"role": role, "content": content} if content else None
    message: Message = {"role": role, "content": content}
    message.update({key: item[key] for key in _KEPT if isinstance(item.get(key), str)})
    if role == "assistant":
        reasoning = next((item[key] for key in _REASONING if item.get(key)), None)
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning, "reasoning", required=True)
        if item.get("tool_calls"):
            message["tool_calls"] = _tool_calls(item["tool_calls"])
        if len(message) == 2 and not content:
            raise RowError(Reason.EMPTY_CONTENT, role)
    return message


def _text(content: Any, where: str, *, required: bool) -> str:
    if isinstance(content, list):
        parts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                raise RowError(Reason.BAD_CONTENT, f"{where}: a part that is not text")
            parts.append(text)
        content = "".join(parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise RowError(Reason.BAD_CONTENT, f"{where}: a {type(content).__name__}")
    if not content.strip():
        if required:
            raise RowError(Reason.EMPTY_CONTENT, where)
        return ""
    return content


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(Reason.BAD_UNICODE, "a lone surrogate") from None


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    done = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(Reason.BAD_TOOL_CALL, "no function name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments, Reason.BAD_TOOL_CALL, "arguments are not JSON")
        if not isinstance(arguments, dict):
            raise RowError(Reason.BAD_TOOL_CALL, "arguments are not an object")
        done.append(
            {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return done


def _check_order(messages: list[Message]) -> None:
    roles = [message["role"] for message in messages]
    if not roles:
        raise RowError(Reason.NO_MESSAGES, "an empty conversation")
    if "system" in roles[1:]:
        raise RowError(Reason.SYSTEM_NOT_FIRST)
    if "user" not in roles:
        raise RowError(Reason.NO_USER_TURN)
    if next(role for role in roles if role != "system") != "user":
        raise RowError(Reason.ASSISTANT_FIRST)
