"""Target workers in processes of their own: the same training, and clean ends of all kinds."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import config_io
from dspark.config import CaptureSettings, TargetSettings
from dspark.corpus.capture import capture
from dspark.errors import RunError, TargetError
from dspark.target import load
from dspark.testing import save_tiny_target, tiny_tokenizer
from dspark.training import program
from dspark.training.features import batch_features
from dspark.training.split.pool import TargetPool
from dspark.training.window import Pass, Window, draw_pass

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds
LAYERS = (1, 2, 4)
CPU = torch.device("cpu")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_trace_in_shared_memory() -> Any:
    before = set(os.listdir("/dev/shm"))
    yield
    # other programs' come and go; what is left behind is what nobody has open
    new = set(os.listdir("/dev/shm")) - before
    assert not {name for name in new if not _in_use(f"/dev/shm/{name}")}


def _in_use(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except OSError:
            continue  # it has ended, or is not ours to look at
    # gone by now is not left behind either
    return not Path(path).exists()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, rows of several lengths, and shards captured three rows at a time."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("split")
    save_tiny_target(directory / "target")
    rng = random.Random(0)
    with (directory / "rows.jsonl").open("w") as file:
        for number in range(10):
            ids = [rng.randrange(97, 107) for _ in range(64 - 3 * number)]
            mask = [0] * 4 + [1] * (len(ids) - 4)
            row = {"id": f"r{number}", "input_ids": ids, "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    with (directory / "prompts.jsonl").open("w") as file:
        for text in ("abc", "dcba", "bb"):
            prompt = {"messages": [{"role": "user", "content": text}]}
            file.write(json.dumps(prompt) + "\n")
    target = load(str(directory / "target"), dtype="float32", device="cpu")
    data = config_io.load(None, settings(directory, directory)).data
    kept = CaptureSettings(out=str(directory / "shards"), dtype="float32", batch_size=3)
    capture(target, tiny_tokenizer(), data, kept, LAYERS)
    # and as a capture leaves them that was killed: here with nothing but the manifest
    (directory / "none").mkdir()
    manifest = json.loads((directory / "shards" / "manifest.json").read_text())
    manifest |= {"complete": False, "shards": [], "check": None}
    (directory / "none" / "manifest.json").write_text(json.dumps(manifest))
    return directory


def settings(place: Path, out: Path, *overrides: str) -> list[str]:
    return [
        f"target.path={place / 'target'}",
        "target.dtype=float32",
        "target.device=cpu",
        "draft.num_layers=2",
        "draft.block_size=4",
        f"draft.target_layer_ids={list(LAYERS)}",
        "draft.markov_rank=8",
        f"data.responses=[{place / 'rows.jsonl'}]",
        f"data.shards={place / 'shards'}",
        f"train.output_dir={out}",
        "train.steps=8",
        "train.grad_accumulation=2",
        "train.num_anchors=6",
        "train.lr=0.003",
        "train.log_every=1",
        "train.save_every=3",
        f"train.validation_prompts=[{place / 'prompts.jsonl'}]",
        "train.validation_max_new_tokens=6",
        "train.validate_every=4",
        *overrides,
    ]


def split(*devices: str, queue: int = 2) -> list[str]:
    return [
        "train.features=split",
        f"train.target_devices=[{', '.join(devices)}]",
        f"train.split_queue={queue}",
    ]


def figures(out: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def assert_same(one: Path, other: Path) -> None:
    """Losses, norms, validation and weights, to the bit."""
    assert figures(one) == figures(other)
    names = ("model.safetensors", "check.json")
    for name in names:
        assert (one / "latest" / name).read_bytes() == (other / "latest" / name).read_bytes()


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


# --- the same numbers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def online(place: Path) -> Path:
    torch.set_num_threads(1)
    program.run(config_io.load(None, settings(place, place / "online")))
    return place / "online"


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["train.features=offline"], id="offline"),
        pytest.param(["train.features=offline", "data.on_missing=generate"], id="none missing"),
        pytest.param(split("cpu"), id="one worker"),
        pytest.param(split("cpu", "cpu"), id="two workers"),
        pytest.param(split("cpu", "cpu", queue=1), id="two workers, one slot each"),
    ],
)
def test_every_kind_of_features_is_the_same_run(
    place: Path, online: Path, tmp_path: Path, how: list[str]
) -> None:
    report = program.run(config_io.load(None, settings(place, tmp_path / "out", *how)))
    assert report.status == "finished"
    assert_same(tmp_path / "out", online)


def test_packed_documents_are_computed_apart_in_a_worker_too(place: Path, tmp_path: Path) -> None:
    packed = ["data.max_length=64", "data.pack_length=128", "train.validation_prompts=[]"]
    for name, how in {"online": [], "split": split("cpu")}.items():
        out = tmp_path / name
        program.run(config_io.load(None, settings(place, out, *packed, *how)))
    assert figures(tmp_path / "split") == figures(tmp_path / "online")
    lines = (tmp_path / "split" / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["perf/features_wait_s"] >= 0 for line in lines)
    name = "latest/model.safetensors"
    weights = [(tmp_path / kind / name).read_bytes() for kind in ("online", "split")]
    assert weights[0] == weights[1]


def test_two_trainers_with_a_worker_each(forks: Any, place: Path, tmp_path: Path) -> None:
    two = "train.num_processes=2"
    kinds = {
        "online": ["train.features=online"],
        "offline": ["train.features=offline"],
        "generated": [
            "train.features=offline",
            "data.on_missing=generate",
            f"data.shards={place / 'none'}",
            "data.window_bytes=10000000",
        ],
    }
    for name, how in kinds.items():
        ended = forks.run(settings(place, tmp_path / name, two, *how), processes=2)
        assert ended.codes == [0, 0], ended.said
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "train.py"]
    done = subprocess.run(
        [*command, *settings(place, tmp_path / "split", two, *split("cpu", "cpu"))],
        cwd=ROOT,
        env={**environment(), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_no_noise(done.stderr)
    assert_same(tmp_path / "split", tmp_path / "online")
    assert_same(tmp_path / "offline", tmp_path / "online")
    assert_same(tmp_path / "generated", tmp_path / "online")
    assert len(list((place / "none-window").glob("*.row"))) == 10


# --- back-pressure ------------------------------------------------------------------------------


def passes(count: int) -> list[Pass]:
    from dspark.corpus.dataset import Row

    rows = [
        Row(f"r{n}", torch.arange(97, 97 + 9 + n), torch.ones(9 + n, dtype=torch.bool))
        for n in range(count)
    ]
    return [draw_pass([row], [0], num_anchors=2, block_size=4) for row in rows]


def opened(place: Path, queue: int) -> TargetPool:
    target = TargetSettings(path=str(place / "target"), dtype="float32")
    return TargetPool(target, ["cpu"], queue=queue, device=CPU)


def windows(given: list[Pass]) -> Iterator[Window]:
    yield Window(0, given, torch.zeros(2))


def test_a_worker_is_never_ahead_of_its_slots(place: Path) -> None:
    given = passes(8)
    target = load(str(place / "target"), dtype="float32", device="cpu")
    with opened(place, queue=3) as pool:
        pool.start()
        worker = pool._workers[0]
        next(pool.feed(windows(given), LAYERS))
        answers: list[Any] = []

        def idle() -> int:
            """Answers of the worker, until it has nothing more to say."""
            while worker.connection.poll(1):
                answers.append(worker.connection.recv())
            return len(answers)

        assert idle() == 3
        for number, one in enumerate(given):
            worker._found.append(answers[number])
            features = pool.take(one)
            assert idle() == min(8, 4 + number)
            # and what it did ahead has overwritten nothing
            expected = batch_features(target, LAYERS, one.input_ids, None, None, one.spans)
            assert torch.equal(features.taps, expected.taps)
            assert torch.equal(features.last_hidden, expected.last_hidden)


# --- ends ---------------------------------------------------------------------------------------


def assert_no_noise(text: str) -> None:
    assert "resource_tracker" not in text
    assert "leaked" not in text
    assert "Traceback" not in text


def until(true: Callable[[], bool], limit: float, *, running: Any = None) -> None:
    deadline = time.monotonic() + limit
    while not true():
        assert running is None or running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return True
    return state in "ZX"


class Started:
    """A training in a process group of its own, somewhere behind its first checkpoint."""

    def __init__(self, place: Path, out: Path, *overrides: str) -> None:
        self.out = out
        self.log = out.parent / "stderr.txt"
        self.command = [sys.executable, str(ROOT / "train.py")]
        self.command += settings(place, out, "train.steps=400", *overrides)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                self.command, env=environment(), stderr=file, start_new_session=True
            )
        checkpoint = out / "latest"
        until(lambda: checkpoint.exists(), LIMIT, running=self.process)
        found = re.findall(r"on cpu: process (\d+)", self.log.read_text())
        self.workers = [int(pid) for pid in found]
        assert self.workers
        assert not any(gone(pid) for pid in self.workers)

    def stop(self) -> None:
        """Whatever a failed test left."""
        for pid in (self.process.pid, *self.workers):
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def started(place: Path, tmp_path: Path) -> Iterator[Started]:
    run = Started(place, tmp_path / "out", *split("cpu"))
    yield run
    run.stop()


def test_a_dead_worker_ends_the_training_with_a_sentence(started: Started) -> None:
    kind = signal.SIGSEGV
    os.kill(started.workers[0], kind)
    assert started.process.wait(120) == 1
    text = started.log.read_text()
    (sentence,) = (line for line in text.splitlines() if line.startswith("error:"))
    assert f"the target worker on cpu was ended by {kind.name}" in sentence
    assert_no_noise(text)
    until(lambda: all(gone(pid) for pid in started.workers), 60)


def test_after_a_killed_worker_a_run_goes_on_to_the_bit(
    place: Path, online: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "train.py"), *settings(place, out, *split("cpu"))]
    log = tmp_path / "stderr.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment(), stderr=file)
    until(lambda: (out / "latest").exists(), LIMIT, running=process)
    os.kill(int(re.findall(r"on cpu: process (\d+)", log.read_text())[0]), signal.SIGKILL)
    assert process.wait(120) == 1
    text = log.read_text()
    assert "error: the target worker on cpu was ended by SIGKILL" in text
    assert_no_noise(text)
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "going on from" in done.stderr
    assert_same(out, online)


def test_a_killed_trainer_takes_its_workers_along(started: Started) -> None:
    started.process.kill()
    started.process.wait(60)
    until(lambda: all(gone(pid) for pid in started.workers), 60)
    assert_no_noise(started.log.read_text())


def test_a_worker_that_is_busy_ends_with_its_trainer_too() -> None:
    """It does not have to come back to its connection first."""
    script = """
import os
from multiprocessing import get_context
from dspark.training.split.worker import _end_with_trainer
process = get_context("spawn").Process(target=_end_with_trainer, args=(os.getpid(),))
process.start()
print(process.pid, flush=True)
process.join()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        time.sleep(1)
        assert not gone(worker)
        trainer.kill()
        until(lambda: gone(worker), 120)  # importing what it needs included


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_of_them_saves_and_exits_with_75(started: Started, kind: Any) -> None:
    os.killpg(started.process.pid, kind)
    assert started.process.wait(120) == 75
    text = started.log.read_text()
    assert f"{kind.name}: saving at the next step boundary" in text
    assert_no_noise(text)
    until(lambda: all(gone(pid) for pid in started.workers), 60)
    saved = json.loads((started.out / "latest" / "trainer_state.json").read_text())
    assert f"interrupted at step {saved['step']} of 400" in text


def test_a_stopped_worker_is_waited_for(started: Started) -> None:
    """Back-pressure in the other direction: no features, no step, and then on as before."""
    os.kill(started.workers[0], signal.SIGSTOP)
    log = started.out / "metrics.jsonl"
    time.sleep(2)
    before = log.read_text()
    time.sleep(1)
    assert log.read_text() == before
    os.kill(started.workers[0], signal.SIGCONT)
    until(lambda: log.read_text() != before, 120, running=started.process)


def test_a_fault_of_the_worker_is_told(place: Path, tmp_path: Path) -> None:
    (one,) = passes(1)
    one.input_ids[0, 3] = 4096  # no id of the target: a bug, whose traceback the worker shows
    with opened(place, queue=2) as pool:
        pool.start()
        next(pool.feed(windows([one]), LAYERS))
        with pytest.raises(RunError, match="worker on cpu ended with exit code 1"):
            pool.take(one)
        # and again, when something more is sent to it
        with pytest.raises(RunError, match="worker on cpu ended with exit code 1"):
            next(pool.feed(windows(passes(1)), LAYERS))


def test_a_target_that_does_not_load_is_the_same_sentence_as_online(
    place: Path, tmp_path: Path
) -> None:
    broken = save_tiny_target(tmp_path / "target")
    (broken / "model.safetensors").unlink()
    with pytest.raises(TargetError) as here:
        load(str(broken), dtype="float32", device="cpu")
    with opened(tmp_path, queue=2) as pool, pytest.raises(TargetError) as there:
        pool.start()
    assert str(here.value) == str(there.value)


def test_what_the_worker_refuses_is_told(place: Path) -> None:
    (one,) = passes(1)
    with opened(place, queue=2) as pool:
        pool.start()
        next(pool.feed(windows([one]), [99]))
        with pytest.raises(RunError, match="worker on cpu failed: tap layer 99 is out of range"):
            pool.take(one)
