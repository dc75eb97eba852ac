"""The objective over a vocabulary of 157,184 holds some tensors of one chunk, never one of all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, SLOTS, VOCABULARY, CHUNK = 512, 7, 157_184, 16

# The peak of a process is its own only if nothing else was ever done in it.
PROGRAM = """
import json, resource, sys
import torch
from dspark.config import LossSettings
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.losses import denominators, objective, objective_chunked

blocks, slots, vocabulary, chunk = map(int, sys.argv[1:5])
torch.set_num_threads(1)
torch.manual_seed(0)
width = 16
draft = DSparkDraftModel(DSparkConfig(
    hidden_size=width, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, intermediate_size=16, vocab_size=vocabulary, max_position_embeddings=64,
    block_size=slots, target_layer_ids=[1], num_target_layers=4, mask_token_id=0,
    initializer_range=0.3, markov_rank=4,
))
head = torch.randn(vocabulary, width)
draft.attach(head, head)

def gradients(count, chunk, whole=False):
    generator = torch.Generator().manual_seed(1)
    hidden, target_hidden = torch.randn(2, count, slots, width, generator=generator) / 2
    labels, before = torch.randint(vocabulary, (2, count, slots), generator=generator)
    mask = torch.ones(count, slots, dtype=torch.bool)
    settings = LossSettings(chunk_blocks=chunk)
    hidden.requires_grad_()
    draft.zero_grad()
    if whole:
        confidence = draft.confidence_logits(hidden, draft.markov_head.embed(before))
        sums = objective(draft.slot_logits(hidden, before), draft.base_logits(target_hidden),
                         labels, mask, confidence, settings)
    else:
        sums = objective_chunked(hidden, target_hidden, labels, mask, before, draft=draft,
                                 target_head=draft.base_logits, settings=settings)
    loss = sums.loss(denominators(mask, settings), settings, 1.0)
    loss.backward()
    rest = [p.grad.flatten() for p in draft.parameters() if p.grad is not None]
    return loss.detach(), hidden.grad, torch.cat(rest)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

gradients(1, 1)
before = peak()
gradients(blocks, chunk)
print(json.dumps(peak() - before))
found = [gradients(20, 8), gradients(20, 8, whole=True)]
print(json.dumps([float((a - b).norm() / b.norm()) for a, b in zip(*found)]))
"""


@pytest.mark.slow
def test_512_anchors_over_a_large_vocabulary_take_the_memory_of_a_chunk() -> None:
    """Peak memory in a process of its own; and the gradient is that of the definition."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sizes = [str(one) for one in (BLOCKS, SLOTS, VOCABULARY, CHUNK)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sizes],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    used, apart = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    of_a_chunk = CHUNK * SLOTS * VOCABULARY * 4  # bytes of its logits in float32: 67 MiB
    # logits of target and draft, both distributions, and a little; all logits would be 32
    assert used < 6 * of_a_chunk
    assert max(apart) < 1e-5
