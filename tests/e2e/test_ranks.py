"""Ranks on a CPU, a process each: the tokens of one model, whatever is asked of them and ended.

Forked, so that they start at once; that `dspark serve` spawns them is tested last.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from dspark.config import TargetSettings
from dspark.decoding import Commit, DecodeParams, SamplingParams, decode, loop, nextn_draft, stream
from dspark.decoding.reference_step import ReferenceStep
from dspark.errors import RunError
from dspark.export.hf import export_draft
from dspark.serving import process
from dspark.serving.process import EngineProcess
from dspark.serving.ranks import follow as followers
from dspark.serving.ranks import lead as leaders
from dspark.serving.ranks.loading import lead, load_rank
from dspark.serving.settings import ServeSettings
from dspark.target import base, load
from dspark.testing import save_tiny_ling, tiny_draft, tiny_tokenizer
from tests.unit.scripted import alive, body, free_port, healthy, until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=0.8, seed=(5 << 33) + 3)
FILTERED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02, seed=11)
POSITIONS = 96


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process, "_METHOD", "fork")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is sometimes right: both are random."""
    place = tmp_path_factory.mktemp("ranks")
    save_tiny_ling(place / "target", max_position_embeddings=POSITIONS)
    settings = TargetSettings(path=str(place / "target"), dtype="float32", device="cpu")
    target = load(settings)
    export_draft(tiny_draft(target), place / "draft", target, check=False)
    return place / "target", place / "draft"


def engine(saved: tuple[Path, Path], ranks: int, *, drafted: bool = True) -> EngineProcess:
    target = TargetSettings(path=str(saved[0]), dtype="float32", device="cpu")
    settings = ServeSettings(tp=ranks)
    loads = (target, str(saved[1]) if drafted else None, frozenset[int](), settings)
    return EngineProcess(partial(lead, *loads), settings, partial(load_rank, *loads))


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, 500, (length,), generator=generator).tolist()
    return ids


def tokens(commits: Any) -> list[int]:
    return [token for commit in commits for token in commit.token_ids]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_output_is_that_of_one_model_with_a_draft_and_without(
    ranks: int, saved: tuple[Path, Path]
) -> None:
    whole = load(TargetSettings(path=str(saved[0]), dtype="float32", device="cpu"))
    with engine(saved, ranks) as model:
        for seed, sampling in enumerate((GREEDY, SEEDED, FILTERED)):
            ids, params = prompt(seed, 5 + 9 * seed), DecodeParams(12, sampling, ignore_eos=True)
            expected = decode(whole, None, ids, params).token_ids
            for proposals in (None, 0, 1):
                asked = DecodeParams(12, sampling, ignore_eos=True, num_draft_tokens=proposals)
                assert tokens(model.stream(ids, asked)) == expected, (sampling, proposals)


def test_the_nextn_block_of_ranks_proposes_as_that_of_one_model(saved: tuple[Path, Path]) -> None:
    settings = TargetSettings(path=str(saved[0]), dtype="float32", device="cpu")
    whole = load(settings, nextn=True)
    params = DecodeParams(12, SamplingParams(temperature=8.0, seed=2), ignore_eos=True)
    expected = list(stream(whole, nextn_draft(whole, 3), prompt(0, 9), params))
    assert any(0 < one.num_accepted < 3 for one in expected)
    with engine((saved[0], Path("nextn:3")), 2) as model:
        found = list(model.stream(prompt(0, 9), params))
    assert [_told(one) for one in found] == [_told(one) for one in expected]


def _told(commit: Commit) -> tuple[Any, ...]:
    return commit.token_ids, commit.num_proposed, commit.num_accepted, commit.finish_reason


class _Watched(ReferenceStep):
    """The step that this process is in."""

    last: "ReferenceStep | None" = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _Watched.last = self


def _with_state(commit: Commit) -> int:
    """What ranks must agree on, and what they hold alike: latents, and the draft's context."""
    step = _Watched.last
    assert step is not None
    state = zlib.crc32(repr((commit.token_ids, commit.finish_reason)).encode())
    cache: Any = step._cache
    for latent in cache.latents.values():
        state = zlib.crc32(latent.held[:, : cache.length].numpy().tobytes(), state)
    return zlib.crc32(repr(cache.length).encode(), state)


def impatient(asks: int) -> Callable[[], bool]:
    """Goes on when it is asked the first times."""
    left = iter([True] * asks)
    return lambda: next(left, False)


@pytest.mark.parametrize(("ranks", "requests"), [(2, 170), (4, 30)])
def test_no_schedule_makes_ranks_part_ways(
    ranks: int, requests: int, saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(base.PREFILL_ROWS, "cpu", 32)
    monkeypatch.setattr(loop, "ReferenceStep", _Watched)
    monkeypatch.setattr(leaders, "digest", _with_state)
    monkeypatch.setattr(followers, "digest", _with_state)
    whole = load(TargetSettings(path=str(saved[0]), dtype="float32", device="cpu"))
    chance, ends = random.Random(ranks), set[str | None]()
    with engine(saved, ranks) as model:
        for number in range(requests):
            # some begin alike, some end at the last position, some do not fit
            length = chance.choice((1, 7, 12, POSITIONS - 4, POSITIONS - 1, POSITIONS))
            ids, count = prompt(number % 5, length), chance.choice((1, 2, 5, 9))
            sampling = chance.choice((GREEDY, SEEDED, FILTERED))
            params = DecodeParams(
                count, sampling, ignore_eos=True, num_draft_tokens=chance.choice((None, 0, 2)),
                stop_ids=frozenset(chance.sample(range(512), 100)),
            )  # fmt: skip
            taken = chance.choice((0, 1, 2, None))
            # a long prompt is read in pieces, between which nobody may want it any more
            asks = chance.choice((0, 1, 2))
            leaves = length > 80 and chance.random() < 0.5
            stream = model.stream(ids, params, impatient(asks) if leaves else None)
            if length == POSITIONS:
                with pytest.raises(RunError, match=f"more than the target's {POSITIONS} positions"):
                    next(stream)
                ends.add("refused")
                continue
            commits = list(islice(stream, taken))
            if leaves and not commits and taken != 0:
                ends.add("given up")
            stream.close()  # type: ignore[attr-defined]
            if taken is not None:
                ends.add("left")
            elif number % 6 == 0 and not leaves:
                expected = decode(whole, None, ids, params)
                assert tokens(commits) == expected.token_ids
            ends.update({commits[-1].finish_reason} if commits else ())
            if chance.random() < 0.05:
                model.forget()
        model.check()
    assert ends >= {"refused", "left", "stop", "length", "given up"}


def test_the_command_spawns_ranks_and_ends_with_one_of_them(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    tiny_tokenizer().save_pretrained(saved[0])
    log, port = tmp_path / "log", free_port()
    words = ["--target", saved[0], "--draft", saved[1], "--tp", 2, "--device", "cpu"]
    words += ["--dtype", "float32", "--port", port]
    with log.open("w") as said:
        server = subprocess.Popen(
            [sys.executable, "-m", "dspark", "serve", *map(str, words)], cwd=ROOT, stderr=said,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            until(lambda: healthy(http) or server.poll() is not None, within_s=120)
            answer = http.post("/generate", json=body("a", 12)).json()
            assert answer["meta_info"]["completion_tokens"] == 12
            found = re.search(r"rank 1 is process (\d+)", log.read_text())
            assert found is not None
            os.kill(int(found[1]), signal.SIGSTOP)
            begun = time.monotonic()
            until(lambda: not healthy(http), within_s=5)
            assert "rank 1 hangs" in http.get("/health").text
            assert server.wait(30) == 1
            assert time.monotonic() - begun < 5
        assert "rank 1 hangs: no sign of life for 2.5 s" in log.read_text()
        assert "Traceback" not in log.read_text()
        assert not alive(int(found[1]))
    finally:
        server.kill()
