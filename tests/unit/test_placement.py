"""A target over several devices: the same numbers, each layer where it was put."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dspark.config import TargetSettings
from dspark.decoding import DecodeParams, decode
from dspark.errors import TargetError
from dspark.target import load
from dspark.target.placement import parse_devices, spread
from dspark.target.state import Call
from dspark.target.weights import save_model
from dspark.testing import save_tiny_target, tiny_draft, tiny_ling

CPU, META = torch.device("cpu"), torch.device("meta")
GPUS = [torch.device(f"cuda:{i}") for i in range(8)]


def layers(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(size, 1, bias=False, device="meta") for size in sizes]


def test_layers_are_dealt_out_in_runs_of_like_size() -> None:
    def counts(sizes: tuple[int, ...], devices: int, *before: int) -> list[int]:
        placed = spread(layers(*sizes), GPUS[:devices], before=layers(*before))
        assert list(placed) == sorted(placed, key=lambda device: device.index)
        return [placed.count(device) for device in GPUS[:devices]]

    assert counts((10,) * 12, 3) == [4, 4, 4]
    assert counts((10,) * 12, 3, 20) == [3, 4, 5]  # the first holds the tables too
    assert counts((40, *(10,) * 8), 3) == [1, 4, 4]
    assert counts((10,) * 5, 2) in ([2, 3], [3, 2])
    assert counts((10,) * 3, 3, 500) == [1, 1, 1]  # everyone gets one
    assert counts((1, 1, 100), 3) == [1, 1, 1]
    assert counts((10,) * 2, 3) == [1, 1, 0]


@pytest.mark.parametrize("sizes", [(3, 9, 9, 9, 9, 9, 9), tuple(range(1, 43)), (5,) * 42])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_no_device_is_more_than_a_layer_over_its_share(
    sizes: tuple[int, ...], devices: int
) -> None:
    placed = spread(layers(*sizes), GPUS[:devices])
    for device in GPUS[:devices]:
        held = sum(size for size, place in zip(sizes, placed, strict=True) if place == device)
        assert 0 < held <= sum(sizes) / devices + max(sizes)


@pytest.mark.slow
def test_a_spread_target_gives_the_same_numbers(tmp_path: Path) -> None:
    whole = tiny_ling("flash")
    save_model(whole.model, tmp_path)
    spread_out = load(TargetSettings(path=str(tmp_path)), device="cpu+cpu+cpu", dtype="float32")
    once = load(TargetSettings(path=str(tmp_path)), device="cpu", dtype="float32")
    assert spread_out.model.placement == (CPU,) * whole.num_layers
    assert once.model.placement == ()
    ids = torch.randint(3, 200, (2, 33), generator=torch.Generator().manual_seed(0))
    left, right = (target.features(ids, (0, 2)) for target in (once, spread_out))
    assert torch.equal(left.taps, right.taps)
    assert torch.equal(left.last_hidden, right.last_hidden)
    assert spread_out.fingerprint() == once.fingerprint()
    params = DecodeParams(max_new_tokens=12)
    outputs = [
        decode(target, tiny_draft(target), [5, 6, 7], params).token_ids
        for target in (once, spread_out)
    ]
    assert outputs[0] == outputs[1]


def test_every_layer_and_its_state_are_where_they_were_put() -> None:
    model = tiny_ling("flash").model
    with torch.device("meta"):
        model.to_devices([CPU, META])
    assert set(model.placement) == {CPU, META}
    for layer, device in zip(model.layers, model.placement, strict=True):
        assert {parameter.device for parameter in layer.parameters()} == {device}
    assert model.lm_head.weight.device == model.model.norm.weight.device == CPU
    assert model.model.word_embeddings.weight.device == CPU
    cache = model.new_cache((), 1, CPU, torch.float32)
    for index, device in enumerate(model.placement):
        state = cache.kda.get(index)
        held = cache.latents[index].held if state is None else state.state
        assert held.device == device


def test_a_call_moves_with_everything_but_states() -> None:
    call = Call(
        torch.arange(3)[None], valid=torch.ones(1, 3).bool(), hidden=torch.ones(1, 1, 3, 3).bool(),
        masks=(torch.zeros(1, 3, 8),), start=7, count=2, by_row=True,
    )  # fmt: skip
    moved = call.to(META)
    assert {moved.positions.device, moved.masks[0].device} == {META}
    assert moved.valid is not None
    assert moved.hidden is not None
    assert {moved.valid.device, moved.hidden.device} == {META}
    assert (moved.start, moved.count, moved.by_row) == (7, 2, True)
    assert call.to(CPU) is call


def test_devices_that_are_none(tmp_path: Path) -> None:
    assert parse_devices("cpu+cpu") == (CPU, CPU)
    with pytest.raises(TargetError, match=r"target.device 'gpu' is not a torch device: write cpu"):
        parse_devices("cpu+gpu")
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match="'cuda:1' needs a GPU, and torch finds none"):
            parse_devices("cuda:1")
    for name in ("meta", "xpu", "hpu"):
        with pytest.raises(TargetError, match=f"'{name}' is a device that this torch does not"):
            parse_devices(name)
    save_tiny_target(tmp_path / "other")
    with pytest.raises(TargetError, match=r"several devices, which is for Ling-3.0 targets"):
        load(TargetSettings(path=str(tmp_path / "other")), device="cpu+cpu")
