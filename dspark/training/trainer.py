"""Distil a draft: what is loaded once, and the loop over steps.

One optimizer step is a window of forward passes. Its rows, anchors and denominators are known
before the first of them, and the denominators are those of the whole step over all processes: so
one process with four forward passes, two with two and four with one have the same loss and the
same gradient. Every random number is a function of (seed, position of the row), every rate of the
step; that is what makes a resumed run continue to the bit.
"""

import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from dspark import config_io, kernels, provenance
from dspark.acceptance import AcceptStats
from dspark.config import Config
from dspark.corpus.chat import check_template
from dspark.corpus.unusable import Unusable
from dspark.draft.config import DSparkConfig
from dspark.errors import RunError
from dspark.export.check import Probe
from dspark.export.config_json import ARCHITECTURES, from_json, read_json, to_json
from dspark.progress import Bar
from dspark.target import load_tokenizer, resolve
from dspark.training import build, changes, checkpoint, ema, launch, validation
from dspark.training.captured import CapturedFeatures
from dspark.training.checkpoint import Best, Saved, TrainState
from dspark.training.engine import autocast_dtype, build_engine, can_compile
from dspark.training.features import batch_features, gather_rows, silence
from dspark.training.journal import Journal
from dspark.training.later import Later
from dspark.training.missing import MissingFeatures, open_window
from dspark.training.monitor import Monitor
from dspark.training.objective import Objective
from dspark.training.optim import Schedule, plan_steps, ramp_at
from dspark.training.rows import (
    check_features,
    check_fit,
    documents_of,
    facts,
    hybrid_of,
    identity,
    open_rows,
)
from dspark.training.signals import StopRequest
from dspark.training.split.pool import TargetPool
from dspark.training.targets import open_target
from dspark.training.window import Pass, Split, Window, Windows

__all__ = ["TrainReport", "Trainer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What a run did."""

    status: str
    """finished; interrupted (saved on a signal); already finished (nothing was left to do)."""
    step: int
    total_steps: int
    output_dir: str
    last: str | None
    """Newest checkpoint."""
    best: str | None
    """Checkpoint with the longest accept length in validation; None without validation."""
    best_accept_length: float | None
    best_weights: str | None
    """raw or ema: which of its weights accepted that much."""
    loss: float | None
    """Of the last line of metrics that this process wrote, like `tau`."""
    tau: float | None
    seconds: float


class Trainer:
    """One run: what is loaded once, and the loop over steps."""

    def __init__(
        self,
        config: Config,
        accelerator: Accelerator,
        resume: Path | None,
        pool: TargetPool | None = None,
    ) -> None:
        """``pool`` computes the features where `train.features` is split."""
        self.config = config
        self._pool = pool
        self.accelerator = accelerator
        self.output_dir = Path(config.train.output_dir)
        settings, processes = config.train, accelerator.num_processes

        # once, on rank 0: a named target may have to be unpacked first
        launch.on_main(accelerator, lambda: resolve(config.target))
        tokenizer = load_tokenizer(config.target)
        if settings.validation_prompts:
            check_template(tokenizer)
        rows = open_rows(config, tokenizer)
        self.plan = plan_steps(settings, num_rows=len(rows), num_processes=processes)
        self.schedule = Schedule(
            peak=settings.lr,
            total_steps=self.plan.total_steps,
            warmup_ratio=settings.warmup_ratio,
            kind=settings.schedule,
        )
        self.target = open_target(config, accelerator.device, pool)
        self._recorded = changes.resolved(
            config,
            precision=accelerator.mixed_precision,
            dtype=str(self.target.dtype).removeprefix("torch."),
        )
        check_fit(rows, self.target)
        self.prompts = validation.prompt_ids(
            settings,
            tokenizer,
            max_positions=self.target.max_position_embeddings,
            vocab_size=self.target.vocab_size,
        )

        saved = checkpoint.read(resume) if resume else None
        draft_config = build.draft_config(
            config,
            self.target,
            tokenizer,
            rows.used_ids,
            saved=_shape_of(saved) if saved else None,
        )
        layer_ids = tuple(draft_config.target_layer_ids or ())
        check_features(config, self.target, layer_ids, tokenizer)
        then = saved.state.structure.get("target") if saved else None
        self.structure = {
            # a run of an earlier version goes on under the fingerprint that it knows
            "target": self.target.fingerprint_like(str(then or self.target.fingerprint())),
            **changes.structure(
                config,
                rows=identity(rows),
                shape=build.shape(draft_config),
                global_batch=self.plan.global_batch,
            ),
        }
        if saved is None:
            self.draft = build.initial_draft(
                draft_config, config.draft, self.target, seed=settings.seed
            )
        else:
            checkpoint.check_structure(saved.state.structure, self.structure, saved.path)
            changes.check_length(saved.state, saved.path, config, self.schedule)
            changes.warn(saved, self._recorded)
            self.draft = build.restored_draft(
                draft_config, saved.weights, self.target, where=str(saved.path)
            )
        self.draft.sparse_attention = settings.attention == "auto" and kernels.installed()
        strategy = launch.strategy_of(os.environ)
        self._packed: CapturedFeatures | None = None
        if settings.compile and can_compile(strategy, accelerator):
            self.draft.compile_training()
            # one shape
            if pool is None and config.data.pack_length is not None:
                self._packed = CapturedFeatures(self.target)
        if settings.gradient_checkpointing:
            build.checkpoint_layers(self.draft)
        named = dict(self.draft.trainable())
        self._size = sum(parameter.numel() for parameter in named.values())
        objective = Objective(
            self.draft,
            self.target.logits,
            config.loss,
            autocast=autocast_dtype(strategy, accelerator.mixed_precision),
        )
        self.engine = build_engine(
            strategy, accelerator, objective, named, settings, saved.moments if saved else None
        )
        self.average = ema.begin(self.engine, settings.ema_decay, saved)

        self.windows = Windows(
            rows,
            Split(
                batch_size=settings.batch_size,
                grad_accumulation=settings.grad_accumulation,
                process_index=accelerator.process_index,
                num_processes=processes,
            ),
            seed=settings.seed,
            num_anchors=settings.num_anchors,
            block_size=self.draft.block_size,
            loss=config.loss,
            pin=accelerator.device.type == "cuda",
            # one shape, for which the layers are compiled once
            length=config.data.pack_length if accelerator.device.type == "cuda" else None,
        )
        self._window, self._missing = None, None
        if (hybrid := hybrid_of(rows)) is not None:
            self._window = open_window(
                hybrid,
                config.data.window_bytes,
                self.target,
                index=accelerator.process_index,
                count=processes,
            )
            self._missing = MissingFeatures(hybrid.header.dtype, self._window)
        self.monitor = Monitor(self.draft.block_size, accelerator)
        self._data = facts(rows)
        self.unusable = Unusable(len(documents_of(rows)), self.target.dtype)
        self._usable: list[tuple[tuple[str, ...], Tensor]] = []
        self.step = 0
        self.best: Best | None = None
        self.last: Path | None = None
        self._tracker_run: str | None = None
        self._figures: dict[str, float] = {}
        if saved is not None:
            self.step, self.best, self.last = saved.state.step, saved.state.best, saved.path
            self._tracker_run = saved.state.tracker_run
            self.monitor.restore(saved.state.window, saved.state.window_steps)
            done = self.step >= self.plan.total_steps
            log.info("%s %s", "finished before:" if done else "going on from", saved.path)
        self._describe()

    def train(self) -> str:
        """Run the steps that are left; `finished`, `interrupted` or `already finished`."""
        if self.step >= self.plan.total_steps:
            return "already finished"
        main = self.accelerator.is_main_process
        with ExitStack() as stack:
            if main:
                config_io.save(self.config, self.output_dir / "config.yaml")
                provenance.write_json(self.output_dir / "provenance.json", provenance.collect())
            journal = stack.enter_context(
                Journal(
                    self.config,
                    self.output_dir,
                    last_step=self.step,
                    tracker_run=self._tracker_run,
                    active=main,
                )
            )
            self._tracker_run = journal.tracker_run
            bar = stack.enter_context(Bar("train", self.plan.total_steps, shown=main))
            bar.advance(self.step)
            stop = stack.enter_context(StopRequest())
            if self._window is not None:
                stack.enter_context(self._window)
            try:
                return self._loop(journal, bar, stop)
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"the GPU is out of memory at step {self.step}: lower train.batch_size (and "
                    "raise train.grad_accumulation), train.num_anchors or loss.chunk_blocks"
                ) from error

    def report(self, status: str, seconds: float) -> TrainReport:
        """What the run did."""
        best = self.best
        return TrainReport(
            status=status,
            step=self.step,
            total_steps=self.plan.total_steps,
            output_dir=str(self.output_dir),
            last=str(self.last) if self.last else None,
            best=str(self.output_dir / f"checkpoint-{best.step}") if best else None,
            best_accept_length=best.accept_length if best else None,
            best_weights=best.weights if best else None,
            loss=self._figures.get("train/loss"),
            tau=self._figures.get("train/tau"),
            seconds=seconds,
        )

    def _loop(self, journal: Journal, bar: Bar, stop: StopRequest) -> str:
        settings, total = self.config.train, self.plan.total_steps
        self.monitor.restart_clock()
        windows = self.windows.between(self.step, total)
        if self._pool is not None:
            windows = self._pool.feed(windows, self.draft.layer_ids)
        for window in windows:
            stopping = self._optimize(window, stop)
            self.step = window.step + 1
            final = self.step == total
            if self.step % settings.log_every == 0 or final:
                self._figures = self._line()
                journal.write(self.step, self._figures)
                self._say()
            bar.advance(1, **self._shown())
            probes: dict[str, Probe] = {}
            if self.prompts and (final or _due(self.step, settings.validate_every)):
                probes = self._validate(journal)
            improved = bool(probes) and self.best is not None and self.best.step == self.step
            if final or stopping or improved or self.step % settings.save_every == 0:
                self._save(probes)
            elif not probes:
                continue
            # the rows' own pace, without the time for validating and saving
            self.monitor.restart_clock()
            if stopping and not final:
                return "interrupted"
        return "finished"

    def _optimize(self, window: Window, stop: StopRequest) -> bool:
        """One optimizer step; true if any process was asked to stop before it."""
        accelerator, step = self.accelerator, window.step
        device, processes = accelerator.device, accelerator.num_processes
        asked = torch.tensor([float(stop.pending)], dtype=torch.float64)
        # one collective for both; nothing waits for its result but the stop below
        shared = torch.cat([window.denominators, asked]).to(device, non_blocking=True)
        if processes > 1:
            shared = accelerator.reduce(shared, reduction="sum")
        stopping = Later(shared[2])
        loss_settings = self.config.loss
        ramp = ramp_at(
            step,
            total_steps=self.plan.total_steps,
            start=loss_settings.accept_length_start,
            ratio=loss_settings.accept_length_ramp,
        )
        for number, one in enumerate(window.passes, 1):
            last = number == len(window.passes)
            with self.engine.part(last=last):
                loss, vector, skipped = self._forward(one.to(device), shared[:2], ramp)
                self.engine.backward(loss)
            self.monitor.add(vector, loss, tokens=one.num_tokens, skipped=skipped)
        norm = self.engine.step(self.schedule.lr(step))
        if self.average is not None:
            self.average.update(step + 1)
        self.monitor.end_step(norm, shared[:2])
        return stop.pending if processes == 1 else stopping.read()

    def _forward(
        self, one: Pass, denominators: Tensor, ramp: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss share, `Sums.to_vector`, and how many rows were left out."""
        if self._pool is not None:
            features = self._pool.take(one)
        elif self._missing is not None:
            features = self._missing.complete(self.target, self.draft.layer_ids, one)
        else:
            features = batch_features(
                self.target,
                self.draft.layer_ids,
                one.input_ids,
                one.taps,
                one.last_hidden,
                one.spans,
                tap_scales=one.tap_scales,
                last_scales=one.last_scales,
                packed=self._packed,
            )
        usable = features.usable_documents(one.documents, len(one.spans))
        self._usable.append((one.row_ids, usable))  # read when a line is due
        mask = silence(features, usable, one.documents, one.mask, one.block_documents)
        loss, vector = self.engine(
            features.taps,
            gather_rows(features.last_hidden, one.target_rows),
            **one.blocks(mask=mask),
            denominators=denominators,
            ramp=ramp,
        )
        return loss, vector, (~usable).sum()

    def _line(self) -> dict[str, float]:
        figures = self.monitor.line()
        if figures["train/skipped_rows"]:
            self._name_skipped()
        self._usable.clear()
        if self._pool is not None:
            figures["perf/features_wait_s"] = self._pool.waited()
        if self._missing is not None:
            for name, count in self._missing.counts().items():
                figures[f"perf/rows_{name}"] = float(count)
        return {
            **figures,
            "train/lr": self.schedule.lr(self.step - 1),
            "train/epoch": self.plan.epoch(self.step),
        }

    def _name_skipped(self) -> None:
        """Say which rows of the last line were left out, the same in every process.

        Raises:
            RunError: they are too many by now.
        """
        found = [
            row_id
            for row_ids, usable in self._usable
            for row_id, fine in zip(row_ids, usable.tolist(), strict=True)
            if not fine
        ]
        self.unusable.add(gather_object(found))

    def _shown(self) -> dict[str, str]:
        if not self._figures:
            return {}
        return {
            "loss": f"{self._figures['train/loss']:.3f}",
            "tau": f"{self._figures['train/tau']:.2f}",
            "lr": f"{self._figures['train/lr']:.1e}",
        }

    def _say(self) -> None:
        """A line in the log where there is no terminal for the bar."""
        if not sys.stderr.isatty():
            left = (self.plan.total_steps - self.step) * self._figures["perf/step_s"]
            shown = " ".join(f"{name} {value}" for name, value in self._shown().items())
            total = self.plan.total_steps
            log.info("step %d of %d: %s, %.0f s left", self.step, total, shown, left)

    def _validate(self, journal: Journal) -> dict[str, Probe]:
        """Decode the validation prompts, note the figures, and remember the best step.

        The probes are those of the weights (raw) and, where there is one, of their average (ema).
        """
        raw = self._decode()
        figures, found = validation.figures(raw), {"raw": raw.accept_length}
        if self.average is not None:
            with self.average.shown():
                found["ema"] = self._decode().accept_length
            figures["val/ema_tau"] = found["ema"]
        journal.write(self.step, figures)
        for name, length in found.items():
            log.info("step %d: accept length %.3f in validation (%s)", self.step, length, name)
            if self.best is None or length > self.best.accept_length:
                self.best = Best(self.step, length, "ema" if name == "ema" else "raw")
        return {name: self._probe(length) for name, length in found.items()}

    def _decode(self) -> AcceptStats:
        return validation.validate(
            self._pool.counts if self._pool else partial(validation.counts, self.target),
            self.draft,
            self.engine.weights(),
            self.prompts,
            max_new_tokens=self.config.train.validation_max_new_tokens,
            accelerator=self.accelerator,
        )

    def _probe(self, accept_length: float) -> Probe:
        return Probe(
            prompt_ids=tuple(tuple(ids) for ids in self.prompts),
            max_new_tokens=self.config.train.validation_max_new_tokens,
            expected=accept_length,
            expected_from="the trainer's validation",
        )

    def _save(self, probes: dict[str, Probe]) -> None:
        window, window_steps = self.monitor.state()
        self.last = self.output_dir / f"checkpoint-{self.step}"
        main = self.accelerator.is_main_process
        # first, and to the CPU: so the GPU never holds both as a whole
        average = self.average.weights(keep=main) if self.average is not None else None
        weights, moments = self.engine.weights(), self.engine.moments()
        if not main:
            return
        state = TrainState(
            step=self.step,
            total_steps=self.plan.total_steps,
            world_size=self.accelerator.num_processes,
            structure=self.structure,
            window=window,
            window_steps=window_steps,
            best=self.best,
            ema_since=self.average.since if self.average is not None else None,
            tracker_run=self._tracker_run,
        )
        shape = to_json(self.draft.config, architecture=ARCHITECTURES[0])
        checkpoint.save(
            self.output_dir,
            state,
            weights=weights,
            draft_config={**shape, "dtype": "float32", "torch_dtype": "float32"},
            moments=moments,
            config=self._recorded,
            average=average,
            probe=probes.get("raw"),
            average_probe=probes.get("ema"),
            data=self._data,
        )
        if self.best is not None:
            checkpoint.link(self.output_dir, "best", self.best.step)
        checkpoint.rotate(self.output_dir, keep=self.config.train.keep, best=self.best)

    def _describe(self) -> None:
        plan, processes = self.plan, self.accelerator.num_processes
        log.info(
            "%d rows, %d of them a step (%d process(es)), %d steps, %.2f epochs; "
            "%.1fM trainable parameters, %s, on %s",
            plan.num_rows,
            plan.global_batch,
            processes,
            plan.total_steps,
            plan.epoch(plan.total_steps),
            self._size / 1e6,
            self.accelerator.mixed_precision.replace("no", "fp32"),
            self.accelerator.device,
        )
        if plan.left_out:
            log.info("each pass leaves out %d rows, other ones every time", plan.left_out)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _shape_of(saved: Saved) -> DSparkConfig:
    return from_json(read_json(saved.path), str(saved.path / "config.json"))
