"""The tables of benchmarks/PAPERS.md, from the results of benchmarks/papers.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.tables import markdown_table as table

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


def reports(results: Path) -> dict[str, Any]:
    """The reports of all models, by name."""
    files = sorted(results.glob("papers_*.json"))
    return {file.stem.removeprefix("papers_"): json.loads(file.read_text(encoding="utf-8")) for file in files}


def laboratory(found: Mapping[str, Any], tables: Mapping[str, Sequence[Any]]) -> str:
    """Every table, with all models side by side."""
    parts = [_settings(found), *(_table(found, *rows) for rows in tables.items()), _persistence(found)]
    return "\n\n".join(filter(None, parts))


def _settings(found: Mapping[str, Any]) -> str:
    rows = []
    for name, report in found.items():
        s = report["settings"]
        device = "CPU" if s["device"] == "cpu" else "GPU"
        rows.append((name, s["segments"], f"{s['length']:,}", f"{s['samples']} x 512 tokens", device))
    return table(("model", "segments of each text", "tokens of a segment", "calibrated on", "device"), rows)


def _table(reports: Mapping[str, Any], name: str, rows: Sequence[Any]) -> str:
    """Per row the KL on each text, and in brackets the paired difference from the row that it is compared with."""
    models = [m for m, r in reports.items() if any(row.case.key in r["rows"] for row in rows)]
    if not models:
        return ""
    against = {row.label: row.case.key for row in rows}
    lines = []
    for row in rows:
        found = [reports[m]["rows"].get(row.case.key) for m in models]
        if any(found):
            base = [reports[m]["rows"].get(against.get(row.against, "")) for m in models]
            bits = next((f"{f['bits']:.2f}" for f in found if f and "bits" in f), "3")
            lines.append((row.label, bits, row.against, *map(_cell, found, base)))
    return f"### {TITLES[name]}\n\n{table(('', 'bits', 'compared with', *models), lines)}"


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
    rows = [(name, *(f"{sum(v) / len(v):.0%}" for v in values.values())) for name, values in found.items()]
    return (
        "### MiniKV: heavy hitters of the prompt that still are at the segment's end (section 3.1.1), by their share "
        f"of the prompt\n\n{table(('model', *shares), rows)}"
    )
