"""Sequential temperature scaling: what is wrong with the head is found, and decoding goes by it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.config import DraftSettings
from dspark.decoding import (
    DecodeParams,
    Outcomes,
    SamplingParams,
    Verification,
    decode,
    fit_temperatures,
    measures,
    reliability,
    replay,
)
from dspark.draft import DSparkDraftModel
from dspark.errors import CheckpointError, ConfigError
from dspark.export import calibrate as calibration
from dspark.export.calibrate import Calibration, calibrate
from dspark.export.check import read_probe
from dspark.export.convert import convert_draft
from dspark.export.hf import export_draft
from dspark.export.load import load_draft, read_config
from dspark.target import Target
from dspark.testing import tiny_draft, tiny_target
from dspark.training.build import initial_draft

PROMPT = list(range(5, 17))
TRUE = (2.0, 0.5, 1.0, 1.5)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def drawn(rounds: int, *, seed: int = 0, shown: int = 4) -> Outcomes:
    """Slots that are kept with the chance that the logits over `TRUE` tell."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rounds, 4, generator=generator, dtype=torch.float64) + 1
    chances = (logits / torch.tensor(TRUE)).sigmoid()
    kept = (torch.rand(rounds, 4, generator=generator) < chances).int().cumprod(1).bool()
    return Outcomes(logits, kept, (torch.arange(4) < shown).expand(rounds, 4))


def confident(target: Target, *, head: int = 1, **settings: Any) -> DSparkDraftModel:
    """A draft whose confidence goes up and down; a tied target lets a few proposals through."""
    draft = tiny_draft(target, **settings)
    assert draft.confidence_head is not None
    generator = torch.Generator().manual_seed(head)
    draft.confidence_head.proj.weight.data.normal_(0, 0.3, generator=generator)
    assert draft.markov_head is not None
    draft.markov_head.markov_w1.weight.data.normal_(0, 2, generator=generator)
    return draft


# --- the fit ---------------------------------------------------------------------------------


def test_known_temperatures_are_found_and_mend_other_rounds() -> None:
    found = fit_temperatures(drawn(20_000))
    assert [a / b for a, b in zip(found, TRUE, strict=True)] == pytest.approx([1] * 4, rel=0.12)
    other = drawn(20_000, seed=1)
    before, after = measures(other), measures(other, found)
    for kind in ("slot", "survival"):
        assert after[kind]["ece"] < 0.4 * before[kind]["ece"]
        assert after[kind]["brier"] < before[kind]["brier"]
        assert after[kind]["ece"] < 0.02
    # a slot's own order does not change with its temperature
    assert after["slot"]["auroc"] == before["slot"]["auroc"]
    assert found == fit_temperatures(drawn(20_000))


def test_a_slot_that_few_rounds_reach_takes_the_temperature_before_it() -> None:
    outcomes = drawn(5_000, shown=2)
    first = fit_temperatures(outcomes)
    assert first[1] == first[2] == first[3]
    assert first[0] != first[1]
    assert fit_temperatures(drawn(30)) == (1.0,) * 4
    assert measures(outcomes)["slot"]["ece_at"][2:] == [None, None]


def test_figures_are_those_computed_by_hand() -> None:
    logits = torch.tensor([0.9, 0.9, 0.7, 0.3], dtype=torch.float64).logit()[:, None]
    kept = torch.tensor([[True], [False], [True], [False]])
    known = torch.ones(4, 1, dtype=torch.bool)
    slot = measures(Outcomes(logits, kept, known))["slot"]
    # bins: {0.9, 0.9} of which one is kept, {0.7} kept, {0.3} not
    assert slot["ece"] == pytest.approx((0.8 + 0.3 + 0.3) / 4)
    assert slot["brier"] == pytest.approx((0.01 + 0.81 + 0.09 + 0.09) / 4)
    # pairs of kept and not: a tie, won, lost, won
    assert slot["auroc"] == pytest.approx(2.5 / 4)
    none = measures(Outcomes(logits, torch.zeros_like(kept), known))["slot"]
    assert none["auroc"] is None
    json.dumps(none, allow_nan=False)


@pytest.mark.parametrize(
    ("kept", "told", "known", "reached"),
    [
        (1, 3, [1, 1, 1, 0], [1, 1, 0, 0]),
        (2, 2, [1, 1, 0, 0], [1, 1, 0, 0]),  # the output ends behind what was kept
        (0, 1, [1, 1, 1, 0], [1, 0, 0, 0]),  # it ends, but none can be kept behind a miss
        (3, 3, [1, 1, 1, 0], [1, 1, 1, 0]),
    ],
)
def test_a_round_tells_of_slots_up_to_the_outputs_end(
    kept: int, told: int, known: list[int], reached: list[int]
) -> None:
    one = Outcomes.of_round(torch.ones(3), kept, told, 4)
    assert one.known.int().tolist() == [known]
    assert one.reached.int().tolist() == [reached]
    assert int(one.kept.sum()) == kept


# --- decoding --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "rule"),
    [(0.0, "coupled"), (0.0, "block"), (3.0, "coupled"), (3.0, "rejection"), (3.0, "block")],
)
def test_a_replay_shows_what_the_real_rounds_kept(
    target: Target, temperature: float, rule: Verification
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=2)
    params = DecodeParams(60, sampling, ignore_eos=True, verification=rule)
    draft = confident(target)
    done = decode(target, draft, PROMPT, params)
    rounds: list[Outcomes] = []
    replay(target, draft, PROMPT, done.token_ids, params, outcomes=rounds)
    whole = Outcomes.together(rounds)
    # so hot that whole blocks are kept
    assert sampling.greedy or 1 < whole.kept[:, -1].sum() < len(whole.kept)
    assert whole.kept.sum(0).tolist() == done.stats.kept_at
    assert whole.reached.sum(0).tolist() == done.stats.reached_at
    assert draft.confidence_head is not None
    blind: list[Outcomes] = []
    draft.confidence_head = None
    replay(target, draft, PROMPT, done.token_ids, params, outcomes=blind)
    assert blind == []


@pytest.mark.parametrize("temperatures", [None, [3.0, 0.2, 0.5, 4.0]])
@pytest.mark.parametrize("with_markov", [True, False])
def test_rounds_are_cut_where_the_scaled_confidence_is_too_low(
    target: Target, temperatures: list[float] | None, with_markov: bool
) -> None:
    lengths = set()
    params = DecodeParams(8, ignore_eos=True)
    tokens = decode(target, None, PROMPT, params).token_ids
    for head in range(8):
        draft = confident(target, head=head, confidence_head_with_markov=with_markov)
        draft.config.sts_temperatures = temperatures
        rounds: list[Outcomes] = []
        replay(target, draft, PROMPT, tokens, params, outcomes=rounds)
        first = rounds[0].confidence(temperatures)[0]
        for threshold in (0.3, 0.5, 0.7):
            cut = replace(params, confidence_threshold=threshold)
            stats = replay(target, draft, PROMPT, tokens[:2], cut)
            expected = int((first >= threshold).int().cumprod(0).sum())
            assert stats.proposed == expected
            lengths.add(expected)
    assert len(lengths) > 2


# --- config and export -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperatures", "words"),
    [
        ([1.0, 1.0, 1.0], r"one value for each of 4 slots \(block_size\), got 3"),
        ([1.0] * 5, "got 5"),
        ([1.0, 0.0, 1.0, 1.0], r"finite numbers above 0, got \[1.0, 0.0"),
        ([1.0, -2, 1.0, 1.0], "above 0"),
        ([1.0, math.nan, 1.0, 1.0], "finite numbers"),
        ([1.0, math.inf, 1.0, 1.0], "finite numbers"),
        ([1.0, "2", 1.0, 1.0], "finite numbers"),
        ([1.0, True, 1.0, 1.0], "finite numbers"),
        ("high", "sts_temperatures"),
        (1.5, "sts_temperatures"),
    ],
)
def test_temperatures_that_mean_nothing_are_refused(
    target: Target, tmp_path: Path, temperatures: Any, words: str
) -> None:
    export_draft(tiny_draft(target), tmp_path / "out", target, check=False)
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sts_temperatures": temperatures}))
    with pytest.raises(CheckpointError, match=words) as caught:
        load_draft(tmp_path / "out", target=target)
    assert "\n" not in str(caught.value)


def test_temperatures_need_a_head_and_their_right_name(target: Target, tmp_path: Path) -> None:
    draft = tiny_draft(target, enable_confidence_head=False)
    draft.config.sts_temperatures = [1.0] * 4
    export_draft(draft, tmp_path / "out", target, check=False)
    with pytest.raises(CheckpointError, match="enable_confidence_head says is not there"):
        read_config(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    text = path.read_text().replace("sts_temperatures", "sts_temperature")
    path.write_text(text)
    with pytest.raises(CheckpointError, match="did you mean 'sts_temperatures'"):
        read_config(tmp_path / "out")


def test_an_export_is_calibrated_and_says_so(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LEAST_ROUNDS", 60)
    monkeypatch.setattr("dspark.export.hf.check_in_clean_process", lambda *_: None)
    draft = confident(target)
    assert draft.confidence_head is not None
    draft.confidence_head.proj.weight.data.mul_(8)  # far too sure
    asked = Calibration(
        prompt_ids=[[one, *PROMPT] for one in range(1, 9)], name="asked.jsonl", max_new_tokens=24
    )
    record = export_draft(
        draft,
        tmp_path / "out",
        target,
        calibration=asked,
        tokenizer=None,
        probe=read_probe_of(tmp_path),
    )
    assert draft.config.sts_temperatures is None
    found = record["calibration"]
    assert found["gains"] is True
    assert (found["prompts"], found["num_prompts"]) == ("asked.jsonl", 8)
    loaded = load_draft(tmp_path / "out", target=target)
    again = calibrate(loaded, target, asked)
    assert list(again.temperatures) == loaded.config.sts_temperatures
    assert again.report == found
    assert read_probe(tmp_path / "out").calibration == found
    card = (tmp_path / "out" / "README.md").read_text()
    brier = found["before"]["survival"]["brier"], found["after"]["survival"]["brier"]
    assert f"| brier, survival up to a slot | {brier[0]:.4f} | {brier[1]:.4f} |" in card
    convert_draft(tmp_path / "out", tmp_path / "vllm", "vllm")
    assert read_config(tmp_path / "vllm").sts_temperatures == loaded.config.sts_temperatures
    assert "Each half of the prompts" in (tmp_path / "vllm" / "README.md").read_text()
    # an export of the export keeps what was fitted
    export_draft(tmp_path / "out", tmp_path / "third", target, check=False)
    assert read_config(tmp_path / "third").sts_temperatures == loaded.config.sts_temperatures


def test_temperatures_that_lose_are_not_written(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LEAST_ROUNDS", 60)
    # of the whole, and of each half for the other: sure of what is hardly ever kept
    monkeypatch.setattr(calibration, "fit_temperatures", lambda _: (0.01, 0.01, 0.01, 0.01))
    asked = Calibration(
        prompt_ids=[[one, *PROMPT] for one in range(1, 5)], name="asked.jsonl", max_new_tokens=24
    )
    source = tmp_path / "source"
    for own in (None, list(TRUE)):
        draft = confident(target)
        draft.config.sts_temperatures = own
        export_draft(draft, source, target, check=False)
        record = export_draft(
            source, tmp_path / "out", target, calibration=asked, tokenizer=None, check=False
        )
        assert record["calibration"]["gains"] is False
        assert read_config(tmp_path / "out").sts_temperatures == own
    assert "**They did not gain" in (tmp_path / "out" / "README.md").read_text()


def read_probe_of(place: Path) -> Any:
    """A probe that is never met: the check does not run."""
    text = {"prompt_ids": [[1, 2]], "max_new_tokens": 4, "expected": 1.5, "expected_from": "hand"}
    (place / "check.json").write_text(json.dumps(text))
    return read_probe(place)


def test_slots_that_are_never_verified_get_a_temperature_too(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LEAST_ROUNDS", 40)
    draft = confident(target, block_size=16)
    prompts = [[one, *PROMPT] for one in range(1, 4)]
    fitted = calibrate(
        draft, target, Calibration(prompt_ids=prompts, name="x", temperature=1.0, max_new_tokens=24)
    )
    assert len(fitted.temperatures) == 16
    assert fitted.temperatures[15] == fitted.temperatures[14]
    assert len(fitted.report["before"]["slot"]["ece_at"]) == 15


def test_what_cannot_be_calibrated_is_one_sentence(target: Target) -> None:
    asked = Calibration(prompt_ids=[PROMPT, PROMPT], name="x", max_new_tokens=8)
    with pytest.raises(ConfigError, match=r"2 prompts gave \d+ rounds, and it takes 200"):
        calibrate(confident(target), target, asked)
    with pytest.raises(ConfigError, match="this draft has none"):
        calibrate(tiny_draft(target, enable_confidence_head=False), target, asked)


def test_training_on_leaves_the_temperatures_behind(target: Target, tmp_path: Path) -> None:
    draft = tiny_draft(target)
    draft.config.sts_temperatures = list(TRUE)
    export_draft(draft, tmp_path / "out", target, check=False)
    settings = DraftSettings(init_from=str(tmp_path / "out"))
    begun = initial_draft(draft.config, settings, target, seed=0)
    assert begun.config.sts_temperatures is None
    assert draft.config.sts_temperatures == list(TRUE)


def test_reliability_is_told_by_bins_of_chance() -> None:
    ends = torch.tensor([[0.0, 0.0], [0.0, 5.0], [0.0, 5.0]], dtype=torch.float64)
    kept = torch.tensor([[True, False], [True, True], [False, False]])
    found = reliability(Outcomes(ends, kept, torch.ones_like(kept)))
    sure = float(torch.tensor(5.0, dtype=torch.float64).sigmoid())
    # the second slot of the third round was not reached
    told = [one for rows in found.values() for one in rows]
    expected = [
        (4, 0.5, 2 / 4),
        (1, sure, 1.0),
        (1, 0.25, 0.0),
        (2, sure / 2, 1 / 2),
        (3, 0.5, 2 / 3),
    ]
    assert [len(rows) for rows in found.values()] == [2, 3]
    for row, hand in zip(told, expected, strict=True):
        assert row == pytest.approx(hand)
    milder = reliability(Outcomes(ends, kept, torch.ones_like(kept)), [1.0, 2.0])
    assert milder["slot"][1][1] < sure
