"""What kernels and whole models take on a GPU, and models on a CPU, as tables.

Every figure comes from the results of gpu.py, engine.py, linear_shapes.py, and cpu_models.py, or is
computed from them alone; a bar is met or missed by the unrounded figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tables import table

from kvconvert.kernels.linear import gpu_path
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.triton.prompt_shapes import split_shape

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
    benchmarks/KERNELS.md that explains a miss.
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
    ("oscar-g128 (norms), 1 x 1,024", 1.0, "one-long-sequence"),
)
LINEAR = ((1, 3.2), (16, 2.5), (256, 0.9))
BARS = (
    *(Bar("decode", case, "ratio", limit, analysis) for case, limit, analysis in DECODE),
    *(
        Bar("decode", case, "of_copy_bandwidth", 0.55, analysis, percent=True)
        for case, limit, analysis in DECODE
        if limit == 4.5
    ),
    *(
        Bar("quantize", f"quantize a prompt of 32768 tokens, {scheme}", "ratio", 0.15, "prompts", True, True)
        for scheme in ("oscar", "oscar-g128", "kitty")
    ),
    Bar("prompt", "prompt of 8192 tokens, output and sums", "ratio", 1.8, "prompts", most=True),
    *(Bar("linear", f"W4A16, 4096 x 14336, {rows} rows", "ratio", limit, "linears") for rows, limit in LINEAR),
    Bar("linear", "W4A16, 4096 x 14336, 1 rows", "bandwidth_of_copy", 0.7, "linears", percent=True),
)
FLUSH_BAR = 0.01
# Cases and columns of the tables for users.
SHOWN_DECODE = (
    "oscar-g128 (norms), 1 x 1,024",
    "oscar-g128 (norms), 1 x 8,192",
    "oscar-g128 (norms), 1 x 131,072",
    "oscar-g128 (norms), 32 x 8,192",
    "oscar G = 32, 32 x 8,192",
    "4 bits G = 128, 32 x 8,192",
    "8 bits G = 128, 32 x 8,192",
)
# Of the GPU that linear_shapes.json is from.
GROUP_SIZE, MULTIPROCESSORS, CAPABILITY = 128, 132, (9, 0)


def machine(results: dict[str, Any]) -> str:
    """GPU, versions, and its own bandwidth and matrix rate."""
    m = results["machine"]
    return (
        f"{m['gpu']} (compute capability {m['compute_capability']}, {m['multiprocessors']} multiprocessors), "
        f"torch {m['torch']}, Triton {m['triton']}, CUDA {m['cuda']}. A device-to-device copy moves "
        f"{m['copy_bytes_per_second'] / 1e12:.2f} TB/s, read plus written; a bf16 matrix product does "
        f"{m['bf16_matmul_flops'] / 1e12:.0f} TFLOP/s."
    )


def kernels(results: dict[str, Any]) -> str:
    """Decode attention for users."""
    rows = []
    for case in SHOWN_DECODE:
        row = row_of(results, "decode", case)
        peer = min(row["peers_us"].values())
        rows.append((case, _us(row["ours_us"]), _us(peer), f"{row['ratio']:.2f}x",
                     _percent(row["of_copy_bandwidth"])))  # fmt: skip
    head = ("2-bit pages unless said, sequences x tokens", "kvconvert, us", "bf16, us", "speed-up", "of copy bandwidth")
    return f"{machine(results)}\n\n{table(head, rows)}"


def bars(results: dict[str, Any]) -> str:
    """Every bar of the kernels: measured, met or missed."""
    rows: list[tuple[object, ...]] = []
    for bar in BARS:
        row = row_of(results, bar.section, bar.case)
        value = row[bar.column]
        limit, found = (_percent(x) if bar.percent else f"{x:.2f}" for x in (bar.limit, value))
        wanted = f"{'at most' if bar.most else 'at least'} {limit} {_unit(bar)}"
        needed = row["ours_us"] * (bar.limit / value if bar.most else value / bar.limit)
        met = value <= bar.limit if bar.most else value >= bar.limit
        rows.append((bar.case, wanted, found, _us(row["ours_us"]), _us(needed), verdict(met, bar.analysis)))
    for row, steps in flushes(results):
        for step, step_us in steps.items():
            share = row["ours_us"] / FLUSH_STEPS / step_us
            needed = FLUSH_BAR * FLUSH_STEPS * step_us
            wanted = f"at most 1% of 128 steps, a step being {step}"
            cells = (row["case"], wanted, _percent(share), _us(row["ours_us"]), _us(needed))
            rows.append((*cells, verdict(share <= FLUSH_BAR, "flushes-and-steps")))
    for row in results["rows"]["steps"]:
        cost, share = flush_cost(row), flush_share(row)
        needed = FLUSH_BAR * row["us_without_flushes"]["mean"] / row["flush_steps"]
        cells = (f"page flushes, {row['case']}", "at most 1% of the steps", _percent(share), _us(cost), _us(needed))
        rows.append((*cells, verdict(share <= FLUSH_BAR, "flushes-and-steps")))
        over, control = row["p99_over_median"], row["us_without_flushes"]
        found = f"{_percent(over)} ({_percent(control['p99'] / control['median'] - 1)} without flushes)"
        cells = (f"p99 step time, {row['case']}", "at most 1% above the median step", found, _us(row["us"]["p99"]))
        met = over <= FLUSH_BAR
        rows.append((*cells, _us((1 + FLUSH_BAR) * row["us"]["median"]), verdict(met, "flushes-and-steps")))
    per_token = [row["bytes_per_token"] for row in results["rows"]["prompt"] if "bytes_per_token" in row]
    linear = max(per_token) <= 1.01 * min(per_token)
    found = f"{min(per_token):,.0f} to {max(per_token):,.0f} bytes per token"
    rows.append(("selective flash attention, memory", "linear", found, "", "", verdict(linear, "prompts")))
    return table(("case", "bar", "measured", "ours, us", "the bar needs, us", ""), rows)


def decode(results: dict[str, Any]) -> str:
    """Decode attention, with every peer's time."""
    rows = results["rows"]["decode"]
    names = _peers(rows)
    head = ("case", "ours, us", *(f"{name}, us" for name in names), "ratio", "MB read", "of copy bandwidth")
    return table(
        head,
        [
            (row["case"], _us(row["ours_us"]), *_times(row, names), f"{row['ratio']:.2f}",
             f"{row['bytes'] / 1e6:,.1f}", _percent(row["of_copy_bandwidth"]))
            for row in rows
        ],
    )  # fmt: skip


def quantize(results: dict[str, Any]) -> str:
    """Pages, spans and rotations."""
    copying = results["machine"]["copy_bytes_per_second"]
    rows = []
    for row in results["rows"]["quantize"]:
        share = _percent(row["bandwidth"] / copying) if "bandwidth" in row else ""
        peer = (row["peer"], _us(row["peer_us"]), f"{row['ratio']:.4f}") if "peer" in row else ("", "", "")
        rows.append((row["case"], _us(row["ours_us"]), *peer, share))
    return table(("case", "ours, us", "peer", "peer, us", "ours / peer", "of copy bandwidth"), rows)


def prompts(results: dict[str, Any]) -> str:
    """Attention of prompts, with every peer's time."""
    rows = results["rows"]["prompt"]
    names = _peers(rows)
    head = ("case", "ours, us", *(f"{name}, us" for name in names), "ours / fastest", "TFLOP/s")
    return table(
        head,
        [
            (row["case"], _us(row["ours_us"]), *_times(row, names), f"{row['ratio']:.2f}", f"{row['teraflops']:.0f}")
            for row in rows
        ],
    )


def linear(results: dict[str, Any]) -> str:
    """4-bit Linears against a dense bf16 product."""
    return table(
        ("case", "ours, us", "torch bf16, us", "ratio", "of copy bandwidth"),
        [
            (row["case"], _us(row["ours_us"]), _us(row["peer_us"]), f"{row['ratio']:.2f}",
             _percent(row["bandwidth_of_copy"]))
            for row in results["rows"]["linear"]
        ],
    )  # fmt: skip


def products(results: dict[str, Any]) -> str:
    """How many times as fast as torch's bf16 product 4-bit products are, for users."""
    cases = list(dict.fromkeys(row["case"] for row in results["rows"]))
    found = {(row["case"], row["rows"]): row["times"]["bf16"] / chosen_path(row)[1] for row in results["rows"]}
    counts = sorted({count for _, count in found})
    rows = [(case, *(f"{found[case, count]:.2f}x" for count in counts)) for case in cases]
    about = f"{results['gpu']}, Triton {results['triton']}; speed over torch's bf16 product by rows of activations."
    return f"{about}\n\n{table(('inputs x outputs', *counts), rows)}"


def chosen_path(row: Row) -> tuple[str, float]:
    """The path that the package takes in one case of linear_shapes.json, and the microseconds that it took."""
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


def model_bars(results: dict[str, Any]) -> str:
    """Every bar of whole models."""
    rows: list[tuple[str, ...]] = []

    def bar(case: str, limit: float, row: Row, ours: str, peer: str, most: bool = False, ratio: str = "ratio") -> None:
        met = row[ratio] <= limit if most else row[ratio] >= limit
        wanted = f"at {'most' if most else 'least'} {limit:g}x"
        rows.append((case, wanted, f"{row[ratio]:.2f}x", ours, peer, verdict(met, "whole-models")))

    found = results["rows"]
    for case, limit in (("1 x 1,024", 2.8), ("1 x 131,072", 3.0), ("32 x 8,192", 2.3)):
        row = found["steps"][case]
        peers = f"{row['bf16_own_step_ms']:.2f} ms our own step, {row['bf16_static_compiled_ms']:.2f} ms transformers"
        bar(f"`generate`, {case}", limit, row, f"{row['ours_ms']:.2f} ms", peers)
    for case, row in found["steps"].items():
        ours = f"{row['ours_ms']:.2f} of {row['kernels_ms']:.2f} ms"
        bar(f"`generate` over its kernels, {case}", 1.3, row, ours, "", True, "over_kernels")
    for case, row in found["eager"].items():
        bar(f"steps layer by layer, {case}", 1.2, row, f"{row['ours_ms']:.1f} ms", f"{row['bf16_ms']:.1f} ms", True)
    for case, row in found["prompts"].items():
        limit = 1.1 if case.startswith("8,192") else 1.15
        bar(f"prompt of {case}", limit, row, f"{row['ours_s']:.2f} s", f"{row['bf16_s']:.2f} s", True)
    bf16 = found["engine"]["bf16"]
    for case, limit in (("2 bits", 4), ("1 bit", 6)):
        row = found["engine"][case]
        ours, peer = (f"{r['tokens_per_second']:,.0f} tokens/s, {r['batch']} rows" for r in (row, bf16))
        bar(f"Engine, 30 GB of pages, prompts of 8,192, {case}", limit, row, ours, peer)
    for case, row in found["mixtures"].items():
        ours, peer = f"{row['ours_ms']:.2f} ms", f"{row['bf16_eager_ms']:.1f} ms, eager"
        bar(f"mixture, `generate`, {case}", 2, row, ours, peer)
    return table(("case", "bar", "measured", "ours", "bf16", ""), rows)


def whole_models(results: dict[str, Any]) -> str:
    """Whole models for users: steps, prompts, and the Engine beside bf16."""
    found, m = results["rows"], results["machine"]
    rows = []
    for case, row in found["steps"].items():
        rows.append((f"ms per step, {case} tokens", f"{row['ours_ms']:.2f}", f"{row['bf16_own_step_ms']:.2f}",
                     f"{row['bf16_static_compiled_ms']:.2f}"))  # fmt: skip
    for case, row in found["prompts"].items():
        rows.append((f"seconds for a prompt of {case}", f"{row['ours_s']:.2f}", "", f"{row['bf16_s']:.2f}"))
    ours, bf16 = found["engine"]["2 bits"], found["engine"]["bf16"]
    cells = (f"{row['tokens_per_second']:,.0f} ({row['batch']} sequences)" for row in (ours, bf16))
    rows.append(("Engine, tokens per second at 8,192 tokens", *cells, ""))
    about = f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, transformers {m['transformers']}."
    return f"{about}\n\n{table(('', 'kvconvert', 'bf16, our runtime', 'bf16, transformers'), rows)}"


def on_cpu(report: dict[str, Any]) -> str:
    """What models take on a CPU, and the bundle's speed over the faster dtype of its source."""
    columns = ("first token of 2048, s", "1 x 2048, ms", "1 x 16384, ms", "8 x 2048, ms")
    rows = []
    for model in dict.fromkeys(row["model"] for row in report["results"]):
        own = [row for row in report["results"] if row["model"] == model]
        sources = [row for row in own if row["kind"] == "source"]
        (bundle,) = (row for row in own if row["kind"] == "bundle" and row["dtype"] == "bfloat16")
        best = {column: min(row[column] for row in sources if column in row) for column in columns}
        rows.append((f"{model}, source", *(f"{best[column]:g}" for column in columns)))
        rows.append((f"{model}, bundle", *(f"{bundle[column]:g} ({best[column] / bundle[column]:.2f}x)"
                                           for column in columns)))  # fmt: skip
    heads = ("first token of 2,048, s", "ms per step, 1 x 2,048", "1 x 16,384", "8 x 2,048")
    return table(("", *heads), rows)


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


def _peers(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["peers_us"]))


def _times(row: Row, names: list[str]) -> list[str]:
    return [_us(row["peers_us"][name]) if name in row["peers_us"] else "" for name in names]


def _unit(bar: Bar) -> str:
    if bar.column != "ratio":
        return "of copy bandwidth"
    if bar.most:
        return "of the peer's time" if bar.percent else "times the peer's time"
    return "times as fast as the peer"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.1 else f"{100 * share:.2f}%"
