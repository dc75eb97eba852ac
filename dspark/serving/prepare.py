"""From a validated request to token ids and effective parameters; refuses what cannot be run."""

import re
import secrets
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from dspark.decoding import SamplingParams, check_request
from dspark.errors import ConfigError
from dspark.serving.answer import CLOSE, OPEN, AnswerParser
from dspark.serving.calls import MARKS, CallReader, reader_of
from dspark.serving.card import ModelCard
from dspark.serving.engine import end_ids
from dspark.serving.protocol import (
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
    Tool,
)
from dspark.serving.request import GenerateParams
from dspark.serving.settings import ServeSettings
from dspark.serving.stream import Detokenizer, num_tokens_of, special_ids

__all__ = ["Preparer", "Work"]

_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
        *(
            "padding",
            "truncation",
            "max_length",
            "tokenizer_kwargs",
            "return_assistant_tokens_mask",
        ),
    }
)


class Work:
    """Token ids and effective parameters of one request, and how its answer is read."""

    def __init__(self, prompt_ids: list[int], params: GenerateParams, seed: int | None) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self.separate = self.opened = False
        self.calls: Callable[[], CallReader] | None = None
        self._seed = seed

    def parser(self) -> AnswerParser:
        """For one pass over the answer's text."""
        return AnswerParser(separate=self.separate, opened=self.opened, calls=self.calls)

    def echo(self) -> dict[str, Any]:
        """The sampling that really happens, for the response; the seed is None when greedy."""
        sampling = self.params.sampling
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": self._seed,
            "max_tokens": self.params.max_new_tokens,
        }


class Preparer:
    """Renders, tokenises and fills in defaults for one model."""

    def __init__(self, card: ModelCard, tokenizer: Any, settings: ServeSettings) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._settings = settings
        self._ends = card.eos_ids | end_ids(tokenizer)
        self._specials = special_ids(tokenizer)
        self.max_model_len = card.context

    def chat(self, request: ChatRequest) -> Work:
        """Render the messages with the tokenizer's own template.

        Raises:
            ApiError: 400; no template, a template that refuses, or a prompt that does not fit.
        """
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _bad(
                "max_completion_tokens",
                f"'max_tokens' is {request.max_tokens} and 'max_completion_tokens' is "
                f"{request.max_completion_tokens}; send one of them",
            )
        messages = [_template_message(message) for message in request.messages]
        tools = request.tools if request.tool_choice != "none" else []
        calls = self._calls(request, tools)
        variables = request.chat_template_kwargs or {}
        specs = [tool.model_dump(exclude_none=True) for tool in tools]
        text = self._render(messages, specs, variables)
        # a user may end with the mark as well; the template's own stands behind all messages
        opened = text.rstrip().endswith(OPEN) and not self._render(
            messages, specs, variables, begun=False
        ).rstrip().endswith(OPEN)
        # the template has written the special tokens itself
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        limit = limits.pop() if limits else None
        marks = self._marks(OPEN, CLOSE, *(MARKS if calls else ()))
        top = self._top_logprobs("logprobs", request.logprobs, "top_logprobs", request.top_logprobs)
        work = self._work(
            ids, request, (name, limit), request.seed, "messages", keep=marks, top_logprobs=top
        )
        work.separate, work.opened = request.separate_reasoning is not False, opened
        work.calls = calls
        return work

    def completion(self, request: CompletionRequest) -> Work:
        """Tokenise a plain prompt, or take its ids as they are."""
        ids = self._ids(request.prompt)
        limit = ("max_tokens", request.max_tokens)
        asked = request.logprobs is not None
        top = self._top_logprobs("logprobs", asked, "logprobs", request.logprobs)
        return self._work(ids, request, limit, request.seed, "prompt", top_logprobs=top)

    def native(self, request: GenerateRequest) -> Work:
        """The same for SGLang's /generate."""
        if (request.text is None) == (request.input_ids is None):
            raise _bad("text", "send either 'text' or 'input_ids'")
        name = "text" if request.text is not None else "input_ids"
        ids = self._ids(getattr(request, name))
        params = request.sampling_params
        limit = ("sampling_params.max_new_tokens", params.max_new_tokens)
        top = self._top_logprobs(
            "return_logprob", request.return_logprob, "top_logprobs_num", request.top_logprobs_num
        )
        return self._work(ids, params, limit, params.sampling_seed, name, top_logprobs=top)

    def _top_logprobs(
        self, switch: str, asked: bool | None, name: str, top: int | None
    ) -> int | None:
        """How many alternatives; None: no logprobs."""
        if not asked:
            if top:
                raise _bad(name, f"'{name}' needs '{switch}': true")
            return None
        if not self._card.logprobs:
            raise _bad(
                switch,
                f"'{switch}' cannot be given: the graph engine keeps its logits on the device; "
                "leave it out, or serve with --engine reference",
            )
        return top or 0

    def tokens(self, request: TokenizeRequest) -> dict[str, Any]:
        """/tokenize: what a prompt, or messages in the model's template, would be read as.

        Raises:
            ApiError: 400; neither or both, or a template that refuses.
        """
        if (request.prompt is None) == (request.messages is None):
            raise _bad("prompt", "send either 'prompt' or 'messages'")
        special = request.add_special_tokens
        if request.prompt is not None:
            for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
                if getattr(request, name) not in (None, []):
                    raise _bad(name, f"'{name}' needs 'messages'")
            text, special = request.prompt, special is not False
        else:
            self._check_kept(request.messages or [], request.tools)
            text = self._render(
                [_template_message(message) for message in request.messages or []],
                [tool.model_dump(exclude_none=True) for tool in request.tools],
                request.chat_template_kwargs or {},
                begun=request.add_generation_prompt is not False,
            )
        ids = self._tokenizer(text, add_special_tokens=bool(special))["input_ids"]
        strings = self._tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    def text(self, request: DetokenizeRequest) -> dict[str, Any]:
        """/detokenize: special tokens included.

        Raises:
            ApiError: 400; an id that the model does not have.
        """
        self._check_ids(request.tokens, "tokens")
        decoded = self._tokenizer.decode(
            request.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return {"prompt": decoded}

    def _check_ids(self, ids: list[int], name: str) -> None:
        vocab = self._card.vocab_size
        # the tokenizer's own too: it may know more ids than the target has rows for
        for token_id in ids:
            if not 0 <= token_id < vocab:
                raise _bad(name, f"'{name}' holds the id {token_id}; ids are 0..{vocab - 1}")

    def reasoning_tokens(self, work: Work, token_ids: list[int], chars: int) -> int:
        """How many tokens the first ``chars`` characters of an answer's text took."""
        params = work.params
        detokenizer = Detokenizer(
            self._tokenizer, skip_special=params.skip_special, keep=params.keep
        )
        return num_tokens_of(detokenizer, token_ids, chars) if chars else 0

    def _marks(self, *marks: str) -> frozenset[int]:
        """Those that are special tokens, which a text is usually without."""
        return self._specials & set(self._tokenizer.convert_tokens_to_ids(list(marks)))

    def _calls(self, request: ChatRequest, tools: list[Tool]) -> Callable[[], CallReader] | None:
        """What reads calls of these tools in the form that the chat template writes.

        Raises:
            ApiError: 400; the template has no place for tools, or writes calls in another form.
        """
        template = self._check_kept(request.messages, tools)
        if not tools:
            return None
        reader = reader_of(template)
        if reader is None:
            raise _bad(
                "tools",
                "'tools' cannot be served: this model's chat template writes calls neither as "
                '<tool_call>{"name": …}</tool_call> nor with <arg_key> and <arg_value>',
            )
        if request.parallel_tool_calls is False:
            raise _bad(
                "parallel_tool_calls",
                "'parallel_tool_calls' false cannot be kept: nothing hinders the model from "
                "calling twice; leave it out",
            )
        parameters = {tool.function.name: tool.function.parameters or {} for tool in tools}
        if len(parameters) < len(tools):
            raise _bad("tools", "'tools' has two functions of the same name")
        return partial(reader, parameters)

    def _check_kept(self, messages: list[ChatMessage], tools: list[Tool]) -> str:
        """The template, which has a place for everything."""
        template = self._template([tool.model_dump() for tool in tools])
        for index, message in enumerate(messages):
            if message.tool_calls and "tool_calls" not in template:
                name = f"messages.{index}.tool_calls"
                raise _bad(name, f"'{name}' would be lost: this model's chat template has no calls")
        if tools and re.search(r"\btools\b", template) is None:
            raise _bad("tools", "'tools' would be lost: this model's chat template knows none")
        return template

    def _template(self, tools: list[dict[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise _bad(
                "messages",
                "this model's tokenizer has no chat template; use /v1/completions with a prompt",
            )
        template: str = self._tokenizer.get_chat_template(tools=tools or None)
        return template

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        variables: dict[str, Any],
        *,
        begun: bool = True,
    ) -> str:
        """``begun``: with the beginning of the answer."""
        try:
            template = self._template(tools)
            for name in variables:
                if name in _TEMPLATE_ARGUMENTS:
                    where = f"; send '{name}' beside it" if name in ("messages", "tools") else ""
                    raise _bad(
                        "chat_template_kwargs",
                        f"'chat_template_kwargs.{name}' cannot be set: the server gives the chat "
                        f"template its own{where}",
                    )
                if re.search(rf"\b{re.escape(name)}\b", template) is None:
                    raise _bad(
                        "chat_template_kwargs",
                        f"'chat_template_kwargs.{name[:100]}' has no effect: this model's chat "
                        "template has no such variable",
                    )
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=begun,
                **variables,
            )
        except ApiError:
            raise
        except RecursionError:
            given = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
            name, depth = max(((key, _depth(one)) for key, one in given.items()), key=itemgetter(1))
            raise _bad(
                name, f"'{name}' is nested {depth} deep, too deeply for the chat template"
            ) from None
        # A template is the model's own program and raises whatever it likes over its input.
        except Exception as error:
            raise _bad(
                "messages", f"the chat template refuses these messages: {str(error)[:300]}"
            ) from error
        return text

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt)["input_ids"]
            return ids
        return prompt

    def _work(
        self,
        ids: list[int],
        options: Any,
        limit: tuple[str, int | None],
        seed: int | None,
        name: str,
        *,
        keep: frozenset[int] = frozenset(),
        top_logprobs: int | None = None,
    ) -> Work:
        """``limit`` is the output limit by the name that the client knows it by."""
        if not ids:
            raise _bad(name, f"'{name}' is empty: there is nothing to continue")
        self._check_ids(ids, name)
        field, max_tokens = limit
        cap = self._settings.max_output_tokens
        if max_tokens is not None and max_tokens > cap:
            raise _bad(field, f"'{field}' is {max_tokens}, above this server's limit of {cap}")
        room = self.max_model_len - len(ids)
        if room < 1:
            full = self.max_model_len == self._card.max_position_embeddings
            message = (
                f"'{name}' has {len(ids)} tokens and leaves no room for an answer in the "
                f"{self.max_model_len} positions of the {'model' if full else 'engine'}"
            )
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        if max_tokens is None:
            max_tokens = min(self._settings.default_max_tokens, cap, room)
        try:
            check_request(
                self._card.max_position_embeddings,
                len(ids),
                max_tokens,
                f"'{field}'",
                context=self.max_model_len,
            )
        except ConfigError as error:
            raise ApiError(400, str(error), param=name, code="context_length_exceeded") from None
        sampling, seed = self._sampling(options, seed)
        params = GenerateParams(
            max_new_tokens=max_tokens,
            sampling=sampling,
            stop=tuple(options.stop),
            stop_ids=self._stop_ids(options, "sampling_params." if "." in field else ""),
            ignore_eos=bool(options.ignore_eos),
            skip_special=options.skip_special_tokens is not False,
            keep=keep,
            interval=options.stream_interval,
            top_logprobs=top_logprobs,
            draft=options.dspark_draft is not False,
            trace=bool(getattr(options, "dspark_tokens", None)),
        )
        return Work(list(ids), params, seed)

    def _stop_ids(self, options: Any, place: str) -> frozenset[int]:
        ends = frozenset() if options.ignore_eos else self._ends
        given = frozenset(options.stop_token_ids)
        name, vocab = f"{place}stop_token_ids", self._card.vocab_size
        # the model's own ends may lie behind its vocabulary, and a client names them all
        for token_id in sorted(given - self._ends):
            if not 0 <= token_id < vocab:
                raise _bad(name, f"'{name}' holds the id {token_id}; ids are 0..{vocab - 1}")
        if self._card.most_stops is not None and len(given | ends) > self._card.most_stops:
            raise _bad(
                name,
                f"'{name}' makes {len(given | ends)} ids that end an output, the model's own "
                f"{len(ends)} among them; this engine knows at most {self._card.most_stops}",
            )
        return given

    def _sampling(self, options: Any, seed: int | None) -> tuple[SamplingParams, int | None]:
        chosen = dict(self._card.sampling)
        for name in chosen:
            if getattr(options, name) is not None:
                chosen[name] = getattr(options, name)
        if chosen["temperature"] == 0:
            if options.min_p:
                raise _bad("min_p", f"'min_p' {options.min_p} has no effect at temperature 0")
            chosen["min_p"] = 0.0
        elif seed is None:
            # small enough for clients whose numbers are doubles
            seed = secrets.randbits(48)
        return SamplingParams(**chosen, seed=seed or 0), seed


def _template_message(message: ChatMessage) -> dict[str, Any]:
    """As chat templates read it."""
    given = message.model_dump(exclude_none=True)
    if given["role"] == "developer":
        given["role"] = "system"
    if not given["tool_calls"]:
        del given["tool_calls"]
    return {**given, "content": message.content or ""}


def _depth(value: Any) -> int:
    """How many lists and objects stand in one another, without recursion."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            inner for one in level for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
