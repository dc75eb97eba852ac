"""What goes back: OpenAI's response and chunk objects, and SGLang's for `/generate`.

Beside OpenAI's fields there is one of our own, `dspark`: the sampling that was really done and how
many drafted tokens were kept.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark.acceptance import AcceptStats
from dspark.serving.answer import Answer, Part
from dspark.serving.calls import Call
from dspark.serving.likelihood import Likelihood, as_chat, as_native, as_text
from dspark.serving.origin import Trace
from dspark.serving.prepare import Work
from dspark.serving.request import Delta, Finished

__all__ = ["Shape", "native_chunk", "usage"]


def usage(
    prompt: int,
    completion: int,
    stats: AcceptStats | None = None,
    reasoning: int = 0,
    *,
    cached: int = 0,
) -> dict[str, Any]:
    """Token counts. Rejected proposals are not part of the completion."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if stats is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.proposed - stats.accepted,
            "reasoning_tokens": reasoning,
        }
    return counts


@dataclass(frozen=True, slots=True)
class Shape:
    """Builds the objects of one request."""

    kind: Literal["chat", "text"]
    name: str
    """The answer's id."""
    request_id: str
    created: int
    model: str
    work: Work
    with_ids: bool = False
    """Ids of prompt and output go with the whole response."""

    def whole(self, end: Finished, answer: Answer, reasoning_tokens: int = 0) -> dict[str, Any]:
        """The response of a request without streaming."""
        if self.kind == "chat":
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.content or (None if answer.calls else ""),
                "refusal": None,
                "reasoning_content": answer.reasoning or None,
            }
            if answer.calls:
                message["tool_calls"] = [
                    self._call(call, index) for index, call in enumerate(answer.calls)
                ]
            content: dict[str, Any] = {"message": message}
        else:
            content = {"text": answer.content}
        reason = _reason(end, bool(answer.calls))
        logprobs = self._logprobs(end.likelihoods)
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        prompt: dict[str, Any] = {}
        if self.with_ids:
            # where vLLM has them
            choice["token_ids"] = end.token_ids
            (prompt if self.kind == "chat" else choice)["prompt_token_ids"] = self.work.prompt_ids
        return {
            **self._head(name),
            **prompt,
            "choices": [choice],
            "usage": self._usage(end, reasoning_tokens),
            "dspark": self._figures(end),
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat, which carries the role."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def part(
        self,
        part: Part,
        num_calls: int = 0,
        likelihoods: list[Likelihood] | None = None,
        trace: Trace | None = None,
    ) -> dict[str, Any]:
        """A chunk with a part of the answer; ``num_calls`` came before it."""
        if self.kind == "text":
            content: dict[str, Any] = {"text": part.text}
        elif part.call is not None:
            call = {"index": num_calls, **self._call(part.call, num_calls)}
            content = {"delta": {"tool_calls": [call]}}
        else:
            name = "reasoning_content" if part.kind == "reasoning" else "content"
            content = {"delta": {name: part.text}}
        chunk = self._chunk(content, None, likelihoods)
        return chunk if trace is None else {**chunk, "dspark": asdict(trace)}

    def closing(
        self, end: Finished, num_calls: int = 0, likelihoods: list[Likelihood] | None = None
    ) -> dict[str, Any]:
        """The chunk with the finish reason."""
        content: dict[str, Any] = {"delta": {}} if self.kind == "chat" else {"text": ""}
        reason = _reason(end, num_calls > 0)
        return {**self._chunk(content, reason, likelihoods), "dspark": self._figures(end)}

    def counts(self, end: Finished, reasoning_tokens: int) -> dict[str, Any]:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return {
            **self._chunk({}, None),
            "choices": [],
            "usage": self._usage(end, reasoning_tokens),
        }

    def _usage(self, end: Finished, reasoning_tokens: int) -> dict[str, Any]:
        return usage(
            end.num_prompt_tokens,
            len(end.token_ids),
            end.stats,
            reasoning_tokens,
            cached=end.num_cached_tokens,
        )

    def _call(self, call: Call, index: int) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{self.request_id}_{index}", "type": "function", "function": function}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": name,
            "created": self.created,
            "model": self.model,
        }

    def _logprobs(self, likelihoods: list[Likelihood] | None) -> dict[str, Any] | None:
        if likelihoods is None:
            return None
        return as_chat(likelihoods) if self.kind == "chat" else as_text(likelihoods)

    def _chunk(
        self,
        content: dict[str, Any],
        reason: str | None,
        likelihoods: list[Likelihood] | None = None,
    ) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        logprobs = self._logprobs(likelihoods)
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(name), "choices": [choice]}

    def _figures(self, end: Finished) -> dict[str, Any]:
        return {
            **self.work.echo(),
            "accept_length": end.stats.accept_length,
            "rounds": end.stats.rounds,
            "accept_histogram": end.stats.histogram,
            "stop": end.stop,
            "queue_ms": 1000 * end.queue_s,
            "ttft_ms": 1000 * end.ttft_s,
            "decode_ms": 1000 * end.decode_s,
            "total_ms": 1000 * end.total_s,
        }


def _reason(end: Finished, called: bool) -> str:
    """A model that called ends by itself; an output that was cut stays cut."""
    return "tool_calls" if called and end.finish_reason == "stop" else end.finish_reason


def native_chunk(
    request_id: str,
    work: Work,
    text: str,
    event: Delta | Finished,
    likelihoods: list[Likelihood] | None = None,
) -> dict[str, Any]:
    """An event in SGLang's shape; ``text`` and ``likelihoods`` are all so far."""
    info: dict[str, Any] = {
        "id": request_id,
        "prompt_tokens": len(work.prompt_ids),
        "cached_tokens": event.num_cached_tokens,
        "finish_reason": None,
    }
    if likelihoods is not None:
        info |= as_native(likelihoods, top=bool(work.params.top_logprobs))
    if isinstance(event, Delta):
        return {"text": text, "meta_info": {**info, "completion_tokens": event.num_tokens}}
    reason: dict[str, Any] = {"type": event.finish_reason}
    if event.finish_reason == "length":
        reason["length"] = len(event.token_ids)
    elif event.finish_reason == "stop":
        reason["matched"] = event.stop if event.stop is not None else event.token_ids[-1]
    info |= {
        "completion_tokens": len(event.token_ids),
        "finish_reason": reason,
        "spec_accept_length": event.stats.accept_length,
        "spec_verify_ct": event.stats.rounds,
        "e2e_latency": event.total_s,
        "sampling": work.echo(),
    }
    return {"text": text, "output_ids": event.token_ids, "meta_info": info}
