import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, sys
from dspark.target import load_tokenizer
import dspark.corpus.doctor
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.slow
def test_who_only_reads_data_loads_no_models_and_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": "."},
    )
    loaded = json.loads(done.stdout)
    heavy = ("torch._dynamo", "triton", "sympy", "transformers.modeling_utils", "accelerate")
    assert "dspark.target" in loaded
    assert [name for name in heavy if name in loaded] == []
