"""Sizes of a planned run that follow from one another: batch, steps, memory, disk, arithmetic."""

from pathlib import Path
from typing import Any

import torch

from dspark import provenance
from dspark.config import Config
from dspark.corpus import store
from dspark.draft.config import DSparkConfig
from dspark.target import Target
from dspark.training.flops import PassWork, draft_flops
from dspark.training.memory import Holding, TargetSize, TrainingShape, estimate, largest_batch
from dspark.training.optim import Schedule, plan_steps
from dspark.training.plan_data import DataSize
from dspark.training.plan_model import inner_size, target_counts
from dspark.training.targets import reads_tables

__all__ = ["PEAK_TFLOPS", "Sizes"]

PEAK_TFLOPS = 989.0
"""bf16, dense, of an H100 or H200."""

_BUDGET = 80 * 2**30
_STATE_BYTES = 12  # of a parameter in a checkpoint: fp32 weight and two moments


class Sizes:
    """What follows from the sizes of draft, target and data, for any number of processes."""

    def __init__(
        self,
        config: Config,
        draft: DSparkConfig,
        target: Target,
        data: DataSize,
        trainable: int,
        bf16: bool,
        mfu: float,
    ) -> None:
        self._config, self._draft, self._data = config, draft, data
        self._trainable, self._bf16, self._mfu = trainable, bf16, mfu
        generate = config.train.features == "offline" and config.data.on_missing == "generate"
        self.computed = data.missing if generate else 1.0
        """Share of the rows that the target computes in a pass, where it does."""
        self._online = config.train.features == "online" or generate
        self._split = config.train.features == "split"
        self.target_parameters, self.active = target_counts(target)
        weights = {id(one): one for one in target.model.parameters()}.values()
        self.target_bytes = sum(one.numel() * one.element_size() for one in weights)
        # of a target whose layers are elsewhere, a trainer holds the tables only (`targets`)
        shards = reads_tables(config)
        tables = {id(one): one for one in (target.embed_weight, target.head_weight)}.values()
        self._target = TargetSize(
            weight_bytes=sum(one.numel() * one.element_size() for one in tables)
            if self._split or shards
            else self.target_bytes,
            itemsize=target.dtype.itemsize,
            hidden_size=target.hidden_size,
            inner_size=inner_size(target.config),
            num_taps=len(draft.target_layer_ids or ()),
            runs=self._online,
        )

    def batch(self, processes: int) -> dict[str, Any]:
        settings, data = self._config.train, self._data
        rows = settings.batch_size * settings.grad_accumulation * processes
        anchors = rows * data.row_anchors
        return {
            "rows_per_pass": settings.batch_size,
            "grad_accumulation": settings.grad_accumulation,
            "processes": processes,
            "global_batch": rows,
            "packed": self._config.data.pack_length is not None,
            "tokens_per_step": round(rows * data.row_tokens),
            "anchors_per_step": round(anchors),
            "slots_per_step": round(anchors * int(self._draft.block_size or 0)),
        }

    def steps(self, processes: int) -> dict[str, Any]:
        """Steps, passes over the data, warm-up and tokens; None where the data decides."""
        settings, data = self._config.train, self._data
        total, epochs = settings.steps, None
        if data.rows is not None:
            plan = plan_steps(settings, num_rows=data.rows, num_processes=processes)
            total, epochs = plan.total_steps, plan.epoch(plan.total_steps)
        elif total is None:
            epochs = float(settings.epochs)
        warmup = None if total is None else self._schedule(total).warmup_steps
        tokens = None if total is None else total * self.batch(processes)["tokens_per_step"]
        return {"total": total, "epochs": epochs, "warmup": warmup, "tokens": tokens}

    def schedule(self, processes: int) -> Schedule | None:
        """Learning rates; None where the data decides the number of steps and is not there."""
        total = self.steps(processes)["total"]
        return None if total is None else self._schedule(total)

    def _schedule(self, total: int) -> Schedule:
        settings = self._config.train
        return Schedule(
            peak=settings.lr,
            total_steps=total,
            warmup_ratio=settings.warmup_ratio,
            kind=settings.schedule,
        )

    def memory(self, holding: Holding, processes: int) -> dict[str, Any]:
        settings = self._config.train
        shape = TrainingShape(
            holding=holding,
            processes=processes,
            bf16=self._bf16,
            batch_size=settings.batch_size,
            row_tokens=self._data.longest_row,
            row_anchors=self._data.most_anchors,
            grad_accumulation=settings.grad_accumulation,
            gradient_checkpointing=settings.gradient_checkpointing,
            compiled=settings.compile and holding in ("replicated", "zero2"),
            averaged=settings.ema_decay is not None,
        )
        loss = self._config.loss
        given = (self._draft, self._trainable, self._target)
        found = estimate(*given, shape, loss).to_dict()
        return {
            **found,
            "budget": self.budget,
            "budget_assumed": not torch.cuda.is_available(),
            "largest_batch_size": largest_batch(*given, shape, loss, room=self.budget),
        }

    @property
    def budget(self) -> int:
        """Bytes of a GPU; of this machine's where it has one."""
        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(0).total_memory)
        return _BUDGET

    def workers(self, processes: int) -> dict[str, Any] | None:
        """Of split features: what a target worker's devices hold, and what they compute a step."""
        if not self._split:
            return None
        groups = self._config.train.target_devices
        return {
            "devices": list(groups),
            # runs of layers of about equal size
            "weights_a_device": max(self.target_bytes / len(g.split("+")) for g in groups),
            "tflop_per_step": self._target_flops(processes) / 1e12,
        }

    def _target_flops(self, processes: int) -> float:
        tokens: float = self.batch(processes)["global_batch"] * self._data.row_tokens
        return 2.0 * self.active * tokens * self.computed

    def disk(self) -> dict[str, Any]:
        settings = self._config.train
        each = (_STATE_BYTES + (4 if settings.ema_decay is not None else 0)) * self._trainable
        # `best` is one more, and so is the one being written before the oldest goes
        most = settings.keep + 1 + bool(settings.validation_prompts)
        shards = None
        if not self._online and not self._split:
            shards = self.store_bytes
        return {
            "checkpoint": each,
            "checkpoints": most,
            "total": most * each,
            "shards": shards,
            "free": provenance.free_bytes(Path(settings.output_dir)),
        }

    @property
    def token_bytes(self) -> int:
        """Of a token's features on disk, stored as `capture.dtype` says."""
        given = self._target.hidden_size, self._target.num_taps, self._config.capture.dtype
        return store.row_bytes(1, *given)

    @property
    def store_bytes(self) -> int | None:
        """Of all rows' features; None where the number of tokens is not known."""
        tokens = self._data.tokens
        return None if tokens is None else tokens * self.token_bytes

    @property
    def capture_hours(self) -> float | None:
        """One pass of the target over all rows, on one device."""
        if self._data.tokens is None:
            return None
        flops = 2.0 * self.active * self._data.tokens
        return flops / (PEAK_TFLOPS * 1e12 * self._mfu) / 3600

    def cost(self, processes: int) -> dict[str, Any]:
        """Arithmetic of a step over all processes, and the time that follows from the MFU."""
        settings, data = self._config.train, self._data
        rows = self.batch(processes)["global_batch"]
        block = int(self._draft.block_size or 0)
        slots = rows * data.row_anchors * block
        flops = draft_flops(
            self._draft,
            PassWork(
                context=rows * data.row_tokens,
                slots=slots,
                seen=slots * (data.context + block),
                supervised=slots,
            ),
        )
        if settings.gradient_checkpointing:
            flops["recomputation"] = (flops["attention"] + flops["layers"]) / 3
        if self._online:
            flops["target"] = self._target_flops(processes)
        whole = sum(flops.values())
        rate = PEAK_TFLOPS * 1e12 * self._mfu
        total = self.steps(processes)["total"]
        seconds, gpus, waiting = whole / rate / processes, processes, None
        if self._split:
            groups = settings.target_devices
            # of a target on several devices one computes at a time
            waiting = self._target_flops(processes) / rate / len(groups)
            seconds = max(seconds, waiting)
            gpus += len({name for group in groups for name in group.split("+")})
        hours = None if total is None else total * seconds / 3600
        return {
            "tflop_per_step": {name: value / 1e12 for name, value in flops.items()},
            "tflop_per_step_total": whole / 1e12,
            "assumed_mfu": self._mfu,
            "assumed_peak_tflops": PEAK_TFLOPS,
            "seconds_per_step": seconds,
            "target_seconds_per_step": waiting,
            "gpus": gpus,
            "gpu_hours": None if hours is None else hours * gpus,
            "hours": hours,
        }
