"""Figures at wandb: with the real package where it is installed, else with one that is made up."""

import json
import random
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from accelerate import PartialState
from pydantic import BaseModel

from dspark import config_io
from dspark.config import Config, TrackerSettings
from dspark.errors import ConfigError, RunError
from dspark.testing import save_tiny_target
from dspark.training import program
from dspark.training.tracker import Tracker, check_server

KEY = "1234567890" * 4
CONFIG = Config.model_validate(
    {"train": {"tracker": {"kind": "wandb", "name": "x", "tags": ("a", "b")}}}
)


@pytest.fixture(autouse=True)
def _accelerate() -> None:
    """accelerate's trackers ask for its state, as there is in every training."""
    PartialState(cpu=True)


# --- with a made up package ---------------------------------------------------------------


class FakeRun:
    def __init__(self) -> None:
        self.id = "abc"
        self.logged: list[dict[str, float]] = []
        self.code: int | None = None
        self.defined: list[Any] = []

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self.defined.append((args, kwargs))

    def log(self, figures: dict[str, float], step: int | None = None) -> None:
        assert step is None
        self.logged.append(figures)

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


class FakeWandb(types.ModuleType):
    """As much of the package as is used here."""

    Error = RuntimeError

    def __init__(self, refusal: str = "", mode: str = "online", url: str = "") -> None:
        super().__init__("wandb")
        self.run, self.asked, self.kept = FakeRun(), {}, {}  # type: ignore[var-annotated]
        self.refusal = refusal
        self.settings = types.SimpleNamespace(mode=mode, base_url=url)
        self.config = types.SimpleNamespace(update=self._update)

    def _update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        assert allow_val_change
        self.kept.update(values)

    def init(self, **kwargs: Any) -> FakeRun:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.asked.update(kwargs)
        return self.run

    def setup(self) -> Any:
        return types.SimpleNamespace(settings=self.settings)

    def login(self) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    return fake


def test_the_tracker_continues_its_run_and_is_told_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = install(monkeypatch, FakeWandb())
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    tracker = Tracker(CONFIG, tmp_path, run_id="abc")
    tracker.write(7, {"train/loss": 1.0})
    tracker.close(exit_code=1)
    asked = fake.asked
    assert (asked["id"], asked["resume"], asked["name"]) == ("abc", "allow", "x")
    assert (asked["project"], asked["tags"], asked["dir"]) == ("dspark", ["a", "b"], str(tmp_path))
    assert fake.run.logged == [{"step": 7, "train/loss": 1.0}]
    assert fake.run.defined == [(("*",), {"step_metric": "step"})]
    assert fake.run.code == 1
    assert fake.kept["train"]["lr"] == CONFIG.train.lr
    assert "git_commit" in fake.kept["provenance"]
    assert KEY not in json.dumps(fake.kept)


def test_a_tracker_that_refuses_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, FakeWandb(refusal="no API key configured\nand more"))
    with pytest.raises(RunError, match=r"no API key configured \(WANDB_MODE=offline"):
        Tracker(CONFIG, tmp_path, run_id=None)


def test_a_server_that_is_not_there_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrackerSettings(kind="wandb")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: refused
        port = held.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        fake = install(monkeypatch, FakeWandb(url=url))
        with pytest.raises(RunError, match=rf"127.0.0.1:{port} cannot be reached.*WANDB_MODE"):
            check_server(settings)
        # nobody is asked for what will not be used
        for mode in ("offline", "disabled"):
            fake.settings.mode = mode
            check_server(settings)
        check_server(TrackerSettings())
        fake.settings.mode = "online"
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")  # the way there is another
        check_server(settings)
        fake.refusal = "no API key configured"
        with pytest.raises(RunError, match="no API key configured"):
            check_server(settings)


def test_an_environment_that_wandb_does_not_know_is_a_sentence_without_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Settings(BaseModel):
        mode: Literal["online", "offline"]

    fake = install(monkeypatch, FakeWandb())
    monkeypatch.setattr(fake, "setup", lambda: Settings.model_validate({"mode": KEY}))
    with pytest.raises(ConfigError, match=r"wandb refuses mode .*: Input should be") as caught:
        check_server(TrackerSettings(kind="wandb"))
    assert KEY not in str(caught.value)


# --- with the real one --------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and six rows."""
    directory = tmp_path_factory.mktemp("tracker")
    save_tiny_target(directory / "target")
    rng = random.Random(0)
    with (directory / "rows.jsonl").open("w") as file:
        for number in range(6):
            ids = [rng.randrange(97, 107) for _ in range(30)]
            mask = [0] * 4 + [1] * 26
            file.write(json.dumps({"id": f"r{number}", "input_ids": ids, "loss_mask": mask}) + "\n")
    return directory


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The real package, without the settings of whoever runs this."""
    real = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    real.teardown()  # its settings are those of the environment at the first use
    yield real
    real.teardown()


def run(place: Path, out: Path, *overrides: str) -> Any:
    return program.run(
        config_io.load(
            None,
            [
                "target.dtype=float32", "target.device=cpu", "draft.num_layers=1",
                "draft.block_size=4", "draft.num_taps=2", "draft.markov_rank=8",
                "train.num_anchors=6", "train.log_every=1", "train.schedule=constant",
                "train.warmup_ratio=0", "loss.accept_length_ramp=0", "train.tracker.kind=wandb",
                f"target.path={place / 'target'}", f"data.responses=[{place / 'rows.jsonl'}]",
                f"train.output_dir={out}", *overrides,
            ],
        )
    )  # fmt: skip


def runs_in(out: Path) -> list[str]:
    """Names of the folders that runs without a network left."""
    return sorted(path.name for path in (out / "wandb").glob("offline-run-*"))


@pytest.mark.timeout(180)
def test_an_offline_run_goes_on_under_its_id_and_keeps_the_key_to_itself(
    place: Path, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    out = tmp_path / "out"
    run(place, out, "train.steps=2")
    assert wandb.run is None  # closed
    (first,) = runs_in(out)
    state = json.loads((out / "latest" / "trainer_state.json").read_text())
    assert first.endswith(f"-{state['tracker_run']}")
    assert (out / "wandb" / first / f"run-{state['tracker_run']}.wandb").stat().st_size > 0
    run(place, out, "train.steps=4", "train.lr=0.001")
    names = runs_in(out)
    assert len(names) == 2
    assert {name.split("-")[3] for name in names} == {state["tracker_run"]}  # a number may follow
    for path in out.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path


@pytest.mark.timeout(180)
def test_a_run_that_fails_is_closed_as_failed(
    place: Path, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    codes: list[int | None] = []
    finish = wandb.sdk.wandb_run.Run.finish

    def noted(self: Any, exit_code: int | None = None, **kwargs: Any) -> Any:
        codes.append(exit_code)
        return finish(self, exit_code=exit_code, **kwargs)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "finish", noted)

    def broken(*args: Any) -> Any:
        raise RunError("the disk has gone")

    monkeypatch.setattr("dspark.training.trainer.Trainer._save", broken)
    with pytest.raises(RunError, match="the disk has gone"):
        run(place, tmp_path / "out", "train.steps=1")
    assert codes == [1]
    assert wandb.run is None
    assert len(runs_in(tmp_path / "out")) == 1


@pytest.mark.timeout(180)
def test_the_run_holds_settings_and_provenance(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(CONFIG, tmp_path, run_id="own")
    live = wandb.run
    assert (tracker.run_id, live.project, live.name, live.tags) == (
        "own",
        "dspark",
        "x",
        ("a", "b"),
    )
    assert live.config["train"]["num_anchors"] == CONFIG.train.num_anchors
    assert "git_commit" in live.config["provenance"]
    tracker.write(1, {"train/loss": 2.0})
    tracker.close()
    (file,) = (tmp_path / "wandb").rglob("*.wandb")
    assert b"train/loss" in file.read_bytes()


@pytest.mark.timeout(180)
def test_a_disabled_run_trains_and_leaves_no_files(
    place: Path, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert run(place, tmp_path / "out", "train.steps=1").status == "finished"
    assert not (tmp_path / "out" / "wandb").exists()


@pytest.mark.timeout(60)
def test_without_network_or_key_an_online_run_ends_before_it_begins(
    place: Path, tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(RunError, match="cannot be reached"):
            run(place, tmp_path / "out", "train.steps=1")
        server.listen()
        with pytest.raises(RunError, match=r"No API key configured.*WANDB_MODE=offline"):
            run(place, tmp_path / "out", "train.steps=1")
    assert not (tmp_path / "out").exists()
