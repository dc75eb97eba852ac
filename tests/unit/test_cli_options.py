"""What is given on the command line reaches the stage, zeros included, and how a command ends."""

import io
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from dspark.cli import main
from dspark.cli.distill import Format
from dspark.corpus.rejects import Reason, Rejects, RowError
from dspark.corpus.sampling import SampleReport
from dspark.errors import DataError, RunError
from dspark.export.layouts import FORMATS
from dspark.serving.loading import load_model


class Stage:
    """Stands in for a function of a stage and keeps its last call."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.args, self.options = args, options
        return self.answer


def report(**values: Any) -> SimpleNamespace:
    """What a stage returns, by its own figures."""
    return SimpleNamespace(**values, to_dict=lambda: {"a": 1}, summary=lambda: {"a": 1})


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace a function by a `Stage`; target and tokenizer are mere words from the start."""

    def replace(path: str, answer: Any = None) -> Stage:
        stage = Stage(answer)
        monkeypatch.setattr(f"dspark.{path}", stage)
        return stage

    replace("target.load", SimpleNamespace(name="TARGET", num_layers=6))
    replace("target.load_tokenizer", "TOKENIZER")
    replace("corpus.chat.check_template")
    return replace


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dspark", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_eval_hands_on_every_option(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def evaluation(*conditions: str) -> SimpleNamespace:
        found = [
            {"condition": one, "drafts": {"d": {"a": 1}}, "base": "d", "paired": {"p": 1}}
            for one in conditions
        ]
        return SimpleNamespace(summaries=lambda: found, environment={"cores": 2})

    evaluate = stub("bench.conditions.run", evaluation("one"))
    stub("bench.prompt_sets.read_sets", {"set": ["a prompt"]})
    checked = stub("bench.conditions.check_thinking")
    shown = stub("bench.evaluate_report.print_evaluation")
    stub("export.load.load_draft", "DRAFT")
    warned = stub("export.template.warn_of_another")
    stub("export.tensors.weights_sha256", "DIGEST")
    load = stub("target.load", SimpleNamespace(name="TARGET"))
    # zeros are values, and an option wins over an override
    words = ("eval", "--draft", "d", "--target", "t", "--dtype", "float32", "--prompts", "p",
             "--limit", "3", "--max-new-tokens", "7",
             "--temperature", "0", "--top-p", "0.5", "--seed", "0", "--num-draft-tokens", "2",
             "--confidence-threshold", "0.25", "eval.temperature=0.7", "eval.seed=9")  # fmt: skip
    assert run(monkeypatch, *words) == 0
    assert capsys.readouterr().out == ""
    target, drafts, tokenizer, sets, settings, asked = evaluate.args
    assert (target.name, drafts, tokenizer) == ("TARGET", {"d": "DRAFT"}, "TOKENIZER")
    assert sets == {"set": ["a prompt"]}
    assert (settings.limit, settings.max_new_tokens, settings.prompts) == (3, 7, ("p",))
    assert (settings.top_p, settings.seed) == (0.5, 0)
    assert [(one.temperature, one.thinking, one.verification) for one in asked] == [
        (0.0, None, "coupled")
    ]
    assert evaluate.options == {
        "num_draft_tokens": 2,
        "confidence_threshold": 0.25,
        "base": None,
        "out": None,
    }
    assert (load.args[0].path, load.args[0].dtype) == ("t", "float32")
    assert load.options == {"nextn": False}
    assert warned.args == ("d", "TOKENIZER")
    assert shown.args == ({"a": 1},)
    assert checked.args == ()
    assert run(monkeypatch, *words, "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["target"], said["draft"], said["a"]) == ("TARGET", "d", 1)
    assert said["draft_sha256"] == "DIGEST"
    assert (said["environment"], said["definitions"]) == ({"cores": 2}, "dspark.eval/2")

    # several drafts of one run, the target's own block among them
    compared = stub("bench.evaluate_report.print_comparison")
    block = stub("decoding.nextn_draft", "BLOCK")
    both = ("eval", "--target", "t", "--prompts", "p", "--draft", "nextn:3", "--draft", "d")
    assert run(monkeypatch, *both, "--base", "d", "--out", "o", "--json") == 0
    assert evaluate.args[1] == {"nextn:3": "BLOCK", "d": "DRAFT"}
    assert (evaluate.options["base"], evaluate.options["out"]) == ("d", Path("o"))
    assert (load.options, block.args[1]) == ({"nextn": True}, 3)
    assert warned.args == ("d", "TOKENIZER")
    assert (compared.args, compared.options) == (({"d": {"a": 1}}, {"p": 1}), {"base": "d"})
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["drafts"] == {"d": {"a": 1, "draft_sha256": "DIGEST"}}
    assert said["paired"] == {"p": 1}
    assert run(monkeypatch, *both, "--draft", "d") == 2
    assert "--draft 'd' was given twice; give each" in capsys.readouterr().err
    assert run(monkeypatch, *both, "--draft", "./e/../d/") == 2
    assert "--draft './e/../d/' was given twice, the first time as 'd'" in capsys.readouterr().err
    assert run(monkeypatch, *both, "--base", "e") == 2
    assert "--base 'e' is none of the drafts: nextn:3, d" in capsys.readouterr().err

    # refused before the target is loaded
    load.args = ()
    assert run(monkeypatch, *words, "--png", str(tmp_path / "a.foo")) == 2
    assert "--png must name a file that ends in .png, got" in capsys.readouterr().err
    assert load.args == ()

    # several conditions of one run
    evaluate.answer = evaluation("one", "two")
    drawn = stub("bench.plot.plot_evaluation")
    stub("bench.plot.check_plots")
    png = tmp_path / "a.png"
    many = (*words, "--temperature", "0.5", "--thinking", "both", "--verification", "block",
            "--verification", "rejection", "--png", str(png), "--json")  # fmt: skip
    assert run(monkeypatch, *many) == 0
    assert [(one.temperature, one.thinking, one.verification) for one in evaluate.args[5]] == [
        *((0.0, mode, "block") for mode in (False, True)),
        *((0.5, mode, rule) for mode in (False, True) for rule in ("block", "rejection")),
    ]
    assert checked.args == ("TOKENIZER",)
    assert drawn.args == (png, {"one": {"a": 1}, "two": {"a": 1}})
    out = capsys.readouterr().out.splitlines()
    assert out[:-1] == ["", "one", "", "two"]
    assert [one["condition"] for one in json.loads(out[-1])["conditions"]] == ["one", "two"]


def test_export_hands_on_every_option(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export = stub("export.hf.export_draft", {})
    trained = stub("export.source.target_dtype", "bfloat16")
    load = stub("target.load", "TARGET")
    words = ("export", "run", "out", "--format", "vllm", "--slim", "--no-check",
             "--weights", "ema", "--overwrite", "--licence", "apache-2.0")  # fmt: skip
    assert run(monkeypatch, *words) == 0
    assert (trained.args, load.args[0].dtype) == ((Path("run"),), "bfloat16")
    assert [str(path) for path in export.args[:2]] == ["run", "out"]
    facts = export.options.pop("facts")
    assert facts.licence == "apache-2.0"
    assert export.options == {
        "weights": "ema",
        "format": "vllm",
        "slim": True,
        "tokenizer": "TOKENIZER",
        "calibration": None,
        "check": False,
        "overwrite": True,
    }
    assert capsys.readouterr().out == "wrote out\n"
    export.answer = {"check": {"accept_length": 2.3456}}
    more = ("--target", "t", "--dtype", "float32", "--json")
    assert run(monkeypatch, "export", "run", "out", *more) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote out, accept_length 2.346 when decoded again",
        json.dumps(export.answer),
    ]
    assert (load.args[0].path, load.args[0].dtype) == ("t", "float32")
    assert export.options["check"] is True
    assert export.options["weights"] == "best"
    assert export.options["facts"] is None


def test_export_encodes_the_prompts_to_calibrate_with(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {"rounds": 300, "num_prompts": 3, "gains": True}
    found |= {when: {"survival": {"ece": ece}} for when, ece in (("before", 0.05), ("after", 0.02))}
    export = stub("export.hf.export_draft", {"calibration": found})
    stub("export.source.target_dtype", "auto")
    read = stub("bench.prompt_sets.read_sets", {"a": ["x", "y"], "b": ["z"]})
    encode = stub("bench.evaluate.encode_sets", ({"a": [[1], [2]], "b": [[3]]}, None))
    words = ("--calibrate", "some/*.jsonl", "--calibrate-limit", "2")
    assert run(monkeypatch, "export", "run", "out", *words, "--calibrate-temperature", "0.5") == 0
    assert read.args == (["some/*.jsonl"],)
    assert encode.args[1:] == ("TOKENIZER", {"a": ["x", "y"], "b": ["z"]}, 2)
    asked = export.options["calibration"]
    assert (asked.prompt_ids, asked.name, asked.temperature) == ([[1], [2], [3]], "a, b", 0.5)
    assert "300 rounds of 3 prompts: error of survival 5.0% before, 2.0%" in capsys.readouterr().out
    found["gains"] = False
    assert run(monkeypatch, "export", "run", "out", *words) == 0
    assert "2.0% after; not written, for the Brier score does not gain" in capsys.readouterr().out
    for option, value in (("--calibrate-limit", "2"), ("--calibrate-temperature", "0.0")):
        export.args = ()
        assert run(monkeypatch, "export", "run", "out", option, value) == 2
        assert f"error: {option} {value} is for --calibrate" in capsys.readouterr().err
        assert export.args == ()


def test_every_format_can_be_asked_for() -> None:
    assert get_args(get_args(Format)[0]) == FORMATS


def test_convert_hands_on_every_option(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert = stub("export.convert.convert_draft", {"format": "vllm"})
    outline = stub("target.outline", "OUTLINE")
    load = stub("target.load", "TARGET")
    assert run(monkeypatch, "convert", "a", "b", "--to", "vllm") == 0
    assert [str(one) for one in convert.args] == ["a", "b", "vllm"]
    nothing = {"target": None, "load_target": None, "slim": False, "overwrite": False}
    assert convert.options == nothing
    assert capsys.readouterr().out == "wrote b for vllm\n"
    words = ("convert", "a", "b", "--to", "hf", "--target", "t", "--slim", "--overwrite", "--json")
    assert run(monkeypatch, *words) == 0
    assert convert.options.pop("load_target")() == "TARGET"
    assert convert.options == {"target": "OUTLINE", "slim": True, "overwrite": True}
    assert (outline.args[0].path, load.args[0].path) == ("t", "t")
    assert capsys.readouterr().out.splitlines()[-1] == '{"format": "vllm"}'


def test_serve_hands_on_every_option(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = stub("serving.server.serve")
    given = {
        "num_draft_tokens": 2,
        "confidence_threshold": 0.25,
        "default_max_tokens": 3,
        "max_output_tokens": 4,
        "max_queue": 5,
        "max_body_bytes": 600,
        "deadline_s": 7.0,
        "drain_s": 8.0,
        "step_timeout_s": 9.0,
        "load_timeout_s": 10.0,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words += ["--host=h", "--port=0", "--model-name=m", "--api-key=k", "--draft=d"]
    assert run(monkeypatch, "serve", "--target", "smollm2-135m", *words) == 0
    load, tokenizer = serve.args
    assert tokenizer == "TOKENIZER"
    settings = serve.options.pop("settings")
    assert load.func is load_model
    assert load.args[1:] == ("d", frozenset(), settings)
    assert {name: getattr(settings, name) for name in given} == given
    assert serve.options.pop("load_rank") is None
    assert serve.options == {"host": "h", "port": 0, "model_name": "m", "api_key": "k"}
    assert run(monkeypatch, "serve", "--target", "smollm2-135m") == 0
    assert serve.args[0].args[1] is None
    assert run(monkeypatch, "serve", "--target", "smollm2-135m", "--draft", "nextn:4") == 0
    assert serve.args[0].args[1] == "nextn:4"
    assert run(monkeypatch, "serve", "--target", "smollm2-135m", "--draft", "nextn:x") == 2


def test_sampling_tells_where_every_row_is(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rejects = Rejects(read=20)
    for number in range(3):
        rejects.add(RowError(Reason.NO_MESSAGES), f"\u00e9.jsonl:{number}")
    done = SampleReport(rejects, written=13, resumed=4, new_tokens=4321, seconds=2.0)
    sample = stub("corpus.sampler.sample_responses", done)
    stub("corpus.prompts.read_prompts", ["row"])
    load = stub("target.load", "TARGET")
    words = ("sample", "--prompts", "p", "--out", "o", "--target", "t", "--json")
    assert run(monkeypatch, *words) == 0
    told = "o: 20 rows asked for = {} written + 4 there already + 3 rejected + {} failed; "
    told += "4,321 new tokens at 2,160/s"
    line, report = capsys.readouterr().out.splitlines()
    assert line == told.format(13, 0)
    assert json.loads(report) == {"out": "o", "prompts": Rejects().to_dict(), **done.to_dict()}
    # names of files are for people, too
    assert "\u00e9.jsonl" in report
    assert load.args[0].path == "t"
    assert sample.args[0] == "TARGET"

    # of a server: what failed, and what was said of the kind that must be mended first
    stub("target.remote.describe")
    stub("corpus.files.expand", [])
    stub("corpus.endpoint.sample_endpoint", done)
    done.written = 5
    again = "see o.errors.jsonl; the same command asks them again"
    for kinds, first, ending in (
        ({"timeout": 7, "refused": 1}, {"refused": "400", "timeout": "slow"}, "refused: 400"),
        ({"half": 1, "timeout": 7}, {"half": "500", "timeout": "slow"}, "timeout: slow"),
        ({"half": 1, "timeout": 7}, {}, None),
    ):
        done.errors, done.first_errors = Counter(kinds), first
        assert run(monkeypatch, *words, "--endpoint", "http://host:1/v1") == 1
        said = capsys.readouterr()
        assert said.out.splitlines()[0] == told.format(5, 8)
        listed = ", ".join(f"{name} {count}" for name, count in Counter(kinds).most_common())
        assert said.err == f"error: 8 rows were not answered ({listed}), {again}" + (
            f"; the first {ending}\n" if ending else "\n"
        )


def test_limits_of_sample_and_bench_reach_the_prompts(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = stub("corpus.prompts.read_prompts", ["row"])
    sample = stub("corpus.sampler.sample_responses", SampleReport(written=1))
    assert run(monkeypatch, "sample", "--prompts", "p", "--out", "o", "--limit", "5") == 0
    assert read.args[:2] == (("p",), 5)
    assert read.options == {"with_tools": True}
    assert sample.args[2] == ["row"]
    assert sample.args[3].out == "o"
    asked = stub("corpus.endpoint.sample_endpoint", SampleReport(written=1))
    lazy = stub("corpus.prompts.iterate_prompts", ["row"])
    stub("corpus.files.expand", [])
    at = ("--endpoint", "http://host:1/v1/")
    assert run(monkeypatch, "sample", "--prompts", "p", "--limit", "5", *at) == 0
    assert lazy.args[:2] == (("p",), 5)
    assert lazy.options == {"with_tools": True}
    assert asked.args[3].endpoint == "http://host:1/v1"

    stub("bench.prompt_sets.read_sets", {"a": [[1], [2]], "b": [[3], [4]]})
    done = SimpleNamespace(table=str, to_dict=lambda: {"requests": []}, check=lambda: None)
    measure = stub("bench.serving.measure", done)
    words = ("--prompts", "p", "--limit", "3", "--max-tokens", "9", "--seed", "0", "--ignore-eos")
    assert run(monkeypatch, "bench", "serving", *words) == 0
    assert measure.args[1] == [[1], [2], [3]]
    assert measure.options["max_tokens"] == [9, 9, 9]
    assert measure.options["seed"] == 0
    assert measure.options["ignore_eos"] is True


def test_capture_taps_the_layers_that_are_asked_for(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = report(rows=1, tokens=2000, bytes=3000, forward_s=4.0, other_s=0.5, skipped=[])
    capture = stub("corpus.capture.capture", done)
    assert run(monkeypatch, "capture", "--out", "o", "draft.target_layer_ids=[0, 4]") == 0
    assert capture.args[3].out == "o"
    assert capture.args[4] == (0, 4)
    told = "o: 1 rows, 2,000 tokens, 3,000 bytes; 4.0 s in the target, 0.5 s in all else"
    assert capsys.readouterr().out.splitlines() == [told]
    done.skipped = ["r1", "r2"]
    words = ("capture", "--out", "o", "draft.target_layer_ids=[0, 4]", "--json")
    assert run(monkeypatch, *words) == 0
    assert capsys.readouterr().out.splitlines() == [
        told,
        "2 rows were left out: see o/quarantine.jsonl",
        '{"a": 1}',
    ]
    assert run(monkeypatch, "capture", "draft.num_taps=2") == 0
    assert capture.args[4] == (1, 3)
    stub("export.load.read_config", SimpleNamespace(target_layer_ids=(2, 3)))
    assert run(monkeypatch, "capture", "draft.init_from=x", "draft.num_taps=2") == 0
    assert capture.args[4] == (2, 3)


def test_the_doctor_fails_on_what_it_found(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> None:
        raise DataError("no usable row")

    found = report(render=lambda console: print("a table"), check=check)
    examine = stub("corpus.doctor.examine", found)
    load = stub("target.load_tokenizer", "TOKENIZER")
    words = ("x.jsonl", "y.jsonl", "--max-length", "77", "--show", "0", "--target", "t", "--json")
    assert run(monkeypatch, "doctor", *words) == 2
    # a report that fails is shown first
    said = capsys.readouterr()
    assert said.out.splitlines() == ["a table", '{"a": 1}']
    assert said.err == "error: no usable row\n"
    assert examine.args[:2] == (["x.jsonl", "y.jsonl"], "TOKENIZER")
    assert examine.args[2].max_length == 77
    assert examine.options == {"show": 0}
    assert load.args[0].path == "t"
    found.check = lambda: None
    assert run(monkeypatch, "doctor", "x.jsonl") == 0
    assert (examine.args[2].max_length, examine.options) == (4096, {"show": 1})
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (RunError("the check failed"), 1, "error: the check failed\n"),
        (DataError("no row"), 2, "error: no row\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_an_error_says_which_kind_it_is_by_its_exit_code(
    error: Exception,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    class Kept(io.StringIO):
        """A stream whose text outlives its end."""

        left = False

        def close(self) -> None:
            self.left = True

    monkeypatch.setattr("dspark.demo.run", fail)
    stream = Kept()
    monkeypatch.setattr(sys, "stderr", stream)
    assert run(monkeypatch, "demo") == code
    assert stream.getvalue() == words
    # nothing more is written where nobody reads
    assert stream.left is isinstance(error, BrokenPipeError)
    # a pipe reads results from there
    assert capsys.readouterr().out == ""


def test_nothing_is_sampled_from_an_evaluation_set(
    stub: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("speculator-benchmarks", "RedHatAI/speculator_benchmarks:x"):
        assert run(monkeypatch, "sample", "--prompts", source) == 2
        said = capsys.readouterr().err
        assert "sample.prompts: 'RedHatAI/speculator_benchmarks' is an evaluation set" in said
