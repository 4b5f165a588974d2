"""benchmarks/real_model.py: its case files are recipes of this version, and `auto` is compared at equal bytes."""

import json
from pathlib import Path

import pytest
import real_model_docs as docs
import real_model_merge as merge
from real_model_bench import at_page_end
from real_model_cases import Case
from real_model_measure import cache_size
from tiny.checkpoints import tiny_model

from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
FILES = ("ablations.txt", "baselines.txt")
CASES = [case for file in FILES for case in docs.cases_of(BENCHMARKS / file)]


@pytest.mark.parametrize("case", CASES)
def test_a_line_of_a_case_file_is_a_recipe_of_a_cache(case, tmp_path):
    recipe = Case.parse(case).recipe(True, tmp_path)
    assert recipe.kv is not None
    assert recipe.weights.method == "none"


def test_bits_at_a_pages_end_are_those_of_a_cache_that_was_measured_at_both():
    tiny = tiny_model("llama", 0).config
    schemes = [PRESETS["oscar-g128"]] * tiny.num_hidden_layers
    length = 4 + 4 * 128
    size = cache_size(tiny, schemes, {}, length, "cpu")
    # Not equal, because quotients are averaged.
    assert at_page_end(size["mean_bits_per_value"], length) == pytest.approx(size["bits_per_value"], abs=0.03)
    longer = cache_size(tiny, schemes, {}, length + 128, "cpu")["bits_per_value"]
    assert at_page_end(longer, length, length + 128) == pytest.approx(size["bits_per_value"], abs=1e-6)


def row(mean, kl, protocol="pages", last=None):
    size = {"mean_bits_per_value": mean, "bits_per_value": mean if last is None else last}
    return {"protocol": protocol, "size": size, "texts": {"novels": {"kl_by_segment": kl}}}


REPORT = {
    "settings": {"texts": ["novels"]},
    "baseline": "kivi",
    "caches": {
        "kivi": row(3.0, [0.2, 0.3]),
        "oscar": row(2.5, [0.1, 0.1]),
        "auto:kv_bits=2.9": row(2.9, [0.1, 0.2]),
        "auto:kv_bits=2.5": row(2.5, [0.2, 0.3]),
        "kivi, sealed prompt": row(3.0, [0.3, 0.3], "sealed prompt"),
        # Its own mean is over lengths, of which after a sealed prompt none counts.
        "auto:kv_bits=2, sealed prompt": row(2.4, [0.1, 0.3], "sealed prompt", last=2.0),
        "minikv": row(2.0, [0.1, 0.2], "sealed prompt"),
        "broken": {"failure": "no calibration"},
    },
}


def test_auto_is_paired_with_every_cache_of_its_protocol_that_takes_its_bytes():
    assert docs._same_size(docs._measured(REPORT)) == [
        ("auto:kv_bits=2.5", "oscar"),
        ("auto:kv_bits=2.9", "kivi"),
        ("auto:kv_bits=2, sealed prompt", "minikv"),
    ]


def test_the_verdict_counts_significant_differences():
    text = docs._auto(REPORT)
    assert "Of 3 differences 1 are significantly better and 1 significantly worse" in text
    assert "| kivi | 3.000 | 2.900 | -0.1000 (-0.1000 to -0.1000) |" in text
    assert "| minikv | 2.000 | 2.000 | +0.0500 (+0.0000 to +0.1000) |" in text


def test_options_that_every_search_has_are_said_once():
    caches = {"auto:kv_bits=2,context=64": {}, "auto:kv_bits=3,context=64, sealed prompt": {}, "kivi": {}}
    labels = [docs._label(name, {"caches": caches}) for name in caches]
    assert labels == ["auto:kv_bits=2", "auto:kv_bits=3, sealed prompt", "kivi"]
    assert "for all: context=64." in docs._options({"caches": caches})
    caches["auto:kv_bits=2"] = {}
    assert [docs._label(name, {"caches": caches}) for name in caches] == [*caches]
    assert docs._options({"caches": caches}) == ""


def part(rows, length=64):
    return {"settings": {"length": length}, "source": {}, "baseline": "a", "caches": rows, "bundles": {}}


def test_rows_of_several_runs_are_one_report_if_they_were_measured_in_the_same_way():
    first, second = part({"a": {"kl": 1, "seconds": 5}}), part({"a": {"kl": 1, "seconds": 6}, "b": {"kl": 2}})
    found = merge.merged([first, second], ["1.json", "2.json"])
    assert found["caches"] == {"a": {"kl": 1, "seconds": 5}, "b": {"kl": 2}}
    assert first["caches"].keys() == {"a"}
    with pytest.raises(UsageError, match=r"2\.json was measured otherwise than 1\.json: length"):
        merge.merged([first, part({}, length=65)], ["1.json", "2.json"])
    with pytest.raises(UsageError, match=r"2\.json has other figures of a "):
        merge.merged([first, part({"a": {"kl": 2}})], ["1.json", "2.json"])


@pytest.mark.parametrize(
    ("report", "page"), [("real_model", "real-model"), ("real_model_reference", "reference-model")]
)
def test_a_page_shows_what_its_report_holds(report, page, tmp_path):
    shown = BENCHMARKS.parent / "docs" / f"{page}.md"
    copy = tmp_path / "page.md"
    copy.write_text(shown.read_text(encoding="utf-8"), encoding="utf-8")
    rows = json.loads((BENCHMARKS / "results" / f"{report}.json").read_text(encoding="utf-8"))
    docs.write_page(rows, copy, docs.cases_of(docs.BASELINES))
    assert copy.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8")
