"""The documentation's tables and pictures are those that `make docs` writes, with every bar of the kernels."""

import json
import re
from pathlib import Path

import gpu_docs
import methods_docs
import multimodal
import pytest
from tiny.models import ARCHITECTURES

import docs
from kvconvert.methods.scheme import FIELDS, PLAN_TENSORS, PRESETS

ROOT = Path(__file__).resolve().parent.parent
BARS = ROOT / "benchmarks" / "KERNELS.md"


@pytest.mark.parametrize("name", docs.MAKERS)
def test_a_page_is_up_to_date_with_results_and_code(name):
    message = "run `make docs` and read whether the text beside the table still fits"
    assert (ROOT / name).read_text(encoding="utf-8") == docs.MAKERS[name](), message


def test_no_table_that_a_page_holds_is_written_by_hand():
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"), ROOT / "README.md"]:
        places = re.findall(r"<!-- ([\w -]+): written by `make docs` -->", page.read_text(encoding="utf-8"))
        assert places == [*docs.PAGES.get(page.relative_to(ROOT).as_posix(), {})], page.name


def test_the_format_and_the_methods_are_described_in_full():
    bundle, methods = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("bundle", "methods"))
    assert not [name for name in (*FIELDS, *PLAN_TENSORS) if f"| `{name}` |" not in bundle]
    assert not [
        name for name in PRESETS if f"| `{name.removesuffix('-paper').removesuffix('-plain')}` |" not in methods
    ]


def test_every_architecture_of_the_matrix_has_a_row():
    results = json.loads((ROOT / "tests" / "test_matrix" / "models.json").read_text(encoding="utf8"))
    text = methods_docs.architectures(results)
    assert not [name for name, entry in ARCHITECTURES.items() if f"`{entry.model_type}`" not in text]
    for entry in results["models"].values():
        assert entry["weights"].get("refused", "") in text
    assert f"{len(results['models'])} architectures" in (ROOT / "README.md").read_text(encoding="utf8")


def test_a_missed_bar_leads_to_its_analysis():
    text = BARS.read_text(encoding="utf8")
    headings = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings}
    assert {*re.findall(r"\*\*missed\*\*: \[analysis\]\(#([^)]*)\)", text)} <= anchors


def test_all_checks_of_the_recorded_run_passed():
    for checks in docs.results("gpu")["checks"].values():
        assert checks["made"]
        assert checks["failed"] == []


def test_linears_take_what_measured_best_or_nearly_so():
    rows = docs.results("linear_shapes")["rows"]
    assert len(rows) == 4 * 7
    for row in rows:
        others = [time for path, time in row["times"].items() if path not in ("bf16", "dispatch")]
        assert gpu_docs.chosen_path(row)[1] <= 1.05 * min(*others, *row["fused"].values()), (row["case"], row["rows"])


def test_every_width_of_image_tokens_is_recorded_with_and_without_tau_and_range():
    rows = docs.results("multimodal")["rows"]
    for bits in (8, 4, 2, 1):
        for name in ("min and max", "tau", "range", "tau and range"):
            assert f"{bits} bit, {name}" in rows


def test_the_shares_that_the_notes_on_images_name_are_the_recorded_ones():
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf8").split("<!-- end of images -->")[1]
    result = docs.results("multimodal")
    rows = result["rows"]
    exact = [
        rows[f"1 bit, {name}"]["exact_answers"]
        for name in ("min and max", "range", "released factors about the midpoint")
    ]
    for value in (*exact, rows["1 bit, range"]["exact_captions"], result["full_precision"]["exact_answers"]):
        assert multimodal.share(value) in text
