"""A tiny target with its draft, and a server of them, for whoever needs just these."""

from collections.abc import Iterator
from typing import Any

import pytest

from dspark.testing import tiny_draft, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    target = tiny_target()
    return target, tiny_draft(target)


@pytest.fixture(scope="module")
def address(pair: tuple[Any, Any]) -> Iterator[str]:
    # only here: most tests do without the server's packages
    from dspark.serving.server import running

    with running(*pair, tiny_tokenizer()) as where:
        yield where
