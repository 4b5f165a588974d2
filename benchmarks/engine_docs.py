"""Write the table of docs/performance.md that shows what benchmarks/results/engine.json holds.

python benchmarks/engine_docs.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- whole models: written by benchmarks/engine_docs.py -->", "<!-- end of whole models -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "engine.json")
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
    """The machine and one table of all bars."""
    machine, rows = results["machine"], results["rows"]
    yield (
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}, transformers "
        f"{machine['transformers']}; {sum(results['seconds'].values()):.0f} s in all."
    )
    yield ""
    yield "| case | bar | measured | ours | bf16 | |"
    yield "|---|---|---|---|---|---|"
    least = {"1 x 1,024": 2.8, "1 x 131,072": 3.0, "32 x 8,192": 2.3}
    for case, row in rows["steps"].items():
        own, theirs = row["bf16_own_step_ms"], row["bf16_static_compiled_ms"]
        peers = f"{own:.2f} ms our own step, {theirs:.2f} ms transformers"
        yield _line(f"`generate`, {case}", f"at least {least[case]}x", row["ratio"], f"{row['ours_ms']:.2f} ms", peers,
                    row["ratio"] >= least[case])  # fmt: skip
    for case, row in rows["steps"].items():
        yield _line(f"`generate` over its kernels, {case}", "at most 1.3x", row["over_kernels"],
                    f"{row['ours_ms']:.2f} of {row['kernels_ms']:.2f} ms", "", row["over_kernels"] <= 1.3)  # fmt: skip
    for case, row in rows["eager"].items():
        yield _line(f"steps layer by layer, {case}", "at most 1.2x", row["ratio"], f"{row['ours_ms']:.1f} ms",
                    f"{row['bf16_ms']:.1f} ms", row["ratio"] <= 1.2)  # fmt: skip
    for case, row in rows["prompts"].items():
        most = 1.1 if case.startswith("8,192") else 1.15
        yield _line(f"prompt of {case}", f"at most {most}x", row["ratio"], f"{row['ours_s']:.2f} s",
                    f"{row['bf16_s']:.2f} s", row["ratio"] <= most)  # fmt: skip
    bf16 = rows["engine"]["bf16"]
    for case, bar in (("2 bits", 4.0), ("1 bit", 6.0)):
        row = rows["engine"][case]
        ours, peer = (f"{r['tokens_per_second']:,.0f} tokens/s, {r['batch']} rows" for r in (row, bf16))
        name = f"Engine, 30 GB of pages, prompts of 8,192, {case}"
        yield _line(name, f"at least {bar:.0f}x", row["ratio"], ours, peer, row["ratio"] >= bar)
    for case, row in rows["mixtures"].items():
        ours, peer = f"{row['ours_ms']:.2f} ms", f"{row['bf16_eager_ms']:.1f} ms, eager"
        yield _line(f"mixture, `generate`, {case}", "at least 2x", row["ratio"], ours, peer, row["ratio"] >= 2)


def _line(case: str, bar: str, ratio: float, ours: str, peer: str, met: bool) -> str:
    verdict = "met" if met else "**missed**: [analysis](#what-whole-models-miss)"
    return f"| {case} | {bar} | {ratio:.2f}x | {ours} | {peer} | {verdict} |"


if __name__ == "__main__":
    main()
