"""Who holds the draft's weights, gradients and moments while it trains: an engine.

The trainer gives every engine the same loss: this pass's share of the loss of the whole step, whose
denominators are sums over all passes and all processes. An engine must therefore add up what the
passes of a window give and add up the processes, and divide by nothing. All of them average over
processes; `backward` takes that division back.

- `Replicated`: everything in every process (no distribution, or data parallelism).
- `zero.Zero`: DeepSpeed's ZeRO stages 2 and 3.
- `fsdp.Sharded`: torch's fully_shard (FSDP2).

Checkpoints are the same for all: whole fp32 weights and whole moments by parameter name, put
together from every process's shard. So a run goes on to the bit under the engine and the number of
processes that it stopped with, and can go on under any other.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dspark import kernels
from dspark.config import TrainSettings
from dspark.training import checkpoint, launch
from dspark.training.optim import build_optimizer, set_learning_rate

__all__ = ["Engine", "Moments", "Replicated", "autocast_dtype", "build_engine", "can_compile"]

Moments = dict[str, Any]
"""Of every parameter, by name: step, exp_avg, exp_avg_sq; whole tensors."""


class Engine(Protocol):
    """A model and its optimizer, wherever their parts are. All methods are collectives."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of the objective."""
        ...

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one pass; ``last`` ends the window."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this process's share of the loss to the window's."""
        ...

    def step(self, learning_rate: float) -> Tensor:
        """Clip once, step, clear the gradients; the norm before clipping."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Whole fp32 weights of the draft, in every process."""
        ...

    def moments(self) -> Moments:
        """Whole moments, in the main process (others may get an empty dict)."""
        ...

    def masters(self) -> list[Tensor]:
        """This process's part of the fp32 weights, as they are held: not copies. No collective."""
        ...

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Write whole ``weights`` into the masters, and only there. For `ema` between steps."""
        ...


class Replicated:
    """Everything in every process; gradients are averaged as they come, once a window."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: nn.Module,
        named: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        moments: Moments | None,
    ) -> None:
        self._accelerator = accelerator
        self._settings = settings
        self._named = dict(named)
        self._names = {id(parameter): name for name, parameter in named.items()}
        optimizer = build_optimizer(named.items(), settings)
        if moments is not None:
            checkpoint.restore_optimizer(optimizer, moments, self._names)
        self._model, self._optimizer = launch.prepare(accelerator, objective, optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = (
            nullcontext() if last else self._accelerator.no_sync(self._model)
        )
        return context

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss * self._accelerator.num_processes)

    def step(self, learning_rate: float) -> Tensor:
        set_learning_rate(self._optimizer, learning_rate)
        norm: Tensor = self._accelerator.clip_grad_norm_(
            self._named.values(), self._settings.max_grad_norm
        )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._named.items()}

    def moments(self) -> Moments:
        return checkpoint.optimizer_by_name(self._optimizer.optimizer, self._names)

    def masters(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._named.values()]

    def put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.detach().copy_(weights[name])


def build_engine(
    strategy: launch.Strategy,
    accelerator: Accelerator,
    objective: nn.Module,
    named: Mapping[str, nn.Parameter],
    settings: TrainSettings,
    moments: Moments | None,
) -> Engine:
    """The engine that the launch asked for, around fp32 weights and the moments to go on from."""
    kind: Any = Replicated
    if strategy == "zero":
        from dspark.training.zero import Zero as kind
    elif strategy == "fsdp":
        from dspark.training.fsdp import Sharded as kind
    engine: Engine = kind(accelerator, objective, named, settings, moments)
    return engine


def can_compile(strategy: launch.Strategy, accelerator: Accelerator) -> bool:
    """Whether the draft's layers can become one function: on a GPU, with whole weights at hand.

    It takes Triton, which torch for CUDA brings along.
    """
    if strategy == "zero":
        whole = bool(accelerator.state.deepspeed_plugin.zero_stage < 3)
    else:
        whole = strategy == "replicated"
    return whole and accelerator.device.type == "cuda" and kernels.installed()


def autocast_dtype(strategy: launch.Strategy, precision: str) -> torch.dtype | None:
    """What the objective itself must cast to: accelerate does it for replicated weights only."""
    return torch.bfloat16 if strategy != "replicated" and precision == "bf16" else None
