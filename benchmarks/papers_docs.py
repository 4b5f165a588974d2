"""The tables of benchmarks/PAPERS.md and the summary in docs/methods.md, from the results of benchmarks/papers.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import bootstrap_mean

ROOT = Path(__file__).resolve().parent.parent
LABORATORY, USERS = ROOT / "benchmarks" / "PAPERS.md", ROOT / "docs" / "methods.md"
BEGIN, END = "<!-- written by benchmarks/papers.py -->", "<!-- end of papers -->"
TITLES = {
    "pages": "Page methods: the paper's preset, then ours, which is calibrated",
    "prompts": "After a sealed prompt of 1,024 tokens; `oscar-g128` read in the same way beside them",
    "oscar": "OScaR's parts and norms, groups of 128 (the paper's tables 9 and 10)",
    "kitty": "Kitty: share of the key channels with 4 bits",
    "budgets": "MiniKV: heavy hitters + newest tokens, shares of the prompt in full precision (the paper's figure 2)",
    "allocation": "MiniKV: half of the prompt, spread over layers, in full precision (the paper's figure 3)",
    "weights": "AWQ: weights of 3 bits, full-precision cache (the paper's tables 1 to 3)",
}
FEWEST = 4  # segments that tell anything of a spread
TEXTS = {"wikitext2-test": "WikiText-2", "python": "code"}


def write_pages(results: Path, tables: Mapping[str, Sequence[Any]], in_place: bool) -> None:
    """Print the tables of all models; put them, and the summary, between the marks of their pages if `in_place`."""
    files = sorted(results.glob("papers_*.json"))
    reports = {file.stem.removeprefix("papers_"): json.loads(file.read_text(encoding="utf-8")) for file in files}
    text = laboratory(reports, tables)
    if in_place:
        _put(LABORATORY, text)
        _put(USERS, summary(reports, tables))
    else:
        print(text)


def _put(page: Path, text: str) -> None:
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def laboratory(reports: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]) -> str:
    """Every table, with all models side by side."""
    return "\n\n".join(
        filter(
            None, [_settings(reports), *(_table(reports, *table) for table in tables.items()), _persistence(reports)]
        )
    )


def _settings(reports: Mapping[str, Any]) -> str:
    lines = [
        "| model | segments of each text | tokens of a segment | calibrated on | device |",
        "|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        s = report["settings"]
        device = "CPU" if s["device"] == "cpu" else "GPU"
        lines.append(f"| {name} | {s['segments']} | {s['length']:,} | {s['samples']} x 512 tokens | {device} |")
    return "\n".join(lines)


def _table(reports: Mapping[str, Any], name: str, rows: Sequence[Any]) -> str:
    """Per row the KL on each text, and below it the paired difference from the row that it is compared with."""
    models = [m for m, r in reports.items() if any(row.case.key in r["rows"] for row in rows)]
    if not models:
        return ""
    against = {row.label: row.case.key for row in rows}
    lines = [f"| | bits | compared with | {' | '.join(models)} |", f"|---|---|---|{'---|' * len(models)}"]
    for row in rows:
        found = [reports[m]["rows"].get(row.case.key) for m in models]
        if not any(found):
            continue
        base = [reports[m]["rows"].get(against.get(row.against, "")) for m in models]
        bits = next((f"{f['bits']:.2f}" for f in found if f and "bits" in f), "3")
        cells = [_cell(f, b) for f, b in zip(found, base, strict=True)]
        lines.append(f"| {row.label} | {bits} | {row.against} | {' | '.join(cells)} |")
    return f"### {TITLES[name]}\n\n" + "\n".join(lines)


def _cell(row: Any, base: Any) -> str:
    if not row:
        return ""
    said = []
    for text in TEXTS:
        kl = torch.tensor(row["texts"][text]["kl"], dtype=torch.float64)
        difference = ""
        if base:
            difference = f" ({_said(kl - torch.tensor(base['texts'][text]['kl'], dtype=torch.float64))})"
        said.append(f"{float(kl.mean()):.4f}{difference}")
    return "; ".join(said)


def _said(differences: torch.Tensor) -> str:
    """A paired difference: lower is better; "=" where the interval holds 0."""
    if len(differences) < FEWEST:
        return f"{float(differences.mean()):+.4f}"
    gain = bootstrap_mean(differences, 0)
    none = not gain.above_zero and not gain.below_zero
    return f"{'=, ' * none}{gain.low:+.4f} to {gain.high:+.4f}"


def _persistence(reports: Mapping[str, Any]) -> str:
    found = {name: report["persistence"] for name, report in reports.items() if "persistence" in report}
    if not found:
        return ""
    shares = list(next(iter(found.values())))
    lines = [f"| model | {' | '.join(shares)} |", f"|---|{'---|' * len(shares)}"]
    for name, values in found.items():
        lines.append(f"| {name} | {' | '.join(f'{sum(v) / len(v):.0%}' for v in values.values())} |")
    return (
        "### MiniKV: heavy hitters of the prompt that still are at the segment's end (section 3.1.1), by their share "
        "of the prompt\n\n" + "\n".join(lines)
    )


def summary(reports: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]) -> str:
    """KL on WikiText-2 / code of every method, the lowest of a column's page methods and of its others in bold.

    Models are left out of which some method is not measured yet.
    """
    needed = {row.case.key for name in ("pages", "prompts") for row in tables[name]}
    reports = {model: report for model, report in reports.items() if needed <= report["rows"].keys()}
    lines = [f"| preset | bits | {' | '.join(reports)} |", f"|---|---|{'---|' * len(reports)}"]
    for name in ("pages", "prompts"):
        rows = tables[name]
        kl = {m: {row.label: _means(r["rows"][row.case.key]) for row in rows} for m, r in reports.items()}
        best = {m: [min(values) for values in zip(*found.values(), strict=True)] for m, found in kl.items()}
        for row in rows:
            cells = [
                " / ".join(
                    f"**{x:.3f}**" if x == least else f"{x:.3f}"
                    for x, least in zip(kl[m][row.label], best[m], strict=True)
                )
                for m in reports
            ]
            bits = {f"{r['rows'][row.case.key]['bits']:.2f}": None for r in reports.values()}
            label = f"`{row.label}`" + (", sealed prompt" if name == "prompts" else "")
            lines.append(f"| {label} | {' to '.join(sorted(bits)[:: max(1, len(bits) - 1)])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _means(row: Any) -> tuple[float, ...]:
    return tuple(sum(row["texts"][text]["kl"]) / len(row["texts"][text]["kl"]) for text in TEXTS)
