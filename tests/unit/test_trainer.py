"""The trainer: one loss for every split of a step, clear refusals, and what it leaves behind."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import config_io, provenance
from dspark.corpus.dataset import Row
from dspark.errors import CheckpointError, ConfigError, DataError, MissingPackageError, RunError
from dspark.export.load import load_draft
from dspark.target import Features, HFTarget
from dspark.testing import (
    save_tiny_run,
    save_tiny_target,
    tiny_rows,
    tiny_run,
    tiny_target,
    tiny_tokenizer,
    write_rows,
)
from dspark.training import build, program, trainer
from dspark.training.signals import StopRequest
from dspark.training.window import Split, Windows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, ten rows, and two validation prompts."""
    return save_tiny_run(tmp_path_factory.mktemp("trainer"), tiny_rows(10))


def run(place: Path, out: Path, *overrides: str) -> trainer.TrainReport:
    return program.run(config_io.load(None, tiny_run(place, out, *overrides)))


def lines(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "latest" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    """Figures and weights within float32's rounding of sums in another order."""
    for mine, theirs in zip(lines(one), lines(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            if not key.startswith("perf/"):
                assert mine[key] == pytest.approx(theirs[key], rel=2e-6, abs=2e-6), key
    first, second = weights(one), weights(other)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=2e-6)


# --- one loss for every split -------------------------------------------------------------


def test_accumulation_makes_the_step_of_one_large_batch(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "one", "train.steps=4", "train.batch_size=4")
    run(place, tmp_path / "four", "train.steps=4", "train.grad_accumulation=4")
    assert_same_run(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_two_processes_make_the_step_of_one(place: Path, tmp_path: Path) -> None:
    """Also when one of them has rows without a single supervised slot, or one with NaN."""
    rows = tiny_rows(10)
    for row in rows[::2]:  # one supervised token is enough for the reader, none for a block
        row["loss_mask"] = [0] * (len(row["loss_mask"]) - 1) + [1]
    own = [
        *with_bad_rows(place, tmp_path, rows, 3),
        "data.min_supervised_tokens=1",
        "train.steps=5",
        "train.save_every=3",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_max_new_tokens=8",
    ]
    run(place, tmp_path / "one", *own, "train.grad_accumulation=2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(ROOT / "train.py")]
    command += tiny_run(place, tmp_path / "two", *own, "train.num_processes=2")
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("row r3: features with NaN, Inf or only zeros") == 2  # by each process
    assert_same_run(tmp_path / "one", tmp_path / "two")
    # and one process goes on where two stopped
    halfway = tmp_path / "two" / "checkpoint-3"
    run(place, tmp_path / "three", *own, "train.grad_accumulation=2", f"train.resume={halfway}")
    first, second = weights(tmp_path / "one"), weights(tmp_path / "three")
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=2e-6)
    rates = [line["train/lr"] for line in lines(tmp_path / "two") if "train/lr" in line]
    assert rates == [line["train/lr"] for line in lines(tmp_path / "one") if "train/lr" in line]
    windows = windows_of(place, tmp_path / "rows.jsonl", Split(batch_size=1, grad_accumulation=2))
    empty = [[int(one.mask.any()) for one in windows.draw(step).passes] for step in range(5)]
    assert [0, 1] in empty or [1, 0] in empty  # the case this test is for did happen


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def windows_of(place: Path, rows: Path, split: Split) -> Windows:
    config = config_io.load(None, [*tiny_run(place, place), f"data.responses=[{rows}]"])
    from dspark.corpus.dataset import ResponseRows

    data = config.data.model_copy(update={"min_supervised_tokens": 1})
    return Windows(
        ResponseRows(data, tiny_tokenizer()),
        split,
        seed=0,
        num_anchors=6,
        block_size=4,
        loss=config.loss,
        pin=False,
    )


def test_rows_and_anchors_do_not_depend_on_the_split(place: Path) -> None:
    def drawn(processes: int, accumulation: int, batch: int) -> list[Any]:
        found = []
        for index in range(processes):
            split = Split(
                batch_size=batch,
                grad_accumulation=accumulation,
                process_index=index,
                num_processes=processes,
            )
            for one in windows_of(place, place / "rows.jsonl", split).draw(7).passes:
                for ids, anchors in zip(one.input_ids, one.anchors, strict=True):
                    kept = anchors.tolist()
                    found.append((ids[ids > 0].tolist(), [a for a in kept if a > 0]))
        return sorted(found)

    assert drawn(1, 4, 1) == drawn(2, 2, 1) == drawn(4, 1, 1) == drawn(1, 1, 4) == drawn(2, 1, 2)


def test_a_row_gets_other_anchors_at_every_visit(place: Path) -> None:
    row = Row("a", torch.arange(60), torch.ones(60, dtype=torch.bool))

    class One:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Row:
            return row

    split = Split(batch_size=2, grad_accumulation=1)
    loss = config_io.load(None).loss
    windows = Windows(One(), split, seed=0, num_anchors=6, block_size=4, loss=loss, pin=False)
    drawn = [tuple(line.tolist()) for s in range(3) for line in windows.draw(s).passes[0].anchors]
    assert len(set(drawn)) == 6
    assert drawn[:2] == [tuple(line.tolist()) for line in windows.draw(0).passes[0].anchors]


def test_a_step_without_a_supervised_slot_is_counted_and_harmless(
    place: Path, tmp_path: Path
) -> None:
    rows = tiny_rows(10)[:2]
    rows[0]["loss_mask"] = [0] * (len(rows[0]["loss_mask"]) - 1) + [1]
    write_rows(tmp_path / "rows.jsonl", rows)
    run(
        place,
        tmp_path / "out",
        f"data.responses=[{tmp_path / 'rows.jsonl'}]",
        "data.min_supervised_tokens=1",
        "train.steps=4",
    )
    figures = lines(tmp_path / "out")
    assert sorted(line["train/empty_steps"] for line in figures) == [0, 0, 1, 1]
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "out").values())


def with_bad_rows(place: Path, out: Path, rows: list[dict[str, Any]], *bad: int) -> list[str]:
    """Settings for a target whose features are NaN behind token 122, which stands in ``bad``."""
    save_tiny_target(out / "target", tie_word_embeddings=False)
    file = out / "target" / "model.safetensors"
    held = load_file(file)
    held["model.embed_tokens.weight"][122] = float("nan")
    save_file(held, file, metadata={"format": "pt"})
    for number in bad:
        rows[number]["input_ids"][5] = 122
    write_rows(out / "rows.jsonl", rows)
    return [f"target.path={out / 'target'}", f"data.responses=[{out / 'rows.jsonl'}]"]


def with_bad_features(
    monkeypatch: pytest.MonkeyPatch, out: Path, value: float, *bad: int
) -> list[str]:
    """Settings of rows of which ``bad`` start with id 122, and what the target says of these."""
    rows = tiny_rows(10)
    for number in bad:
        rows[number]["input_ids"][0] = 122
    write_rows(out / "rows.jsonl", rows)
    honest = HFTarget.features

    def poisoned(self: Any, input_ids: torch.Tensor, layer_ids: Any) -> Features:
        found = honest(self, input_ids, layer_ids)
        for row in (input_ids[:, 0] == 122).nonzero()[:, 0]:
            if value == 0:
                found.last_hidden[row] = 0
            else:
                found.taps[row, 2, 5] = value
        return found

    monkeypatch.setattr(HFTarget, "features", poisoned)
    return [f"data.responses=[{out / 'rows.jsonl'}]"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_row_that_the_target_cannot_compute_is_named_and_left_out(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: float,
) -> None:
    own = with_bad_features(monkeypatch, tmp_path, value, 6)
    run(place, tmp_path / "out", *own, "train.steps=10", "train.batch_size=2", "train.log_every=2")
    assert caplog.text.count("row r6: features with NaN, Inf or only zeros; skipped") == 1
    figures = lines(tmp_path / "out")
    assert sum(line["train/skipped_rows"] for line in figures) == 2  # in two passes over ten rows
    assert all(line["train/loss"] > 0 for line in figures)
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "out").values())


@pytest.mark.parametrize("value", [float("-inf"), 0.0])
def test_too_many_rows_that_the_target_cannot_compute_stop_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    own = with_bad_features(monkeypatch, tmp_path, value, 6, 2)
    with pytest.raises(RunError, match=r"2 of 10 rows .*zeros \(first: r[26], r[26]\)"):
        run(place, tmp_path / "out", *own, "train.steps=20", "train.log_every=1")


def test_rows_that_cannot_hold_an_anchor_stop_the_run(place: Path, tmp_path: Path) -> None:
    rows = [{"id": "a", "input_ids": [97, 98, 99], "loss_mask": [0, 0, 1]}]
    write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match="no block can be trained"):
        run(
            place,
            tmp_path / "out",
            f"data.responses=[{tmp_path / 'rows.jsonl'}]",
            "data.min_supervised_tokens=1",
            "train.steps=1",
        )


# --- what a run leaves behind -------------------------------------------------------------


@pytest.mark.slow
def test_a_run_learns_and_leaves_checkpoints(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = run(
        place,
        out,
        "train.steps=30",
        "train.batch_size=4",
        "train.lr=0.01",
        "train.save_every=20",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_max_new_tokens=8",
        "train.validate_every=15",
    )
    figures = lines(out)
    trained = [line for line in figures if "train/loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 31))
    assert trained[-1]["train/ce_loss"] < 0.7 * trained[0]["train/ce_loss"]
    assert trained[-1]["train/tau"] == pytest.approx(trained[-1]["train/accepted_drafts"] + 1)
    assert trained[-1]["train/epoch"] == pytest.approx(15.0)  # 2 steps of 4 rows a pass
    validated = {line["step"]: line["val/tau"] for line in figures if "val/tau" in line}
    assert list(validated) == [15, 30]
    assert report.status == "finished"
    assert report.best_accept_length == max(validated.values())
    assert report.last == str(out / "checkpoint-30")
    assert (out / "latest").resolve() == out / "checkpoint-30"
    best = (out / "best").resolve()
    assert best.name == Path(report.best or "").name
    probe = json.loads((best / "check.json").read_text())
    assert probe["expected"] == report.best_accept_length
    assert len(probe["prompt_ids"]) == 2
    assert config_io.load(out / "config.yaml").train.steps == 30
    assert "embed_tokens.weight" not in weights(out)


def test_the_same_settings_give_the_same_run(place: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(place, tmp_path / name, "train.steps=3", "train.batch_size=2")
    first, second = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradient_checkpointing_changes_no_number(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "plain", "train.steps=3")
    run(place, tmp_path / "again", "train.steps=3", "train.gradient_checkpointing=true")
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bf16_keeps_fp32_masters(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", "train.steps=3", "train.mixed_precision=bf16")
    assert {value.dtype for value in weights(tmp_path / "out").values()} == {torch.float32}
    assert lines(tmp_path / "out")[-1]["train/loss"] < 5


# --- where a draft starts ------------------------------------------------------------------


def test_the_mask_token_is_a_special_id_without_a_use() -> None:
    tokenizer, target = tiny_tokenizer(), tiny_target()
    ids = tokenizer.get_vocab()
    spare, start = ids["<|mask|>"], ids["<|im_start|>"]
    free = config_io.load(None).draft
    assert build.mask_token(free, tokenizer, target, used={start}) == spare
    used = {start, spare, 9}
    with pytest.raises(ConfigError, match=r"no special id .*, such as ") as caught:
        build.mask_token(free, tokenizer, target, used=used)
    named = int(str(caught.value).rpartition(" ")[2])
    given = config_io.load(None, [f"draft.mask_token_id={named}"]).draft
    assert build.mask_token(given, tokenizer, target, used=used) == named
    with pytest.raises(ConfigError, match=r"to an id \(all occur\)"):
        build.mask_token(free, tokenizer, target, used=range(target.vocab_size))
    # rows of the target's table behind the tokenizer are free too
    padded = tiny_target(vocab_size=320)
    assert build.mask_token(free, tokenizer, padded, used={start, spare}) == len(tokenizer)
    for taken, reason in (
        (tokenizer.pad_token_id, "pad"),
        (tokenizer.eos_token_id, "end id"),
        (97, "occurs"),
        (260, "outside the target's vocabulary of 260"),
        (9999, "outside"),
    ):
        given = free.model_copy(update={"mask_token_id": taken})
        with pytest.raises(ConfigError, match=reason):
            build.mask_token(given, tokenizer, target, used={97})


def test_a_run_continues_an_exported_draft(place: Path, tmp_path: Path) -> None:
    from dspark.export.hf import export_draft
    from dspark.target import load

    run(place, tmp_path / "first", "train.steps=2")
    target = load(str(place / "target"), dtype="float32", device="cpu")
    export_draft(tmp_path / "first", tmp_path / "draft", target, format="vllm", check=False)
    loaded = load_draft(tmp_path / "draft", dtype=torch.float32)
    start = {name: value.clone() for name, value in loaded.named_parameters()}
    # as the speculators library writes it
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    del config["num_target_layers"]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    run(
        place,
        tmp_path / "second",
        f"draft.init_from={tmp_path / 'draft'}",
        "draft.block_size=7",  # replaced by the draft's own
        "train.steps=1",
        "train.lr=1e-9",
    )
    after = weights(tmp_path / "second")
    assert after.keys() == start.keys()
    for name, value in start.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


# --- what it refuses ------------------------------------------------------------------------


def test_resume_none_refuses_a_directory_in_use(place: Path, tmp_path: Path) -> None:
    with (
        provenance.claimed(tmp_path / "out"),
        pytest.raises(ConfigError, match=r"another run is writing to train.output_dir '.*out'"),
    ):
        run(place, tmp_path / "out", "train.steps=1")
    run(place, tmp_path / "out", "train.steps=1", "train.resume=none")
    with pytest.raises(ConfigError, match=r"is not empty and train.resume is none"):
        run(place, tmp_path / "out", "train.steps=1", "train.resume=none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.seed=1", "train.seed is 1 but .* trained with 0"),
        ("draft.block_size=3", "draft.block_size is 3 but .* trained with 4"),
        ("train.batch_size=2", "global batch .* is 2 but .* trained with 1"),
        ("data.max_length=32", "data"),
        ("train.steps=4", r"the run is 4 steps long but .* was trained for 2"),
    ],
)
def test_another_structure_is_refused_with_both_values(
    place: Path, tmp_path: Path, change: str, message: str
) -> None:
    run(place, tmp_path / "out", "train.steps=2")
    with pytest.raises(CheckpointError, match=message):
        run(place, tmp_path / "out", "train.steps=2", change)


@pytest.mark.slow
def test_a_constant_schedule_may_be_extended(place: Path, tmp_path: Path) -> None:
    constant = ["train.schedule=constant", "train.warmup_ratio=0.0", "loss.accept_length_ramp=0.0"]
    run(place, tmp_path / "out", "train.steps=2", *constant)
    run(place, tmp_path / "out", "train.steps=4", *constant)
    run(place, tmp_path / "whole", "train.steps=4", *constant)
    first, second = weights(tmp_path / "out"), weights(tmp_path / "whole")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_late_term_leaves_the_steps_before_alone(place: Path, tmp_path: Path) -> None:
    off, late = "loss.accept_length_weight=0", "loss.accept_length_start=0.5"
    losses = []
    for name, change in (("off", off), ("late", late)):
        run(place, tmp_path / name, "train.steps=2", "loss.accept_length_ramp=0", change)
        found = lines(tmp_path / name)
        losses.append([line["train/loss"] for line in found if "train/loss" in line])
    (before, after), (same, other) = losses
    assert before == same
    assert other > after + 0.01


def test_a_finished_run_says_so(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", "train.steps=2")
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    assert run(place, tmp_path / "out", "train.steps=2").status == "already finished"
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before


def test_wandb_that_is_not_installed_is_a_sentence(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"dspark\[train\]"):
        run(place, tmp_path / "out", "train.tracker.kind=wandb")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "did you mean 'train.steps'"),
        ("data.responses=[]", "data.responses is empty"),
        ("data.responses=[nowhere.jsonl]", "nowhere.jsonl"),
        ("train.features=offline", "data.shards is not set"),
        ("draft.init_from=nowhere", "nowhere"),
        ("train.resume=nowhere", "neither auto, nor none, nor a directory"),
        ("train.validation_prompts=[nowhere.jsonl]", "nowhere.jsonl"),
        ("train.betas=[1, 0.5]", "train.betas.0: input should be less than 1, got 1"),
        ("train.seed=9223372036854775808", "train.seed: input should be less than"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_code_2(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        program.main([*tiny_run(place, tmp_path / "out", "train.steps=1"), override])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_last_line_of_stdout_is_json(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main(["--json", *tiny_run(place, tmp_path / "out"), "--train.steps", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["status"] == "finished"
    assert report["step"] == 1


@pytest.mark.parametrize(("world", "ends"), [("2", [75]), ("1", []), (None, [])])
def test_one_process_of_several_ends_without_taking_python_apart(
    monkeypatch: pytest.MonkeyPatch, world: str | None, ends: list[int]
) -> None:
    def main(argv: Any) -> None:
        sys.exit(75)

    found: list[int] = []
    monkeypatch.setattr(program, "main", main)
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit) as end:
        program.process([])
    assert (end.value.code, found) == (75, ends)


def test_a_checkpoint_tells_its_data(place: Path, tmp_path: Path) -> None:
    rows = [
        {"id": name, "input_ids": [97, 98] * 6, "loss_mask": [1] * 12, "thinking": name != "a"}
        for name in "abc"
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    given = f"data.responses=[{tmp_path / 'rows.jsonl'}]"
    run(place, tmp_path / "out", given, "train.steps=1")
    told = json.loads((tmp_path / "out" / "latest" / "provenance.json").read_text())
    assert told["data"] == {"rows": 3, "thinking": {"off": 1, "on": 2}}


def test_a_signal_saves_and_exits_with_75(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = trainer.Trainer._optimize

    def interrupted(self: Any, window: Any, stop: Any) -> bool:
        if window.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return optimize(self, window, stop)

    monkeypatch.setattr(trainer.Trainer, "_optimize", interrupted)
    with pytest.raises(SystemExit) as exit_:
        program.main(tiny_run(place, tmp_path / "out", "train.steps=6"))
    assert exit_.value.code == 75
    assert (tmp_path / "out" / "latest").resolve().name == "checkpoint-3"


def test_a_training_whose_launcher_has_ended_is_asked_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    launched = StopRequest()
    with monkeypatch.context() as fork:
        fork.setattr("os.getpid", lambda: 1)
        forked = StopRequest()  # whose parent is no launcher
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    started_by_hand = StopRequest()
    assert not launched.pending
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert launched.pending
    assert not started_by_hand.pending  # a terminal may close behind it
    assert not forked.pending


@pytest.mark.slow
def test_one_row_learnt_by_heart_is_accepted_in_whole_blocks(place: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train" / "overfit_one_batch.py")]
    command += ["--target", str(place / "target"), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "whole blocks accepted: 100%" in done.stdout


def test_a_row_longer_than_the_target_is_refused(place: Path, tmp_path: Path) -> None:
    rows = [{"id": "a", "input_ids": [97] * 600, "loss_mask": [1] * 600}]
    write_rows(tmp_path / "rows.jsonl", rows)
    long = f"data.responses=[{tmp_path / 'rows.jsonl'}]"
    with pytest.raises(DataError, match=r"a row holds 600 tokens but .* has 512 positions"):
        run(place, tmp_path / "out", long, "train.steps=1")
    run(place, tmp_path / "out", long, "train.steps=1", "data.max_length=512")


def test_another_learning_rate_goes_on_with_a_word(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    constant = ["train.schedule=constant", "train.warmup_ratio=0.0", "loss.accept_length_ramp=0.0"]
    run(place, tmp_path / "out", "train.steps=1", *constant)
    with caplog.at_level("WARNING"):
        run(
            place,
            tmp_path / "out",
            "train.steps=2",
            *constant,
            "train.lr=0.5",
            "train.mixed_precision=bf16",  # where no launch asked for any
            "train.validation_limit=1",
        )
    for words in (
        "lr changes from 0.002 to 0.5",
        "mixed_precision changes from no to bf16",
        "validation_limit changes from 8 to 1",
    ):
        assert f"train.{words} at step 1" in caplog.text
