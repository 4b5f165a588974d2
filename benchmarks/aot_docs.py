"""The readable form of the compiled table: docs/kernels.md between its two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: written by benchmarks/aot.py -->", "<!-- end of the table -->"
COLUMNS = {
    "registers": "registers",
    "shared": "shared memory",
    "instructions": "instructions",
    "loop": "in the main loop",
    "matrix": "of them matrix",
    "wide": "wide loads",
    "per_code": "per code",
}


def write_tables(path: Path, results: dict[str, Any]) -> None:
    """Replace what lies between the marks of a document."""
    text = path.read_text(encoding="utf8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n{END}{after}", encoding="utf8")


def tables(results: dict[str, Any]) -> str:
    """For each module a table of its variants, with figures of all architectures that they were compiled for."""
    rows = results["rows"]
    parts = []
    if "triton" in results:
        parts.append(f"Triton {results['triton']}, ptxas {results['ptxas']}; {len(rows)} compiled kernels.\n")
    for module in sorted({row["module"] for row in rows}):
        own = [row for row in rows if row["module"] == module]
        parts.append(f"### kernels/gpu/{module}.py\n")
        parts.append(_table(own))
    return "\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    # Names share a cell when nothing but the architecture differs.
    lines = [
        "| variant | sm | " + " | ".join(COLUMNS.values()) + " | remarks |",
        "|---|" + "---|" * (len(COLUMNS) + 2),
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['name']} | {row['capability']} |" + " |" * len(COLUMNS) + " does not compile |")
            continue
        cells = ["" if row[column] is None else _number(row[column]) for column in COLUMNS]
        remarks = "; ".join(
            [*row["problems"], *([f"spills: {row['spills']}"] if row["spills"] and row["stack"] else [])]
        )
        lines.append(f"| {row['name']} | {row['capability']} | " + " | ".join(cells) + f" | {remarks} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
