"""The tables of docs/choosing.md: the best caches of every size, and what else there is.

    python benchmarks/choosing.py [--report FILE] [--simulated FILE] [--page docs/choosing.md]

From the reports of benchmarks/real_model.py, where baselines are the cases of benchmarks/baselines.txt, and of
benchmarks/simulated_baselines.py. What was not measured has no row.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from real_model_docs import BASELINES, SEALED, cases_of

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "results" / "real_model.json"
SIMULATED = ROOT / "benchmarks" / "results" / "simulated_baselines.json"
PAGE = ROOT / "docs" / "choosing.md"
BEST = "<!-- written by benchmarks/choosing.py -->", "<!-- end -->"
OTHERS = "<!-- also written by benchmarks/choosing.py -->", "<!-- end of the others -->"
SAME_SIZE = 1.02  # times the bits per value


def label(name: str, labels: Mapping[str, str]) -> str:
    """How a user asks for a case: a preset's name, `auto` with its budget, or what a case file calls it."""
    if name.startswith("auto:"):
        option, _, value = name.removeprefix("auto:").removesuffix(SEALED).partition(",")[0].partition("=")
        return f"`auto --{option.replace('_', '-')} {value}`"
    return labels.get(name, f"`{name.removesuffix(SEALED)}`")


def bits_of(row: dict[str, Any]) -> float:
    """Stored bits per value: in the mean over how full the last page is, or after a whole prompt."""
    return row["size"]["mean_bits_per_value" if row["protocol"] == "pages" else "bits_per_value"]


def frontier(report: dict[str, Any], text: str) -> list[str]:
    """Names of the caches read page by page that have a smaller KL on a text than all of about their size or less."""
    rows = _rows(report, "pages")
    divergence = {name: row["texts"][text]["kl"] for name, row in rows.items()}
    return sorted(
        (
            name
            for name in rows
            if all(
                divergence[name] < divergence[other] or bits_of(rows[other]) > SAME_SIZE * bits_of(rows[name])
                for other in rows.keys() - {name}
            )
        ),
        key=lambda name: bits_of(rows[name]),
    )


def _rows(report: dict[str, Any], protocol: str) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in report["caches"].items() if row.get("protocol") == protocol}


def table(report: dict[str, Any], labels: Mapping[str, str]) -> str:
    """The best caches of every size in Markdown."""
    heads, figures = _figures(report)
    lines = [f"| cache | bits per value | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for name in frontier(report, report["settings"]["texts"][0]):
        row = report["caches"][name]
        lines.append(f"| {' | '.join([label(name, labels), f'{bits_of(row):.2f}', *figures(row)])} |")
    return "\n".join(lines)


def _figures(report: dict[str, Any]) -> tuple[list[str], Callable[[dict[str, Any]], list[str]]]:
    """Heads of the columns of quality, and what a row has there."""
    texts, lengths = report["settings"]["texts"], report["settings"]["recall"]
    heads = [f"KL, {text}" for text in texts] + ([f"found at {max(lengths):,}"] if lengths else [])

    def figures(row: dict[str, Any]) -> list[str]:
        cells = [f"{row['texts'][text]['kl']:.4f}" for text in texts]
        if lengths:
            hits = row.get("found", {}).get(str(max(lengths)))
            cells.append("" if hits is None else f"{100 * sum(hits) / len(hits):.0f} %")
        return cells

    return heads, figures


def others(report: dict[str, Any], labels: Mapping[str, str], protocol: str) -> str:
    """All measured caches of a protocol in Markdown, each with the smallest KL among those of at most its size."""
    rows, text = _rows(report, protocol), report["settings"]["texts"][0]
    heads, figures = _figures(report)
    heads.append(f"best of at most its size: KL, {text}")
    lines = [f"| cache | bits per value | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for name, row in sorted(rows.items(), key=lambda item: bits_of(item[1])):
        within = [other for other in rows if bits_of(rows[other]) <= SAME_SIZE * bits_of(row)]
        best = min(within, key=lambda other: rows[other]["texts"][text]["kl"])
        beside = "" if best == name else f"{label(best, labels)}: {rows[best]['texts'][text]['kl']:.4f}"
        if protocol == "sealed prompt" or not name.startswith("auto:"):
            lines.append(f"| {' | '.join([label(name, labels), f'{bits_of(row):.2f}', *figures(row), beside])} |")
    return "\n".join(lines) if rows else ""


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


def with_table(page: str, text: str, markers: tuple[str, str]) -> str:
    """A page with the table between two markers."""
    head, begin, rest = page.partition(markers[0])
    _, end, tail = rest.partition(markers[1])
    if not begin or not end:
        raise ValueError(f"the page has no place for the table: {' ... '.join(markers)}")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def written(page: str, report_file: Path, simulated_file: Path) -> str:
    """The page with the tables of two reports, of which the second may be missing."""
    report, labels = json.loads(report_file.read_text(encoding="utf-8")), cases_of(BASELINES)
    settings = report["settings"]
    parts = []
    if pages := others(report, labels, "pages"):
        parts += ["Read page by page:", pages]
    if sealed := others(report, labels, "sealed prompt"):
        prompt = settings.get("sealed_prompt", settings["length"] // 2)
        scored = settings["length"] - prompt
        parts += [f"Read and compressed as one prompt of {prompt:,} tokens, the next {scored} scored:", sealed]
    if simulated_file.is_file():
        parts.append(simulated(json.loads(simulated_file.read_text(encoding="utf-8"))))
    return with_table(with_table(page, table(report, labels), BEST), "\n\n".join(parts), OTHERS)


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--simulated", type=Path, default=SIMULATED)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(written(page, options.report, options.simulated), encoding="utf-8")


if __name__ == "__main__":
    main()
