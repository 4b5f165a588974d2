"""The table of docs/choosing.md: the best cache for each number of bits."""

import choosing
import pytest


def row(bits, kl, protocol="pages"):
    texts = {"wikitext": {"kl": kl, "perplexity": 20.0}}
    return {"protocol": protocol, "size": {"mean_bits_per_value": bits}, "texts": texts, "found": {"64": [True, False]}}


def report(**rows):
    return {"settings": {"texts": ["wikitext"], "recall": [16, 64]}, "caches": rows}


def test_a_band_has_its_best_cache_and_is_left_out_where_more_bits_buy_nothing():
    found = choosing.best_in_bands(
        report(
            small=row(1.5, 0.5),
            worse=row(2.4, 0.2),
            better=row(2.3, 0.1),
            wasteful=row(3.0, 0.3),
            wide=row(4.0, 0.01),
            sealed=row(2.0, 0.001, "sealed prompt"),
            failed={"failure": "no calibration"},
        ),
        "wikitext",
    )
    assert [(band, name) for band, name, _ in found] == [(1.6, "small"), (2.5, "better"), (4.3, "wide")]


def test_a_baseline_stands_beside_the_best_cache_of_its_size():
    found = choosing.baselines(
        report(
            a=row(2.5, 0.1), b=row(2.5, 0.2), evicts=row(2.0, 0.3, "sealed prompt") | {"size": {"bits_per_value": 2}}
        ),
        "# Comment\nb # the plain one\nevicts # H2O-like\nnever # measured\n",
    ).splitlines()
    assert found[2] == "| H2O-like | 2.00 | after a prompt | 0.3000 | 50% |  |"
    assert found[3] == "| the plain one | 2.50 | page by page | 0.2000 | 50% | `a`: 0.1000 |"
    assert len(found) == 4


def test_simulated_rows_are_sorted_by_bits():
    rows = {
        "large": {"bits": 4.0, "kl": 0.1, "perplexity": 20.0},
        "small": {"bits": 2.0, "kl": 0.5, "perplexity": 25.0},
    }
    about = {"prompts": 2, "length": 8, "scored": 4, "text": "novels.txt", "source_perplexity": 19.0}
    text = choosing.simulated({"rows": rows, **about})
    assert text.endswith("| small | 2.00 | 0.5000 | 25.00 |\n| large | 4.00 | 0.1000 | 20.00 |")


def test_the_table_is_put_between_the_pages_markers():
    page = choosing.with_table(choosing.PAGE.read_text(encoding="utf-8"), choosing.table(report(a=row(2.3, 0.1234))))
    assert "| 2.5 | `a` | 2.30 | 0.1234 | 50% |" in page
    assert page.startswith("# Which cache to choose")
    assert page.rstrip().endswith("a paper describes.")
    with pytest.raises(ValueError, match="no place"):
        choosing.with_table("nothing", "")
