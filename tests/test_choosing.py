"""The table of docs/choosing.md: the best caches of every size."""

import choosing
import pytest


def row(bits, kl, protocol="pages"):
    texts = {"wikitext": {"kl": kl, "perplexity": 20.0}}
    return {
        "protocol": protocol,
        "size": {"mean_bits_per_value": bits, "bits_per_value": bits},
        "texts": texts,
        "found": {"64": [True, False]},
    }


def report(**rows):
    return {"settings": {"texts": ["wikitext"], "recall": [16, 64]}, "caches": rows}


def test_the_best_are_those_that_nothing_of_their_size_or_less_beats():
    found = choosing.frontier(
        report(
            small=row(1.5, 0.5),
            worse=row(2.4, 0.2),
            better=row(2.3, 0.1),
            as_large=row(2.28, 0.101),
            wasteful=row(3.0, 0.3),
            wide=row(4.0, 0.01),
            sealed=row(2.0, 0.001, "sealed prompt"),
            failed={"failure": "no calibration"},
        ),
        "wikitext",
    )
    assert found == ["small", "better", "wide"]


def test_every_cache_stands_beside_the_best_of_its_size_that_is_read_in_the_same_way():
    auto = "auto:kv_bits=2.5,context=64"
    given = report(
        b=row(2.5, 0.2),
        evicts=row(2.0, 0.3, "sealed prompt"),
        large=row(3.0, 0.4, "sealed prompt"),
        **{auto: row(2.5, 0.1), auto + ", sealed prompt": row(2.5, 0.05, "sealed prompt")},
    )
    labels = {"b": "the plain one", "evicts": "H2O-like", "never": "measured"}
    pages = choosing.others(given, labels, "pages").splitlines()
    assert pages[2:] == ["| the plain one | 2.50 | 0.2000 | 50 % | `auto --kv-bits 2.5`: 0.1000 |"]
    assert choosing.others(given, labels, "sealed prompt").splitlines()[2:] == [
        "| H2O-like | 2.00 | 0.3000 | 50 % |  |",
        "| `auto --kv-bits 2.5` | 2.50 | 0.0500 | 50 % |  |",
        "| `large` | 3.00 | 0.4000 | 50 % | `auto --kv-bits 2.5`: 0.0500 |",
    ]


def test_simulated_rows_are_sorted_by_bits():
    rows = {
        "large": {"bits": 4.0, "kl": 0.1, "perplexity": 20.0},
        "small": {"bits": 2.0, "kl": 0.5, "perplexity": 25.0},
    }
    about = {"prompts": 2, "length": 8, "scored": 4, "text": "novels.txt", "source_perplexity": 19.0}
    text = choosing.simulated({"rows": rows, **about})
    assert text.endswith("| small | 2.00 | 0.5000 | 25.00 |\n| large | 4.00 | 0.1000 | 20.00 |")


def test_the_table_is_put_between_the_pages_markers():
    page = choosing.PAGE.read_text(encoding="utf-8")
    page = choosing.with_table(page, choosing.table(report(a=row(2.3, 0.1234)), {}), choosing.BEST)
    page = choosing.with_table(page, "nothing else", choosing.OTHERS)
    assert "| `a` | 2.30 | 0.1234 | 50 % |" in page
    assert page.startswith("# Which cache to choose")
    assert f"{choosing.OTHERS[0]}\nnothing else\n" in page
    with pytest.raises(ValueError, match="no place"):
        choosing.with_table("nothing", "", choosing.BEST)


def test_the_page_shows_what_the_reports_hold():
    """Of a report that changed, the page has to be written again."""
    page = choosing.PAGE.read_text(encoding="utf-8")
    assert choosing.written(page, choosing.REPORT, choosing.SIMULATED) == page
