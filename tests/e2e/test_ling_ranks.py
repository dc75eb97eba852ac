"""Four processes, each with its slice of a Ling-3.0 checkpoint, compute what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.testing import save_tiny_ling

ROOT = Path(__file__).parents[2]

_RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from dspark.config import TargetSettings
from dspark.target import load, load_ling

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

def reduce(part):
    total = part.contiguous().clone()
    dist.all_reduce(total)
    return total

settings = TargetSettings(path=sys.argv[1], dtype="float32", device="cpu")
mine = load_ling(
    settings, device=torch.device("cpu"), dtype=torch.float32,
    ranks=ranks, rank=rank, reduce=reduce,
)
whole = load(settings)
held = sum(p.numel() for p in mine.model.parameters())
assert held < 0.4 * sum(p.numel() for p in whole.model.parameters())
ids = torch.randint(4, 512, (70,), generator=torch.Generator().manual_seed(0))

def close(one, other, what):
    error = float((one - other).norm() / other.norm())
    assert error < 2e-5, (what, error)

layers = tuple(range(whole.num_layers))
one, other = mine.features(ids[None], layers), whole.features(ids[None], layers)
close(one.taps, other.taps, "taps")
close(mine.logits(one.last_hidden), whole.logits(other.last_hidden), "logits")

caches = [target.new_cache((1, 5)) for target in (mine, whole)]
for target, cache in zip((mine, whole), caches):
    target.prefill(cache, ids[:40])
while caches[0].length < 60:
    piece = ids[caches[0].length : caches[0].length + 9]
    rows = [target.verify(cache, piece) for target, cache in zip((mine, whole), caches)]
    close(rows[0].logits, rows[1].logits, "rows")
    close(rows[0].taps, rows[1].taps, "row taps")
    for target, cache in zip((mine, whole), caches):
        target.commit(cache, 4)

dist.barrier()
if rank == 0:
    print("equal", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flash", "tiny"])
def test_four_ranks_are_one_model(tmp_path: Path, variant: str) -> None:
    directory = save_tiny_ling(tmp_path / variant, variant)
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "4",
         "--standalone", script, directory],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout
