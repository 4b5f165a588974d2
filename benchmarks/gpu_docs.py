"""Write the tables of docs/performance.md from what benchmarks/gpu.py measured.

    python benchmarks/gpu_docs.py [--json benchmarks/results/gpu.json] [--docs docs/performance.md]

Replaces what lies between each pair of marks and nothing else. Every figure comes from the JSON or is computed from its
figures alone; a bar is met or missed by the unrounded figure.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- {}: written by benchmarks/gpu_docs.py -->", "<!-- end of {} -->"
FLUSH_STEPS = 128
# The Linears of one layer with 4,096 channels, 8 KV heads of 128 and an inner size of 14,336.
LAYER_LINEARS = (
    "4096 x 4096",
    "4096 x 1024",
    "4096 x 1024",
    "4096 x 4096",
    "4096 x 14336",
    "4096 x 14336",
    "14336 x 4096",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """One bar of the table of bars.

    `column` is the row's figure that it limits, from above if `most`; `analysis` is the heading's anchor in
    docs/performance.md that explains a miss.
    """

    section: str
    case: str
    column: str
    limit: float
    analysis: str
    most: bool = False
    percent: bool = False


DECODE = (
    ("oscar-g128 (norms), 1 x 131,072", 4.5, "one-long-sequence"),
    ("oscar-g128 (norms), 32 x 8,192", 4.5, "a-batch-of-2-bit-pages"),
    ("oscar G = 32, 1 x 131,072", 3.5, "one-long-sequence"),
    ("oscar G = 32, 32 x 8,192", 3.5, "groups-of-32"),
    ("1-bit spans, 32 x 8,192", 6.0, "1-bit-spans"),
    ("1-bit spans with tau, 32 x 8,192", 4.0, "1-bit-spans"),
    ("oscar-g128 (norms), 1 x 1,024", 1.0, "short-sequences"),
)
LINEAR = ((1, 3.2, "w4a16-one-row"), (16, 2.5, "w4a16-16-rows"), (256, 0.9, "w4a16-256-rows"))
BARS = (
    *(Bar("decode", case, "ratio", limit, analysis) for case, limit, analysis in DECODE),
    *(
        Bar("decode", case, "of_copy_bandwidth", 0.55, analysis, percent=True)
        for case, limit, analysis in DECODE
        if limit == 4.5
    ),
    *(
        Bar("quantize", f"quantize a prompt of 32768 tokens, {scheme}", "ratio", 0.15, "quantization", True, True)
        for scheme in ("oscar", "oscar-g128", "kitty")
    ),
    Bar("prompt", "prompt of 8192 tokens, output and sums", "ratio", 1.8, "prompts", most=True),
    *(Bar("linear", f"W4A16, 4096 x 14336, {rows} rows", "ratio", limit, analysis) for rows, limit, analysis in LINEAR),
    Bar("linear", "W4A16, 4096 x 14336, 1 rows", "bandwidth_of_copy", 0.7, "w4a16-one-row", percent=True),
)
FLUSH_BAR = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    results = json.loads(arguments.json.read_text(encoding="utf8"))
    text = arguments.docs.read_text(encoding="utf8")
    arguments.docs.write_text(with_tables(text, results), encoding="utf8")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """The document with the tables of these results between its marks."""
    for name, write in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = "\n".join([before + begin, "", *write(results), end + after])
    return text


def machine(results: dict[str, Any]) -> Iterator[str]:
    """GPU, versions, and its own bandwidth and matrix rate."""
    m = results["machine"]
    yield (
        f"{m['gpu']} (compute capability {m['compute_capability']}, {m['multiprocessors']} multiprocessors), "
        f"torch {m['torch']}, Triton {m['triton']}, CUDA {m['cuda']}. A device-to-device copy moves "
        f"{m['copy_bytes_per_second'] / 1e12:.2f} TB/s, read plus written; a bf16 matrix product does "
        f"{m['bf16_matmul_flops'] / 1e12:.0f} TFLOP/s. Checks and measurements took {results['seconds']:.0f} s."
    )


def bars(results: dict[str, Any]) -> Iterator[str]:
    """Every bar of the issue: measured, met or missed."""
    yield "| case | bar | measured | ours, us | the bar needs, us | |"
    yield "|---|---|---|---|---|---|"
    for bar in BARS:
        row = row_of(results, bar.section, bar.case)
        value = row[bar.column]
        limit, found = (_percent(x) if bar.percent else f"{x:.2f}" for x in (bar.limit, value))
        wanted = f"{'at most' if bar.most else 'at least'} {limit} {_unit(bar)}"
        needed = row["ours_us"] * (bar.limit / value if bar.most else value / bar.limit)
        met = value <= bar.limit if bar.most else value >= bar.limit
        cells = (bar.case, wanted, found, _us(row["ours_us"]), _us(needed), verdict(met, bar.analysis))
        yield _line(cells)
    for row, steps in flushes(results):
        for step, step_us in steps.items():
            share = row["ours_us"] / FLUSH_STEPS / step_us
            met = share <= FLUSH_BAR
            needed = FLUSH_BAR * FLUSH_STEPS * step_us
            wanted = f"at most 1 % of 128 steps, a step being {step}"
            cells = (row["case"], wanted, _percent(share), _us(row["ours_us"]), _us(needed))
            yield _line((*cells, verdict(met, "flushes")))
    for row in results["rows"]["steps"]:
        cost, share = flush_cost(row), flush_share(row)
        needed = FLUSH_BAR * row["us_without_flushes"]["mean"] / row["flush_steps"]
        cells = (f"page flushes, {row['case']}", "at most 1 % of the steps", _percent(share), _us(cost), _us(needed))
        yield _line((*cells, verdict(share <= FLUSH_BAR, "flushes")))
        over, control = row["p99_over_median"], row["us_without_flushes"]
        found = f"{_percent(over)} ({_percent(control['p99'] / control['median'] - 1)} without flushes)"
        cells = (f"p99 step time, {row['case']}", "at most 1 % above the median step", found, _us(row["us"]["p99"]))
        yield _line((*cells, _us((1 + FLUSH_BAR) * row["us"]["median"]), verdict(over <= FLUSH_BAR, "steps")))
    per_token = [row["bytes_per_token"] for row in results["rows"]["prompt"] if "bytes_per_token" in row]
    linear = max(per_token) <= 1.01 * min(per_token)
    found = f"{min(per_token):,.0f} to {max(per_token):,.0f} bytes per token"
    yield _line(("selective flash attention, memory", "linear", found, "", "", verdict(linear, "prompts")))


def decode(results: dict[str, Any]) -> Iterator[str]:
    """Decode attention, with every peer's time."""
    rows = results["rows"]["decode"]
    names = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    peers = [f"{name}, us" for name in names]
    yield _line(("case", "ours, us", *peers, "ratio", "MB read", "at copy bandwidth, us", "of copy bandwidth"))
    yield "|---|" + "---|" * (len(names) + 5)
    for row in rows:
        times = [_us(row["peers_us"][name]) if name in row["peers_us"] else "" for name in names]
        floor = row["ours_us"] * row["of_copy_bandwidth"]
        cells = (row["case"], _us(row["ours_us"]), *times, f"{row['ratio']:.2f}", f"{row['bytes'] / 1e6:,.1f}")
        yield _line((*cells, _us(floor), _percent(row["of_copy_bandwidth"])))


def quantize(results: dict[str, Any]) -> Iterator[str]:
    """Pages, spans and rotations."""
    copying = results["machine"]["copy_bytes_per_second"]
    yield "| case | ours, us | peer | peer, us | ours / peer | of copy bandwidth |"
    yield "|---|---|---|---|---|---|"
    for row in results["rows"]["quantize"]:
        share = _percent(row["bandwidth"] / copying) if "bandwidth" in row else ""
        peer = (row["peer"], _us(row["peer_us"]), f"{row['ratio']:.4f}") if "peer" in row else ("", "", "")
        yield _line((row["case"], _us(row["ours_us"]), *peer, share))


def flush(results: dict[str, Any]) -> Iterator[str]:
    """Page flushes against decode steps of the same run."""
    yield "| case | flush, us | amortised, us | step | step, us | share | a step with the flush in it |"
    yield "|---|---|---|---|---|---|---|"
    for row, steps in flushes(results):
        amortised = row["ours_us"] / FLUSH_STEPS
        for step, step_us in steps.items():
            cells = (row["case"], _us(row["ours_us"]), f"{amortised:.3f}", step, _us(step_us))
            yield _line((*cells, _percent(amortised / step_us), f"{1 + row['ours_us'] / step_us:.2f}x"))


def steps(results: dict[str, Any]) -> Iterator[str]:
    """Decode steps one by one, with and without the flushes that fall into them."""
    names = ("median", "mean", "p99", "p99.5", "max")
    columns = (*(f"{name}, us" for name in names), "median, p99 and max without flushes, us")
    yield _line(("case", "steps that flush", *columns, "a flush, us", "and the step after it, us", "share"))
    yield "|---|" + "---|" * (len(columns) + 4)
    for row in results["rows"]["steps"]:
        control = " / ".join(_us(row["us_without_flushes"][name]) for name in ("median", "p99", "max"))
        times = (*(_us(row["us"][name]) for name in names), control)
        more = (_us(row["flush_us"]), _us(flush_cost(row) - row["flush_us"]), _percent(flush_share(row)))
        yield _line((row["case"], _percent(row["flush_steps"]), *times, *more))


def prompt(results: dict[str, Any]) -> Iterator[str]:
    """Attention of prompts, with every peer's time."""
    rows = results["rows"]["prompt"]
    names = list(dict.fromkeys(name for row in rows for name in row["peers_us"]))
    yield _line(("case", "ours, us", *(f"{name}, us" for name in names), "ours / fastest", "TFLOP/s", "peak MB"))
    yield "|---|" + "---|" * (len(names) + 4)
    for row in rows:
        times = [_us(row["peers_us"][name]) if name in row["peers_us"] else "" for name in names]
        peak = f"{row['peak_bytes'] / 1e6:,.1f}" if "peak_bytes" in row else ""
        yield _line((row["case"], _us(row["ours_us"]), *times, f"{row['ratio']:.2f}", f"{row['teraflops']:.0f}", peak))


def linear(results: dict[str, Any]) -> Iterator[str]:
    """4-bit Linears against a dense bf16 product."""
    yield "| case | ours, us | torch bf16, us | ratio | of copy bandwidth |"
    yield "|---|---|---|---|---|"
    for row in results["rows"]["linear"]:
        cells = (row["case"], _us(row["ours_us"]), _us(row["peer_us"]), f"{row['ratio']:.2f}")
        yield _line((*cells, _percent(row["bandwidth_of_copy"])))


def checks(results: dict[str, Any]) -> Iterator[str]:
    """How many checks of each kernel passed in the run, and the one nearest to its tolerance."""
    yield "| kernel | checks | passed | largest error, in tolerances |"
    yield "|---|---|---|---|"
    for section in results["checks"].values():
        for kernel in dict.fromkeys(check["kernel"] for check in section):
            own = [check for check in section if check["kernel"] == kernel]
            worst = max(check["error"] / check["tolerance"] for check in own)
            yield _line((kernel, len(own), sum(check["passed"] for check in own), f"{worst:.2f}"))


def flushes(results: dict[str, Any]) -> Iterator[tuple[Row, dict[str, float]]]:
    """Every flush with the microseconds of measured decode steps of its batch, by what the step consists of."""
    linears = sum(row_of(results, "linear", f"W4A16, {shape}, 1 rows")["ours_us"] for shape in LAYER_LINEARS)
    for row in results["rows"]["quantize"]:
        if not row["case"].startswith("page flush"):
            continue
        batch = row["case"].split("batch ")[1].split(",")[0]
        attention = row_of(results, "decode", f"oscar-g128 (norms), {batch} x 8,192")["ours_us"]
        steps = {f"the layer's attention at {batch} x 8,192": attention}
        if batch == "1":
            steps["that attention and the layer's seven 4-bit Linears"] = attention + linears
        yield row, steps


def flush_cost(row: Row) -> float:
    """Microseconds that a flush adds to its step and to the next one."""
    return row["flush_us"] + row["us_after_flush"] - row["us_without_flushes"]["median"]


def flush_share(row: Row) -> float:
    """All flushes' part of the time of all steps."""
    return flush_cost(row) * row["flush_steps"] / row["us_without_flushes"]["mean"]


def row_of(results: dict[str, Any], section: str, case: str) -> Row:
    """The only row of this case."""
    (row,) = (row for row in results["rows"][section] if row["case"] == case)
    return row


def verdict(met: bool, analysis: str) -> str:
    """ "met", or "missed" with a link to the analysis."""
    return "met" if met else f"**missed**: [analysis](#{analysis})"


def _unit(bar: Bar) -> str:
    if bar.column != "ratio":
        return "of copy bandwidth"
    if bar.most:
        return "of the peer's time" if bar.percent else "times the peer's time"
    return "times as fast as the peer"


def _line(cells: tuple[object, ...]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.1 else f"{100 * share:.2f} %"


TABLES = {
    "machine": machine,
    "bars": bars,
    "decode": decode,
    "quantize": quantize,
    "flushes": flush,
    "steps": steps,
    "prompts": prompt,
    "linear": linear,
    "checks": checks,
}

if __name__ == "__main__":
    main()
