"""The documentation's tables and pictures are those that `make docs` writes."""

import re
from pathlib import Path

import pytest

import docs

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", docs.MAKERS)
def test_a_page_is_up_to_date_with_results_and_code(name):
    message = "run `make docs` and read whether the text beside the table still fits"
    assert (ROOT / name).read_text(encoding="utf-8") == docs.MAKERS[name](), message


def test_no_table_that_a_page_holds_is_written_by_hand():
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), ROOT / "README.md"]:
        places = re.findall(r"<!-- ([\w -]+): written by `make docs` -->", page.read_text(encoding="utf-8"))
        assert places == [*docs.PAGES.get(page.relative_to(ROOT).as_posix(), {})], page.name
