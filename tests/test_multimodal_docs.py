"""The multimodal table of docs/images.md shows what benchmarks/results/multimodal.json holds, and every ablation."""

import json
from pathlib import Path

import multimodal

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "images.md"
RESULTS = ROOT / "benchmarks" / "results" / "multimodal.json"


def test_the_table_is_that_of_the_recorded_run(tmp_path):
    copy = tmp_path / PAGE.name
    copy.write_bytes(PAGE.read_bytes())
    multimodal.write(json.loads(RESULTS.read_text(encoding="utf8")), copy)
    message = "run `python benchmarks/multimodal.py --write docs/images.md` and read whether the text still fits"
    assert copy.read_text(encoding="utf8") == PAGE.read_text(encoding="utf8"), message


def test_every_width_is_recorded_with_and_without_tau_and_range():
    rows = json.loads(RESULTS.read_text(encoding="utf8"))["rows"]
    for bits in (8, 4, 2, 1):
        for name in ("min and max", "tau", "range", "tau and range", "values per token", "values with one range"):
            assert f"{bits} bit, {name}" in rows


def test_the_shares_that_the_text_names_are_the_recorded_ones():
    text = PAGE.read_text(encoding="utf8").split(multimodal.END)[1]
    result = json.loads(RESULTS.read_text(encoding="utf8"))
    rows = result["rows"]
    exact = [
        rows[f"1 bit, {name}"]["exact_answers"]
        for name in ("min and max", "range", "released factors about the midpoint")
    ]
    captions = [rows[f"1 bit, {name}"]["exact_captions"] for name in ("range, values per token", "range")]
    for value in (*exact, *captions, result["full_precision"]["exact_answers"]):
        assert multimodal.share(value) in text
    assert f"{rows['2 bit, range']['bits_per_visual_value']:.2f} per value" in text
