"""The HTTP request surface: what is accepted, what is refused and by which name.

OpenAI's chat completions and completions, and SGLang's `/generate` (its benchmark client sends
that). Nothing is ignored silently: an option that this server does not implement is accepted only
with the value that changes nothing, anything else is a 400 that names the option.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from dspark.errors import nearest, wanted
from dspark.serving.options import CALLER_LABELS, NEUTRAL_VALUES

__all__ = [
    "ApiError",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "GenerateRequest",
    "NativeSampling",
    "StreamOptions",
    "parse",
]

MAX_SEED = 2**63 - 1
MAX_STOPS = 4


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


def _stop_ids(value: Any) -> Any:
    if not _token_ids(value):
        raise PydanticCustomError("stop_token_ids", "must be a list of token ids")
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


TokenCount = Annotated[int, Field(ge=1)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Stops = Annotated[list[str], BeforeValidator(_stops)]
StopIds = Annotated[list[int], BeforeValidator(_stop_ids)]


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
    stop_token_ids: StopIds = []
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
    dspark_tokens: bool | None = None
    """With ``stream``: each chunk says which of its text accepted draft tokens made."""


class ChatMessage(_Body):
    """One turn. `developer` is read as `system`, as OpenAI defines it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None
    reasoning_content: str | None = None


class ChatRequest(_OpenAI):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as a thinking switch."""


class CompletionRequest(_OpenAI):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]


class NativeSampling(_Sampled):
    """`sampling_params` of /generate."""

    max_new_tokens: TokenCount | None = None
    sampling_seed: Seed | None = None


class GenerateRequest(_Body):
    """POST /generate."""

    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool | None = None


_PARTS: dict[str, type[_Body]] = {
    "messages": ChatMessage,
    "stream_options": StreamOptions,
    "sampling_params": NativeSampling,
}
"""Options that are objects (or lists of them) with options of their own."""

Model = TypeVar("Model", bound=_Body)


def parse(model: type[Model], raw: bytes) -> Model:
    """Read a request body.

    Raises:
        ApiError: 400; the message names the option and what would be right.
    """
    body = _without_neutral(model, _read_json(raw), "")
    for name, part in _PARTS.items():
        value = body.get(name)
        if isinstance(value, dict):
            body[name] = _without_neutral(part, value, f"{name}.")
        elif isinstance(value, list):
            body[name] = [
                _without_neutral(part, one, f"{name}.{index}.") if isinstance(one, dict) else one
                for index, one in enumerate(value)
            ]
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def _read_json(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=refuse)
        # a lone surrogate (\ud800) passes the parser but is no text that a tokenizer can read
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the request body is not valid JSON: {problem[:200]}") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {_shown(body)}")
    return body


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
