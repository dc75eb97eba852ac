"""The engine of torch's fully_shard (FSDP2): each process keeps a part of every tensor.

Masters, gradients and moments are sharded. The draft is one unit: its weights are gathered for the
first forward pass of a window and kept until the last backward pass. The draft is small beside its
target, and it reads its weights outside the modules that hold them (keys of the context, heads
under recomputation), which smaller units would have to know of.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dspark.config import TrainSettings
from dspark.training.engine import Moments
from dspark.training.optim import build_optimizer, set_learning_rate

__all__ = ["Sharded"]


class Sharded:
    """See the module's text; methods as in `engine.Engine`."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: nn.Module,
        named: Mapping[str, nn.Parameter],
        settings: TrainSettings,
        moments: Moments | None,
    ) -> None:
        self._settings = settings
        self._main = accelerator.is_main_process
        self._processes = accelerator.num_processes
        bf16 = accelerator.mixed_precision == "bf16"
        model = fully_shard(
            objective,
            mesh=init_device_mesh(accelerator.device.type, (accelerator.num_processes,)),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if bf16 else None,
                reduce_dtype=torch.float32,
                # the denominators are float64, and the objective casts what it wants cast
                cast_forward_inputs=False,
            ),
        )
        assert isinstance(model, FSDPModule)
        self._model = model
        # other objects than before, under the same names
        held = {name.removeprefix("draft."): value for name, value in model.named_parameters()}  # type: ignore[attr-defined]
        self._named: dict[str, DTensor] = {name: held[name] for name in named}
        self._optimizer = build_optimizer(self._named.items(), settings)  # type: ignore[arg-type]
        if moments is not None:
            for name, parameter in self._named.items():
                self._optimizer.state[parameter] = {
                    key: _like(parameter, value) for key, value in moments[name].items()
                }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)  # type: ignore[operator]

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        self._model.set_requires_gradient_sync(last)
        self._model.set_is_last_backward(last)
        self._model.set_reshard_after_backward(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss * self._processes).backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> Tensor:
        set_learning_rate(self._optimizer, learning_rate)
        norm = torch.nn.utils.clip_grad_norm_(self._named.values(), self._settings.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return _whole(norm)

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(parameter.detach()) for name, parameter in self._named.items()}

    def moments(self) -> Moments:
        found: Moments = {}
        for name, parameter in self._named.items():
            # every process takes part in putting a tensor together, one keeps it
            whole = {key: _whole(value) for key, value in self._optimizer.state[parameter].items()}
            if self._main:
                found[name] = {key: value.cpu() for key, value in whole.items()}
        return found

    def masters(self) -> list[Tensor]:
        parts = (parameter.detach() for parameter in self._named.values())
        return [part.to_local() for part in parts if isinstance(part, DTensor)]

    def put(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._named.items():
            parameter.detach().copy_(_like(parameter, weights[name]))


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(parameter: DTensor, value: Tensor) -> Tensor:
    """This process's part of ``value``, which it holds whole; a scalar as it is."""
    moved = value.to(parameter.device)
    if value.dim() == 0:
        return moved
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)
