"""`dspark bench objective`: the draft's objective, forward and backward, beside its products alone.

Random hidden states of draft and target over one random head, as a training step would hand them
on: parameters in float32, products in bfloat16 by autocast. What no form can do without is two
products of the head forward and one backward, and three of the Markov rank; `products` times
them chunk by chunk, as the kernels run them, and over all slots at once.

Symbols: N blocks (anchors), K slots, D hidden, V vocabulary, r rank.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark.bench.report import environment, print_table
from dspark.config import LossSettings
from dspark.draft import DSparkConfig, DSparkDraftModel
from dspark.errors import ConfigError
from dspark.losses import denominators, objective, objective_chunked
from dspark.losses.one_pass import add_product, objective_in_one_pass, wide_product

__all__ = ["ObjectiveBench", "ObjectiveOptions", "measure", "print_report"]

_RAMP = 0.5
Result = tuple[Tensor, Tensor]
"""Sums of alpha [K], and the gradient by the draft's hidden states."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """What is measured.

    Raises:
        ConfigError: a value is out of range.
    """

    anchors: int = 512
    block_size: int = 8
    vocabulary: int = 157184
    hidden: int = 2560
    rank: int = 256
    chunk_blocks: int = 64
    distance: str = "l1"
    accept_temperature: float = 1.0
    repeats: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("anchors", "block_size", "hidden", "rank", "chunk_blocks", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.vocabulary < 2:
            raise ConfigError(f"vocabulary must be >= 2, got {self.vocabulary}")
        if self.distance not in ("l1", "lk_hybrid", "nla"):
            raise ConfigError(f"distance must be l1, lk_hybrid or nla, got '{self.distance}'")
        if not 0.01 <= self.accept_temperature <= 1:
            raise ConfigError(
                f"accept temperature must lie in 0.01..1, got {self.accept_temperature}"
            )


class ObjectiveBench:
    """Inputs of one forward pass, and the forms that take them."""

    def __init__(self, options: ObjectiveOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.settings = LossSettings(
            chunk_blocks=options.chunk_blocks,
            distance=options.distance,  # type: ignore[arg-type]
            accept_length_temperature=options.accept_temperature,
        )
        generator = torch.Generator(device).manual_seed(options.seed)

        def normal(*shape: int, dtype: torch.dtype, scale: float) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(
                0, scale, generator=generator
            )

        shape = (options.anchors, options.block_size)
        half = torch.bfloat16
        # logits with a deviation of 3: some thousand tokens share most of the mass
        head = normal(options.vocabulary, options.hidden, dtype=half, scale=3 / options.hidden**0.5)
        self.target_hidden = normal(*shape, options.hidden, dtype=half, scale=1.0)
        noise = normal(*shape, options.hidden, dtype=half, scale=0.3)
        self.hidden = (self.target_hidden + noise).float().requires_grad_()
        ids = torch.randint(options.vocabulary, (2, *shape), generator=generator, device=device)
        self.labels, self.prev_ids = ids
        self.mask = torch.ones(shape, dtype=torch.bool, device=device)
        self.draft = _draft(options, device, generator)
        self.draft.attach(head, head)
        self.head = head
        self.denominators = denominators(self.mask, self.settings)

    def forms(self) -> dict[str, Callable[[], Result | None]]:
        """By name, each forward and backward."""
        whole = self.options.anchors
        return {
            "products": lambda: self._products(self.options.chunk_blocks),
            "products, all at once": lambda: self._products(whole),
            "eager": self._eager,
            "chunked": self._chunked,
            "full logits, four softmaxes": self._full,
            "kernels": self._kernels,
        }

    def _products(self, chunk: int) -> None:
        """The matrix products alone, of numbers that mean nothing."""
        head = self.draft.markov_head
        assert head is not None
        with torch.no_grad():
            hidden, target = self.hidden.bfloat16(), self.target_hidden
            latent = head.embed(self.prev_ids).bfloat16()
            factor = head.markov_w2.weight.bfloat16()
            total = torch.zeros_like(head.markov_w2.weight)
            for first in range(0, len(hidden), chunk):
                rows = slice(first, first + chunk)
                logits = hidden[rows].flatten(0, 1) @ self.head.T
                logits.addmm_(latent[rows].flatten(0, 1), factor.T)
                other = target[rows].flatten(0, 1) @ self.head.T
                wide_product(logits, self.head)
                wide_product(logits, factor)
                add_product(total, logits.T, latent[rows].flatten(0, 1))
                del logits, other

    def _eager(self) -> Result:
        with torch.autocast(self.device.type, torch.bfloat16):
            sums = objective(
                self.draft.slot_logits(self.hidden, self.prev_ids),
                self.draft.base_logits(self.target_hidden),
                self.labels,
                self.mask,
                self._confidence(),
                self.settings,
            )
            loss = sums.loss(self.denominators, self.settings, _RAMP)
        return self._backward(loss, sums.alpha)

    def _chunked(self) -> Result:
        with torch.autocast(self.device.type, torch.bfloat16):
            sums = objective_chunked(*self._blocks(), **self._heads())
            loss = sums.loss(self.denominators, self.settings, _RAMP)
        return self._backward(loss, sums.alpha)

    def _kernels(self) -> Result:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, sums = objective_in_one_pass(
                *self._blocks(), **self._heads(), denominators=self.denominators, ramp=_RAMP
            )
        return self._backward(loss, sums.alpha)

    def _full(self) -> Result:
        """All logits at once; q and p made for the distance, and again for the confidence.

        CE, L1 and confidence only: the terms that the public trainers have.
        """
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.draft.slot_logits(self.hidden, self.prev_ids)
            confidence = self._confidence()
            with torch.no_grad():
                target = self.draft.base_logits(self.target_hidden)
        ce = functional.cross_entropy(
            logits.float().flatten(0, 1), self.labels.flatten(), reduction="none"
        )
        l1 = (logits.float().softmax(-1) - target.float().softmax(-1)).abs().sum(-1)
        with torch.no_grad():
            q, p = logits.float().softmax(-1), target.float().softmax(-1)
            alpha = (1 - (q - p).abs().sum(-1) / 2).clamp(0, 1)
            del q, p
        assert confidence is not None
        rated = functional.binary_cross_entropy_with_logits(confidence, alpha, reduction="none")
        slots = torch.arange(self.options.block_size, device=self.device)
        weight = torch.exp(-slots / self.settings.decay).expand_as(l1)
        settings = self.settings
        mixed = settings.ce_weight * ce.view_as(l1) + settings.l1_weight * l1
        loss = (weight * (mixed + settings.confidence_weight * rated)).sum() / weight.sum()
        return self._backward(loss, alpha.sum(0))

    def _blocks(self) -> tuple[Tensor, ...]:
        return self.hidden, self.target_hidden, self.labels, self.mask, self.prev_ids

    def _heads(self) -> dict[str, Any]:
        return {
            "draft": self.draft,
            "target_head": self.draft.base_logits,
            "settings": self.settings,
        }

    def _confidence(self) -> Tensor | None:
        head = self.draft.markov_head
        assert head is not None
        return self.draft.confidence_logits(self.hidden, head.embed(self.prev_ids))

    def _backward(self, loss: Tensor, alpha: Tensor) -> Result:
        heads = [
            parameter
            for name, parameter in self.draft.named_parameters()
            if name.startswith(("markov_head", "confidence_head"))
        ]
        gradients = torch.autograd.grad(loss, [self.hidden, *heads])
        return alpha.detach(), gradients[0]


def measure(options: ObjectiveOptions) -> dict[str, Any]:
    """Time and memory of every form that fits.

    Raises:
        ConfigError: no GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("dspark bench objective needs a GPU")
    bench = ObjectiveBench(options, torch.device("cuda"))
    slots = options.anchors * options.block_size
    found: dict[str, Any] = {}
    reference: Tensor | None = None
    for name, form in bench.forms().items():
        gc.collect()
        torch.cuda.empty_cache()
        try:
            figures, result = _timed(form, options.repeats)
        except torch.OutOfMemoryError:
            found[name] = None
            continue
        if result is not None:
            alpha, gradient = result
            figures["alpha"] = float(alpha.sum()) / slots
            if name == "eager":
                reference = gradient
            elif reference is not None and name != "full logits, four softmaxes":
                gap = (gradient - reference).norm() / reference.norm()
                figures["gradient_gap"] = float(gap)
        del result
        found[name] = figures
    base = found["products"]
    for figures in found.values():
        if figures is not None and base is not None:
            figures["ratio"] = figures["ms"] / base["ms"]
    return {
        "weights": "synthetic",
        "anchors": options.anchors,
        "block_size": options.block_size,
        "vocabulary": options.vocabulary,
        "hidden": options.hidden,
        "rank": options.rank,
        "chunk_blocks": options.chunk_blocks,
        "distance": options.distance,
        "accept_temperature": options.accept_temperature,
        "forms": found,
        "environment": environment(),
    }


def print_report(report: dict[str, Any]) -> None:
    """To the terminal."""
    rows = []
    for name, figures in report["forms"].items():
        if figures is None:
            rows.append([name, "does not fit", "", "", "", ""])
            continue
        gap = figures.get("gradient_gap")
        rows.append(
            [
                name,
                f"{figures['ms']:,.2f}",
                f"{figures['ratio']:.2f}" if "ratio" in figures else "",
                f"{figures['peak_gib']:.2f}",
                f"{figures['alpha']:.5f}" if "alpha" in figures else "",
                "" if gap is None else f"{gap:.1e}",
            ]
        )
    shape = (
        f"{report['anchors']} x {report['block_size']} slots, V {report['vocabulary']}, "
        f"D {report['hidden']}, {report['distance']}, {', '.join(report['environment']['gpus'])}"
    )
    print_table(
        f"objective, forward and backward, {shape}",
        ["", "ms", "/ products", "peak GiB above inputs", "alpha", "gradient beside eager"],
        rows,
        note=f"SYNTHETIC inputs; chunks of {report['chunk_blocks']} blocks; gradients of the "
        "parameters count as memory; the full logits have no accept-length term",
    )


def _timed(
    form: Callable[[], Result | None], repeats: int
) -> tuple[dict[str, float], Result | None]:
    """Median milliseconds of the device, peak GiB above what was there, and the result."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = form()  # compiles kernels
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # one behind the other without waiting, as in training: the device is timed, not the host
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    form()
    marks[0].record()
    for mark in marks[1:]:
        result = None
        result = form()
        mark.record()
    torch.cuda.synchronize()
    taken = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return {"ms": median(taken), "peak_gib": peak / 2**30}, result


def _draft(
    options: ObjectiveOptions, device: torch.device, generator: torch.Generator
) -> DSparkDraftModel:
    """Heads of true size; its layers, which nobody calls, are small."""
    config = DSparkConfig(
        hidden_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        vocab_size=options.vocabulary,
        max_position_embeddings=64,
        block_size=options.block_size,
        target_layer_ids=[1],
        num_target_layers=4,
        mask_token_id=0,
        markov_rank=options.rank,
    )
    with torch.device("meta"):
        draft = DSparkDraftModel(config)
    draft.to_empty(device=device)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    return draft
