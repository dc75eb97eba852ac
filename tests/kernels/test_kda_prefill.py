"""A KDA layer over a prompt beside the row-by-row recurrence: outputs, states, parts, segments."""

import pytest
import torch
from torch import Tensor, nn

from dspark.kernels.kda_prefill import kda_prefill
from dspark.serving.graph.weights import _kda
from dspark.target.config import LingConfig
from dspark.target.kda import KDA, decay, recurrence, short_convolution
from dspark.target.state import Call
from dspark.testing import TINY_LING

EPS, LOWER = 1e-6, -5.0


class Case:
    """Random weights of H heads and projections of T rows, as one matrix [T, 5 H K + H]."""

    def __init__(
        self, rows: int, heads: int, size: int, seed: int, device: torch.device,
        dtype: torch.dtype = torch.float32, raw: float | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.heads, self.size, self.width = heads, size, heads * size
        whole = normal(rows, 5 * self.width + heads)
        whole[:, 3 * self.width : 4 * self.width] *= 3
        self.a_log = 0.3 * normal(heads).to(device)
        self.dt_bias = normal(self.width).to(device)
        if raw is not None:
            whole[:, 3 * self.width : 4 * self.width] = raw
        self.whole = whole.to(device, dtype)
        self.taps = [(0.5 * normal(self.width, 4)).to(device, dtype) for _ in range(3)]
        self.norm = normal(size).to(device, dtype)
        self.tail = normal(3, 3 * self.width).to(device, dtype)
        self.state = normal(heads, size, size).to(device)

    def kernel(
        self, rows: slice = slice(None), tail: Tensor | None = None,
        state: Tensor | None = None, segment: int = 4096, split: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        parts = self.whole[rows].tensor_split([self.width * i for i in range(1, 6)], -1)
        if split:  # as separate projections come
            parts = tuple(one.contiguous() for one in parts)
        return kda_prefill(
            parts,
            tail=self.tail if tail is None else tail,
            taps=self.taps,
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            norm=self.norm,
            state=self.state if state is None else state,
            lower_bound=LOWER,
            eps=EPS,
            segment=segment,
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        """The module's own functions, row by row."""
        rows, dtype = len(self.whole), self.whole.dtype
        *_, f, g, b = self.whole.split([self.width] * 5 + [self.heads], -1)
        inputs = torch.cat([self.tail, self.whole[:, : 3 * self.width]])[None]
        mixed = short_convolution(inputs, torch.cat(self.taps)).float()
        query, key, value = mixed.view(1, rows, 3, self.heads, self.size).unbind(2)
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
        left = decay(
            f.view(1, rows, self.heads, self.size), self.a_log, self.dt_bias, LOWER
        )  # fmt: skip
        out, states = recurrence(
            query * self.size**-0.5, key, value, left, b[None].float().sigmoid(), self.state[None]
        )
        out = nn.functional.rms_norm(out[0], (self.size,), eps=EPS) * self.norm
        out = out * g.view(rows, self.heads, self.size).float().sigmoid()
        return out.flatten(1).to(dtype), states[-1][0]


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def size(device: torch.device) -> int:
    """Of a head: small ones are sooner done by the interpreter, and do not compile for a GPU."""
    return 128 if device.type == "cuda" else 16


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_prompt_is_its_recurrence(rows: int, seed: int, device: torch.device) -> None:
    case = Case(rows, 3, size(device), seed, device)
    (out, state), (expected, last) = case.kernel(), case.reference()
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)
    assert relative(state, last) < 2e-6


@pytest.mark.parametrize("raw", [-60.0, 60.0])  # nothing is forgotten; e^-5 a row everywhere
@pytest.mark.parametrize("rows", [17, 100])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_ends_of_the_range_of_decays(
    raw: float, rows: int, seed: int, device: torch.device
) -> None:
    case = Case(rows, 2, size(device), seed, device, raw=raw)
    (out, state), (expected, last) = case.kernel(), case.reference()
    torch.testing.assert_close(out, expected, rtol=5e-4, atol=1e-4)
    assert relative(state, last) < 1e-5


@pytest.mark.parametrize("raw", [None, 60.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_heads_of_128(raw: float | None, seed: int, device: torch.device) -> None:
    case = Case(130, 2, 128, seed, device, raw=raw)
    (out, state), (expected, last) = case.kernel(), case.reference()
    torch.testing.assert_close(out, expected, rtol=5e-4, atol=1e-4)
    assert relative(state, last) < 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_roundings_are_those_of_the_layer(seed: int, device: torch.device) -> None:
    case = Case(70, 2, size(device), seed, device, torch.bfloat16)
    (out, state), (expected, last) = case.kernel(), case.reference()
    # on a GPU a rounding of an input may fall to the other side; the interpreter cuts off instead
    limit = 4e-3 if device.type == "cuda" else 2e-2
    assert relative(out.float(), expected.float()) < limit
    assert relative(state, last) < limit


@pytest.mark.parametrize("cut", [1, 2, 3, 64, 90])
def test_a_second_call_goes_on_from_the_first(cut: int, device: torch.device) -> None:
    case = Case(133, 2, size(device), 5, device)
    expected, last = case.reference()
    first, middle = case.kernel(slice(0, cut))
    tail = torch.cat([case.tail, case.whole[:cut, : 3 * case.width]])[-3:]
    second, end = case.kernel(slice(cut, None), tail, middle)
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=2e-4, atol=2e-5)
    assert relative(end, last) < 2e-6


def test_segments_and_strides_change_nothing(device: torch.device) -> None:
    case = Case(150, 2, size(device), 6, device)
    out, state = case.kernel()
    for segment, split in ((64, False), (128, True), (4096, True)):
        other, end = case.kernel(segment=segment, split=split)
        assert torch.equal(other, out)
        assert torch.equal(end, state)


def test_what_lies_behind_the_rows_does_not_matter(device: torch.device) -> None:
    case = Case(40, 2, size(device), 7, device)
    out, state = case.kernel(slice(0, 21))
    case.whole[21:] = torch.nan
    other, end = case.kernel(slice(0, 21))
    assert torch.equal(other, out)
    assert torch.equal(end, state)
    assert not out.isnan().any()


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    case = Case(20, 2, size(device), 8, device)
    with pytest.raises(ValueError, match="segments of whole chunks"):
        case.kernel(segment=100)
    with pytest.raises(ValueError, match="wants contiguous tail"):
        case.kernel(tail=case.tail[:, :-1])
    with pytest.raises(ValueError, match="wants contiguous state"):
        case.kernel(state=case.state[:1])
    with pytest.raises(ValueError, match="wants rows"):
        case.kernel(slice(0, 0))
    case.whole = case.whole[:, :-40]
    with pytest.raises(ValueError, match="one stride"):
        case.kernel(split=True)


@pytest.mark.parametrize("together", [False, True])
def test_the_layer_reads_a_prompt_in_parts(together: bool, device: torch.device) -> None:
    config = LingConfig.from_dict(TINY_LING["flash"] | {"head_dim": size(device)})
    layer = KDA(config, 0).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    layer.to(device)
    if together:
        _kda(layer)
    x = torch.randn(1, 70, config.hidden_size, generator=generator).to(device)
    plain = layer.new_state(1, device, torch.float32)
    with torch.enable_grad():  # the kernels have no gradients
        expected = layer(x, Call(positions=torch.arange(70, device=device)[None], kda={0: plain}))
    held = layer.new_state(1, device, torch.float32)
    parts = [layer.prompt(piece, held) for piece in x.split([66, 2, 2], 1)]
    out = layer.o_proj(torch.cat(parts, 1))
    assert relative(out, expected) < 1e-5
    assert relative(held.state, plain.state) < 1e-5
    torch.testing.assert_close(held.tail, plain.tail)
