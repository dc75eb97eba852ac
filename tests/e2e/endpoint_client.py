"""The client that `test_endpoint_killed` starts and kills."""

import json
import signal
from pathlib import Path

import torch

from dspark.config import SampleSettings
from dspark.corpus import client
from dspark.corpus.endpoint import sample_endpoint
from dspark.corpus.prompts import iterate_prompts
from dspark.corpus.rejects import Rejects
from dspark.target.remote import Remote
from dspark.testing import tiny_tokenizer

__all__ = ["run"]


def run(folder: Path) -> None:
    """Sample as settings.json says, with short pauses; report.json tells how it went."""
    # what a shell starts in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    client.FIRST_PAUSE_S = 0.01
    tokenizer = tiny_tokenizer()
    report = sample_endpoint(
        Remote("tiny", None, len(tokenizer), 512, frozenset({tokenizer.eos_token_id})),
        tokenizer,
        iterate_prompts([str(folder / "prompts.jsonl")], None, Rejects()),
        SampleSettings.model_validate_json((folder / "settings.json").read_text()),
        folder / "rows.jsonl",
    )
    (folder / "report.json").write_text(json.dumps(report.to_dict()))
