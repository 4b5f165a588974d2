"""docs/performance.md shows what benchmarks/results/gpu.json holds, and every bar of the kernels."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
GENERATOR = ROOT / "benchmarks" / "gpu_docs.py"

STEPS = [
    f"{scheme}, {size}, {parts}"
    for scheme in ("oscar", "kitty")
    for size in ("1 x 131,072", "32 x 8,192, all rows at once", "32 x 8,192, one row after another")
    for parts in ("attention alone", "with Linears")
]
# (case of the table of bars, its bar), as they were asked for.
ASKED = (
    ("oscar-g128 (norms), 1 x 131,072", "at least 4.50 times as fast as the peer"),
    ("oscar-g128 (norms), 32 x 8,192", "at least 4.50 times as fast as the peer"),
    ("oscar-g128 (norms), 1 x 131,072", "at least 55.0 % of copy bandwidth"),
    ("oscar-g128 (norms), 32 x 8,192", "at least 55.0 % of copy bandwidth"),
    ("oscar G = 32, 1 x 131,072", "at least 3.50 times as fast as the peer"),
    ("oscar G = 32, 32 x 8,192", "at least 3.50 times as fast as the peer"),
    ("1-bit spans, 32 x 8,192", "at least 6.00 times as fast as the peer"),
    ("1-bit spans with tau, 32 x 8,192", "at least 4.00 times as fast as the peer"),
    ("oscar-g128 (norms), 1 x 1,024", "at least 1.00 times as fast as the peer"),
    ("quantize a prompt of 32768 tokens, oscar-g128", "at most 15.0 % of the peer's time"),
    ("page flush, batch 1, oscar", "at most 1 % of 128 steps"),
    ("page flush, batch 32, oscar", "at most 1 % of 128 steps"),
    *((f"page flushes, {steps}", "at most 1 % of the steps") for steps in STEPS),
    *((f"p99 step time, {steps}", "at most 1 % above the median step") for steps in STEPS),
    ("prompt of 8192 tokens, output and sums", "at most 1.80 times the peer's time"),
    ("selective flash attention, memory", "linear"),
    ("W4A16, 4096 x 14336, 1 rows", "at least 3.20 times as fast as the peer"),
    ("W4A16, 4096 x 14336, 1 rows", "at least 70.0 % of copy bandwidth"),
    ("W4A16, 4096 x 14336, 16 rows", "at least 2.50 times as fast as the peer"),
    ("W4A16, 4096 x 14336, 256 rows", "at least 0.90 times as fast as the peer"),
)


def bars() -> list[list[str]]:
    text = DOCS.read_text(encoding="utf8")
    table = text.split("<!-- bars: ")[1].split("<!-- end of bars -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_tables_are_those_of_the_recorded_run(tmp_path):
    copy = tmp_path / DOCS.name
    copy.write_bytes(DOCS.read_bytes())
    subprocess.run([sys.executable, str(GENERATOR), "--json", str(RESULTS), "--docs", str(copy)], check=True)
    message = "run `python benchmarks/gpu_docs.py` and read whether the text still fits"
    assert copy.read_text(encoding="utf8") == DOCS.read_text(encoding="utf8"), message


@pytest.mark.parametrize(("case", "bar"), ASKED)
def test_every_bar_is_measured(case, bar):
    found = [cells for cells in bars() if cells[0] == case and cells[1].startswith(bar)]
    assert found
    for cells in found:
        assert cells[5].startswith(("met", "**missed**"))
        assert cells[2]


def test_every_bar_of_the_recorded_run_is_in_the_table():
    asked = {case for case, _ in ASKED}
    rows = [row for section in json.loads(RESULTS.read_text(encoding="utf8"))["rows"].values() for row in section]
    with_bars = {row["case"] for row in rows if row.get("bar") is not None or row.get("bandwidth_bar") is not None}
    assert asked & with_bars
    assert with_bars <= {cells[0] for cells in bars()}


def test_a_missed_bar_leads_to_its_analysis():
    text = DOCS.read_text(encoding="utf8")
    headings = [line.lstrip("# ").lower() for line in text.splitlines() if line.startswith("#")]
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading).replace(" ", "-") for heading in headings}
    for cells in bars():
        for anchor in re.findall(r"\(#([^)]*)\)", cells[5]):
            assert anchor in anchors, cells


def test_all_checks_of_the_recorded_run_passed():
    results = json.loads(RESULTS.read_text(encoding="utf8"))
    assert all(check["passed"] for section in results["checks"].values() for check in section)


def test_the_table_of_whole_models_is_that_of_the_results():
    before = DOCS.read_text(encoding="utf8")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import engine_docs
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    results = json.loads((ROOT / "benchmarks" / "results" / "engine.json").read_text(encoding="utf8"))
    assert engine_docs.with_table(before, results) == before
    rows = before.split(engine_docs.BEGIN)[1].split(engine_docs.END)[0]
    # every bar that was asked for has its row
    assert rows.count("| met |") + rows.count("**missed**") == 3 + 3 + 3 + 3 + 2 + 1


@pytest.fixture
def linear_docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("linear_docs")


def test_the_tables_of_linears_are_those_of_the_results(linear_docs):
    before = (ROOT / "docs" / "performance.md").read_text(encoding="utf8")
    message = "run `python benchmarks/linear_docs.py` and read whether the text still fits"
    assert linear_docs.with_tables(before) == before, message


def test_linears_take_what_measured_best_or_nearly_so(linear_docs):
    results = json.loads((ROOT / "benchmarks" / "results" / "linear_shapes.json").read_text(encoding="utf8"))
    assert len(results["rows"]) == 4 * 7
    for row in results["rows"]:
        others = [time for path, time in row["times"].items() if path not in ("bf16", "dispatch", "humming")]
        assert linear_docs.ours(row)[1] <= 1.05 * min(*others, *row["fused"].values()), (row["case"], row["rows"])
