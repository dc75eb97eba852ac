import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark import html_page
from dspark.cli import main
from dspark.config import DataSettings
from dspark.corpus import doctor
from dspark.corpus.chat import template_hash
from dspark.corpus.dataset import ResponseRows
from dspark.corpus.doctor import examine
from dspark.corpus.doctor_html import check_place, page
from dspark.corpus.doctor_report import DoctorReport
from dspark.corpus.doctor_tables import histogram, quantiles
from dspark.corpus.languages import language
from dspark.corpus.responses import FORMAT
from dspark.errors import ConfigError, DataError, TargetError
from dspark.testing import tiny_tokenizer
from tests.unit.templates import FORGETFUL

DATA = DataSettings()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def tokens(name: str, length: int, supervised: int, **more: Any) -> dict[str, Any]:
    mask = [0] * (length - supervised) + [1] * supervised
    ids = [65 + i % 20 for i in range(length)]
    return {"id": name, "input_ids": ids, "loss_mask": mask, **more}


def sampled(tokenizer: Any, name: str, length: int, supervised: int, **more: Any) -> dict[str, Any]:
    own = {"format": FORMAT, "template_hash": template_hash(tokenizer), "finish_reason": "stop"}
    return tokens(name, length, supervised, **{**own, **more})


def talk(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_figures_of_a_mixed_file(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        sampled(tokenizer, "a", 10, 4, thinking=True),
        sampled(tokenizer, "b", 30, 12, finish_reason="length"),
        sampled(tokenizer, "c", 9, 4, thinking=False, template_hash="f" * 16),
        tokens("d", 10, 4),
        tokens("e", 8, 1),
        tokens("f", 26, 2),
        tokens("a", 12, 4),
        {"id": "g", "input_ids": [260, 1, 1], "loss_mask": [1, 1, 1]},
        talk("q", "yes"),
        {"turns": ["only a question"]},
        "not json",
        "",
        "[1]",
    )
    report = examine([path], tokenizer, DataSettings(max_length=24), show=2)
    told = report.to_dict()
    assert report.ok
    assert told["rows"]["read"] == 12
    assert told["rows"]["accepted"] == 6
    assert told["rows"]["reasons"] == {
        "too_few_supervised": 1,
        "prompt_too_long": 1,
        "duplicate_id": 1,
        "id_out_of_vocabulary": 1,
        "invalid_json": 1,
        "not_an_object": 1,
    }
    assert sum(told["kinds"].values()) == told["rows"]["accepted"]
    assert told["kinds"] == {"sampled": 3, "tokenised": 1, "conversation": 1, "prompt": 1}
    # "b" is cut to 24 tokens, of which 6 are supervised; "yes<end>" has 4 tokens
    chat_length = len(tokenizer.apply_chat_template(talk("q", "yes")["messages"])["input_ids"]) - 1
    assert told["tokens"] == 10 + 24 + 9 + 10 + min(24, chat_length)
    assert told["supervised_tokens"] == 4 + 6 + 4 + 4 + sum_supervised(chat_length)
    assert told["cut_share"] == round((1 + (chat_length > 24)) / 5, 4)
    assert told["length_stopped_share"] == round(1 / 3, 4)
    assert told["thinking"] == {"on": 1, "unset": 3, "off": 1}
    assert told["thinking_share"] == 0.2
    assert told["duplicate_ids"] == 1
    assert told["rows"]["places"]["duplicate_id"] == [f"{path}:7 (a)"]
    assert told["duplicate_contents"] == 1
    assert told["other_templates"] == {"f" * 16: 1}
    assert json.loads(json.dumps(told)) == told
    assert len(report.previews) == 2
    for word in ("another chat template", "get cut", "stopped by length", "repeat the content"):
        assert any(word in warning for warning in report.warnings), word


def sum_supervised(chat_length: int) -> int:
    return 4 - max(0, chat_length - 24)


def test_the_counts_are_those_of_training(tokenizer: Any, tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        tokens("a", 10, 4),
        tokens("b", 40, 12),
        tokens("c", 40, 30),
        tokens("a", 10, 4),
        talk("q", "yes", "r", "no"),
    )
    data = DataSettings(responses=(path,), max_length=30)
    report = examine([path], tokenizer, data)
    rows = ResponseRows(data, tokenizer)
    assert report.rejects.counts == rows.rejects.counts
    assert report.rejects.read == rows.rejects.read
    assert (report.answered, report.cut, report.tokens) == (
        len(rows),
        rows.num_cut,
        rows.num_tokens,
    )


def test_a_conversation_counts_as_the_sequences_it_is_trained_as(tmp_path: Path) -> None:
    stripping: Any = tiny_tokenizer()
    stripping.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write(tmp_path / "r.jsonl", talk("q", "yes", "r", "no"))
    data = DataSettings(responses=(path,))
    report, rows = examine([path], stripping, data), ResponseRows(data, stripping)
    assert report.answered == report.rejects.read == rows.rejects.read == len(rows) == 2
    assert report.supervised == len("yes") + len("no") + 2


def test_prompts_without_answers_are_fine(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["a?", "b?"]}, talk("c?"), {"text": "d?"})
    report = examine([path], tokenizer, DataSettings())
    report.check()
    assert report.verdict == "3 prompts, no answers yet: run dspark sample"
    assert report.to_dict()["length"]["max"] > 4
    assert report.warnings == []


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([tokens("a", 8, 0), tokens("b", 8, 1)], "no row can be trained on: 2 of 2"),
        ([tokens("a", 8, 0), {"text": "q"}], "no row can be trained on: 1 of 2"),
        ([tokens("a", 4098, 2), {"text": "q"}], "no row can be trained on: 1 of 2 .*too_long 1"),
        (["x", "y"], r"r\.jsonl' holds no usable row: all 2 are rejected .*invalid_json 2"),
        ([], r"r\.jsonl' holds no usable row: it is empty"),
    ],
)
def test_hopeless_data_is_refused(
    tokenizer: Any, tmp_path: Path, rows: list[Any], sentence: str
) -> None:
    report = examine([write(tmp_path / "r.jsonl", *rows)], tokenizer, DataSettings())
    assert not report.ok
    with pytest.raises(DataError, match=sentence):
        report.check()


def test_a_file_without_a_usable_row_is_named_beside_good_ones(
    tokenizer: Any, tmp_path: Path
) -> None:
    good = write(tmp_path / "good.jsonl", tokens("a", 8, 4), "broken", tokens("b", 9, 4))
    again = write(tmp_path / "again.jsonl", tokens("a", 8, 4))
    report = examine([good, again], tokenizer, DataSettings())
    report.check()
    assert report.warnings[0] == "2 of 4 rows rejected: invalid_json 1, duplicate_id 1"
    bad, empty = write(tmp_path / "bad.jsonl", "[1]"), write(tmp_path / "empty.jsonl")
    report = examine([good, bad, empty], tokenizer, DataSettings())
    assert report.to_dict()["useless_files"] == {bad: 1, empty: 0}
    with pytest.raises(DataError, match=r"bad\.jsonl' .*all 1 .*empty\.jsonl' .* is empty"):
        report.check()
    # training stops at the same files
    for path in (bad, empty):
        with pytest.raises(DataError, match=path):
            ResponseRows(DataSettings(responses=(good, path)), tokenizer)


def test_prompts_are_counted_as_rows_are(tokenizer: Any, tmp_path: Path) -> None:
    ask = {
        "messages": [{"role": "system", "content": RUSSIAN}, {"role": "user", "content": ENGLISH}]
    }
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", **ask},
        {"id": "b", **ask},
        {"id": "a", "text": "another question"},
        {"id": "c", "turns": ["这个问题很简单。", ENGLISH]},
        # the template has no place for them
        {"id": "d", "text": "q", "tools": [{"name": "f"}]},
    )
    report = examine([path], tokenizer, DATA)
    told = report.to_dict()
    assert told["rows"]["reasons"] == {"duplicate_id": 1, "tools_unsupported": 1}
    assert told["kinds"] == {"prompt": 3}
    # in the language of the question that is asked first
    assert {name: one["rows"] for name, one in told["languages"].items()} == {"en": 2, "zh": 1}
    assert (report.lengths.total(), told["duplicate_contents"]) == (3, 1)
    assert len(report.previews) == 1


def test_little_supervision_is_warned_about(tokenizer: Any, tmp_path: Path) -> None:
    report = examine([write(tmp_path / "r.jsonl", tokens("a", 100, 2))], tokenizer, DataSettings())
    assert report.warnings == ["only 2.0% of the tokens are supervised"]


def test_the_preview_colours_what_is_supervised(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", talk("why?", "because"))
    report = examine([path], tokenizer, DataSettings())
    assert report.previews == [
        [
            ("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n", "context"),
            ("because<|im_end|>", "supervised"),
        ]
    ]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=200)
    report.render(console)
    assert "\x1b[30;42mbecause<|im_end|>" in out.getvalue()
    assert "1 rows can be trained on" in out.getvalue()


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(TargetError, match="no chat template"):
        examine([write(tmp_path / "r.jsonl", {"text": "q"})], bare, DataSettings())


def test_quantiles_and_histogram() -> None:
    assert quantiles(range(1, 102)) == {"min": 1, "p50": 51, "p90": 91, "p99": 100, "max": 101}
    assert quantiles([]) == {}
    assert histogram([1, 2, 3, 4, 5, 128, 129]) == {
        "<=1": 1,
        "<=2": 1,
        "<=4": 2,
        "<=8": 1,
        "<=128": 1,
        "<=256": 1,
    }


RUSSIAN = "\u0414\u0430"
ENGLISH = "What is the best of all for you?"


def said(question: str, *answer: str, **more: Any) -> dict[str, Any]:
    text, *reasoning = answer
    message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning[0]
    return {"messages": [{"role": "user", "content": question}, message], **more}


def test_languages_settings_and_reasoning_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    warm, cold = {"temperature": 1.0, "top_p": 0.95}, {"temperature": 0.0}
    thought = tokens("t", 30, 10)
    thought["input_ids"] = [65] * 10 + tokenizer.encode("why</think>是的没有问题")
    thought["loss_mask"] = [0] * 10 + [1] * (len(thought["input_ids"]) - 10)
    path = write(
        tmp_path / "r.jsonl",
        sampled(tokenizer, "a", 12, 6, sampling=warm, **said("q", "Yes, it is the one you want.")),
        sampled(
            tokenizer, "b", 12, 8, sampling=warm, finish_reason="length", **said("q", "是的。")
        ),
        sampled(tokenizer, "c", 12, 4, sampling=cold, **said("q", RUSSIAN, "let me see")),
        sampled(
            tokenizer, "d", 12, 4, sampling=cold, **said("q", "<think>\nhm\n</think>\n\n" + RUSSIAN)
        ),
        sampled(
            tokenizer, "e", 12, 4, sampling=cold, **said("q", "<think>\n\n</think>\n\n" + RUSSIAN)
        ),
        thought,
    )
    report = examine([path], tokenizer, DataSettings())
    told = report.to_dict()
    assert {name: one["rows"] for name, one in told["languages"].items()} == {
        "ru": 3,
        "zh": 2,
        "en": 1,
    }
    assert told["languages"]["ru"]["row_share"] == 0.5
    assert told["languages"]["ru"]["supervised_share"] == round(12 / report.supervised, 4)
    assert sum(one["supervised_tokens"] for one in told["languages"].values()) == report.supervised
    assert told["settings"] == {
        "temperature 0.0": {"rows": 3, "supervised": 12, "stopped": 0},
        "temperature 1.0, top_p 0.95": {"rows": 2, "supervised": 14, "stopped": 1},
    }
    assert told["reasoning_share"] == 0.5


def test_near_certain_mistakes_are_told(tokenizer: Any, tmp_path: Path) -> None:
    refusal = "I am sorry, but something went wrong on the server."
    path = write(
        tmp_path / "r.jsonl",
        *(said(f"question {i}", refusal, category="chat") for i in range(12)),
        *(said(f"sum {i}", "", category="math\ud800") for i in range(3)),
        # what is no text is no name
        *(said(f"number {i}", "yes", category=i) for i in range(2)),
        sampled(tokenizer, "e", 12, 4, **said("q", "\n")),
        tokens("all", 8, 8),
        tokens("twice", 9, 4),
        tokens("twice", 9, 4),
        tokens("again", 9, 4),
    )
    report = examine([path], tokenizer, DataSettings())
    told = report.to_dict()
    json.dumps(told, ensure_ascii=False).encode()
    assert told["categories"] == {
        "chat": {"read": 12, "rejected": 0},
        "math?": {"read": 3, "rejected": 3},
    }
    assert told["duplicate_id_share"] == round(1 / 22, 4)
    assert told["duplicate_content_share"] == round(1 / 18, 4)
    for sentence in (
        "all 3 rows of category 'math?' are rejected",
        "1 of 18 answers are empty",
        "11 of 18 answers are word for word another row's",
        "1 rows supervise their prompt too",
    ):
        assert any(warning.startswith(sentence) for warning in report.warnings), sentence
    report.check()


def test_answers_that_are_all_empty_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    rows = [sampled(tokenizer, name, 12, 4, **said(name, " \n")) for name in "ab"]
    report = examine([write(tmp_path / "r.jsonl", *rows)], tokenizer, DataSettings())
    with pytest.raises(DataError, match="all 2 answers are empty"):
        report.check()


def test_an_answer_that_only_thinks_or_calls_is_none_that_is_missing(
    tokenizer: Any, tmp_path: Path
) -> None:
    long = "Das ist nicht die Antwort auf die Frage."
    assert len(long) == 40
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    rows = [
        {"messages": [{"role": "user", "content": "q"}, call]},
        said("q", "", long),
        # word for word again, from 40 characters on; a call is often made in the same words
        *(said("q", long) for _ in range(2)),
        *(said("q", long[:39]) for _ in range(2)),
        *({"messages": [{**call, "content": long + ENGLISH}]} for _ in range(2)),
        # of several answers the last counts
        talk("q", ENGLISH, "r", long + "!"),
        talk("q", long, "r", ENGLISH + "!"),
    ]
    own = (sampled(tokenizer, str(i), 12, 4, **row) for i, row in enumerate(rows))
    report = examine([write(tmp_path / "r.jsonl", *own)], tokenizer, DATA)
    assert (report.empty_answers, report.reasoning, report.repeated_answers) == (0, 1, 1)
    counts = {name: tally.rows for name, tally in report.languages.items()}
    assert counts == {"none": 1, "de": 8, "en": 1}


def test_of_very_many_names_the_rest_are_counted_together(tokenizer: Any, tmp_path: Path) -> None:
    rows = [said(f"q{i}", "yes", category=f"c{i}") for i in range(103)]
    counts = examine([write(tmp_path / "r.jsonl", *rows)], tokenizer, DATA).categories
    assert len(counts) == 101
    assert counts["(others)"] == [3, 0]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("The cat is on the table, and it is not for you.", "en"),
        ("这个问题很简单。", "zh"),
        ("これは漢字を使う文章です。", "ja"),
        ("이것은 한국어 문장입니다.", "ko"),
        ("Это простой вопрос, и вот ответ.", "ru"),
        ("هذا سؤال بسيط", "ar"),
        ("Das ist nicht die Antwort auf eine Frage.", "de"),
        ("Le chat est dans la maison avec vous.", "fr"),
        ("El gato no es como los perros de la casa.", "es"),
        ("O gato não é como os cães da casa.", "pt"),
        ("Il gatto non è nella casa con gli altri.", "it"),
        ("Het is een huis voor de kat en het kind.", "nl"),
        ("To nie jest kot, ale pies, który się boi.", "pl"),
        ("Bu ev bir kedi için çok güzel ve büyük.", "tr"),
        ("זו שאלה פשוטה", "he"),
        ("यह एक सरल प्रश्न है", "hi"),
        ("นี่เป็นคำถามง่าย", "th"),
        ("Αυτή είναι μια απλή ερώτηση", "el"),
        # a script that says more with a letter outweighs more Latin ones
        ("请用 PyTorch 写代码", "zh"),
        ("これは PyTorch です", "ja"),
        ("이것은 PyTorch 입니다", "ko"),
        # few kana are Japanese still, and one that is quoted is not
        ("東京都知事選挙立候補者一覧表の公開", "ja"),
        ("这个词在日语中写作の。意思是表示所属关系的助词。很常见也很简单。", "zh"),
        # one small word among many names, a sentence with a sum, an end that is not looked at
        ("Alpha Beta Gamma Delta the Epsilon Zeta Eta Theta Iota Kappa Lambda Mu Nu Xi", "other"),
        ("The sum is 2 + 3 = 5 for you and me.", "en"),
        ("The answer is for you. " * 45 + "这个问题很简单。" * 200, "en"),
        ("Here is one:\n```python\ndef f(x):\n    return [y for y in x if y]\n```", "code"),
        ("for (int i = 0; i < n; ++i) { a[i] = b[i] * (c + 1); }", "code"),
        ("Reykjavik", "other"),
        ("42 🙂", "none"),
        ("Use `print`: the answer is 这 in the text.", "en"),
    ],
)
def test_languages(text: str, name: str) -> None:
    assert language(text) == name


def test_what_is_cut_is_shown_apart(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", tokens("a", 300, 290))
    for limit, cut in ((50, 64 + len(" …")), (236, 64)):
        (shown,) = examine([path], tokenizer, DataSettings(max_length=limit)).previews
        assert [state for _, state in shown] == ["context", "supervised", "cut"]
        assert [len(text) for text, _ in shown] == [10, limit - 10, cut]


def test_the_page_is_self_contained_and_escapes_the_data(tokenizer: Any, tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\x00\x1b[31m"
    rows = [
        said("q" + evil, "a" + evil, category=evil),
        sampled(tokenizer, "s" + evil, 150, 140, template_hash=evil, sampling={evil: 1}),
        {**tokens(evil, 8, 4), "format": evil},
        '{"messages": [{"role": "<script>", "content": "x"}]}',
    ]
    folder = tmp_path / "<script>"
    folder.mkdir()
    source = write(folder / "r.jsonl", *rows)
    data = DataSettings(max_length=90)
    text = page(examine([source], tokenizer, data, show=3), [source])
    assert "<script" not in text
    assert "\x00" not in text
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert") >= 5
    assert not re.search(r"(?:src|href)=|url\(|@import|https?:", text)
    states = ("supervised", "context", "cut")
    assert all(f'<span class="{state}">' in text for state in states)
    parsed = Tags()
    parsed.feed(text)
    assert parsed.open == []
    assert {"svg", "rect", "table", "pre"} <= parsed.seen
    assert "prefers-color-scheme: dark" in text


class Tags(HTMLParser):
    """Which elements there are, and which of them are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command_writes_the_page_and_fails_on_hopeless_data(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("dspark.target.load_tokenizer", lambda settings: tokenizer)
    html = tmp_path / "new" / "report.html"

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["dspark", "doctor", *words])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    bad = write(tmp_path / "bad.jsonl", tokens("a", 8, 0))
    assert run(bad, "--html", str(html)) == 2
    assert "no row can be trained on" in html.read_text()
    good = write(tmp_path / "good.jsonl", tokens("a", 8, 4))
    assert run(good, "--html", str(html)) == 0
    assert "1 rows can be trained on" in html.read_text()
    assert [path.name for path in html.parent.iterdir()] == ["report.html"]
    assert run(good, "--html", str(tmp_path)) == 2
    assert "is a directory: name a file" in capsys.readouterr().err
    # told before anything is read
    assert run(str(tmp_path / "none.jsonl"), "--html", "/proc/report.html") == 2
    assert "--html /proc/report.html cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("held", ['{"id": "a"}\n', "notes", "# report"])
def test_a_page_is_not_written_over_rows(tmp_path: Path, held: str) -> None:
    # `dspark doctor --html a.jsonl b.jsonl`
    path = tmp_path / "a.jsonl"
    path.write_text(held)
    with pytest.raises(ConfigError, match=r"--html .*a\.jsonl is there already .* report\.html"):
        check_place(path)
    assert path.read_text() == held


def test_a_page_is_written_over_a_page_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    check_place(path)
    path.touch()
    check_place(path)
    path.write_text(page(DoctorReport(4096, "0"), ["a"]))
    check_place(path)
    # of another kind
    path.write_text(html_page.page("bench serving", []))
    with pytest.raises(ConfigError, match="no page of `dspark doctor`"):
        check_place(path)
    with pytest.raises(ConfigError, match="/dev/null is there already"):
        check_place(Path("/dev/null"))


def test_the_vocabulary_is_counted_once(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(doctor, "id_limit", lambda one: asked.append(one) or 260)  # type: ignore[func-returns-value]
    path = write(tmp_path / "r.jsonl", *(tokens(f"r{i}", 8, 4) for i in range(5)))
    assert examine([path], tokenizer, DataSettings()).answered == 5
    assert len(asked) == 1


def test_rows_in_which_no_block_fits_are_told(tokenizer: Any, tmp_path: Path) -> None:
    """As the trainer does: a block is an anchor and the token behind it, both supervised."""
    apart = {**tokens("a", 10, 0), "loss_mask": [0, 1] * 5}
    only = write(tmp_path / "apart.jsonl", apart)
    report = examine([only], tokenizer, DATA)
    assert not report.ok
    assert "none of the 1 rows holds two supervised tokens in a row" in report.verdict
    mixed = examine([write(tmp_path / "m.jsonl", apart, tokens("b", 9, 3))], tokenizer, DATA)
    assert mixed.ok
    assert mixed.to_dict()["rows_without_anchor"] == 1
    assert any("1 rows teach nothing" in one for one in mixed.warnings)


def test_every_sequence_of_a_conversation_is_looked_at_by_itself(tmp_path: Path) -> None:
    """A template that forgets reasoning gives a sequence a turn, each with all the messages."""
    forgetful = tiny_tokenizer()
    forgetful.chat_template = FORGETFUL
    turns = [
        (
            "Why is the sky blue?",
            "the air is thin and it is of light",
            "it is the light in the air",
        ),
        ("Und auf Deutsch?", "das ist nicht ein Satz", "das Licht ist in der Luft und nicht rot"),
        ("En fran\u00e7ais ?", "", "la lumi\u00e8re est dans le ciel et les nuages pour vous"),
    ]
    messages = []
    for asked, reasoning, answer in turns:
        messages.append({"role": "user", "content": asked})
        said = f"<think>{reasoning}</think>{answer}" if reasoning else answer
        messages.append({"role": "assistant", "content": said})
    path = write(tmp_path / "r.jsonl", {"messages": messages})
    report = examine([path], forgetful, DATA).to_dict()
    assert report["rows"]["accepted"] == 3
    assert {name: one["rows"] for name, one in report["languages"].items()} == {
        "en": 1, "de": 1, "fr": 1,
    }  # fmt: skip
    assert report["reasoning_rows"] == 2
    assert report["repeated_answers"] == 0


def test_a_file_of_prompts_among_responses_is_named(tokenizer: Any, tmp_path: Path) -> None:
    answers = write(tmp_path / "answers.jsonl", talk("q", "yes"), "[1]", "[1]")
    prompts = write(tmp_path / "prompts.jsonl", {"turns": ["only a question"]})
    report = examine([answers, prompts], tokenizer, DATA)
    assert report.ok
    assert any(f"training stops at {prompts}" in one for one in report.warnings)
    # and what the trainer says is about that file alone
    with pytest.raises(DataError, match=r"1 of 1 rows rejected: no_answer 1; first: .*prompts"):
        ResponseRows(DataSettings(responses=(answers, prompts)), tokenizer)


def test_ids_that_are_null_are_not_there(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {**talk("q", "yes"), "input_ids": None})
    assert examine([path], tokenizer, DATA).kinds == {"conversation": 1}
    assert len(ResponseRows(DataSettings(responses=(path,)), tokenizer)) == 1
