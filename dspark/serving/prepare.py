"""From a validated request to token ids and effective parameters; refuses what cannot be run."""

import re
import secrets
from typing import Any

from dspark.decoding import SamplingParams, check_request
from dspark.errors import ConfigError
from dspark.serving.engine import end_ids
from dspark.serving.protocol import ApiError, ChatRequest, CompletionRequest, GenerateRequest
from dspark.serving.request import GenerateParams
from dspark.serving.settings import ServeSettings
from dspark.target import Target

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
    """Token ids and effective parameters of one request."""

    def __init__(self, prompt_ids: list[int], params: GenerateParams, seed: int | None) -> None:
        self.prompt_ids = prompt_ids
        self.params = params
        self._seed = seed

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
    """Renders, tokenises and fills in defaults for one target."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        settings: ServeSettings,
        context: int | None = None,
        *,
        most_stops: int | None = None,
    ) -> None:
        """``context``: positions that the engine has room for; None: all that the target knows.

        ``most_stops``: as `engine.Decoder` has it.

        Raises:
            ConfigError: the model's own defaults of sampling cannot be run.
        """
        self._target = target
        self._tokenizer = tokenizer
        self._settings = settings
        self._ends = target.eos_ids | end_ids(tokenizer)
        self._most_stops = most_stops
        self._defaults = _sampling_defaults(target)
        self.max_model_len = min(
            int(target.max_position_embeddings), context or int(target.max_position_embeddings)
        )

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
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
        text = self._render(messages, request.chat_template_kwargs or {})
        # the template has written the special tokens itself
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        name = "max_tokens" if request.max_tokens is not None else "max_completion_tokens"
        limit = limits.pop() if limits else None
        return self._work(ids, request, (name, limit), request.seed, "messages")

    def completion(self, request: CompletionRequest) -> Work:
        """Tokenise a plain prompt, or take its ids as they are."""
        ids = self._ids(request.prompt)
        limit = ("max_tokens", request.max_tokens)
        return self._work(ids, request, limit, request.seed, "prompt")

    def native(self, request: GenerateRequest) -> Work:
        """The same for SGLang's /generate."""
        if (request.text is None) == (request.input_ids is None):
            raise _bad("text", "send either 'text' or 'input_ids'")
        name = "text" if request.text is not None else "input_ids"
        ids = self._ids(getattr(request, name))
        params = request.sampling_params
        limit = ("sampling_params.max_new_tokens", params.max_new_tokens)
        return self._work(ids, params, limit, params.sampling_seed, name)

    def _render(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
        if not self._tokenizer.chat_template:
            raise _bad(
                "messages",
                "this model's tokenizer has no chat template; use /v1/completions with a prompt",
            )
        try:
            template: str = self._tokenizer.get_chat_template()
            for name in variables:
                known = re.search(rf"\b{re.escape(name)}\b", template) is not None
                if name in _TEMPLATE_ARGUMENTS or not known:
                    raise _bad(
                        "chat_template_kwargs",
                        f"'chat_template_kwargs.{name[:100]}' has no effect: this model's chat "
                        "template has no such variable",
                    )
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except ApiError:
            raise
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
    ) -> Work:
        """``limit`` is the output limit by the name that the client knows it by."""
        if not ids:
            raise _bad(name, f"'{name}' is empty: there is nothing to continue")
        vocab = self._target.vocab_size
        # the tokenizer's own too: it may know more ids than the target has rows for
        for token_id in ids:
            if not 0 <= token_id < vocab:
                raise _bad(name, f"'{name}' holds the id {token_id}; ids are 0..{vocab - 1}")
        field, max_tokens = limit
        cap = self._settings.max_output_tokens
        if max_tokens is not None and max_tokens > cap:
            raise _bad(field, f"'{field}' is {max_tokens}, above this server's limit of {cap}")
        room = self.max_model_len - len(ids)
        if room < 1:
            full = self.max_model_len == self._target.max_position_embeddings
            message = (
                f"'{name}' has {len(ids)} tokens and leaves no room for an answer in the "
                f"{self.max_model_len} positions of the {'model' if full else 'engine'}"
            )
            raise ApiError(400, message, param=name, code="context_length_exceeded")
        if max_tokens is None:
            max_tokens = min(self._settings.default_max_tokens, cap, room)
        try:
            check_request(
                self._target, len(ids), max_tokens, f"'{field}'", context=self.max_model_len
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
            draft=options.dspark_draft is not False,
            trace=bool(getattr(options, "dspark_tokens", None)),
        )
        return Work(list(ids), params, seed)

    def _stop_ids(self, options: Any, place: str) -> frozenset[int]:
        ends = frozenset() if options.ignore_eos else self._ends
        given = frozenset(options.stop_token_ids)
        name, vocab = f"{place}stop_token_ids", self._target.vocab_size
        # the model's own ends may lie behind its vocabulary, and a client names them all
        for token_id in sorted(given - self._ends):
            if not 0 <= token_id < vocab:
                raise _bad(name, f"'{name}' holds the id {token_id}; ids are 0..{vocab - 1}")
        if self._most_stops is not None and len(given | ends) > self._most_stops:
            raise _bad(
                name,
                f"'{name}' makes {len(given | ends)} ids that end an output, the model's own "
                f"{len(ends)} among them; this engine knows at most {self._most_stops}",
            )
        return given

    def _sampling(self, options: Any, seed: int | None) -> tuple[SamplingParams, int | None]:
        chosen = dict(self._defaults)
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


def _sampling_defaults(target: Target) -> dict[str, Any]:
    """What the model's own generation config asks for, else OpenAI's temperature 1 and no cuts.

    Only values that the model's author wrote down count: the class default of top_k in
    transformers is 50, which nobody asked for.

    Raises:
        ConfigError: a value is no number, or out of range.
    """
    config = getattr(target.model, "generation_config", None)
    written = config.to_diff_dict() if config is not None else {}
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    chosen: dict[str, Any] = {
        name: value if written.get(name) is None else written[name]
        for name, value in defaults.items()
    }
    where = f"generation_config.json of target '{target.name}'"
    for name, value in chosen.items():
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{where}: {name} must be {kind}, got {value!r}")
    try:
        SamplingParams(**chosen)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return chosen


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")
