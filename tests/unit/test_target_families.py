"""Heads that do more than multiply, long prompts, end ids, and what a load is asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)

from dspark.config import TargetSettings
from dspark.errors import TargetError
from dspark.target import HFTarget, load, load_tokenizer
from dspark.target.attention import ATTENTION_NAME
from dspark.target.lockstep import LockstepCache
from dspark.testing import save_tiny_target, tiny_target

SHAPE: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attn_implementation": ATTENTION_NAME,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (GraniteConfig(**SHAPE, logits_scaling=4.0), GraniteForCausalLM),
        (CohereConfig(**SHAPE, logit_scale=0.25), CohereForCausalLM),
        (
            Gemma2Config(**SHAPE, final_logit_softcapping=5.0, attn_logit_softcapping=None),
            Gemma2ForCausalLM,
        ),
    ],
    ids=["divided", "multiplied", "capped"],
)
def test_logits_that_are_scaled_or_capped_are_the_models(
    config: Any, kind: type[PreTrainedModel]
) -> None:
    torch.manual_seed(0)
    target = HFTarget(kind(config), "scaled")
    ids = torch.arange(12) + 5
    with torch.no_grad():
        theirs = target.model(ids[None]).logits[0]
    # or a cap, and a factor, would have nothing to do
    assert float(theirs.abs().max()) > 1
    ours = target.logits(target.features(ids[None], ()).last_hidden)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_prompt_longer_than_one_prefill_piece_gives_all_its_taps() -> None:
    target = tiny_target(max_position_embeddings=2048)
    ids = torch.randint(0, 250, (1100,), generator=torch.Generator().manual_seed(0))
    whole = target.features(ids[None], (1, 4))
    rows = target.prefill(target.new_cache((1, 4)), ids)
    assert rows.logits.shape == (1, target.vocab_size)
    torch.testing.assert_close(rows.taps, whole.taps[0], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(
        rows.logits[0], target.logits(whole.last_hidden[0, -1]), atol=1e-3, rtol=1e-3
    )


def test_the_head_is_always_given_the_rows_of_a_step() -> None:
    """A product of one row may add in another order than the same row among eight."""
    target = tiny_target()
    seen: list[int] = []
    target._head.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[-2]))
    for length in (1, 7, 8, 12, 30):
        cache = target.new_cache()
        target.prefill(cache, torch.arange(length) + 7)
        target.verify(cache, torch.arange(min(length, 16)))
    target.step_together(LockstepCache([cache, cache], 1), torch.tensor([3, 4]))
    assert len(seen) == 11
    assert set(seen) == {8, 16}


def test_padding_on_the_left_is_hidden_by_the_mask() -> None:
    target = tiny_target()
    ids = torch.arange(9) + 40
    alone = target.features(ids[None], (2,)).taps[0]
    padded = torch.cat([torch.full((4,), 3), ids])[None]
    mask = torch.cat([torch.zeros(4, dtype=torch.int64), torch.ones(9, dtype=torch.int64)])[None]
    # rotary attention knows distances only, so the shift by the padding changes nothing
    together = target.features(padded, (2,), attention_mask=mask).taps[0, 4:]
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=1e-3)


def test_no_hook_is_left_behind_even_by_a_forward_that_fails() -> None:
    target = tiny_target()
    target.features(torch.arange(5)[None], (1, 3))
    with pytest.raises(IndexError):
        target.features(torch.tensor([[target.vocab_size]]), (1, 3))
    assert [len(layer._forward_hooks) for layer in target.model.model.layers] == [0] * 6


@pytest.mark.parametrize(
    ("ours", "generation", "ends"),
    [(5, None, {5}), (5, [6, 7], {5, 6, 7}), ([5, 6], 7, {5, 6, 7}), (None, 7, {7})],
)
def test_end_ids_are_those_of_the_config_and_of_the_generation_config(
    ours: Any, generation: Any, ends: set[int]
) -> None:
    model = LlamaForCausalLM(tiny_target().config)
    model.config.eos_token_id = ours
    model.generation_config = GenerationConfig(eos_token_id=generation)
    assert HFTarget(model, "t").eos_ids == ends


def test_a_revision_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_target(tmp_path / "t")
    asked: list[str | None] = []

    def spy(real: Any) -> Any:
        def call(*args: Any, revision: str | None = None, **kwargs: Any) -> Any:
            asked.append(revision)
            return real(*args, **kwargs)

        return call

    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(__import__("transformers"), name)
        monkeypatch.setattr(kind, "from_pretrained", spy(kind.from_pretrained))
    settings = TargetSettings(path=str(path), revision="abc", device="cpu")
    assert load(settings, dtype="float32").revision == "abc"
    load_tokenizer(settings)
    assert asked == ["abc", "abc"]


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "t")
    for file in path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TargetError, match=r"no tokenizer: .* none of tokenizer\.json, ") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    assert "HF_HUB_OFFLINE" not in str(caught.value)  # there is nothing to download
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(TargetError, match=r"cannot load target '.*' \(tokenizer\): ") as caught:
        load_tokenizer(str(path))
    assert "HF_HUB_OFFLINE" not in str(caught.value)
    for text, said in (("[1]", "must hold a JSON object, not list"), ("", "not valid JSON")):
        (path / "config.json").write_text(text)
        with pytest.raises(TargetError, match=rf"config\.json.* {said}"):
            load_tokenizer(str(path))
