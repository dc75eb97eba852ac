"""docs/formats.md is what the code says, and every requirement it lists is met."""

from pathlib import Path

import pytest

from dspark.export.formats_page import READ_BY, REQUIRED, page, places
from dspark.export.layouts import FORMATS, Format

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


def test_the_page_is_up_to_date() -> None:
    remedy = "run `python -m dspark.export.formats_page > docs/formats.md`"
    assert PAGE.read_text(encoding="utf-8") == page(), remedy


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_readers_of_a_layout_require_is_written(format: Format) -> None:
    readers = READ_BY[format]
    wanted = [key for key, rules in REQUIRED.items() if any(one in rules for one in readers)]
    assert len(wanted) > 20
    assert [key for key in wanted if not places(key, format)] == []
