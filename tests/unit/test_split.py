"""Split features without processes: shared memory, dealing of passes, front, refusals."""

import os
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import config_io
from dspark.config import TargetSettings
from dspark.corpus.dataset import Row
from dspark.errors import ConfigError
from dspark.target import Target
from dspark.target.front import Facts, Front, tables
from dspark.testing import tiny_ling, tiny_target
from dspark.training.split.buffer import Buffer, Layout
from dspark.training.split.devices import devices_of
from dspark.training.split.pool import TargetPool
from dspark.training.window import Pass, Window, draw_pass

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")


# --- memory -------------------------------------------------------------------------------------


def test_what_one_process_writes_another_reads_and_it_grows() -> None:
    ours = Buffer()
    theirs = Buffer(os.dup(ours._file))
    before = set(os.listdir("/dev/shm"))
    for size in (3, 70_000, 5):
        tensors = {
            "ids": torch.arange(size),
            "taps": torch.randn(size, 2).to(torch.bfloat16),
            "rows": torch.randn(2, size).T,  # not contiguous
            "none": torch.empty(1, size, 0),
            "seen": torch.arange(size) % 2 == 0,
        }
        for writer, reader in ((ours, theirs), (theirs, ours)):
            found = reader.read(pickle.loads(pickle.dumps(writer.write(tensors))))
            assert found.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(found[name], tensor), name
                assert found[name].dtype == tensor.dtype
    assert set(os.listdir("/dev/shm")) == before
    del found
    ours.empty()
    theirs.drop()
    assert theirs.size == 0
    assert torch.equal(ours.read(theirs.write({"a": torch.ones(9)}))["a"], torch.ones(9))


# --- dealing ------------------------------------------------------------------------------------


class Doubling:
    """Stands for a worker: its features are its input ids twice, computed when they are asked."""

    def __init__(self, queue: int) -> None:
        self.slots = tuple(Buffer() for _ in range(queue))
        self.free = deque(range(queue))
        self.layouts: deque[tuple[int, Layout]] = deque()
        self.most = 0

    def compute(self, inputs: dict[str, Tensor], spans: object, layer_ids: tuple[int, ...]) -> None:
        slot = self.free.popleft()
        assert layer_ids == (1, 2)
        ids = inputs["input_ids"].float()[..., None]
        layout = self.slots[slot].write({"taps": ids.repeat(1, 1, 2), "last_hidden": ids})
        self.layouts.append((slot, layout))
        self.most = max(self.most, len(self.layouts))

    def next_features(self) -> tuple[int, Layout]:
        return self.layouts.popleft()


def one_pass(number: int) -> Pass:
    ids = torch.full((4 + number % 3,), number)
    row = Row(f"r{number}", ids, torch.ones(len(ids), dtype=torch.bool))
    return draw_pass([row], [0], num_anchors=1, block_size=2, pad_to=1)


@pytest.mark.parametrize(
    ("workers", "queue", "accumulation", "windows"),
    [(1, 1, 1, 7), (1, 2, 3, 4), (2, 2, 1, 9), (3, 1, 4, 3), (2, 8, 1, 5)],
)
def test_passes_come_back_in_order_and_no_worker_is_ahead_of_its_slots(
    workers: int, queue: int, accumulation: int, windows: int
) -> None:
    pool = TargetPool(TargetSettings(), ["cpu"] * workers, queue=queue, device=CPU)
    fakes = [Doubling(queue) for _ in range(workers)]
    pool._workers = fakes  # type: ignore[assignment]
    drawn = 0

    def draw() -> Iterator[Window]:
        nonlocal drawn
        for step in range(windows):
            passes = [one_pass(step * accumulation + i) for i in range(accumulation)]
            drawn += accumulation
            yield Window(step, passes, torch.zeros(2))

    taken = 0
    for step, window in enumerate(pool.feed(draw(), [1, 2])):
        assert window.step == step
        for one in window.passes:
            left = windows * accumulation - taken
            held = sum(len(fake.layouts) for fake in fakes)
            assert held == min(workers * queue, left)  # all are busy, none has more than its slots
            features = pool.take(one)
            assert set(features.last_hidden.flatten().tolist()) == {taken}
            assert features.taps.shape == (1, one.input_ids.shape[1], 2)
            taken += 1
    assert taken == drawn == windows * accumulation
    assert all(fake.most <= queue for fake in fakes)
    assert pool._num_taken == taken


# --- front --------------------------------------------------------------------------------------


def targets() -> Iterator[Any]:
    yield pytest.param(lambda: tiny_target(), id="tied")
    yield pytest.param(lambda: tiny_target(tie_word_embeddings=False), id="untied")
    yield pytest.param(lambda: tiny_ling("flash"), id="ling")
    yield pytest.param(lambda: tiny_ling("tiny", dtype=torch.bfloat16), id="ling bf16")


@pytest.mark.parametrize("make", targets())
def test_a_front_answers_like_its_target(make: Any) -> None:
    target: Target = make()
    held = {name: tensor.clone() for name, tensor in tables(target).items()}
    front = Front(pickle.loads(pickle.dumps(Facts.of(target))), held)
    for name in (
        "name", "revision", "eos_ids", "architecture", "hidden_size", "num_layers", "vocab_size",
        "max_position_embeddings", "dtype", "device",
    ):  # fmt: skip
        assert getattr(front, name) == getattr(target, name), name
    assert front.fingerprint() == target.fingerprint()
    assert torch.equal(front.embed_weight, target.embed_weight)
    assert torch.equal(front.head_weight, target.head_weight)
    tied = front.embed_weight.data_ptr() == front.head_weight.data_ptr()
    assert tied == (target.embed_weight.data_ptr() == target.head_weight.data_ptr())
    hidden = torch.randn(5, target.hidden_size)
    assert torch.equal(front.logits(hidden), target.logits(hidden))
    with pytest.raises(RuntimeError, match="are in another process"):
        front.features(torch.zeros(1, 4, dtype=torch.long), ())


def test_a_front_keeps_what_is_done_to_logits() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from dspark.target import HFTarget
    from dspark.target.attention import ATTENTION_NAME

    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5,
        attn_logit_softcapping=None,
        attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(64))
    target = HFTarget(model, "capped")
    front = Front(pickle.loads(pickle.dumps(Facts.of(target))), tables(target))
    hidden = 9 * torch.randn(5, 16)
    assert front.logits(hidden).abs().max() <= 0.5
    assert torch.equal(front.logits(hidden), target.logits(hidden))


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.features=split"], "features is split but target_devices is empty"),
        (["train.target_devices=[cpu]"], "but features is online: set features=split"),
        (["train.features=split", "train.target_devices=[cpu]", "train.split_queue=0"], "queue"),
    ],
)
def test_settings_that_contradict_each_other(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_io.load(None, overrides)


def test_devices_are_dealt_out_by_local_trainer() -> None:
    def dealt(names: list[str], trainers: int, training: torch.device = GPU) -> list[Any]:
        return [
            devices_of(names, local_index=i, local_trainers=trainers, training=training, num_gpus=8)
            for i in range(trainers)
        ]

    gpus = [f"cuda:{i}" for i in range(8)]
    assert dealt(gpus[4:], 4) == [("cuda:4",), ("cuda:5",), ("cuda:6",), ("cuda:7",)]
    assert dealt(gpus[2:], 2) == [("cuda:2", "cuda:4", "cuda:6"), ("cuda:3", "cuda:5", "cuda:7")]
    assert dealt(["cpu", "cpu"], 2, CPU) == [("cpu",), ("cpu",)]
    assert dealt(["cuda:0"], 1, CPU) == [("cuda:0",)]
    assert dealt(["cuda:2+cuda:3", "cuda:4+cuda:5"], 2) == [("cuda:2+cuda:3",), ("cuda:4+cuda:5",)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cuda:4", "cuda:1"], r"holds cuda:1, on which a trainer runs.* from cuda:2 on"),
        (["cuda:4"], r"holds 1 device\(s\) for 2 trainers"),
        (["cuda:4", "cuda:8"], r"holds cuda:8, but this machine shows 8 GPU\(s\)"),
        (["cuda", "cuda:4"], "without a number: write cuda:4"),
        (["gpu4", "cuda:4"], "'gpu4', which cannot run a target"),
        (["meta", "cuda:4"], "'meta', which cannot run a target"),
        (["cuda:4", "cuda:5+cuda:1"], r"holds cuda:1, on which a trainer runs"),
    ],
)
def test_devices_that_cannot_be_used(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        devices_of(names, local_index=0, local_trainers=2, training=GPU, num_gpus=8)
