"""The tables of the documentation are those of the code."""

from pathlib import Path

import pytest

from kvconvert.methods.tables import DOCUMENTS, with_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_has_the_tables_that_the_code_makes(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert with_tables(text, DOCUMENTS[document]) == text, "run `make docs`"


def test_a_document_without_the_place_for_a_table_is_noticed():
    with pytest.raises(ValueError, match="no place for the table 'methods'"):
        with_tables("nothing", ("methods",))
