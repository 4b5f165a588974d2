"""The tables of docs/choosing.md: the best cache for each number of bits, and what else there is.

    python benchmarks/choosing.py [--report FILE] [--simulated FILE] [--page docs/choosing.md]

From the reports of benchmarks/real_model.py, where baselines are the cases of benchmarks/baselines.txt, and of
benchmarks/simulated_baselines.py. What was not measured has no row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "results" / "real_model.json"
SIMULATED = ROOT / "benchmarks" / "results" / "simulated_baselines.json"
BASELINES = ROOT / "benchmarks" / "baselines.txt"
PAGE = ROOT / "docs" / "choosing.md"
BEGIN, END = "<!-- written by benchmarks/choosing.py -->", "<!-- end -->"
SAME_SIZE = 0.005  # bits per value
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


def baselines(report: dict[str, Any], cases: str) -> str:
    """The measured cases of a case file in Markdown, by bytes, with the smallest KL among page caches of their size.

    Whole-prompt caches are scored on the tokens after a sealed prompt, and nothing is put beside them here.
    """
    texts, lengths = report["settings"]["texts"], [int(length) for length in report["settings"]["recall"]]
    rows = report["caches"]
    pages = {name: row for name, row in rows.items() if row.get("protocol") == "pages"}
    found = []
    for line in cases.splitlines():
        name, _, label = (part.strip() for part in line.partition("#"))
        row = rows.get(name, {})
        if "size" not in row:
            continue
        in_pages = row["protocol"] == "pages"
        bits = row["size"]["mean_bits_per_value" if in_pages else "bits_per_value"]
        within = {n: r for n, r in pages.items() if r["size"]["mean_bits_per_value"] < bits + SAME_SIZE}
        best = min(within, key=lambda each: within[each]["texts"][texts[0]]["kl"], default=None) if in_pages else None
        cells = [label or name, f"{bits:.2f}", "page by page" if in_pages else "after a prompt"]
        cells += [f"{row['texts'][text]['kl']:.4f}" for text in texts]
        hits = row.get("found", {}).get(str(max(lengths))) if lengths else None
        cells += ["" if hits is None else f"{sum(hits) / len(hits):.0%}"] if lengths else []
        cells.append("" if best in (None, name) else f"`{best}`: {within[best]['texts'][texts[0]]['kl']:.4f}")
        found.append((bits, cells))
    if not found:
        return ""
    heads = ["baseline", "bits per value", "read", *(f"KL, {text}" for text in texts)]
    heads += [f"found at {max(lengths):,}"] if lengths else []
    heads.append(f"best of at most its size: KL, {texts[0]}")
    lines = ["| " + " | ".join(cells) + " |" for _, cells in sorted(found, key=lambda each: each[0])]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines])


def simulated(report: dict[str, Any]) -> str:
    """What the cache has no format for, in Markdown, by bits."""
    lines = ["| simulated | bits per value | KL | perplexity |", "|---|---|---|---|"]
    for name, row in sorted(report["rows"].items(), key=lambda item: item[1]["bits"]):
        lines.append(f"| {name} | {row['bits']:.2f} | {row['kl']:.4f} | {row['perplexity']:.2f} |")
    about = (
        f"Quantized and dequantized in place: {report['prompts']} prompts of {report['length']:,} tokens "
        f"of {report['text']}, the next {report['scored']} scored, codes and metadata counted; all but the first 4 and "
        "the newest tokens are quantized at once, so that these rows compare with each other and not with those above "
        f"(source perplexity {report['source_perplexity']:.2f}):"
    )
    return f"{about}\n\n" + "\n".join(lines)


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
    parser.add_argument("--simulated", type=Path, default=SIMULATED)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    report = json.loads(options.report.read_text(encoding="utf-8"))
    parts = [table(report)]
    if others := baselines(report, BASELINES.read_text(encoding="utf-8")):
        parts += ["Baselines, and what is better at their bytes:", others]
    if options.simulated.is_file():
        parts.append(simulated(json.loads(options.simulated.read_text(encoding="utf-8"))))
    page = with_table(options.page.read_text(encoding="utf-8"), "\n\n".join(parts))
    options.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
