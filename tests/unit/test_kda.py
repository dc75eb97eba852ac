"""KDA: its three forms agree, and a step is taken back to exactly where it was."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.target.kda import KDA, chunked, decay, recurrence, short_convolution
from dspark.target.state import Call, KDAState
from dspark.testing import tiny_ling

BATCH, HEADS, KEY, VALUE = 2, 3, 8, 12  # unequal sizes: a transposed state would not fit


def inputs(rows: int, seed: int = 0, raw: float | None = None) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, key = normal(BATCH, rows, HEADS, KEY), normal(BATCH, rows, HEADS, KEY)
    gate = 4 * normal(BATCH, rows, HEADS, KEY) if raw is None else torch.full_like(key, raw)
    return (
        query,
        F.normalize(key, dim=-1),
        normal(BATCH, rows, HEADS, VALUE),
        -5 * gate.sigmoid(),
        normal(BATCH, rows, HEADS).sigmoid(),
        normal(BATCH, HEADS, KEY, VALUE),
    )


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence in float64 and matrix form: S = (I - b k k^T) diag(e^g) S + b k v^T."""
    q, k, v, g, b, state = (x.double() for x in (q, k, v, g, b, state))
    out = torch.zeros(v.shape, dtype=torch.float64)
    state = state.clone()
    for i in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                key = k[i, t, h]
                erase = torch.eye(len(key)).double() - b[i, t, h] * torch.outer(key, key)
                decayed = torch.diag(g[i, t, h].exp()) @ state[i, h]
                state[i, h] = erase @ decayed + b[i, t, h] * torch.outer(key, v[i, t, h])
                out[i, t, h] = state[i, h].T @ q[i, t, h]
    return out, state


def test_the_recurrence_is_its_matrix_form() -> None:
    given = inputs(11)
    out, states = recurrence(*given)
    expected, state = by_definition(*given)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[-1].double(), state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 150])
@pytest.mark.parametrize("raw", [None, 9.0, -9.0])  # mixed, all near -5, all near 0
def test_chunks_equal_the_recurrence(rows: int, raw: float | None) -> None:
    given = inputs(rows, raw=raw)
    out, states = recurrence(*given)
    together, state = chunked(*given)
    torch.testing.assert_close(together, out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(state, states[-1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cut", [1, 16, 40, 64])
def test_chunks_go_on_from_a_state(cut: int) -> None:
    q, k, v, g, b, start = inputs(90)
    whole, end = chunked(q, k, v, g, b, start)
    one, two = slice(0, cut), slice(cut, None)
    first, middle = chunked(q[:, one], k[:, one], v[:, one], g[:, one], b[:, one], start)
    second, last = chunked(q[:, two], k[:, two], v[:, two], g[:, two], b[:, two], middle)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, end, atol=1e-5, rtol=1e-5)


def test_gradients_of_both_forms_agree() -> None:
    leaves = [x.requires_grad_() for x in inputs(40)]
    weights = torch.randn(BATCH, 40, HEADS, VALUE, generator=torch.Generator().manual_seed(1))
    one = torch.autograd.grad((recurrence(*leaves)[0] * weights).sum(), leaves)
    other = torch.autograd.grad((chunked(*leaves)[0] * weights).sum(), leaves)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_the_decay_is_bounded_and_has_a_bias_a_channel() -> None:
    raw = torch.tensor([[[-50.0, 0.0], [50.0, 1.0]]])
    bias = torch.tensor([0.0, 0.5, 0.0, -1.0])
    got = decay(raw, torch.tensor([2.0, 3.0]).log(), bias, -5.0)
    expected = -5 * torch.tensor([[[-100.0, 1.0], [150.0, 0.0]]]).sigmoid()
    torch.testing.assert_close(got, expected)


def test_the_convolution_looks_back_and_the_last_tap_is_now() -> None:
    generator = torch.Generator().manual_seed(0)
    values, weight = (
        torch.randn(1, 9, 6, generator=generator),
        torch.randn(6, 4, generator=generator),
    )
    padded = F.pad(values, (0, 0, 3, 0))
    expected = F.conv1d(padded.transpose(1, 2), weight[:, None], groups=6).transpose(1, 2)
    torch.testing.assert_close(short_convolution(padded, weight), F.silu(expected))


@cache
def layer() -> KDA:
    found = tiny_ling().model.layers[1].attention
    assert isinstance(found, KDA)
    return found


def run(rows: slice, held: KDAState, x: Tensor, count: int | None = None) -> Tensor:
    call = Call(
        positions=torch.arange(rows.start, rows.stop)[None],
        by_row=count is not None,
        count=count or 0,
        kda={1: held},
    )
    with torch.no_grad():
        out: Tensor = layer()(x[:, rows], call)
    return out


def fresh() -> KDAState:
    return layer().new_state(1, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 20])  # inside the convolution's window and behind it
def test_a_sequence_may_be_read_in_parts(cut: int) -> None:
    x = torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(2))
    whole = run(slice(0, 24), fresh(), x)
    held = fresh()
    parts = [run(slice(0, cut), held, x)]
    for t in range(cut, 22):
        parts.append(run(slice(t, t + 1), held, x, count=1))
        held.commit(1)
    parts.append(run(slice(22, 24), held, x))
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kept", range(17))
def test_what_was_rejected_never_happened(kept: int) -> None:
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3))
    held, alone = fresh(), fresh()
    for state in (held, alone):
        run(slice(0, 10), state, x)
    run(slice(10, 26), held, x, count=16)
    held.commit(kept)
    for t in range(10, 10 + kept):
        run(slice(t, t + 8), alone, x, count=1)  # a step fills its tile of 8 rows
        alone.commit(1)
    assert torch.equal(held.state, alone.state)
    assert torch.equal(held.tail, alone.tail)
