"""The first thing to run with a new target: overfit one answer, then decode it with the draft.

The target answers a prompt greedily, the draft is trained on that one row, and decoding the prompt
again must accept whole blocks. If it does not, taps, slots or positions disagree between training
and decoding, and no amount of data will help.

    PYTHONPATH=. python train/overfit_one_batch.py --target smollm2-135m
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from dspark import config_io
from dspark.config import TargetSettings
from dspark.corpus.chat import generation_prompt_ids
from dspark.decoding import DecodeParams, decode
from dspark.errors import ConfigError, DSparkError, unwritable
from dspark.progress import quiet_transformers
from dspark.provenance import write_text
from dspark.target import load, load_tokenizer
from dspark.training.program import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m", help="directory, hub id or known name")
    parser.add_argument("--prompt", default="Count from one to twenty.")
    parser.add_argument("--tokens", type=int, default=64, help="length of the answer")
    parser.add_argument("--out", type=Path, default=Path("outputs/overfit"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    quiet_transformers()
    try:
        share = overfit(args.target, args.prompt, args.tokens, args.out, args.overrides)
    except (DSparkError, OSError) as error:
        told = unwritable(error) if isinstance(error, OSError) else error
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)
    print(f"whole blocks accepted: {share:.0%} of the rounds")
    sys.exit(0 if share >= 0.5 else 1)


def overfit(target: str, prompt: str, tokens: int, out: Path, overrides: list[str]) -> float:
    """Share of decode rounds that kept every slot of their block."""
    if tokens < 16:
        raise ConfigError(
            f"--tokens must be at least 16, some blocks and the row's end; got {tokens}"
        )
    messages = [{"role": "user", "content": prompt}]
    settings = TargetSettings(path=target, dtype="float32")
    tokenizer, model = load_tokenizer(settings), load(settings)
    ids = generation_prompt_ids(tokenizer, messages)
    params = DecodeParams(max_new_tokens=tokens, ignore_eos=True)
    answer = decode(model, None, ids, params).token_ids
    # any id will do that this one row leaves unused
    taken = {*ids, *answer, *model.eos_ids, tokenizer.pad_token_id, tokenizer.eos_token_id}
    mask_token = next(token for token in range(model.vocab_size) if token not in taken)
    row = {"input_ids": ids + answer, "loss_mask": [0] * len(ids) + [1] * len(answer)}
    write_text(out / "row.jsonl", json.dumps(row) + "\n")
    write_text(out / "prompt.jsonl", json.dumps({"messages": messages}) + "\n")
    config = config_io.load(
        None,
        [
            f"target.path={json.dumps(target)}",
            "target.dtype=float32",
            "draft.num_layers=2",
            "draft.block_size=4",
            "draft.num_taps=3",
            "draft.markov_rank=32",
            f"draft.mask_token_id={mask_token}",
            f"data.responses=[{json.dumps(str(out / 'row.jsonl'))}]",
            f"train.output_dir={json.dumps(str(out / 'train'))}",
            # the row's own tokens are to be learnt by heart, not the target's distribution
            "loss.ce_weight=1.0",
            "loss.l1_weight=0.0",
            "train.steps=100",
            "train.num_anchors=64",
            "train.lr=5e-3",
            "train.save_every=1000",
            f"train.validation_prompts=[{json.dumps(str(out / 'prompt.jsonl'))}]",
            # the last anchors of a row have no full block behind them
            f"train.validation_max_new_tokens={tokens - 8}",
            *overrides,
        ],
    )
    run(config)
    last = (Path(config.train.output_dir) / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)[f"val/survival@{config.draft.block_size - 1}"])


if __name__ == "__main__":
    main()
