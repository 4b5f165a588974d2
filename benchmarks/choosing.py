"""The table of docs/choosing.md, from the report of benchmarks/real_model.py: the best cache for each number of bits.

python benchmarks/choosing.py [--report benchmarks/results/real_model.json] [--page docs/choosing.md]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "results" / "real_model.json"
PAGE = ROOT / "docs" / "choosing.md"
BEGIN, END = "<!-- written by benchmarks/choosing.py -->", "<!-- end -->"
# Upper ends of the bands of average stored bits per value.
BANDS = (1.6, 2.2, 2.5, 2.8, 3.2, 4.3, 8.6)


def best_in_bands(report: dict[str, Any], text: str) -> list[tuple[float, str, dict[str, Any]]]:
    """(band, name, row) of the cache with the smallest KL on a text among those of at most so many bits.

    Only caches that were read page by page are compared; a band whose best cache is that of the band below is left out,
    for its bits buy nothing.
    """
    rows = {
        name: row
        for name, row in report["caches"].items()
        if row.get("protocol") == "pages" and text in row.get("texts", {})
    }
    found: list[tuple[float, str, dict[str, Any]]] = []
    for band in BANDS:
        within = {name: row for name, row in rows.items() if row["size"]["mean_bits_per_value"] <= band}
        if not within:
            continue
        name = min(within, key=lambda each: within[each]["texts"][text]["kl"])
        if not found or found[-1][1] != name:
            found.append((band, name, within[name]))
    return found


def table(report: dict[str, Any]) -> str:
    """The bands in Markdown: bits, cache, KL on each text, numbers found at the longest length."""
    texts = report["settings"]["texts"]
    lengths = [int(length) for length in report["settings"]["recall"]]
    heads = ["at most, bits per value", "cache", "measured", *(f"KL, {text}" for text in texts)]
    heads += [f"found at {max(lengths):,}"] if lengths else []
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for band, name, row in best_in_bands(report, next(iter(texts))):
        cells = [f"{band:g}", f"`{name}`", f"{row['size']['mean_bits_per_value']:.2f}"]
        cells += [f"{row['texts'][text]['kl']:.4f}" if text in row["texts"] else "" for text in texts]
        if lengths:
            hits = row.get("found", {}).get(str(max(lengths)))
            cells.append("" if hits is None else f"{sum(hits) / len(hits):.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """A page with the table between its markers."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    options.page.write_text(with_table(options.page.read_text(encoding="utf-8"), table(report)), encoding="utf-8")


if __name__ == "__main__":
    main()
