"""Tables of the times of kernels and whole models on a GPU, and of models on a CPU.

Every figure comes from the results of gpu.py, engine.py, and cpu_models.py, or is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconvert.tables import markdown_table as table

Row = dict[str, Any]
# Cases of the table for users.
SHOWN_DECODE = (
    "oscar-g128 (norms), 1 x 1,024",
    "oscar-g128 (norms), 1 x 8,192",
    "oscar-g128 (norms), 1 x 131,072",
    "oscar-g128 (norms), 32 x 8,192",
    "oscar G = 32, 32 x 8,192",
    "4 bits G = 128, 32 x 8,192",
    "8 bits G = 128, 32 x 8,192",
)


def machine(results: dict[str, Any]) -> str:
    """GPU, versions, and its own bandwidth and matrix rate."""
    m = results["machine"]
    return (
        f"{m['gpu']} (compute capability {m['compute_capability']}, {m['multiprocessors']} multiprocessors), "
        f"torch {m['torch']}, Triton {m['triton']}, CUDA {m['cuda']}. A device-to-device copy moves "
        f"{m['copy_bytes_per_second'] / 1e12:.2f} TB/s, read plus written; a bf16 matrix product does "
        f"{m['bf16_matmul_flops'] / 1e12:.0f} TFLOP/s."
    )


def _columns(rows: list[Row], columns: dict[str, Callable[[Row], object]]) -> str:
    """A table with a row for each case; a column is a head and what makes a row's cell."""
    return table(("case", *columns), [(row["case"], *(cell(row) for cell in columns.values())) for row in rows])


def _peers(rows: list[Row]) -> dict[str, Callable[[Row], object]]:
    """A column for each of torch's attention backends."""
    names = dict.fromkeys(name for row in rows for name in row["peers_us"])
    return {f"{name}, us": lambda row, name=name: _us(row["peers_us"].get(name)) for name in names}


def kernels(results: dict[str, Any]) -> str:
    """Decode attention for users."""
    found = {row["case"]: row for row in results["rows"]["decode"]}
    rows = [
        (case, _us(row["ours_us"]), _us(min(row["peers_us"].values())), f"{row['ratio']:.2f}x",
         _percent(row["of_copy_bandwidth"]))
        for case, row in ((case, found[case]) for case in SHOWN_DECODE)
    ]  # fmt: skip
    head = ("2-bit pages unless said, sequences x tokens", "kvconvert, us", "bf16, us", "speed-up", "of copy bandwidth")
    return f"{machine(results)}\n\n{table(head, rows)}"


def decode(results: dict[str, Any]) -> str:
    """Decode attention, with every peer's time."""
    rows = results["rows"]["decode"]
    more = {
        "ratio": lambda row: f"{row['ratio']:.2f}",
        "MB read": lambda row: f"{row['bytes'] / 1e6:,.1f}",
        "of copy bandwidth": lambda row: _percent(row["of_copy_bandwidth"]),
    }
    return _columns(rows, {"ours, us": lambda row: _us(row["ours_us"])} | _peers(rows) | more)


def quantize(results: dict[str, Any]) -> str:
    """Pages, spans and rotations."""
    copying = results["machine"]["copy_bytes_per_second"]
    return _columns(
        results["rows"]["quantize"],
        {
            "ours, us": lambda row: _us(row["ours_us"]),
            "peer": lambda row: row.get("peer", ""),
            "peer, us": lambda row: _us(row.get("peer_us")),
            "ours / peer": lambda row: f"{row['ratio']:.4f}" if "ratio" in row else "",
            "of copy bandwidth": lambda row: _percent(row["bandwidth"] / copying) if "bandwidth" in row else "",
        },
    )


def prompts(results: dict[str, Any]) -> str:
    """Attention of prompts, with every peer's time; output and sums are apart for the longest one alone."""
    rows = [row for row in results["rows"]["prompt"] if "output and sums" in row["case"] or "32768" in row["case"]]
    more = {
        "ours / fastest": lambda row: f"{row['ratio']:.2f}",
        "TFLOP/s": lambda row: f"{row['teraflops']:.0f}",
    }
    return _columns(rows, {"ours, us": lambda row: _us(row["ours_us"])} | _peers(rows) | more)


_SHOWN_ROWS = (", 1 rows", ", 64 rows", ", 4096 rows")
_LEFT_OUT = (", 2 rows", ", 8 rows", ", 2048 rows")  # as their neighbors


def linear(results: dict[str, Any]) -> str:
    """4-bit Linears against a dense bf16 product: one shape by rows, and the others at 1, 64, and 4,096."""
    return _columns(
        [
            row
            for row in results["rows"]["linear"]
            if ("4096 x 14336" in row["case"] and not row["case"].endswith(_LEFT_OUT))
            or row["case"].endswith(_SHOWN_ROWS)
        ],
        {
            "ours, us": lambda row: _us(row["ours_us"]),
            "torch bf16, us": lambda row: _us(row["peer_us"]),
            "ratio": lambda row: f"{row['ratio']:.2f}",
            "of copy bandwidth": lambda row: _percent(row["bandwidth_of_copy"]),
        },
    )


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
    """Times of models on a CPU, and the bundle's speed over the faster dtype of its source."""
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


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.1 else f"{100 * share:.2f}%"
