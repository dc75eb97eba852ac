"""What the servers want to be asked, and what they answer: request bodies out, `Answer`s in.

| api | path | prompt goes as | ids come back as |
|---|---|---|---|
| vllm, `dspark serve` | /v1/completions | ids | `choices[0].token_ids` (`return_token_ids`) |
| sglang | /generate | ids | `output_ids` |
| openai | /v1/chat/completions | messages | `choices[0].token_ids`, by engines that know the key |

Every sampling setting is written out, the neutral ones too: both engines fill what is left out
from the model's generation_config.json, and rows would not be drawn as they say. The target's own
end-of-turn ids are named for the same reason. Nothing here does I/O.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspark.config import SamplingSetting
from dspark.corpus.messages import Message, Tool
from dspark.corpus.rejects import Reason, RowError

__all__ = ["Answer", "Api", "BadAnswer", "Question", "parse", "request"]

Api = Literal["vllm", "sglang", "openai"]
_ENDED = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


class BadAnswer(Exception):
    """The server said something that is no answer; asking again may help."""


@dataclass(frozen=True)
class Question:
    """One turn to be answered."""

    ids: list[int]
    """The prompt as the target's template renders it."""
    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    setting: SamplingSetting
    limit: int
    """Most new tokens."""
    seed: int
    """Of this request, below 2**31."""
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """What came back, before anything of it is believed."""

    ids: list[int] | None
    """New ids, end of turn included; None where the engine gives none."""
    finish_reason: str
    """`stop` or `length`."""
    text: str
    fields: Message | None = None
    """`reasoning_content` and `tool_calls` of a chat answer; None where ``text`` is all."""


def request(api: Api, model: str, question: Question) -> tuple[str, dict[str, Any]]:
    """Path (behind the server's root) and JSON body."""
    setting = question.setting
    shared = {
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "top_k": setting.top_k if setting.top_k > 0 else -1,
        "min_p": setting.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sorted(question.eos_ids),
        "skip_special_tokens": False,
    }
    if api == "sglang":
        return "/generate", {
            "input_ids": question.ids,
            "sampling_params": {
                **shared,
                "n": 1,
                "max_new_tokens": question.limit,
                "sampling_seed": question.seed,
            },
            "stream": False,
        }
    body = {
        "model": model,
        **shared,
        "n": 1,
        "max_tokens": question.limit,
        "seed": question.seed,
        "stream": False,
        "return_token_ids": True,
    }
    if api == "vllm":
        return "/v1/completions", {**body, "prompt": question.ids}
    body["messages"] = [_outgoing(message) for message in question.messages]
    if question.tools:
        body["tools"] = list(question.tools)
    if setting.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": setting.thinking}
    return "/v1/chat/completions", body


def parse(api: Api, body: Any, question: Question) -> Answer:
    """Read the JSON that came back for ``question``.

    Raises:
        BadAnswer: it has not the shape of an answer, or answers another question.
        RowError: the server rendered the messages to other ids than the target's template here.
    """
    answer = _sglang(body, question) if api == "sglang" else _openai(api, body, question)
    if answer.ids is not None and len(answer.ids) > question.limit:
        raise BadAnswer(f"{len(answer.ids)} new tokens where {question.limit} were allowed")
    return answer


def _sglang(body: Any, question: Question) -> Answer:
    if isinstance(body, list):
        if len(body) != 1:
            raise BadAnswer(f"{len(body)} answers to one question")
        body = body[0]
    if not isinstance(body, dict) or not isinstance(body.get("meta_info"), dict):
        raise BadAnswer("no meta_info")
    meta = body["meta_info"]
    reason = meta.get("finish_reason")
    kind, matched = (
        (reason.get("type"), reason.get("matched")) if isinstance(reason, dict) else (reason, None)
    )
    count = meta.get("prompt_tokens")
    if isinstance(count, int) and count != len(question.ids):
        raise _another_prompt("sglang", f"{count} tokens, not {len(question.ids)}")
    ids = _ids(body.get("output_ids"))
    return Answer(
        _with_end(ids, kind, matched, question), _finish(kind), _text(body.get("text") or "")
    )


def _openai(api: Api, body: Any, question: Question) -> Answer:
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list):
        raise BadAnswer("no choices")
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer(f"{len(choices)} choices where one was asked for")
    choice = choices[0]
    echoed = _ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids"))
    if echoed is not None and echoed != question.ids:
        raise _another_prompt(api, "other ids")
    usage = body.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if isinstance(count, int) and count != len(question.ids):
        raise _another_prompt(api, f"{count} tokens, not {len(question.ids)}")
    kind = choice.get("finish_reason")
    ids = _with_end(_ids(choice.get("token_ids")), kind, choice.get("stop_reason"), question)
    if api == "vllm":
        return Answer(ids, _finish(kind), _text(choice.get("text") or ""))
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadAnswer("a choice without message")
    fields: Message = {}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        fields["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        fields["tool_calls"] = message["tool_calls"]
    return Answer(ids, _finish(kind), _text(message.get("content") or ""), fields)


def _finish(kind: Any) -> str:
    if not isinstance(kind, str) or kind not in _ENDED:
        raise BadAnswer(f"finish_reason {kind!r}")
    return _ENDED[kind]


def _another_prompt(api: Api, how: str) -> Exception:
    """Where the server renders the prompt, asking again would change nothing."""
    if api == "openai":
        return RowError(
            Reason.OTHER_PROMPT, f"the server's template renders the prompt otherwise: {how}"
        )
    return BadAnswer(f"the answer to another prompt: {how}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadAnswer(f"a text that is a {type(value).__name__}")
    return value


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise BadAnswer("token ids that are not a list of ids")
    return value


def _with_end(
    ids: list[int] | None, kind: Any, matched: Any, question: Question
) -> list[int] | None:
    """``ids`` with the end-of-turn id that an engine names beside them instead of among them."""
    named = kind != "length" and type(matched) is int and matched in question.eos_ids
    if ids is not None and named and ids[-1:] != [matched]:
        return [*ids, matched]
    return ids


def _outgoing(message: Message) -> Message:
    """As the OpenAI format wants it: arguments of calls are JSON, and calls have names."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for number, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}
