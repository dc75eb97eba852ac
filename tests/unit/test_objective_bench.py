"""`dspark bench objective` as far as it goes without a GPU: refusals, and forms that agree."""

import sys
from typing import Any

import pytest
import torch

from dspark.bench.objective import ObjectiveBench, ObjectiveOptions
from dspark.cli import main
from dspark.errors import ConfigError


def test_without_a_gpu_it_is_one_sentence_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["dspark", "bench", "objective", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: dspark bench objective needs a GPU;")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": 0}, "anchors must be >= 1, got 0"),
        ({"vocabulary": 1}, "vocabulary must be >= 2, got 1"),
        ({"distance": "kl"}, "l1, lk_hybrid or nla, got 'kl'"),
        ({"accept_temperature": 0.0}, r"lie in 0.01..1, got 0.0"),
        ({"accept_temperature": 1e-300}, "lie in 0.01..1, got 1e-300"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ObjectiveOptions(**options)


def test_all_forms_take_the_inputs_and_agree() -> None:
    options = ObjectiveOptions(
        anchors=3, block_size=2, vocabulary=67, hidden=16, rank=4, chunk_blocks=2
    )
    bench = ObjectiveBench(options, torch.device("cpu"))
    found = {name: form() for name, form in bench.forms().items()}
    assert found.pop("products") is found.pop("products, all at once") is None
    eager = found["eager"]
    assert eager is not None
    for name, result in found.items():
        assert result is not None
        torch.testing.assert_close(result[0].double(), eager[0], rtol=0.02, atol=0, msg=name)
        if not name.startswith("full"):  # without the accept-length term
            gap = (result[1] - eager[1]).norm() / eager[1].norm()
            assert gap < 0.03, name
