"""The reference page is what the schema says."""

from pathlib import Path

import pytest

from torchtitan_diloco.config.fields import keys, kinds, sections
from torchtitan_diloco.config.reference import field_docs, page
from torchtitan_diloco.config.retired import FAULT_TOLERANCE_MOVED, FAULT_TOLERANCE_RETIRED, MOVED, RETIRED
from torchtitan_diloco.config.schema import DataSource, IslandTable

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_committed_page_is_up_to_date() -> None:
    """If this fails: python -m torchtitan_diloco.config.reference > docs/config.md"""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("table", [*sections().values(), DataSource, IslandTable], ids=lambda t: t.__name__)
def test_every_key_has_its_sentence(table: type) -> None:
    docs = field_docs(table)
    assert all(docs.get(name, "").endswith(".") for name in kinds(table)), docs


def test_the_page_names_every_key_of_today_and_of_yesterday() -> None:
    text = page()
    for key in keys():
        section, _, leaf = key.rpartition(".")
        assert f"`{leaf}`" in text or f"[[{key}]]" in text
        assert not section or f"`[{section}]`" in text or key == "data.sources"
    for old in (*RETIRED, *MOVED, *FAULT_TOLERANCE_MOVED, *FAULT_TOLERANCE_RETIRED):
        assert f"`{old}`" in text
