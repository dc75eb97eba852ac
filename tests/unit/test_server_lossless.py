"""Over HTTP, too, a draft changes no byte: greedy and seeded, streamed and whole."""

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
import torch

from dspark.decoding import ReferenceStep, SamplingParams
from dspark.serving.settings import ServeSettings
from dspark.target import GoOn
from dspark.testing import tiny_draft, tiny_target
from tests.unit.served import CHAT, answer, chunks_of, client_of, tokenizer_of

PROMPTS = [f"{word} {number}" for number in range(16) for word in ("Why", "é", "Count", "\u2603 a")]
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "top_p": 0.95}]
TOKENIZER = tokenizer_of()


class HalfRight(ReferenceStep):
    """Proposes what the target will say, up to a slot that is drawn anew each round."""

    said: ClassVar[dict[tuple[tuple[int, ...], int], list[int]]] = {}
    """Outputs without a draft, by prompt and seed."""
    draws = random.Random(0)

    def __init__(self, target: Any, draft: Any, sampling: SamplingParams, **options: Any) -> None:
        super().__init__(target, draft, sampling, **options)
        self._seed = sampling.seed if sampling.temperature else -1
        self._drafted = draft is not None

    def prefill(self, prompt: torch.Tensor, go_on: GoOn | None = None) -> int:
        ids = tuple(prompt.tolist())
        self._begin, self._output = len(ids) - 1, self.said.get((ids, self._seed), [])
        return super().prefill(prompt, go_on)

    def propose(self, most: int) -> torch.Tensor:
        if not self._drafted:
            return super().propose(most)
        at = self.position - self._begin
        known, right = self._output[at : at + most], self.draws.randrange(most + 1)
        ids = [t if k < right else (t + 1) % 250 for k, t in enumerate(known)]
        return torch.tensor(ids, dtype=torch.int64)


@pytest.fixture(scope="module")
def clients() -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Without the draft and with it."""
    target, settings = tiny_target(num_hidden_layers=4), ServeSettings(keepalive_s=0)
    with (
        pytest.MonkeyPatch.context() as patch,
        client_of(target, None, TOKENIZER, settings) as plain,
        client_of(
            target, tiny_draft(target, num_layers=1, num_taps=1), TOKENIZER, settings
        ) as drafted,
    ):
        patch.setattr("dspark.decoding.loop.ReferenceStep", HalfRight)
        yield plain, drafted


def said(client: httpx.Client, path: str, body: dict[str, Any], *, stream: bool) -> bytes:
    if not stream:
        choice = answer(client, path, body)["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
    else:
        choices = [chunk["choices"][0] for chunk in chunks_of(client, path, body)]
        text = "".join(
            one["delta"].get("content", "") if path == CHAT else one["text"] for one in choices
        )
    return str(text).encode()


@pytest.mark.slow
def test_64_prompts_have_the_same_bytes_with_and_without_the_draft(
    clients: tuple[httpx.Client, httpx.Client],
) -> None:
    plain, drafted = clients
    texts = set()
    for number, prompt in enumerate(PROMPTS):
        path = CHAT if number % 2 else "/v1/completions"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        asked = asked if path == CHAT else {"prompt": prompt}
        for sampling in SAMPLINGS:
            body = {**asked, **sampling, "max_tokens": 6, "ignore_eos": True}
            if sampling["temperature"]:
                body["seed"] = number
            whole = answer(plain, path, {**body, "return_token_ids": True})
            choice = whole["choices"][0]
            ids = whole["prompt_token_ids"] if path == CHAT else choice["prompt_token_ids"]
            HalfRight.said[tuple(ids), body.get("seed", -1)] = choice["token_ids"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            for client, stream in ((plain, True), (drafted, False), (drafted, True)):
                assert said(client, path, body, stream=stream) == text.encode(), (body, stream)
            texts.add(text)
    assert len(texts) > 100, "the answers are almost all different ones"
    figures = drafted.get("/server_info").json()["internal_states"][0]
    histogram = figures["accept_histogram"]
    assert all(count > 20 for count in histogram[1:]), "blocks kept in part, wholly and not at all"
