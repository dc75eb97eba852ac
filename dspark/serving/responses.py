"""What goes back: OpenAI's response and chunk objects, and SGLang's for `/generate`.

Beside OpenAI's fields there is one of our own, `dspark`: the sampling that was really done and how
many drafted tokens were kept.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dspark.acceptance import AcceptStats
from dspark.serving.prepare import Work
from dspark.serving.request import Delta, Finished

__all__ = ["Shape", "native_chunk", "usage"]


def usage(prompt: int, completion: int, stats: AcceptStats | None = None) -> dict[str, Any]:
    """Token counts. Rejected proposals are not part of the completion."""
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if stats is not None:
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.proposed - stats.accepted,
            "reasoning_tokens": 0,
        }
    return counts


@dataclass(frozen=True, slots=True)
class Shape:
    """Builds the objects of one request."""

    kind: Literal["chat", "text"]
    request_id: str
    created: int
    model: str
    work: Work
    with_ids: bool = False
    """Ids of prompt and output go with the whole response."""

    def whole(self, end: Finished) -> dict[str, Any]:
        """The response of a request without streaming."""
        if self.kind == "chat":
            content: dict[str, Any] = {
                "message": {"role": "assistant", "content": end.text, "refusal": None}
            }
        else:
            content = {"text": end.text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": end.finish_reason}
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
            "usage": usage(end.num_prompt_tokens, len(end.token_ids), end.stats),
            "dspark": self._figures(end),
        }

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat, which carries the role."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, delta: Delta) -> dict[str, Any]:
        """A chunk with text."""
        chunk = self._chunk(self._content(delta.text), None)
        if delta.trace is not None:
            chunk["dspark"] = asdict(delta.trace)
        return chunk

    def closing(self, end: Finished) -> dict[str, Any]:
        """The chunk with the finish reason."""
        content: dict[str, Any] = {"delta": {}} if self.kind == "chat" else {"text": ""}
        return {**self._chunk(content, end.finish_reason), "dspark": self._figures(end)}

    def counts(self, end: Finished) -> dict[str, Any]:
        """The chunk without choices that `stream_options.include_usage` asks for."""
        return {
            **self._chunk({}, None),
            "choices": [],
            "usage": usage(end.num_prompt_tokens, len(end.token_ids), end.stats),
        }

    def _content(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.kind == "chat" else {"text": text}

    def _head(self, name: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(self, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
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


def native_chunk(request_id: str, work: Work, text: str, event: Delta | Finished) -> dict[str, Any]:
    """An event in SGLang's shape; ``text`` is all text so far."""
    info: dict[str, Any] = {
        "id": request_id,
        "prompt_tokens": len(work.prompt_ids),
        "cached_tokens": 0,
        "finish_reason": None,
    }
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
