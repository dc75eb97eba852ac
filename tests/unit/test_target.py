"""The target adapter: taps, logits, cache and rollback, and rows that do not depend on T."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.config import TargetSettings
from dspark.errors import TargetError
from dspark.target import HFTarget, Target, load, load_tokenizer
from dspark.target.attention import ATTENTION_NAME
from dspark.target.rows import CHUNK, padded_rows
from dspark.testing import save_tiny_target, tiny_target

TAPS = (1, 3, 4)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed))


def test_weights_that_compute_nothing_finite_are_named_as_such() -> None:
    model = tiny_target().model
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(TargetError, match="logits that are NaN or Inf: its weights are damaged"):
        HFTarget(model, "tiny")


def test_taps_are_the_hidden_states_one_further(target: Target) -> None:
    ids = ids_of(20).view(2, 10)
    features = target.features(ids, TAPS)
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in TAPS], -1)
    assert torch.equal(features.taps, expected)


def test_last_hidden_gives_the_models_logits(target: Target) -> None:
    ids = ids_of(10)[None]
    with torch.no_grad():
        theirs = target.model(ids).logits
    torch.testing.assert_close(target.logits(target.features(ids, ()).last_hidden), theirs)


def test_rows_of_unequal_length_equal_singles(target: Target) -> None:
    long, short = ids_of(12), ids_of(7, seed=1)
    batch = torch.zeros(2, 12, dtype=torch.int64)
    batch[0], batch[1, :7] = long, short
    together = target.features(batch, TAPS)
    alone = target.features(short[None], TAPS)
    torch.testing.assert_close(together.taps[1, :7], alone.taps[0], atol=1e-4, rtol=1e-4)
    again = target.features(short[None], TAPS)
    assert torch.equal(alone.taps, again.taps)


def test_prefill_and_verify_agree_with_the_whole_sequence(target: Target) -> None:
    ids = ids_of(40)
    with torch.no_grad():
        logits = target.model(ids[None]).logits[0]
    taps = target.features(ids[None], TAPS).taps[0]
    cache = target.new_cache(TAPS)
    rows = target.prefill(cache, ids[:25])
    # another order of the same float32 sums
    torch.testing.assert_close(rows.logits[0], logits[24], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows.taps, taps[:25], atol=1e-4, rtol=1e-4)
    rows = target.verify(cache, ids[25:34])
    torch.testing.assert_close(rows.logits, logits[25:34], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows.taps, taps[25:34], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_logits_are_the_same_to_the_bit_for_every_width(dtype: torch.dtype) -> None:
    target = tiny_target(seed=1, max_position_embeddings=1024)
    target.model.to(dtype)
    # across a chunk border of the keys, where a wider step begins to read the next chunk
    ids = ids_of(CHUNK + 40)
    start = CHUNK - 24
    reference: torch.Tensor | None = None
    for width in (1, 2, 3, 5, 8, 9, 13, 16):
        cache = target.new_cache()
        target.prefill(cache, ids[:start])
        rows = []
        for part in torch.split(ids[start:], width):
            rows.append(target.verify(cache, part).logits)
            target.commit(cache, len(part))
        logits = torch.cat(rows)
        reference = logits if reference is None else reference
        assert torch.equal(logits, reference), width


@pytest.mark.parametrize("kept", range(6))
def test_after_a_rejection_at_any_row_the_state_is_a_fresh_one(target: Target, kept: int) -> None:
    ids = ids_of(30)
    wrong = ids_of(6, seed=9)
    cache = target.new_cache(TAPS)
    target.prefill(cache, ids[:10])
    window = torch.cat([ids[10 : 10 + kept], wrong[kept:]])
    target.verify(cache, window)
    target.commit(cache, kept)
    rolled = target.verify(cache, ids[10 + kept : 14 + kept])
    fresh = target.new_cache(TAPS)
    target.prefill(fresh, ids[:10])
    if kept:
        target.verify(fresh, ids[10 : 10 + kept])
        target.commit(fresh, kept)
    direct = target.verify(fresh, ids[10 + kept : 14 + kept])
    assert torch.equal(rolled.logits, direct.logits)
    assert torch.equal(rolled.taps, direct.taps)


def test_steps_have_eight_or_sixteen_rows() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [padded_rows(n, cpu) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert [padded_rows(n, gpu) for n in (1, 8, 9, 16)] == [16, 16, 16, 16]
    with pytest.raises(ValueError, match="17"):
        padded_rows(17, cpu)


@pytest.mark.parametrize("layer", [-1, 6, 99])
def test_a_tap_outside_the_target_is_refused(target: Target, layer: int) -> None:
    with pytest.raises(TargetError, match=rf"tap layer {layer} .*0\.\.5"):
        target.features(ids_of(4)[None], (layer,))


def test_grouped_queries_head_norms_and_untied_heads_work() -> None:
    config = Qwen3Config(
        vocab_size=90,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=20,
        tie_word_embeddings=False,
        max_position_embeddings=128,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(0)
    target = HFTarget(Qwen3ForCausalLM(config), "qwen")
    ids = torch.arange(20)
    with torch.no_grad():
        logits = target.model(ids[None]).logits[0]
    cache = target.new_cache((1,))
    target.prefill(cache, ids[:12])
    torch.testing.assert_close(
        target.verify(cache, ids[12:]).logits, logits[12:], atol=1e-4, rtol=1e-4
    )


_ALTERNATING = ["full_attention", "sliding_attention"] * 3


@pytest.mark.parametrize(
    "keys",
    [
        {"family": "qwen3", "layer_types": _ALTERNATING},
        {"family": "qwen3", "layer_types": ["full_attention"] * 6},
        {"family": "llama"},
    ],
    ids=["of some layers", "of no layer", "not heeded"],
)
def test_a_window_is_that_of_each_layer(keys: dict[str, Any]) -> None:
    target = tiny_target(sliding_window=6, use_sliding_window=True, **keys)
    ids = torch.arange(24)
    cache = target.new_cache()
    target.prefill(cache, ids[:17])
    found = target.verify(cache, ids[17:]).logits
    torch.testing.assert_close(found, target.own_logits(ids)[17:], atol=1e-4, rtol=1e-4)


def test_a_sliding_window_hides_old_keys() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=6,
        max_position_embeddings=128,
        attn_implementation=ATTENTION_NAME,
    )
    torch.manual_seed(0)
    target = HFTarget(MistralForCausalLM(config), "mistral")
    ids = torch.arange(24)
    with torch.no_grad():
        logits = target.model(ids[None]).logits[0]
    cache = target.new_cache()
    target.prefill(cache, ids[:17])
    torch.testing.assert_close(
        target.verify(cache, ids[17:]).logits, logits[17:], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt_oss", r"\(GptOssAttention\) has attention sinks"),
        ("gemma2", r"\(Gemma2Attention\) has capped attention scores"),
    ],
)
def test_attention_that_is_more_than_a_softmax_is_refused(kind: str, said: str) -> None:
    keys = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model(
        kind, vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, **keys
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    with pytest.raises(TargetError, match=said):
        HFTarget(model, "odd")


def test_a_head_that_is_more_than_a_product_is_refused() -> None:
    class Odd(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3 + 1
            return out

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        attn_implementation=ATTENTION_NAME,
    )
    with pytest.raises(TargetError, match="logits"):
        HFTarget(Odd(config), "odd")


def test_a_recurrent_target_is_refused(target: Target) -> None:
    config = target.config.__class__(**target.config.to_dict())
    model = LlamaForCausalLM(config)
    model.config.layer_types = ["linear_attention"] * 6
    with pytest.raises(TargetError, match="recurrent"):
        HFTarget(model, "hybrid")


def test_save_and_load(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "t")
    loaded = load(str(path), device="cpu", dtype="float32")
    assert loaded.fingerprint() == tiny_target().fingerprint()
    assert loaded.fingerprint() != tiny_target(seed=1).fingerprint()
    assert load_tokenizer(str(path)).chat_template


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_that_is_asked_for_wins_over_the_settings(tmp_path: Path, dtype: str) -> None:
    other = "float32" if dtype == "bfloat16" else "bfloat16"
    path = str(save_tiny_target(tmp_path / "t"))
    settings = TargetSettings.model_validate({"path": path, "dtype": other})
    assert load(settings, device="cpu", dtype=dtype).dtype == getattr(torch, dtype)
    assert load(settings, device="cpu").dtype == getattr(torch, other)


@pytest.mark.parametrize("path", ["no/such/path/here", "smollm3", "./missing", "/nowhere/x"])
def test_a_path_that_is_nothing_is_named(path: str) -> None:
    with pytest.raises(TargetError, match=f"'{path}'"):
        load(path)


def test_the_bare_name_of_a_checkpoint_here_gets_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"known name \(smollm2-135m\)$"):
        load(TargetSettings(path="nano"))
    (tmp_path / "checkpoints/nano").mkdir(parents=True)
    (tmp_path / "checkpoints/nano/config.json").write_text("{}")
    with pytest.raises(TargetError, match="did you mean 'checkpoints/nano'"):
        load(TargetSettings(path="nano"))


def test_an_unreachable_hub_id_is_one_sentence() -> None:
    with pytest.raises(TargetError, match=r"nobody/nothing.*HF_HUB_OFFLINE"):
        load("nobody/nothing")


def test_settings_for_another_family_are_refused(tmp_path: Path) -> None:
    path = str(save_tiny_target(tmp_path / "t"))
    words = r"target\.apply_swiglu_limits false is for Ling-3.0 .*LlamaForCausalLM"
    with pytest.raises(TargetError, match=words):
        load(TargetSettings(path=path, apply_swiglu_limits=False))


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path / "t")
    with pytest.raises(TargetError, match="'quantum'"):
        load(str(path), device="quantum")
