"""The training forward of a Ling-3.0 model against the model itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dspark.config import TargetSettings
from dspark.target import load
from dspark.target.config import LingConfig
from dspark.target.ling import LingTarget, sequence_call
from dspark.target.model import LingModel
from dspark.target.mtp import nextn_hidden
from dspark.target.weights import load_model, save_model
from dspark.testing import TINY_LING, tiny_ling
from dspark.training.ling_forward import TrainingForward, balance, initialise


def some_ids(rows: int = 2, length: int = 41) -> Tensor:
    return torch.randint(4, 512, (rows, length + 2), generator=torch.Generator().manual_seed(1))


def trainable(variant: str = "flash") -> LingModel:
    return tiny_ling(variant, nextn=variant == "flash").model.requires_grad_(True)


@pytest.mark.parametrize("variant", ["flash", "tiny"])
def test_a_trained_model_is_what_its_checkpoint_loads(tmp_path: Path, variant: str) -> None:
    model, rows = trainable(variant), some_ids()
    with torch.no_grad():  # as the file holds them
        for name, weight in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias")):
                weight.copy_(weight.bfloat16())
    hidden, guess, _ = TrainingForward(model).hidden(rows[:, :-2], rows[:, 1:-1])
    save_model(model, tmp_path)

    target = load(TargetSettings(path=str(tmp_path), dtype="float32"))
    assert isinstance(target, LingTarget)
    logits = target.logits(target.features(rows[:, :-2], ()).last_hidden)
    torch.testing.assert_close(model.lm_head(hidden), logits, atol=2e-4, rtol=2e-4)
    assert logits.std() > 0.5
    if variant == "tiny":
        assert guess is None
        return
    whole = load_model(tmp_path, model.config, dtype=torch.float32, nextn=True)
    with torch.no_grad():
        call = sequence_call(rows[:, :-2].shape, rows.device)
        second = whole.logits(
            nextn_hidden(whole, whole(rows[:, :-2], call)[0], rows[:, 1:-1], call)
        )
    assert guess is not None
    torch.testing.assert_close(model.lm_head(guess), second, atol=2e-4, rtol=2e-4)


def test_gradients_are_those_of_the_model_itself() -> None:
    model, rows = trainable(), some_ids()
    main, second, _ = TrainingForward(model).losses(rows, rows)
    (main + 0.3 * second).backward()  # type: ignore[no-untyped-call]
    got = {name: weight.grad for name, weight in model.named_parameters()}

    model.zero_grad(set_to_none=True)
    call = sequence_call(rows[:, :-2].shape, rows.device)
    hidden, _ = model(rows[:, :-2], call)
    guess = nextn_hidden(model, hidden, rows[:, 1:-1], call)
    first, after = (
        functional.cross_entropy(model.logits(h).flatten(0, 1), labels.flatten())
        for h, labels in ((hidden, rows[:, 1:-1]), (guess, rows[:, 2:]))
    )
    (first + 0.3 * after).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close((main, second), (first, after))
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        largest = float(weight.grad.abs().max())
        difference = float((got[name] - weight.grad).abs().max())  # type: ignore[operator]
        assert difference <= 1e-3 * largest + 1e-7, name


def test_balancing_moves_the_bias_against_the_load() -> None:
    model, rows = trainable(), some_ids(4, 100)
    forward = TrainingForward(model)
    with torch.no_grad():
        before = forward.losses(rows, rows)[2]
        for _ in range(60):
            balance(model, forward.losses(rows, rows)[2], 0.02)
        after = forward.losses(rows, rows)[2]
    assert before.shape == (7, 16)
    assert before.sum(1).tolist() == [4 * 100 * 4] * 7
    assert after.float().std(1).mean() < 0.5 * before.float().std(1).mean()


def test_dropout_is_for_training_alone_and_a_label_of_minus_100_for_nothing() -> None:
    model, rows = trainable(), some_ids()
    forward = TrainingForward(model, dropout=0.5)
    plain = TrainingForward(model).losses(rows, rows)[0]
    assert abs(forward.losses(rows, rows)[0] - plain) > 1e-3
    forward.training = False
    torch.testing.assert_close(forward.losses(rows, rows)[0], plain)

    labels = rows.clone()
    labels[:, 20:] = -100
    hidden, _, _ = forward.hidden(rows[:, :-2], rows[:, 1:-1])
    expected = functional.cross_entropy(
        model.logits(hidden)[:, :19].flatten(0, 1), rows[:, 1:20].flatten()
    )
    torch.testing.assert_close(forward.losses(rows, labels)[0], expected)


def test_a_fresh_model_forgets_at_all_speeds_and_begins_as_its_embedding() -> None:
    config = LingConfig.from_dict(TINY_LING["flash"])
    model, other = LingModel(config, nextn=True), LingModel(config, nextn=True)
    initialise(model, 3)
    initialise(other, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    biases = [
        weight.detach() for name, weight in model.named_parameters() if name.endswith("dt_bias")
    ]
    decays = 5 * torch.sigmoid(torch.cat(biases))
    assert decays.min() < 2e-3
    assert decays.max() > 0.2
    rows = some_ids()
    with torch.no_grad():
        hidden, _, _ = TrainingForward(model).hidden(rows[:, :-2], rows[:, 1:-1])
        torch.testing.assert_close(hidden, model.model.norm(model.embed(rows[:, :-2])))
