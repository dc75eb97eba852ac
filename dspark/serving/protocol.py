"""The HTTP request surface: what is accepted, what is refused and by which name.

OpenAI's chat completions and completions, and SGLang's `/generate` (its benchmark client sends
that). Nothing is ignored silently: an option that this server does not implement is accepted only
with the value that changes nothing, anything else is a 400 that names the option.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dspark.decoding import MAX_TOP_LOGPROBS
from dspark.errors import nearest, wanted
from dspark.serving.options import CALLER_LABELS, NEUTRAL_VALUES

__all__ = [
    "AbortRequest",
    "ApiError",
    "CalledFunction",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "NativeSampling",
    "StreamOptions",
    "TokenizeRequest",
    "Tool",
    "ToolCall",
    "ToolFunction",
    "parse",
]

MAX_SEED = 2**63 - 1
MAX_STOPS = 4
SMALLEST = 1e-6
"""Of temperature and top_p: below, float32 divides by zero or leaves no token."""


class ApiError(Exception):
    """An HTTP error in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """{"error": {...}} as clients of OpenAI expect it."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError(
            "stop", "takes at most {most} strings, got {n}", {"most": MAX_STOPS, "n": len(stops)}
        )
    if not all(stops):
        raise PydanticCustomError("stop", "must not contain an empty string")
    return stops


def _id_list(value: Any) -> Any:
    if not _token_ids(value):
        raise PydanticCustomError("token_ids", "must be a list of token ids")
    return value


def _content(value: Any) -> Any:
    """Text, or a list of text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a non-empty list of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError(
                "content",
                "has a part of type {kind}; only 'text' is supported",
                {"kind": str(kind)},
            )
        if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise PydanticCustomError("content", "parts must be {{'type': 'text', 'text': string}}")
        texts.append(part["text"])
    return "\n".join(texts)


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _prompt(value: Any) -> Any:
    """A string or a list of token ids, or a list that holds one of either."""
    if isinstance(value, list) and value and not _token_ids(value):
        if len(value) > 1:
            raise PydanticCustomError(
                "prompt", "takes one prompt a request, got {n}", {"n": len(value)}
            )
        value = value[0]
    if not (isinstance(value, str) or _token_ids(value)):
        raise PydanticCustomError("prompt", "must be a string or a list of token ids")
    return value


def _arguments(value: Any) -> Any:
    """The object that OpenAI has as a text and chat templates as an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "must be the text of a JSON object")
    return value


def _not_too_small(value: float) -> float:
    if 0 < value < SMALLEST:
        raise PydanticCustomError("temperature", "must be 0 or >= {least}", {"least": SMALLEST})
    return value


def _unless_false(value: Any) -> Any:
    """False asks for nothing: some clients send it where OpenAI has a number."""
    return None if value is False else value


def _tool_choice(value: Any) -> Any:
    if value == "required" or isinstance(value, dict):
        raise PydanticCustomError(
            "tool_choice",
            "must be 'auto' or 'none': to force a call, decoding would have to be bound to a "
            "grammar, which this server does not do",
        )
    return value


TokenCount = Annotated[int, Field(ge=1)]
Temperature = Annotated[
    float,
    Field(ge=0.0, le=2.0, allow_inf_nan=False),
    AfterValidator(_not_too_small),
    WithJsonSchema(
        {"anyOf": [{"const": 0}, {"type": "number", "minimum": SMALLEST, "maximum": 2}]}
    ),
]
TopP = Annotated[float, Field(ge=SMALLEST, le=1.0, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Interval = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
_STOP = {"type": "string", "minLength": 1}
Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
IdList = Annotated[list[int], BeforeValidator(_id_list)]
_TEXT_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "additionalProperties": False,
    },
}
Content = Annotated[
    str | None,
    BeforeValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXT_PARTS, {"type": "null"}]}),
]
_IDS = {"type": "array", "items": {"type": "integer"}}
_ONE_PROMPT = {"type": "array", "minItems": 1, "maxItems": 1}
Prompt = Annotated[
    str | list[int],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {**_ONE_PROMPT, "items": {"anyOf": [{"type": "string"}, _IDS]}},
            ]
        }
    ),
]
Arguments = Annotated[
    dict[str, Any],
    BeforeValidator(_arguments),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]}),
]
ToolChoice = Annotated[
    Literal["auto", "none"],
    BeforeValidator(_tool_choice),
    WithJsonSchema({"enum": ["auto", "none"]}),
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    """A last chunk with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk (an extension of vLLM and SGLang)."""


class _Sampled(_Body):
    """Sampling options; None takes the model's default."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    ignore_eos: bool | None = None
    stop: Stops = []
    stop_token_ids: IdList = []
    """Further ids that end the output, even with ``ignore_eos``; they are no part of the text."""
    skip_special_tokens: bool | None = None
    """False: special tokens of the output stand in its text."""
    dspark_draft: bool | None = None
    """False: decode as if there were no draft; the tokens are the same."""


class _OpenAI(_Sampled):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    seed: Seed | None = None
    return_token_ids: bool | None = None
    """Ids of prompt and output beside the text, as vLLM gives them."""
    stream_interval: Interval | None = None
    """Tokens of one event of a stream; None: one event a step."""
    rid: Name | None = None
    """The caller's own name for the request, for /abort_request."""
    dspark_tokens: bool | None = None
    """With ``stream``: each chunk says which of its text accepted draft tokens made."""


class ToolFunction(_Body):
    """`function` of a tool."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""


class Tool(_Body):
    """What the model may call."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(_Body):
    """`function` of a call."""

    name: str
    arguments: Arguments


class ToolCall(_Body):
    """A call of an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Body):
    """One turn. `developer` is read as `system`, as OpenAI defines it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    """Of a `tool` message: the call that it answers."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("message", "needs 'content'")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("message", "may have 'tool_calls' only as an assistant's")
        if self.tool_call_id is not None and self.role != "tool":
            raise PydanticCustomError("message", "may have a 'tool_call_id' only as a tool's")
        return self


class ChatRequest(_OpenAI):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as a thinking switch."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    """False leaves reasoning in the content, as SGLang has it."""


class CompletionRequest(_OpenAI):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[TopLogprobs | None, BeforeValidator(_unless_false)] = None
    """How many alternatives; 0: those of the chosen tokens alone."""


class NativeSampling(_Sampled):
    """`sampling_params` of /generate."""

    max_new_tokens: TokenCount | None = None
    sampling_seed: Seed | None = None
    stream_interval: Interval | None = None


class GenerateRequest(_Body):
    """POST /generate."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool | None = None
    rid: Name | None = None
    return_logprob: bool | None = None
    top_logprobs_num: TopLogprobs | None = None


class AbortRequest(_Body):
    """POST /abort_request, as SGLang has it: what names nothing ends nothing."""

    rid: str | None = None
    """A request's own ``rid``, or the id that it was given."""
    abort_all: bool | None = None
    """Whatever ``rid`` says."""


class TokenizeRequest(_Body):
    """POST /tokenize, as vLLM has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """None: true for a prompt, false for messages, whose template writes them itself."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize, as vLLM has it."""

    model: str | None = None
    tokens: IdList


_PARTS: dict[type[_Body], dict[str, type[_Body]]] = {
    ChatRequest: {"messages": ChatMessage, "stream_options": StreamOptions, "tools": Tool},
    CompletionRequest: {"stream_options": StreamOptions},
    GenerateRequest: {"sampling_params": NativeSampling},
    TokenizeRequest: {"messages": ChatMessage, "tools": Tool},
    ChatMessage: {"tool_calls": ToolCall},
    Tool: {"function": ToolFunction},
    ToolCall: {"function": CalledFunction},
}
"""Options that are objects (or lists of them) with options of their own."""

Model = TypeVar("Model", bound=_Body)


def parse(model: type[Model], raw: bytes) -> Model:
    """Read a request body.

    Raises:
        ApiError: 400; the message names the option and what would be right.
    """
    body = _without_neutral(model, _read_json(raw), "")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def _read_json(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse, object_pairs_hook=_once)
        # a lone surrogate (\ud800) passes the parser but is no text that a tokenizer can read
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the request body is not valid JSON: {problem[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {_shown(body)}")
    return body


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Which of two values a client meant cannot be known."""
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ApiError(
                400,
                f"the request body has '{name[:100]}' twice in one object; send it once",
                param=name[:100],
                code="invalid_value",
            )
        made[name] = value
    return made


def _without_neutral(model: type[_Body], body: dict[str, Any], place: str) -> dict[str, Any]:
    """Drop options that are not implemented but ask for nothing; refuse all others."""
    neutral = NEUTRAL_VALUES[model.__name__]
    kept = {}
    for name, value in body.items():
        if name in model.model_fields:
            # null is OpenAI's way to leave an option out
            if value is not None or model.model_fields[name].is_required():
                kept[name] = value
        elif name in neutral:
            allowed = neutral[name]
            if value is not None and not any(_same(value, one) for one in allowed):
                hint = f" or send {json.dumps(allowed[0])}" if allowed else ""
                raise ApiError(
                    400,
                    f"'{place}{name}' is not supported here (got {_shown(value)}); "
                    f"leave it out{hint}",
                    param=place + name,
                    code="unsupported_parameter",
                )
        elif name not in CALLER_LABELS:
            known = [*model.model_fields, *neutral]
            raise ApiError(
                400,
                f"unknown option '{place}{name[:100]}'{nearest(name, known)}",
                param=place + name[:100],
                code="unknown_parameter",
            )
    for name, part in _PARTS.get(model, {}).items():
        value = kept.get(name)
        if isinstance(value, dict):
            kept[name] = _without_neutral(part, value, f"{place}{name}.")
        elif isinstance(value, list):
            kept[name] = [
                _without_neutral(part, one, f"{place}{name}.{index}.")
                if isinstance(one, dict)
                else one
                for index, one in enumerate(value)
            ]
    return kept


def _same(left: Any, right: Any) -> bool:
    """Equality of JSON values: true is not 1, but 1.0 is."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _first_problem(error: ValidationError) -> ApiError:
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return ApiError(400, f"'{place}' is required", param=place, code="missing_parameter")
    return ApiError(
        400,
        f"'{place}' {wanted(problem)} (got {_shown(problem['input'])})",
        param=place,
        code="invalid_value",
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
