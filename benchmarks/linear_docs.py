"""Write the tables of docs/performance.md that show linear_shapes.json and linear_widths.json of benchmarks/results.

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
RESULTS = ROOT / "benchmarks" / "results"
GROUP_SIZE = 128
# Of the GPU that the results are from.
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    arguments.docs.write_text(with_tables(arguments.docs.read_text(encoding="utf8")), encoding="utf8")


def with_tables(text: str) -> str:
    """The document with the results between its marks."""
    for name, file, table in (("many rows", "linear_shapes", lines), ("widths", "linear_widths", width_lines)):
        results = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf8"))
        begin, end = f"<!-- {name}: written by benchmarks/linear_docs.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "", *table(results), end + rest.split(end)[1]])
    return text


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


def width_lines(results: dict[str, Any]) -> Iterator[str]:
    """The GPU, a line per weight with a column per width, and one per weight and number of rows."""
    cases = list(dict.fromkeys(row["case"] for row in results["rows"]))
    table = {(row["case"], row["bits"]): row for row in results["rows"]}
    widths = sorted({row["bits"] for row in results["rows"]})
    yield (
        f"{results['gpu']}, Triton {results['triton']}; microseconds (share of the time at 4 bits / of its bytes); of "
        f"{results['checks']} products compared with float64 {len(results['failed'])} were wrong."
    )
    yield ""
    yield f"| | {' | '.join(f'{bits} bits' if bits != 16 else 'bf16' for bits in widths)} |"
    yield "|---" * (len(widths) + 1) + "|"
    for case in cases:
        rows = [table[case, bits] for bits in widths]
        cells = [f"{row['us']:.1f} ({row['to_4_bits']:.2f} / {row['bytes_to_4_bits']:.2f})" for row in rows]
        yield f"| {case} | {' | '.join(cells)} |"
    yield ""
    yield f"| more rows | {' | '.join(f'{bits} bits' if bits != 16 else 'bf16' for bits in widths)} |"
    yield "|---" * (len(widths) + 1) + "|"
    for case in cases:
        rows = [table[case, bits] for bits in widths]
        # The layout that the package takes is the first word of its launch shape.
        times = [row["more_rows"][row["shape"].split()[0]] if "shape" in row else row["more_rows"] for row in rows]
        for count in times[0]:
            yield f"| {count} x {case} | {' | '.join(f'{one[count]:.1f}' for one in times)} |"


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
