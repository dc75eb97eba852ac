"""The average of the weights: what it is, that it disturbs nothing, and who gets which weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark import config_io
from dspark.acceptance import AcceptStats
from dspark.errors import CheckpointError, ConfigError
from dspark.export.hf import export_draft
from dspark.export.load import load_draft
from dspark.export.source import read_source
from dspark.target import Target, load
from dspark.testing import save_tiny_run, tiny_draft, tiny_rows, tiny_run
from dspark.training import program, trainer
from dspark.training.ema import Average, decay_at

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_run(tmp_path_factory.mktemp("ema"), tiny_rows(6))


@pytest.fixture(scope="module")
def target(place: Path) -> Target:
    return load(str(place / "target"), dtype="float32", device="cpu")


def run(place: Path, out: Path, *overrides: str) -> trainer.TrainReport:
    constant = ["train.schedule=constant", "train.warmup_ratio=0", "loss.accept_length_ramp=0"]
    given = tiny_run(place, out, "train.steps=4", "train.lr=0.01", *constant, *overrides)
    return program.run(config_io.load(None, given))


def weights(out: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(out / "latest" / f"{name}.safetensors")


def state(out: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((out / "latest" / "trainer_state.json").read_text())
    return held


def test_a_young_average_is_short() -> None:
    assert [decay_at(n, 0.9) for n in (1, 8, 10**6)] == [2 / 11, 0.5, 0.9]


def test_it_is_the_average_of_the_weights_after_every_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []
    optimize = trainer.Trainer._optimize

    def kept(self: Any, *args: Any) -> bool:
        if not seen:
            seen.append({name: value.clone() for name, value in self.engine.weights().items()})
        stopping = optimize(self, *args)
        seen.append({name: value.clone() for name, value in self.engine.weights().items()})
        return stopping

    monkeypatch.setattr(trainer.Trainer, "_optimize", kept)
    run(place, tmp_path / "out", "train.ema_decay=0.25")  # reached by the third step
    found, last = weights(tmp_path / "out", "ema"), weights(tmp_path / "out")
    for name, first in seen[0].items():
        wanted = first.double()
        for number, decay in enumerate((2 / 11, 0.25, 0.25, 0.25), 1):
            wanted = decay * wanted + (1 - decay) * seen[number][name].double()
        torch.testing.assert_close(found[name].double(), wanted, rtol=0, atol=1e-6)
    assert any(not torch.allclose(found[name], last[name], atol=1e-4) for name in found)
    assert state(tmp_path / "out")["ema_since"] == 0


def test_it_changes_nothing_else(place: Path, tmp_path: Path) -> None:
    shown = [f"train.validation_prompts=[{place / 'prompts.jsonl'}]", "train.validate_every=2"]
    run(place, tmp_path / "on", *shown, "train.ema_decay=0.9", "train.validation_max_new_tokens=4")
    run(place, tmp_path / "off", *shown, "train.validation_max_new_tokens=4")
    on, off = weights(tmp_path / "on"), weights(tmp_path / "off")
    assert all(torch.equal(on[name], off[name]) for name in off)
    assert not (tmp_path / "off" / "latest" / "ema.safetensors").exists()
    lines = [
        [json.loads(line) for line in (tmp_path / one / "metrics.jsonl").read_text().splitlines()]
        for one in ("on", "off")
    ]
    for mine, theirs in zip(*lines, strict=True):
        assert mine.keys() - theirs.keys() == ({"val/ema_tau"} if "val/tau" in mine else set())
        assert all(mine[key] == theirs[key] for key in theirs if not key.startswith("perf/"))


def test_turned_on_it_begins_with_the_weights_and_turned_off_it_ends_with_a_word(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    run(place, out, "train.steps=2")
    start = weights(out)
    run(place, out, "train.steps=3", "train.ema_decay=0.9")
    assert "holds no average of the weights (train.ema_decay was null)" in caplog.text
    assert "it begins with the weights of step 2" in caplog.text
    assert state(out)["ema_since"] == 2
    after, found = weights(out), weights(out, "ema")
    for name, value in found.items():
        wanted = start[name] * 2 / 11 + after[name] * 9 / 11
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)
    caplog.clear()
    run(place, out, "train.steps=4")
    assert "train.ema_decay is null, so the average" in caplog.text
    assert state(out)["ema_since"] is None
    assert not (out / "latest" / "ema.safetensors").exists()


def test_a_checkpoint_from_before_there_was_an_average_goes_on(place: Path, tmp_path: Path) -> None:
    old, out = tmp_path / "old", tmp_path / "out"
    prompts = f"train.validation_prompts=[{place / 'prompts.jsonl'}]"
    own = [prompts, "train.validation_max_new_tokens=4", "train.validate_every=2"]
    run(place, out, *own, "train.save_every=2")
    shutil.copytree(out / "checkpoint-2", old / "checkpoint-2")
    held = old / "checkpoint-2"
    told = json.loads((held / "trainer_state.json").read_text())
    del told["ema_since"], told["best"]["weights"]
    (held / "trainer_state.json").write_text(json.dumps({**told, "format": 1}))
    sizes = {one.name: one.stat().st_size for one in held.iterdir() if one.name != "COMPLETE"}
    (held / "COMPLETE").write_text(json.dumps({"format": 1, "files": sizes}))
    settings = (held / "config.yaml").read_text().splitlines(keepends=True)
    (held / "config.yaml").write_text("".join(one for one in settings if "ema_decay" not in one))
    sizes["config.yaml"] = (held / "config.yaml").stat().st_size
    (held / "COMPLETE").write_text(json.dumps({"format": 1, "files": sizes}))
    run(place, old, *own, "train.save_every=2")
    first, second = weights(old), weights(out)
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert state(old) == state(out)


def test_an_average_of_other_weights_is_refused(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", "train.steps=2", "train.ema_decay=0.9")
    path = tmp_path / "out" / "checkpoint-2"
    held = load_file(path / "ema.safetensors")
    held.popitem()
    save_file(held, path / "ema.safetensors")
    complete = json.loads((path / "COMPLETE").read_text())
    complete["files"]["ema.safetensors"] = (path / "ema.safetensors").stat().st_size
    (path / "COMPLETE").write_text(json.dumps(complete))
    with pytest.raises(CheckpointError, match="has other tensors than its weights"):
        run(place, tmp_path / "out", "train.steps=4", "train.ema_decay=0.9")
    (path / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"ema\.safetensors is missing"):
        run(place, tmp_path / "out", "train.steps=4", "train.ema_decay=0.9")


@pytest.mark.parametrize("value", ["0", "1", "-0.5", "1.5"])
def test_a_decay_that_averages_nothing_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema_decay"):
        config_io.load(None, [f"train.ema_decay={value}"])


def test_the_weights_come_back_when_validation_fails() -> None:
    class Held:
        def __init__(self) -> None:
            self.parts = [torch.ones(3), torch.zeros(2)]

        def masters(self) -> list[Tensor]:
            return self.parts

    engine: Any = Held()
    average = Average(engine, 0.5, since=0)
    engine.parts[0] += 1

    def fails() -> None:
        with average.shown():
            assert engine.parts[0].tolist() == [1, 1, 1]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert engine.parts[0].tolist() == [2, 2, 2]


# --- which weights are the best, and which are exported -------------------------------------


def validated(
    place: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[float],
    seen: list[Tensor] | None = None,
) -> trainer.TrainReport:
    """A run whose decodes of weights and average, in turn, accept ``lengths``.

    A weight that each of them decodes with goes to ``seen``.
    """
    decode, given = trainer.Trainer._decode, iter(lengths)

    def told(self: Any) -> AcceptStats:
        decode(self)
        if seen is not None:
            seen.append(self.engine.weights()["fc.weight"].clone())
        return AcceptStats(4, rounds=100, emitted=round(100 * next(given)))

    prompts = f"train.validation_prompts=[{place / 'prompts.jsonl'}]"
    shown = [prompts, "train.validation_max_new_tokens=2", "train.validate_every=2"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_decode", told)
        return run(place, out, *shown, "train.ema_decay=0.9")


def exported(source: Path, out: Path, target: Target, **options: Any) -> tuple[Tensor, str, Any]:
    """A weight of the export, its card and its record."""
    record = export_draft(source, out, target, check=False, **options)
    draft = dict(load_draft(out, dtype=torch.float32).named_parameters())
    return draft["fc.weight"], (out / "README.md").read_text(), record


def test_best_and_the_export_follow_the_longer_of_the_two(
    place: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    seen: list[Tensor] = []
    report = validated(place, out, monkeypatch, [1.5, 1.75, 1.6, 1.7], seen)
    assert (report.best_accept_length, report.best_weights) == (1.75, "ema")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    told = [(one["val/tau"], one["val/ema_tau"]) for one in lines if "val/tau" in one]
    assert told == [(1.5, 1.75), (1.6, 1.7)]
    assert state(out)["best"] == {"step": 2, "accept_length": 1.75, "weights": "ema"}
    best = (out / "best").resolve()
    assert best.name == "checkpoint-2"
    raw, ema = (load_file(best / f"{name}.safetensors")["fc.weight"] for name in ("model", "ema"))
    assert not torch.equal(raw.bfloat16(), ema.bfloat16())
    assert torch.equal(seen[0], raw)
    assert torch.equal(seen[1], ema)

    found, card, record = exported(out, tmp_path / "a", target)
    assert torch.equal(found, ema.bfloat16().float())
    assert "average over the steps (EMA, decay 0.9)" in card
    assert "validation prompts: 1.750" in card
    assert (record["weights"], record["trainer_accept_length"]) == ("ema", 1.75)
    found, card, record = exported(out, tmp_path / "b", target, weights="raw")
    assert torch.equal(found, raw.bfloat16().float())
    assert "weights: those of the last of these steps" in card
    assert "validation prompts" not in card  # 1.75 was not theirs
    assert (record["weights"], record["trainer_accept_length"]) == ("raw", None)
    # the check of each meets the figure of its own
    probes = [read_source(best, target, which).probe for which in ("best", "raw", "ema")]  # type: ignore[arg-type]
    assert [one.expected for one in probes if one] == [1.75, 1.5, 1.75]
    # of a checkpoint that is not the best, nobody has chosen the average
    assert read_source(out / "checkpoint-4", target).weights == "raw"
    assert read_source(out / "checkpoint-4", target, "ema").weights == "ema"


def test_weights_that_accept_as_much_as_their_average_are_preferred(
    place: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = validated(place, tmp_path / "out", monkeypatch, [1.5, 1.5, 1.7, 1.2])
    assert (report.best_accept_length, report.best_weights) == (1.7, "raw")
    assert read_source(tmp_path / "out", target).weights == "raw"
    first = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert first["best"]["weights"] == "raw"


def test_an_average_that_is_not_there_cannot_be_exported(
    place: Path, target: Target, tmp_path: Path
) -> None:
    run(place, tmp_path / "out", "train.steps=1")
    with pytest.raises(CheckpointError, match=r"no average of the weights \(ema.safetensors\)"):
        export_draft(tmp_path / "out", tmp_path / "draft", target, weights="ema", check=False)
    with pytest.raises(CheckpointError, match="in training checkpoints only"):
        export_draft(tiny_draft(target), tmp_path / "draft", target, weights="ema", check=False)
    export_draft(tmp_path / "out", tmp_path / "draft", target, check=False)
    with pytest.raises(CheckpointError, match="in training checkpoints only"):
        export_draft(tmp_path / "draft", tmp_path / "again", target, weights="ema", check=False)
