"""Train `ling3-nano`, a small model in Ling-3.0's official layout, from text to checkpoint.

Text: answers sampled from another model (`--responses`), plain rows (`--text`) and the source of
this Python's library. The tokenizer is trained on the same text. `--minutes` are those of the
training alone: reading, compilation at the first step and evaluation come on top.

    PYTHONPATH=. python train/train_ling3_nano.py --responses outputs/corpus/responses.jsonl \\
        --exclude 'eval/*.jsonl' --minutes 4 --compare smollm2-135m --out outputs/ling3-nano
"""

import argparse
import json
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from dspark.config import TargetSettings
from dspark.corpus.chat import render_turns
from dspark.corpus.overlap import Overlap, read_texts
from dspark.corpus.own_bpe import MARKS, train_tokenizer
from dspark.corpus.pretraining import Document, gather, library_documents, row_documents
from dspark.corpus.rejects import Rejects
from dspark.corpus.token_stream import TokenStream
from dspark.errors import ConfigError, DSparkError, RunError, unwritable
from dspark.progress import quiet_transformers
from dspark.provenance import collect, free_bytes, write_json, write_text
from dspark.target import load, load_tokenizer
from dspark.target.base import Target
from dspark.target.config import LingConfig
from dspark.target.layout import tensors
from dspark.target.model import LingModel
from dspark.target.weights import save_model
from dspark.training.ling_forward import TrainingForward, balance, initialise, recurrence_for
from dspark.training.muon import Muon

log = logging.getLogger("ling3-nano")

MOST_BYTES = 16 << 20
FOR_OTHER_FILES = 640 << 10
WARM_UP, COOL_DOWN = 0.02, 0.6
"""Shares of the training in which the learning rate rises, and falls to zero."""
BIAS_RATE = 5e-3
"""Ten times what long trainings take: here the experts have a minute to come into balance."""
EVALUATIONS = 10
SCORED = 200
"""Documents of a kind that bits per byte are computed on."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--responses", nargs="+", default=[], metavar="FILE", help="rows with `messages`")
    add("--text", nargs="+", default=[], metavar="FILE", help="rows with `text`")
    add("--library", type=Path, help="source to read instead of this Python's library")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="evaluation text, JSON lines")
    add("--out", type=Path, default=Path("outputs/ling3-nano"))
    add("--config", type=Path, default=Path("configs/targets/ling3-nano.json"))
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other values in the config")
    add("--minutes", type=float, default=4.0, help="of training, behind the first step")
    add("--steps", type=int, help="so many steps instead, however long they take")
    add("--batch", type=int, default=32, help="rows of a step")
    add("--length", type=int, default=2048, help="tokens of a row")
    add("--lr", type=float, default=0.02, help="of matrices, by Muon")
    add("--adam-lr", type=float, default=0.004, help="of everything else")
    add("--weight-decay", type=float, default=0.05)
    add("--dropout", type=float, default=0.1)
    add("--nextn-weight", type=float, default=0.2, help="of the NEXTN block's loss")
    add("--heldout", type=float, default=0.01, help="share of documents that are not trained on")
    add("--compare", metavar="TARGET", help="whose bits per byte are shown beside, on this text")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    quiet_transformers()
    try:
        report = run(args, time.monotonic())
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    except (DSparkError, OSError) as error:
        told = unwritable(error) if isinstance(error, OSError) else error
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)
    print(json.dumps({key: report[key] for key in ("out", "bytes", "steps", "bits_per_byte")}))


def run(args: argparse.Namespace, began: float) -> dict[str, Any]:
    """Text to checkpoint; what is written to training.json."""
    config = configured(args)
    check_place(args.out)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: torch finds no GPU here; --device cpu")
    if args.compare:
        load_tokenizer(TargetSettings(path=args.compare))  # told now, not behind the training
    rejects = Rejects()
    excluded, files = excluded_texts(args.exclude)
    found = gather(
        (
            document
            for part in (
                row_documents([*args.responses, *args.text], rejects)
                if args.responses or args.text
                else (),
                library_documents(args.library),
            )
            for document in part
        ),
        excluded,
        args.heldout,
    )
    counts: dict[str, Any] = {**found.counts(), "rejected_rows": rejects.to_dict()}
    log.info("text: %s", json.dumps(counts))
    tokenizer = train_tokenizer((plain(one) for one in found.train), config.vocab_size)
    train, heldout = (
        TokenStream(encode(tokenizer, documents)) for documents in (found.train, found.heldout)
    )
    log.info(
        "%d tokens to train on, %d held out; %.0f s", train.num_tokens, heldout.num_tokens,
        time.monotonic() - began,
    )  # fmt: skip

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = LingModel(config, nextn=bool(config.num_nextn_predict_layers)).to(device)
    initialise(model, args.seed)
    # what cannot be compiled runs as it is, with a warning
    torch._dynamo.config.suppress_errors = True
    recurrence, name = recurrence_for(device, config.head_dim, config.num_attention_heads)
    forward = TrainingForward(
        model, recurrence=recurrence, dropout=args.dropout,
        compiled=device.type == "cuda" and not args.no_compile,
    )  # fmt: skip
    log.info("recurrence: %s; %.0f s", name, time.monotonic() - began)
    history = optimise(args, forward, train, heldout)

    if not all(bool(one.isfinite().all()) for one in model.parameters()):
        raise RunError("the weights are NaN or infinite, and are not written; lower --lr")
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    # a turn ends with the one, a text before the other
    ends = [MARKS.index("<|im_end|>"), MARKS.index("<|endoftext|>")]
    write_json(out / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    save_model(model, out)
    bits = {"ling3-nano": bits_per_byte(str(out), found.heldout, device)}
    if args.compare:
        bits[args.compare] = bits_per_byte(args.compare, found.heldout, device)
    parts: Counter[str] = Counter()
    for spec in tensors(config):
        parts[spec.part] += spec.size
    report = {
        "out": str(out),
        "steps": history[-1]["step"],
        "tokens_seen": history[-1]["step"] * args.batch * args.length,
        "tokens": {"train": train.num_tokens, "heldout": heldout.num_tokens},
        "parameters": {"all": parts.total(), **parts},
        "recurrence": name,
        "text": counts,
        "excluded_files": files,
        "bits_per_byte": bits,
        "settings": {key: value for key, value in sorted(vars(args).items()) if key != "out"},
        "history": history,
        "wall_s": round(time.monotonic() - began, 1),
        **collect(),
    }
    write_json(out / "training.json", json.loads(json.dumps(report, default=str)))
    write_text(out / "README.md", card(report))
    report["bytes"] = sum(path.stat().st_size for path in out.iterdir())
    if report["bytes"] > MOST_BYTES:
        raise ConfigError(f"{out} has {report['bytes']:,} bytes, above {MOST_BYTES:,}")
    log.info("bits per byte: %s", json.dumps(bits))
    return report


def configured(args: argparse.Namespace) -> LingConfig:
    """The config with `--set`, small enough to be shipped."""
    for name, least in (("batch", 1), ("length", 2), ("steps", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}")
    for name in ("lr", "adam_lr", "weight_decay", "nextn_weight"):
        if not 0 <= getattr(args, name) < math.inf:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be a number from 0 on, got {getattr(args, name)}"
            )
    if args.library is not None and not args.library.is_dir():
        raise ConfigError(f"--library {args.library} is no directory")
    if not 0 < args.minutes < math.inf:
        raise ConfigError(f"--minutes must be above 0, got {args.minutes:g}")
    for name in ("dropout", "heldout"):
        if not 0 <= getattr(args, name) < 1:
            raise ConfigError(f"--{name} must lie in [0, 1), got {getattr(args, name):g}")
    overrides = {}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        try:
            overrides[key] = json.loads(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--set wants KEY=VALUE with a JSON value, got '{pair}'")
    config = LingConfig.from_file(args.config, overrides)
    weights = sum(spec.nbytes for spec in tensors(config))
    if weights > MOST_BYTES - FOR_OTHER_FILES:
        raise ConfigError(
            f"{args.config}: weights of {weights:,} bytes leave no room for the tokenizer; "
            f"at most {MOST_BYTES - FOR_OTHER_FILES:,} are possible"
        )
    if args.length > config.max_position_embeddings:
        raise ConfigError(
            f"--length {args.length} exceeds max_position_embeddings "
            f"{config.max_position_embeddings} of {args.config}"
        )
    return config


def check_place(out: Path) -> None:
    """A directory that holds nothing yet, with room for the checkpoint."""
    held = next(iter(out.iterdir()), None) if out.is_dir() else out if out.exists() else None
    if held is not None:
        raise ConfigError(f"--out {out} already holds {held.name}; give a new directory")
    if (free := free_bytes(out)) < MOST_BYTES:
        raise ConfigError(f"--out {out} needs {MOST_BYTES:,} bytes and its disk has {free:,} free")


def excluded_texts(patterns: Sequence[str]) -> tuple[Overlap, list[str]]:
    """Everything that no document may share text with, and the files it stands in."""
    overlap, names = Overlap(), []
    for pattern in patterns:
        paths = sorted(glob(pattern, recursive=True))
        if not paths:
            raise ConfigError(f"--exclude {pattern} matches no file")
        for path in map(Path, paths):
            overlap.add(path.name, read_texts([path]))
            names.append(path.name)
    return overlap, names


def plain(document: Document) -> str:
    """Its text without marks, which the tokenizer has already."""
    text = document.text
    for mark in MARKS:
        text = text.replace(mark, "")
    return text


def encode(tokenizer: Any, documents: Sequence[Document]) -> list[list[int]]:
    """Ids; a text that is no conversation begins with `<|endoftext|>`."""
    inner = tokenizer.backend_tokenizer
    found: list[list[int]] = []
    for first in range(0, len(documents), 1000):
        texts = [
            one.text if one.kind == "chat" else MARKS[0] + one.text
            for one in documents[first : first + 1000]
        ]
        found += [one.ids for one in inner.encode_batch_fast(texts, add_special_tokens=False)]
    return found


def optimise(
    args: argparse.Namespace,
    forward: TrainingForward,
    train: TokenStream,
    heldout: TokenStream,
) -> list[dict[str, Any]]:
    """Train until the steps are done or the time is up; what was seen on the way."""
    model = forward.model
    device = model.lm_head.weight.device
    matrices, others = split_parameters(model)
    muon = Muon(matrices, weight_decay=args.weight_decay)
    adam = torch.optim.AdamW(
        others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    batches = train.batches(args.batch, args.length, args.seed, device)
    watched = watch(heldout, args, device)
    history: list[dict[str, Any]] = []
    began = last = time.monotonic()
    step = last_step = told = 0
    progress = 0.0
    while progress < 1:
        ids, labels = next(batches)
        factor = max(min(1.0, (progress + 1e-3) / WARM_UP, (1 - progress) / COOL_DOWN), 0.0)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss, second, counts = forward.losses(ids, labels)
        (loss + args.nextn_weight * second).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * factor
        adam.step()
        muon.step(args.lr * factor)
        model.zero_grad(set_to_none=True)
        if len(counts):
            balance(model, counts, BIAS_RATE * factor)
        step += 1
        if step == 1:
            # what was compiled and tuned belongs to no later step
            loss.item()
            began = last = time.monotonic()
            last_step = 1
            log.info("first step done")
        if args.steps is not None:
            progress = step / args.steps
        else:
            progress = (time.monotonic() - began) / (60 * args.minutes)
        if step % 10 == 0:
            # the host must not run ahead of the clock that it reads
            loss.item()
        if progress >= 1 or int(progress * EVALUATIONS) > told:
            told = int(progress * EVALUATIONS)
            now = time.monotonic()
            load = counts / counts.sum(1, keepdim=True).clamp(min=1) * counts.shape[1]
            entry = {
                "step": step,
                "loss": round(loss.item(), 4),
                "nextn_loss": round(second.item(), 4),
                **watched_losses(forward, watched),
                "fullest_expert": round(load.max().item(), 2),
                "tokens_per_s": round((step - last_step) * args.batch * args.length / (now - last)),
                "seconds": round(now - began, 1),
            }
            history.append(entry)
            log.info("%s", json.dumps(entry))
            last, last_step = time.monotonic(), step
    return history


def split_parameters(model: LingModel) -> tuple[list[Tensor], list[torch.nn.Parameter]]:
    """Matrices for Muon, each of an expert its own; tables, gains and thin matrices for Adam."""
    tables = {id(model.lm_head.weight), id(model.model.word_embeddings.weight)}
    matrices: list[Tensor] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        inner = weight.dim() in (2, 3) and "conv1d" not in name and min(weight.shape[-2:]) >= 16
        if inner and id(weight) not in tables:
            matrices.append(weight)
        else:
            others.append(weight)
    return matrices, others


def watch(
    heldout: TokenStream, args: argparse.Namespace, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """One batch of held-out text of the shape that everything was compiled for, if there is one."""
    if heldout.num_tokens < args.batch * args.length + 2:
        return None
    return next(heldout.batches(args.batch, args.length, args.seed, device))


def watched_losses(
    forward: TrainingForward, watched: tuple[Tensor, Tensor] | None
) -> dict[str, float]:
    if watched is None:
        return {}
    forward.training = False
    # with gradients, though none is asked for: without them all would be compiled again
    with torch.autocast("cuda", torch.bfloat16, enabled=watched[0].is_cuda):
        loss, second, _ = forward.losses(*watched)
    forward.training = True
    return {
        "heldout_loss": round(loss.item(), 4),
        "heldout_nextn_loss": round(second.item(), 4),
    }


def bits_per_byte(
    name: str, documents: Iterable[Document], device: torch.device
) -> dict[str, float]:
    """Of each kind, over the first `SCORED` held-out documents: conversations by their answers."""
    settings = TargetSettings(path=name)
    tokenizer, target = load_tokenizer(settings), load(settings, device=str(device))
    bits: Counter[str] = Counter()
    size: Counter[str] = Counter()
    scored: Counter[str] = Counter()
    for document in documents:
        if scored[document.kind] < SCORED:
            scored[document.kind] += 1
            for ids, mask, num_bytes in scorable(tokenizer, document):
                bits[document.kind] += bits_of(target, ids, mask)  # type: ignore[assignment]
                size[document.kind] += num_bytes
    return {kind: round(bits[kind] / size[kind], 4) for kind in sorted(size) if size[kind]}


def scorable(tokenizer: Any, document: Document) -> list[tuple[list[int], list[int], int]]:
    """Ids, which of them count, and the bytes that these stand for."""
    if document.kind != "chat":
        start = tokenizer.convert_tokens_to_ids(MARKS[0])
        ids = tokenizer.encode(document.text, add_special_tokens=False)
        return [([start, *ids], [0, *[1] * len(ids)], len(document.text.encode()))]
    answers = [one for one in document.messages if one["role"] == "assistant"]
    rendered = render_turns(tokenizer, document.messages, cut=document.cut) if answers else []
    size = sum(len(str(one.get("content")).encode()) for one in answers)
    return [
        (one.input_ids, one.loss_mask, size if number == 0 else 0)
        for number, one in enumerate(rendered)
    ]


@torch.no_grad()
def bits_of(target: Target, ids: Sequence[int], mask: Sequence[int]) -> float:
    """-log2 of the probability of the ids that count, each after those before it."""
    rows = torch.tensor(ids, device=target.device)
    counted = torch.tensor(mask, device=target.device)[1:].bool()
    logits = target.own_logits(rows)[:-1].float()
    losses = torch.nn.functional.cross_entropy(logits, rows[1:], reduction="none")
    return float(losses[counted].sum()) / math.log(2)


def card(report: dict[str, Any]) -> str:
    """README.md of the checkpoint."""
    text = report["text"]
    bits = report["bits_per_byte"]
    kinds = sorted({kind for one in bits.values() for kind in one})
    rows = "\n".join(
        f"| {name} | " + " | ".join(f"{one.get(kind, float('nan')):.3f}" for kind in kinds) + " |"
        for name, one in bits.items()
    )
    amounts = "; ".join(
        f"{part}: "
        + ", ".join(f"{kind} {n['documents']:,} ({n['bytes']:,} bytes)" for kind, n in of.items())
        for part, of in (("trained on", text["train"]), ("held out", text["heldout"]))
    )
    parts = ", ".join(f"{name} {count:,}" for name, count in report["parameters"].items())
    seconds = report["wall_s"]
    passes = report["tokens_seen"] / report["tokens"]["train"]
    dropped = ", ".join(f"{why} {count}" for why, count in text["dropped"].items()) or "none"
    return f"""---
license: apache-2.0
---

# ling3-nano

A small model in the layout of Ling-3.0 (`BailingMoeV3ForCausalLM`): every branch of the large
one (KDA and gated MLA layers, a dense first block, group-limited experts with a selection bias, a
shared expert, SwiGLU limits, a NEXTN block) and SmolLM2's chat format, for tests and demonstrations
of serving. What it says is not to be relied on.

Parameters: {parts}.

Text (documents): {amounts}. Conversations are answers sampled from SmolLM2-135M-Instruct
(Apache-2.0); code is the library of Python {report["python"]}, without its tests.
Dropped: {dropped}. Excluded were texts of {", ".join(report["excluded_files"]) or "no file"}: no
document shares 13 words in a row or a whole sentence with one. Documents are held out by a hash
of prompt or file; none is repeated within a pass, and a row of training holds several, one behind
the other.

{report["steps"]:,} steps, {report["tokens_seen"]:,} tokens ({passes:.1f} passes), in {seconds:g} s
all told.
Bits per byte of held-out text (conversations: of the answers, which are SmolLM2's own and so easy
for it), the same documents for every model:

| | {" | ".join(kinds)} |
|---|{"---|" * len(kinds)}
{rows}

Everything else is in `training.json`; `train/train_ling3_nano.py` made it.
"""


if __name__ == "__main__":
    main()
