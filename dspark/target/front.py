"""A target without its layers: what a training needs of it where others compute the features.

Config, vocabulary, fingerprint, embedding and output head, as another process read them.

Symbols: D hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import functional

from dspark.target.base import Features, Target
from dspark.target.fingerprint import comparable, of_version_1
from dspark.target.hf import HFTarget, logit_transform

__all__ = ["Facts", "Front", "tables"]


@dataclass(frozen=True)
class Facts:
    """Everything but tensors; can be pickled."""

    name: str
    revision: str | None
    config: Any
    eos_ids: frozenset[int]
    architecture: str
    fingerprint: str
    old_fingerprint: str | None = None
    """As earlier versions wrote it, where there are weights to tell."""

    @classmethod
    def of(cls, target: Target, fingerprint: str | None = None) -> "Facts":
        """Of a whole target; of an outline, which has no values, with its ``fingerprint``."""
        whole = fingerprint is None
        return cls(
            target.name,
            target.revision,
            target.config,
            target.eos_ids,
            target.architecture,
            target.fingerprint() if fingerprint is None else fingerprint,
            of_version_1(target.model) if whole else None,
        )


def tables(target: Target) -> dict[str, Tensor]:
    """`head` [V, D], and `embed` [V, D] and `bias` [V] where they are tensors of their own."""
    found = {"head": target.head_weight.detach()}
    if target.embed_weight.data_ptr() != target.head_weight.data_ptr():
        found["embed"] = target.embed_weight.detach()
    if isinstance(target, HFTarget) and target.head_bias is not None:
        found["bias"] = target.head_bias.detach()
    return found


class Front(Target):
    """Answers like the target of ``facts`` and ``tables`` wherever no layer is needed."""

    def __init__(self, facts: Facts, tables: Mapping[str, Tensor]) -> None:
        self.model = None
        self.name, self.revision = facts.name, facts.revision
        self.config, self.eos_ids = facts.config, facts.eos_ids
        self._facts = facts
        self._head = tables["head"]
        self._embed = tables.get("embed", self._head)
        self._bias = tables.get("bias")
        self._finish = logit_transform(facts.config)

    @property
    def embed_weight(self) -> Tensor:  # [V, D]
        return self._embed

    @property
    def head_weight(self) -> Tensor:  # [V, D]
        return self._head

    @property
    def architecture(self) -> str:
        return self._facts.architecture

    def fingerprint(self) -> str:
        return self._facts.fingerprint

    def fingerprint_like(self, stored: str) -> str:
        """``stored`` itself where no weights are there to tell one of its version."""
        mine = self.fingerprint()
        return mine if comparable(mine, stored) else self._facts.old_fingerprint or stored

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] behind the final norm -> [..., V]."""
        hidden = hidden.to(self._head.device, self._head.dtype)
        return self._finish(functional.linear(hidden, self._head, self._bias))

    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        attention_mask: Tensor | None = None,
    ) -> Features:
        self._without_layers()

    def new_cache(self, layer_ids: Sequence[int] = ()) -> Any:
        self._without_layers()

    def _extend(self, cache: Any, input_ids: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
        self._without_layers()

    def _without_layers(self) -> NoReturn:
        raise RuntimeError(f"the layers of {self.name} are in another process")
