"""Write the table of docs/performance.md that shows what benchmarks/results/linear_shapes.json holds.

python benchmarks/linear_docs.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvconvert.kernels.linear import gpu_path
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.prompt_shapes import split_shape

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- many rows: written by benchmarks/linear_docs.py -->", "<!-- end of many rows -->"
GROUP_SIZE = 128
# Of the GPU that the results are from.
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "linear_shapes.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text(encoding="utf8"))
    text = arguments.docs.read_text(encoding="utf8")
    arguments.docs.write_text(with_table(text, results), encoding="utf8")


def with_table(text: str, results: dict[str, Any]) -> str:
    """The document with these results between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([before + BEGIN, "", *lines(results), END + after])


def lines(results: dict[str, Any]) -> Iterator[str]:
    """The GPU, and a line per number of rows with a column per weight."""
    cases = list(dict.fromkeys(row["case"] for row in results["rows"]))
    table = {(row["case"], row["rows"]): row for row in results["rows"]}
    yield f"{results['gpu']}, Triton {results['triton']}; microseconds: ours / torch's bf16 product / Humming."
    yield ""
    yield f"| rows | {' | '.join(cases)} |"
    yield "|---" * (len(cases) + 1) + "|"
    for rows in sorted({row["rows"] for row in results["rows"]}):
        cells = []
        for case in cases:
            row = table[case, rows]
            path, time = ours(row)
            cells.append(f"{path}: {time:.1f} / {row['times']['bf16']:.1f} / {row['times']['humming']:.1f}")
        yield f"| {rows} | {' | '.join(cells)} |"


def ours(row: dict[str, Any]) -> tuple[str, float]:
    """The path that the package takes in one measured case, and the microseconds that it took."""
    inputs, outputs = map(int, row["case"].split(" x "))
    path, groups = gpu_path(row["rows"], inputs, outputs), inputs // GROUP_SIZE
    if path != "fused":
        return path, row["times"]["few rows" if path == "few rows" else "unpacked 2^26"]
    shape = split_shape(row["rows"], outputs // TILE, groups, GROUP_SIZE, MULTIPROCESSORS, CAPABILITY)
    name = f"{shape.rows}x{shape.tiles}t {shape.warps}w {shape.stages}s /"
    asked = (int(key.removeprefix(name)) for key in row["fused"] if key.startswith(name))
    # By the number of splits that there are in fact, since each is of whole groups.
    times = {-(-groups // -(-groups // splits)): row["fused"][f"{name}{splits}"] for splits in asked}
    return path, times[shape.splits]


if __name__ == "__main__":
    main()
