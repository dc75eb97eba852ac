"""Which of several ranks a process is, and where it runs; refusals of machines that cannot."""

from dataclasses import dataclass

import torch

from dspark.errors import ConfigError
from dspark.serving.settings import RANKS

__all__ = ["Seat", "check_count", "check_gpus"]


@dataclass(frozen=True)
class Seat:
    """One rank's place, given to it when it is started."""

    rank: int
    ranks: int
    board: str
    """Name of the shared memory."""
    meeting: str
    """A file that no other service uses, by which processes on a CPU find each other."""
    timeout_s: float = 3600.0
    """How long the others may take until they are loaded."""
    shared_gpu: bool = False
    """All ranks on the first GPU, which is for tests."""

    def device(self, name: str, *, peers: bool = True) -> torch.device:
        """Of this rank, where ``name`` is what the user wants; ``peers``: as in `check_gpus`.

        Raises:
            ConfigError: this machine's GPUs, or that device, are none for so many ranks.
        """
        if name == "cpu":
            return torch.device("cpu")
        if name not in ("auto", "cuda"):
            raise ConfigError(
                f"target.device is '{name}', and serve.tp {self.ranks} puts a rank on each of the "
                f"first {self.ranks} GPUs: give cuda, or cpu"
            )
        if self.shared_gpu:
            return torch.device("cuda:0")
        check_gpus(self.ranks, peers=peers)
        return torch.device("cuda", self.rank)


def check_gpus(ranks: int, *, peers: bool = True) -> None:
    """The first ``ranks`` GPUs are of one kind, and with ``peers`` read each other's memory.

    Raises:
        ConfigError: there are not so many, they differ, or two cannot.
    """
    check_count(ranks)
    kinds = [torch.cuda.get_device_properties(index) for index in range(ranks)]
    for index, kind in enumerate(kinds):
        same = (kind.name, kind.total_memory) == (kinds[0].name, kinds[0].total_memory)
        if not same:
            raise ConfigError(
                f"serve.tp {ranks} needs GPUs of one kind: cuda:0 is {_kind(kinds[0])} and "
                f"cuda:{index} is {_kind(kind)}; choose others with CUDA_VISIBLE_DEVICES"
            )
    for one in range(ranks):
        for other in range(ranks):
            if peers and one != other and not torch.cuda.can_device_access_peer(one, other):
                raise ConfigError(
                    f"serve.tp {ranks} needs GPUs that read each other's memory, and cuda:{one} "
                    f"cannot read that of cuda:{other} (nvidia-smi topo -p2p r shows which can): "
                    "give --exchange nccl, which is slower"
                )


def check_count(ranks: int) -> None:
    """What can be told without taking a GPU's memory.

    Raises:
        ConfigError: there are fewer GPUs.
    """
    count = torch.cuda.device_count()
    if count < ranks:
        fewer = max((n for n in RANKS if n <= count), default=0)
        instead = f"give --tp {fewer}" if fewer else "--device cpu runs ranks on the CPU, for tests"
        raise ConfigError(
            f"serve.tp is {ranks}, and this machine has {count} GPU{'s' * (count != 1)}: {instead}"
        )


def _kind(properties: "torch.cuda._CudaDeviceProperties") -> str:
    return f"{properties.name} with {properties.total_memory / 1e9:.0f} GB"
