"""Settings: every mistake is one sentence with the path, the value and what would be right."""

import re
from pathlib import Path
from typing import get_args

import pytest

from dspark.config import Config, LossSettings
from dspark.config_io import dump, load, main, parse_overrides
from dspark.errors import ConfigError


def test_defaults_survive_a_round_trip(tmp_path: Path) -> None:
    config = load(None, ["sample.settings=[{weight: 2, temperature: 0.7}]", "train.lr=1e-4"])
    path = tmp_path / "c.yaml"
    path.write_text(dump(config))
    assert load(path) == config
    assert config.train.lr == 1e-4
    assert config.sample.settings[0].weight == 2


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/*.yaml")), ids=str)
def test_every_shipped_config_loads(path: Path) -> None:
    assert isinstance(load(path), Config)


def test_no_is_a_word_and_false_is_a_boolean(tmp_path: Path) -> None:
    config = load(None, ["train.mixed_precision=no", "train.gradient_checkpointing=True"])
    assert config.train.mixed_precision == "no"
    assert config.train.gradient_checkpointing is True
    assert load(None, ["train.gradient_checkpointing=false"]).train.gradient_checkpointing is False
    path = tmp_path / "c.yaml"
    path.write_text(dump(config))
    assert load(path) == config


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train: {lr: 1e-4, max_grad_norm: 2E+0, weight_decay: .5, warmup_ratio: 0}\n")
    train = load(path).train
    assert (train.lr, train.max_grad_norm) == (1e-4, 2.0)
    assert (train.weight_decay, train.warmup_ratio) == (0.5, 0.0)


def test_flag_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train:\n  steps: 5\n  seed: 3\n")
    train = load(path, ["--train.steps", "7", "--train.batch_size=2"]).train
    assert (train.steps, train.seed, train.batch_size, train.num_anchors) == (7, 3, 2, 512)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stesp=5", ["train.stesp", "'train.steps'"]),
        ("trian.steps=5", ["trian", "'train'"]),
        ("sample.settings=[{temprature: 1}]", ["temprature", "'sample.settings.0.temperature'"]),
        ("train.steps='5'", ["train.steps", "integer", "'5'"]),
        ("train.lr=fast", ["train.lr", "number", "'fast'"]),
        ("train.lr=null", ["train.lr", "None"]),
        ("train.lr=-1", ["train.lr", "greater than 0", "-1"]),
        ("train.steps=0", ["train.steps", "greater than or equal to 1"]),
        ("draft.markov_head_type=lstm", ["markov_head_type", "vanilla", "lstm"]),
        ("sample.settings=[{temperature: 0, min_p: 0.1}]", ["min_p", "temperature 0"]),
        ("sample.settings=[]", ["sample.settings", "at least one"]),
        ("sample.settings=[3]", ["sample.settings.0", "keys", "got 3"]),
        ("sample.settings=[{top_p: 0}]", ["sample.settings.0.top_p", "greater than 0", "got 0"]),
        ("sample.settings=[{top_k: -2}]", ["top_k", "equal to -1", "got -2"]),
        ("sample.settings=[{temperature: .nan}]", ["temperature", "got nan"]),
        ("sample.settings=[{weight: .inf}]", ["weight", "finite", "got inf"]),
        ("sample.settings=[{weight: 1e308}, {weight: 1e308}]", ["settings", "sum is finite"]),
        ("sample.settings=[{temperature: 1e-40}]", ["temperature", "from 0.01 to 2", "got 1e-40"]),
        ("sample.settings=[{top_k: 4294967296}]", ["top_k", "less than", "got 4294967296"]),
        ("train.num_processes=9999999999999999", ["num_processes", "equal to 65536"]),
        ("sample.settings=[{repetition_penalty: 1.1}]", ["repetition_penalty", "min_p"]),
        ("train.lr=.inf", ["train.lr", "finite", "got inf"]),
        ("train.lr=2001-13-41", ["train.lr", "month"]),
        ("data.responses=a.jsonl", ["data.responses", "list", "'a.jsonl'"]),
        ("target.dtype=float16", ["target.dtype", "'float32'", "'float16'"]),
        ("eval.max_new_tokens=0", ["eval.max_new_tokens", "equal to 1", "got 0"]),
        ("loss={accept_length_start: 0.95}", ["accept_length_start 0.95", "ramp 0.1", "than 1"]),
        ("loss.accept_length_start=1", ["accept_length_start", "less than 1", "got 1"]),
        (
            "loss={accept_length_form: chain, accept_length_temperature: 0.5}",
            ["accept_length_temperature is 0.5", "form is chain", "temperature=1"],
        ),
        ("loss.accept_length_temperature=1e-300", ["equal to 0.01", "got 1e-300"]),
        ("eval.temperature=1e-300", ["eval.temperature", "from 0.01 to 2", "got 1e-300"]),
        (
            "loss={ce_weight: 0, l1_weight: 0, confidence_weight: 0, accept_length_weight: 0}",
            ["loss: ce_weight, l1_weight,", "are all 0: give one of them a weight"],
        ),
        ("train.output_dir=", ["train.output_dir", "at least 1 character", "got ''"]),
        ("capture.out=", ["capture.out", "at least 1 character", "got ''"]),
        ("sample.out=", ["sample.out", "at least 1 character", "got ''"]),
        ("loss.accept_length_form=reach", ["accept_length_form", "'path_exact'", "'reach'"]),
        ("train=5", ["train", "keys", "got 5"]),
        ("draft.target_layer_ids=[]", ["draft.target_layer_ids: ", "or null", "got []"]),
        ("train.tracker=&x [*x]", ["'train.tracker'", "inside itself"]),
        ("train.steps", ["section.key=value"]),
        ("=5", ["section.key=value"]),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    for word in words:
        assert word in str(caught.value)


def test_the_accept_length_term_may_start_late_and_rise_until_the_end() -> None:
    loss = load(None, ["loss.accept_length_start=0.9", "loss.accept_length_ramp=0.1"]).loss
    assert (loss.accept_length_start, loss.accept_length_ramp) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  steps: 5\n  steps: 6\n", ["'steps'", "twice", "line 3"]),
        ("train:\n  steps: 5\n  seed: 1\n  steps: 6\n", ["'steps'", "twice", "line 4"]),
        ("train:\n  stesp: 5\ntrian: {}\n", ["'train.stesp'", "'trian'"]),
        ("train: [1, 2\n", ["not valid YAML", "line"]),
        ("- 1\n- 2\n", ["sections"]),
        ("train:\n", ["'train'", "empty"]),
        ("train: 5\n", ["'train'", "keys", "got 5"]),
        ("draft:\n  ? [a, b]\n  : 1\n", ["line 2", "['a', 'b']", "no word"]),
        ("train: {lr: '1e-4'}\n", ["train.lr", "number", "'1e-4'"]),
        ("train: &x [*x]\n", ["c.yaml", "inside itself"]),
        ("train: &x {steps: *x}\n", ["c.yaml", "inside itself"]),
        pytest.param(
            "train: " + "[" * 5000, ["c.yaml", "nested too deeply"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, ["train.seed=1"])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "override", "told"),
    [
        ("train: {seed: 1}", "train.lr=-2", "command line: train.lr: .* got -2$"),
        ("train: {lr: -1}", "train.lr=-2", "command line: train.lr: .* got -2$"),
        ("train: {lr: -1}", "train.seed=2", "FILE: train.lr: .* got -1$"),
        ("train: {lr: 1e-4}", "train.stesp=2", "command line: unknown key 'train.stesp'"),
        ("loss: {accept_length_form: chain}", "loss.accept_length_temperature=0.5", "command line"),
        (
            "loss: {accept_length_form: chain, accept_length_temperature: 0.5}",
            "loss.chunk_blocks=3",
            "FILE: loss: accept_length_temperature is 0.5",
        ),
        (
            "train: {stesp: 5}",
            "train.lr=-2",
            "FILE: unknown key 'train.stesp'.*\ncommand line: train.lr|command line: train.lr.*\nF",
        ),
    ],
)
def test_each_fault_is_blamed_on_where_it_stands(
    tmp_path: Path, text: str, override: str, told: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, [override])
    assert re.match(told, str(caught.value).replace(str(path), "FILE"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load(tmp_path / "nothing.yaml")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"train: \xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot read the config .*c\.yaml"):
        load(path)


@pytest.mark.parametrize("value", ["3", "", "null", "[a]"])
def test_a_section_with_a_value_of_its_own_blames_itself(tmp_path: Path, value: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train: {seed: 1}\n")
    given = f"sample={value}"
    for overrides in ([given], [given, "sample.out=x"], ["sample.out=x", given]):
        with pytest.raises(ConfigError) as caught:
            load(path, overrides)
        assert str(caught.value).startswith(f"override '{given}': section 'sample' must hold keys")
    assert load(path, ["sample={out: a}", "sample.limit=2"]).sample.out == "a"


def test_a_value_inside_another_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'a\.b=2' .* inside another value"):
        parse_overrides(["a=1", "a.b=2"])


def test_nothing_behind_the_equals_sign_is_an_empty_word() -> None:
    assert parse_overrides(["a.b="]) == {"a": {"b": ""}}


def test_overrides_nest() -> None:
    assert parse_overrides(["a.b=1", "a.c=[x, 2]", "d=no"]) == {
        "a": {"b": 1, "c": ["x", 2]},
        "d": "no",
    }


def test_settings_are_printed_for_shell_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["configs/tiny.yaml", "target.path", "train.steps", "--", "train.steps=3"]
    assert main(words) == 0
    assert capsys.readouterr().out == "smollm2-135m\n3\n"
    assert main(["configs/tiny.yaml", "target.path", "--", "train.stepz=3"]) == 2
    assert "did you mean 'train.steps'" in capsys.readouterr().err


def test_every_form_of_the_accept_length_term_stands_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "train/README.md").read_text(encoding="utf-8")
    forms = get_args(LossSettings.model_fields["accept_length_form"].annotation)
    assert [form for form in forms if f"\n| `{form}`" not in page] == []
