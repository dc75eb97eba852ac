"""The engine of DeepSpeed's ZeRO: masters, gradients and moments in shards; weights in stage 3.

Only the draft and its objective are DeepSpeed's; the frozen target stays a plain module of each
process. Under bf16 DeepSpeed trains bf16 weights and keeps fp32 masters in its optimizer;
checkpoints hold the masters.

What DeepSpeed would do a second time:

- Accumulation. It divides a loss by its own number of accumulation steps, but the trainer's
  denominators already cover the window. So its number is 1, `backward` asks for no scaling, and
  `part` says by hand where a window ends.
- Clipping. Its step clips by `gradient_clipping`, which is set to `train.max_grad_norm`; the
  trainer does not clip here.
- Loss scaling is for fp16, which is refused; under bf16 and fp32 it is 1.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dspark.config import TrainSettings
from dspark.errors import ConfigError
from dspark.training import launch
from dspark.training.engine import Moments
from dspark.training.optim import build_optimizer, set_learning_rate

__all__ = ["Zero", "check_settings", "fill_settings", "skip_cpu_kernels"]

_OFFLOADS = ("offload_optimizer", "offload_param")


def check_settings(
    given: Mapping[str, Any], settings: TrainSettings, *, precision: str, num_processes: int
) -> None:
    """Refuse DeepSpeed settings that this trainer would not train as they say.

    Args:
        given: the DeepSpeed settings, from JSON or as accelerate's YAML made them.
        settings: the trainer's.
        precision: `no` or `bf16`, what the trainer goes by.
        num_processes: how many the launcher started.

    Raises:
        ConfigError: names the setting and what to write instead.
    """
    zero = given.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (2, 3):
        raise ConfigError(
            f"DeepSpeed's zero_optimization.stage is {stage}: this trainer knows 2 and 3 "
            "(for whole copies in every process use configs/accelerate/ddp.yaml)"
        )
    for key in _OFFLOADS:
        device = (zero.get(key) or {}).get("device", "none")
        if device not in (None, "none"):
            raise ConfigError(
                f"DeepSpeed's {key} is {device}, which this trainer does not do: set it to none"
            )
    for key in ("optimizer", "scheduler"):
        if key in given:
            raise ConfigError(
                f"the DeepSpeed settings hold a section {key!r}: leave it out, it comes from "
                "train.lr, train.schedule and their neighbours"
            )
    if given.get("fp16", {}).get("enabled", False) is True:
        raise ConfigError("DeepSpeed's fp16 is enabled: use bf16 (train.mixed_precision=bf16)")
    bf16 = given.get("bf16", {}).get("enabled", "auto")
    if bf16 not in ("auto", precision == "bf16"):
        raise ConfigError(
            f"DeepSpeed's bf16.enabled is {str(bf16).lower()} but the trainer's precision is "
            f"{precision}: write auto there, and set train.mixed_precision"
        )
    rows = settings.batch_size
    accumulation = settings.grad_accumulation
    for key, fitting, ours in (
        ("gradient_clipping", {settings.max_grad_norm}, "train.max_grad_norm"),
        ("gradient_accumulation_steps", {1, accumulation}, "train.grad_accumulation"),
        ("train_micro_batch_size_per_gpu", {rows}, "train.batch_size"),
        (
            "train_batch_size",
            {rows * accumulation * num_processes},
            "batch_size x grad_accumulation x processes",
        ),
    ):
        value = given.get(key, "auto")
        if value != "auto" and value not in fitting:
            raise ConfigError(
                f"DeepSpeed's {key} is {value}, which is not {ours} ({max(fitting)}): "
                "write auto there"
            )


def fill_settings(given: dict[str, Any], settings: TrainSettings, *, num_processes: int) -> None:
    """Write what the trainer decides into checked DeepSpeed settings."""
    given["gradient_accumulation_steps"] = 1  # see the module's text
    given["gradient_clipping"] = settings.max_grad_norm
    given["train_micro_batch_size_per_gpu"] = settings.batch_size
    given["train_batch_size"] = settings.batch_size * num_processes


def skip_cpu_kernels() -> None:
    """Leave the collectives of CPU processes to gloo.

    DeepSpeed would compile a kernel for them at its first start, for a minute or more.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Zero:
    """See the module's text; methods as in `engine.Engine`."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: nn.Module,
        named: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        moments: Moments | None,
    ) -> None:
        from deepspeed.utils import set_z3_leaf_modules

        self._accelerator = accelerator
        self._named = dict(named)
        optimizer = build_optimizer(named.items(), settings)
        bf16 = accelerator.mixed_precision == "bf16"
        # DeepSpeed rounds the weights to bf16 before it makes masters of them
        masters = (
            {name: value.detach().cpu().clone() for name, value in named.items()} if bf16 else {}
        )
        # and some releases round buffers as well, from which positions are computed
        buffers = {name: value.clone() for name, value in objective.named_buffers()}
        # Stage 3 gathers the draft as a whole: it reads weights outside the modules that hold them
        # (keys of the context, heads under recomputation), where no hook would gather them.
        set_z3_leaf_modules(objective, [type(objective)])
        self._engine, _ = launch.prepare(accelerator, objective, optimizer)
        for name, value in objective.named_buffers():
            value.data = buffers[name].to(value.device)
        self._stage3 = self._engine.zero_optimization_stage() == 3
        self._restore(masters, moments)

    def __call__(self, taps: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._stage3:
            # Weights are let go when the gradient of the inputs is there. Without one that would
            # be at once; that of the first input comes last.
            taps = taps.detach().requires_grad_()
        return self._engine(taps, *args, **kwargs)

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # not accelerate's backward, which steps as well
        self._engine.backward(loss * self._accelerator.num_processes, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> Tensor:
        set_learning_rate(self._engine.optimizer, learning_rate)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, device=self._accelerator.device)

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(value) for name, value in self._named.items()}

    def moments(self) -> Moments:
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link()
        held = self._engine.optimizer.optimizer.state.values()
        step = next(state["step"] for state in held if state).cpu()
        found: Moments = {}
        for name, parameter in self._named.items():
            # every process takes part in putting a tensor together, one keeps it
            first, second = (
                safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")
            )
            if self._accelerator.is_main_process:
                found[name] = {
                    "step": step.clone(),
                    "exp_avg": first.cpu(),
                    "exp_avg_sq": second.cpu(),
                }
        return found

    def masters(self) -> list[Tensor]:
        zero = self._engine.optimizer
        flats: list[Tensor] = (
            zero.fp32_partitioned_groups_flat
            if self._stage3
            else zero.single_partition_of_fp32_groups
        )
        return list(flats)

    def put(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in weights.items():
            self._write(self._named[name], value, None)

    def _restore(self, masters: Mapping[str, Tensor], moments: Moments | None) -> None:
        self.put(masters)
        if moments is None:
            return
        zero = self._engine.optimizer
        step = next(iter(moments.values()))["step"]
        # AdamW makes its moments in its first step; these stand in their place
        for flat in self.masters():
            zero.optimizer.state[flat] = {
                "step": step.clone().to(flat.device),
                "exp_avg": torch.zeros_like(flat),
                "exp_avg_sq": torch.zeros_like(flat),
            }
        self._link()
        for name, parameter in self._named.items():
            for key in ("exp_avg", "exp_avg_sq"):
                self._write(parameter, moments[name][key], key)

    def _link(self) -> None:
        """Let each weight find its part of the moments.

        DeepSpeed does so in stage 2 after the step of the first group of weights, when the others
        have no moments yet.
        """
        if not self._stage3:
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _write(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """This process's part of the whole ``value`` into the master, or into moment ``key``."""
        from deepspeed import utils

        flat = value.flatten()
        if self._stage3:
            # DeepSpeed's writer of whole tensors wants their size to divide by the processes
            size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
            rank = self._accelerator.process_index
            padded = nn.functional.pad(
                flat, (0, size * self._accelerator.num_processes - len(flat))
            )
            part = padded[size * rank : size * (rank + 1)]
            if key is None:
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, flat)
        else:
            utils.safe_set_full_optimizer_state(parameter, flat, key)
