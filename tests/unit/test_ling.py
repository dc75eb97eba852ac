"""A Ling-3.0 target: another implementation agrees with it, and a step can be taken back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dspark.acceptance import AcceptStats
from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, SamplingParams, decode, stream
from dspark.decoding.reference_step import ReferenceStep
from dspark.errors import TargetError
from dspark.target import LingTarget, kda, load, load_tokenizer
from dspark.target.ling import sequence_call
from dspark.target.state import LingCache
from dspark.testing import save_tiny_ling, tiny_draft, tiny_ling

VARIANTS = ["flash", "tiny"]


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 512, (count,), generator=torch.Generator().manual_seed(seed))


def native(directory: Path, variant: str) -> torch.nn.Module:
    """transformers' own class on the same files; it knows no ragged tail unless it is told."""
    copy = directory.with_name(directory.name + "-native")
    shutil.copytree(directory, copy)
    raw = json.loads((copy / "config.json").read_text())
    config = tiny_ling(variant).config
    raw["layer_types"] = [
        "full_attention" if config.is_mla(layer) else "linear_attention"
        for layer in range(config.num_hidden_layers)
    ]
    (copy / "config.json").write_text(json.dumps(raw))
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    return model


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "length",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(63, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        65,
        pytest.param(100, marks=pytest.mark.slow),
    ],
)
def test_transformers_agrees(tmp_path: Path, variant: str, length: int) -> None:
    directory = save_tiny_ling(tmp_path / variant, variant)
    target = load(TargetSettings(path=str(directory), dtype="float32", apply_swiglu_limits=False))
    other = native(directory, variant)
    given = ids(length)
    layers = tuple(range(target.num_layers))
    with torch.no_grad():
        theirs = other(given[None], output_hidden_states=True)
    ours = target.features(given[None], layers)
    assert relative(target.logits(ours.last_hidden), theirs.logits) <= 5e-5
    taps = ours.taps[0].chunk(len(layers), -1)
    # the last entry of theirs stands behind the final norm
    for tap, state in zip(taps[:-1], theirs.hidden_states[1:-1], strict=True):
        assert relative(tap, state[0]) <= 5e-5
    assert relative(ours.last_hidden, theirs.hidden_states[-1]) <= 5e-5

    # prefill of a part, then the rest in steps of uneven length
    cache = target.new_cache()
    start = max(1, length // 2)
    target.prefill(cache, given[:start])
    rows = []
    while cache.length < length:
        piece = given[cache.length : cache.length + 7]
        rows.append(target.verify(cache, piece).logits)
        target.commit(cache, len(piece))
    assert relative(torch.cat(rows), theirs.logits[0, start:]) <= 5e-5


def its_name(name: str) -> str:
    """Name in transformers' class of a parameter of ours."""
    for ours, theirs in (
        (r"word_embeddings", "embed_tokens"),
        (r"\.attention\.", ".self_attn."),
        (r"\.dense\.", ".o_proj."),
        (r"(A_log|dt_bias|f_proj)", r"forget_gate.\1"),
        (r"experts\.(gate_up|down)$", r"experts.\1_proj"),
    ):
        name = re.sub(ours, theirs, name)
    return name


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_agree_with_transformers(tmp_path: Path, variant: str) -> None:
    directory = save_tiny_ling(tmp_path / variant, variant)
    target = load(TargetSettings(path=str(directory), dtype="float32", apply_swiglu_limits=False))
    other = native(directory, variant)
    model = target.model.requires_grad_(True)
    given = ids(70)[None]
    weights = torch.randn(1, 70, 512, generator=torch.Generator().manual_seed(1))

    hidden, _ = model(given, sequence_call(given.shape, given.device))
    (model.logits(hidden) * weights).sum().backward()
    (other(given).logits * weights).sum().backward()
    theirs = {name: one.grad for name, one in other.named_parameters()}
    for name, grad in list(theirs.items()):
        if name.endswith("conv1d.weight"):
            assert grad is not None
            for letter, part in zip("qkv", grad.chunk(3), strict=True):
                theirs[name.replace("conv1d", f"{letter}_conv1d")] = part
    pairs = {name: (one.grad, theirs[its_name(name)]) for name, one in model.named_parameters()}
    assert_close_gradients(pairs, whole=5e-5, each=2e-4)


def assert_close_gradients(
    pairs: dict[str, tuple[Tensor | None, Tensor | None]], whole: float, each: float
) -> None:
    for name, (ours, theirs) in pairs.items():
        assert ours is not None, name
        assert theirs is not None, name
        assert relative(ours, theirs) <= each, name
    ours, theirs = (
        torch.cat([g.flatten() for g in s if g is not None])
        for s in zip(*pairs.values(), strict=True)
    )
    assert relative(ours, theirs) <= whole


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_recurrence(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 states: closer than to transformers, whose chunks are 1e-4 off in A_log."""
    model = tiny_ling(variant).model.requires_grad_(True)
    given = ids(70)[None]
    weights = torch.randn(1, 70, 512, generator=torch.Generator().manual_seed(1))

    def gradients() -> dict[str, Tensor | None]:
        model.zero_grad()
        hidden, _ = model(given, sequence_call(given.shape, given.device))
        torch.autograd.backward((model.logits(hidden) * weights).sum())
        return {name: one.grad for name, one in model.named_parameters()}

    ours = gradients()

    def exact(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, states = kda.recurrence(*(one.double() for one in given))
        return out.float(), states[-1].float()

    monkeypatch.setattr(kda, "chunked", exact)
    expected = gradients()
    pairs = {name: (grad, expected[name]) for name, grad in ours.items()}
    assert_close_gradients(pairs, whole=2e-5, each=5e-5)


@pytest.mark.parametrize("variant", [pytest.param("flash", marks=pytest.mark.slow), "tiny"])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
def test_rows_are_equal_to_the_bit(variant: str, dtype: torch.dtype) -> None:
    target, given = tiny_ling(variant, dtype=dtype), ids(62)
    outputs: dict[int, Tensor] = {}
    for width in (1, 2, 3, 5, 7, 8, 9, 12, 16):
        cache = target.new_cache((1, 4))
        target.prefill(cache, given[:30])
        rows = []
        while cache.length < len(given):
            piece = given[cache.length : cache.length + width]
            got = target.verify(cache, piece)
            rows.append(torch.cat([got.logits, got.taps], -1))
            target.commit(cache, len(piece))
        outputs[width] = torch.cat(rows)
    for width, output in outputs.items():
        assert torch.equal(output, outputs[1]), width


def states(cache: LingCache) -> dict[str, Tensor]:
    found = {f"state {i}": one.state for i, one in cache.kda.items()}
    found |= {f"tail {i}": one.tail for i, one in cache.kda.items()}
    return found | {f"latent {i}": x.held[:, : cache.length] for i, x in cache.latents.items()}


def assert_as_fresh(target: LingTarget, cache: LingCache, given: Tensor) -> None:
    """The states of ``cache`` are those of a fresh prefill of ``given``."""
    fresh = target.new_cache()
    target.prefill(fresh, given)
    assert cache.length == len(given)
    expected = states(fresh)
    for name, got in states(cache).items():
        torch.testing.assert_close(got, expected[name], atol=2e-4, rtol=2e-4, msg=name)


class Scripted:
    """Stands for a `Proposer` that knows what is right, and where to be wrong."""

    def __init__(self, output: list[int], prompt: int, wrong_at: int | None) -> None:
        self.output, self.prompt, self.wrong_at = output, prompt, wrong_at
        self.read = 0
        self.proposal_p: list[Tensor] | None = None
        self.params = SamplingParams()

    def extend(self, taps: Tensor, next_ids: Tensor | None = None) -> None:
        self.read += len(taps)

    def propose(self, anchor: Tensor, most: int) -> Tensor:
        first = self.read - self.prompt + 1
        right = torch.tensor(self.output[first : first + most])
        if self.wrong_at is not None:
            right[self.wrong_at :] = (right[self.wrong_at :] + 1) % 512
        return right


@pytest.mark.parametrize("variant", [pytest.param("flash", marks=pytest.mark.slow), "tiny"])
@pytest.mark.parametrize(
    "wrong_at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (*range(6), None)), 6]
)
def test_a_rejection_at_any_slot_leaves_no_trace(variant: str, wrong_at: int | None) -> None:
    target, prompt = tiny_ling(variant), ids(20).tolist()
    sampling = SamplingParams()
    plain = decode(target, None, prompt, DecodeParams(60, sampling, ignore_eos=True)).token_ids
    draft = tiny_draft(target, block_size=8)
    step = ReferenceStep(target, draft, sampling)
    step._proposer = Scripted(plain, len(prompt), wrong_at)
    tokens = [step.prefill(torch.tensor(prompt))]
    while len(tokens) < 40:
        result = step.step()
        assert result.num_accepted == (7 if wrong_at is None else wrong_at)
        tokens += result.token_ids
        assert_as_fresh(target, step._cache, torch.tensor([*prompt, *tokens[:-1]]))
    assert tokens == plain[: len(tokens)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flash", pytest.param("tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(SamplingParams(), marks=pytest.mark.slow),
        SamplingParams(temperature=1.0, seed=5),
    ],
)
def test_a_draft_changes_nothing(variant: str, sampling: SamplingParams) -> None:
    target = tiny_ling(variant)
    params = DecodeParams(32, sampling)
    stats = AcceptStats(4)
    for seed in range(2):
        prompt = ids(9 + seed, seed).tolist()
        plain = decode(target, None, prompt, params)
        drafted = decode(target, tiny_draft(target, seed=seed), prompt, params)
        assert drafted.token_ids == plain.token_ids
        stats.merge(drafted.stats)
    assert stats.rounds > 0


@pytest.mark.slow
def test_the_context_limit_and_a_stop_end_as_a_fresh_prefill_would() -> None:
    target = tiny_ling()
    prompt = ids(500).tolist()
    params = DecodeParams(100, ignore_eos=True)
    plain = decode(target, None, prompt, params)
    drafted = decode(target, tiny_draft(target), prompt, params)
    assert len(plain.token_ids) == 12  # 512 positions
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == "length"
    stop = plain.token_ids[5]
    stopping = DecodeParams(100, stop_ids=frozenset({stop}), ignore_eos=True)
    stopped = decode(target, tiny_draft(target), prompt, stopping)
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_round_before_a_limit_leaves_the_states_of_a_fresh_prefill(variant: str) -> None:
    """Few tokens may still be emitted, so that fewer are proposed than the block has."""
    target, prompt = tiny_ling(variant), ids(20).tolist()
    step = ReferenceStep(target, tiny_draft(target, block_size=8), SamplingParams())
    tokens = [step.prefill(torch.tensor(prompt))]
    for left in (5, 3, 1, 2):
        result = step.step(max_tokens=left)
        assert len(result.token_ids) <= left
        tokens += result.token_ids
        assert_as_fresh(target, step._cache, torch.tensor([*prompt, *tokens[:-1]]))


@pytest.mark.slow
def test_an_abandoned_answer_leaves_nothing_for_the_next() -> None:
    target, draft = tiny_ling(), tiny_draft(tiny_ling())
    prompt, params = ids(20).tolist(), DecodeParams(40, ignore_eos=True)
    expected = decode(target, draft, prompt, params).token_ids
    begun = stream(target, draft, ids(30, 1).tolist(), params)
    for _ in range(5):
        next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert decode(target, draft, prompt, params).token_ids == expected


def test_no_more_rows_are_committed_than_were_computed() -> None:
    target = tiny_ling()
    cache = target.new_cache()
    target.prefill(cache, ids(10))
    target.verify(cache, ids(3, 1))
    with pytest.raises(AssertionError):
        cache.commit(4)
    cache.commit(2)
    with pytest.raises(AssertionError):
        cache.commit(1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_on_the_left_changes_nothing(variant: str) -> None:
    target = tiny_ling(variant)
    long, short = ids(70), ids(41, 1)
    padded = torch.stack([long, torch.cat([torch.zeros(29, dtype=torch.int64), short])])
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[1, :29] = 0
    together = target.features(padded, (0, 3), mask)
    alone = target.features(short[None], (0, 3))
    torch.testing.assert_close(together.taps[1, 29:], alone.taps[0], atol=5e-4, rtol=1e-4)
    torch.testing.assert_close(
        together.last_hidden[1, 29:], alone.last_hidden[0], atol=5e-4, rtol=1e-4
    )


def test_what_looks_like_ling_and_is_not_is_refused(tmp_path: Path) -> None:
    directory = save_tiny_ling(tmp_path / "ling")
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "architectures": ["BailingMoeV2_5ForCausalLM"]}))
    with pytest.raises(TargetError, match=r"BailingMoeV2_5ForCausalLM.*Ling-2\.6"):
        load(str(directory))


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    directory = save_tiny_ling(tmp_path / "list")
    (directory / "config.json").write_text("[1]")
    with pytest.raises(TargetError, match="cannot load target"):
        load(str(directory))


def test_a_checkpoint_loads_as_it_comes_from_the_hub(tmp_path: Path) -> None:
    """Remote code is named in its config and never asked for; unused keys are many."""
    remote = {
        "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config",
        "AutoModelForCausalLM": "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM",
    }
    unused = {"rotary_dim": 64, "use_qk_norm": True, "max_window_layers": 20, "up_proj_norm": False}
    keys: dict[str, Any] = {"auto_map": remote, **unused}
    directory = save_tiny_ling(tmp_path / "hub", **keys)
    target = load(str(directory))
    assert isinstance(target, LingTarget)
    assert target.eos_ids == {3}
    tokenizer = load_tokenizer(str(directory))
    assert tokenizer.eos_token_id == 3
    assert json.loads((directory / "config.json").read_text())["rotary_dim"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"mscale": 0.7, "mscale_all_dim": 1.3}])
def test_transformers_agrees_under_yarn(tmp_path: Path, more: dict[str, float]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **more}
    # a partial factor means nothing to us, and under YaRN transformers would halve the pairs by it
    keys: dict[str, Any] = {"rope_scaling": yarn, "partial_rotary_factor": 1.0}
    directory = save_tiny_ling(tmp_path / "tiny", "tiny", **keys)
    target = load(TargetSettings(path=str(directory), dtype="float32", apply_swiglu_limits=False))
    given = ids(90)
    with torch.no_grad():
        theirs = native(directory, "tiny")(given[None]).logits
    ours = target.logits(target.features(given[None], ()).last_hidden)
    assert relative(ours, theirs) <= 5e-5


def test_yarn_comes_by_override(tmp_path: Path) -> None:
    directory = str(save_tiny_ling(tmp_path / "ling"))
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    given = ids(60)[None]
    plain = load(TargetSettings(path=directory, dtype="float32"))
    stretched = load(
        TargetSettings(path=directory, dtype="float32", config_overrides={"rope_scaling": scaling})
    )
    before, after = (one.features(given, ()).last_hidden for one in (plain, stretched))
    assert relative(after, before) > 1e-4
    with pytest.raises(TargetError, match=r"rope_scalin.*did you mean 'rope_scaling'"):
        load(TargetSettings(path=directory, config_overrides={"rope_scalin": scaling}))
    # the file is in order: the value that is not came from the settings
    words = r"config\.json under target\.config_overrides \{'num_experts': 7\}: num_experts 7"
    with pytest.raises(TargetError, match=words):
        load(TargetSettings(path=directory, config_overrides={"num_experts": 7}))
