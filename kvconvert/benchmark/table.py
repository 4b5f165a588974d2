"""A report of `bench` as a table for a console."""

from __future__ import annotations

from kvconvert.benchmark.bench import BenchReport
from kvconvert.benchmark.contender import Measurement

HEADER = (
    *("batch", "context", "model", "dtype", "first token", "tokens/s", "ms per step", "peak memory"),
    *("KV bytes per token", "speed-up"),
)


def table(report: BenchReport) -> str:
    """Rows of aligned columns, and what has to be known about them."""
    rows = [HEADER, *(_row(report, measurement) for measurement in report.measurements)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failures = [
        f"{m.model}, {m.batch} x {m.context}: not measured ({m.failure})" for m in report.measurements if m.failure
    ]
    where = f"{report.device}; {report.new_tokens} new tokens per sequence, greedy"
    against = [] if report.against is None else [f"source: {report.against}; speed-up over its fastest row"]
    return "\n".join([*lines, "", where, *against, *failures, *report.notes])


def _row(report: BenchReport, m: Measurement) -> tuple[str, ...]:
    speedup = report.speedup(m) if m.model == "bundle" else None
    return (
        f"{m.batch:,}",
        f"{m.context:,}",
        m.model,
        m.dtype or "-",
        "-" if m.first_token_seconds is None else f"{m.first_token_seconds:.3g} s",
        "-" if m.tokens_per_second is None else f"{m.tokens_per_second:,.1f}",
        "-" if m.tokens_per_second is None else f"{1000 * m.batch / m.tokens_per_second:.2f}",
        "-" if m.peak_memory is None else _bytes(m.peak_memory),
        "-" if m.kv_bytes_per_token is None else f"{m.kv_bytes_per_token:,.0f}",
        "-" if speedup is None else f"{speedup:.2f}x",
    )


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
