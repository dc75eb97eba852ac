"""Options of OpenAI, vLLM and SGLang clients that this server does not implement.

Each is listed with the values that ask for nothing beyond what it does anyway (null is always one);
the first is the one an error message suggests. Clients send many of these on every request.
"""

from typing import Any

__all__ = ["CALLER_LABELS", "NEUTRAL_VALUES"]

CALLER_LABELS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "request_id"}
)
"""Names for the caller's own bookkeeping; no value of theirs asks for anything."""

_COMMON: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "echo": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "lora_path": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}

_CHAT: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "stream_reasoning": (True,),
}

_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "best_of": (1,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
}

_GENERATE: dict[str, tuple[Any, ...]] = {
    "logprob_start_len": (-1,),
    "token_ids_logprob": (),
    "return_text_in_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "image_data": (),
    "audio_data": (),
    "input_embeds": (),
    "lora_path": (),
}

_NATIVE_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "logit_bias": ({},),
}

_MESSAGE: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}

NEUTRAL_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "ChatRequest": _CHAT,
    "ChatMessage": _MESSAGE,
    "CompletionRequest": _COMPLETION,
    "GenerateRequest": _GENERATE,
    "NativeSampling": _NATIVE_SAMPLING,
    "StreamOptions": {"include_obfuscation": (False,)},
    "AbortRequest": {"finished_reason": (), "abort_message": ()},
    "TokenizeRequest": {
        "continue_final_message": (False,),
        "chat_template": (),
        "mm_processor_kwargs": (),
    },
    "DetokenizeRequest": {},
    "Tool": {},
    "ToolFunction": {"strict": (False,)},
    "ToolCall": {"index": tuple(range(128))},
    "CalledFunction": {},
}
"""By the name of the request model."""
