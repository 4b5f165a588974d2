"""The readable form of the compiled table: docs/kernels.md between its two marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: written by benchmarks/aot.py -->", "<!-- end of the table -->"
COLUMNS = {
    "capability": "sm",
    "registers": "registers",
    "stack": "stack",
    "shared": "shared memory",
    "instructions": "instructions",
    "loop": "in the main loop",
    "matrix": "matrix there",
    "wide": "wide loads there",
    "per_code": "per code",
}


def write_tables(path: Path, results: dict[str, Any]) -> None:
    """Replace what lies between the marks of a document."""
    text = path.read_text(encoding="utf8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{tables(results)}\n{END}{after}", encoding="utf8")


def tables(results: dict[str, Any]) -> str:
    """The usual variants one by one, then the extremes of each kernel on each architecture."""
    rows = [row for row in results["rows"] if "failed" not in row]
    usual = [row for row in rows if row["usual"]]
    parts = []
    if "triton" in results:
        parts.append(f"Triton {results['triton']}, ptxas {results['ptxas']}; {len(rows)} compiled kernels.\n")
    if usual:
        parts.append("### Decode attention of the presets: heads of 128 channels, 4 query heads per KV head, bf16\n")
        parts.append(_table(["kernel", *COLUMNS.values()], [_line(row["name"], [row]) for row in usual]))
    parts.append("### All kernels: the largest figures of their variants\n")
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["module"], row["name"].partition("-")[0], row["capability"]), []).append(row)
    lines = [
        [f"{module}: {kernel}", str(len(own)), *_line("", own)[1:], str(sum(bool(row["stack"]) for row in own))]
        for (module, kernel, _), own in sorted(groups.items())
    ]
    parts.append(_table(["module: kernel", "variants", *COLUMNS.values(), "of them spill"], lines))
    reasons = sorted({(row["module"], row["spills"]) for row in rows if row["stack"]})
    if reasons:
        parts.append("Where registers are spilled, and why:\n")
        for module, reason in reasons:
            own = [row for row in rows if (row["module"], row["spills"]) == (module, reason) and row["stack"]]
            most = max(row["stack"] for row in own)
            parts.append(f"- {module}: {reason} ({len(own)} of the variants compiled, up to {most:,} bytes)")
        parts.append("")
    return "\n".join(parts)


def _line(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Cells of one line: the largest figures of rows of one architecture."""
    most = {column: max((row[column] for row in rows if row[column] is not None), default=None) for column in COLUMNS}
    return [name, *("" if value is None else _number(value) for value in most.values())]


def _table(head: list[str], lines: list[list[str]]) -> str:
    body = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]]
    return "\n".join(body) + "\n"


def _number(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
