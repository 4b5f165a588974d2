"""A prompt chunk over stored tokens on a GPU: checked against float64, timed against torch's attention over bf16.

    python benchmarks/gpu_history.py --json FILE

One layer of 8 KV heads of 128 channels, 32 query heads, in bf16, and chunks of 4,096 tokens. A peer attends to the same
history in bf16, dequantized beforehand. A case that fails is reported with its traceback, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_history_cases import DIM, DTYPE, FORMATS, GROUP, HEADS, SCALING, History

from kvconvert.kernels.history import history_attention, history_reference
from kvconvert.kernels.pages import PAGE_SIZE, dequantize_into, dequantize_keys, dequantize_values

CHUNK, HISTORIES = 4096, (28672, 126976)
OPTIONS = {
    "chosen": {},
    "triton": {"backend": "triton"},
    "flash": {"backend": "flash"},
    "cudnn": {"backend": "cudnn"},
    "triton, tiles of 8,192": {"backend": "triton", "workspace_tokens": 8192},
    "cudnn, tiles of 8,192": {"backend": "cudnn", "workspace_tokens": 8192},
}
# The most that a chunk may take, over the fastest peer.
BAR = 1.15
# Relative error of outputs: of bfloat16, as for the attention of prompts.
TOLERANCE = 8e-3
# Queries of short chunks, which pages as they are stored may serve faster.
SHORT, SHORT_HISTORY = (16, 32, 64, 128, 256, 1024), 4096
# Seconds after which what is left is left out.
BUDGET = 75.0
ROUNDS = 5


class Report:
    """What was found, printed as it comes; failures do not end a run."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.checks: list[dict] = []
        self.rows: list[dict] = []
        self.errors: list[dict] = []
        self.left_out: list[str] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def run(self, case: str, function: Callable, *arguments: Any, **options: Any) -> Any:
        """What the function returns, or None after an error."""
        if self.seconds > BUDGET:
            self.left_out.append(case)
            return None
        try:
            return function(*arguments, **options)
        except Exception as error:  # whatever a backend may not serve here
            traceback.print_exc()
            print(f"FAILED {case}: {type(error).__name__}: {error}", flush=True)
            self.errors.append({"case": case, "error": f"{type(error).__name__}: {error}"[:1000]})
            torch.cuda.empty_cache()
            return None

    def check(self, case: str, error: float, tolerance: float) -> None:
        self.checks.append({"case": case, "error": error, "tolerance": tolerance, "passed": error <= tolerance})
        print("check" if error <= tolerance else "FAILED CHECK", case, f"{error:.2e}", flush=True)

    def row(self, **figures: Any) -> None:
        self.rows.append(figures)
        print(json.dumps(figures), f"{self.seconds:.0f} s", flush=True)


def seconds_of(function: Callable, *arguments: Any, **options: Any) -> float:
    """Median of the GPU's time for a call, which takes long enough to hide the host's."""
    function(*arguments, **options)
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(*arguments, **options)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(report: Report) -> None:
    """Pages of every format to the last bit, and every backend against float64 on a short history."""
    for name, formats in FORMATS.items():
        history = report.run(f"history, {name}", History, name, 2304 + PAGE_SIZE, 512)
        if history is None:
            continue
        for side, (f, stored, pages) in enumerate(zip(formats, history.stored, history.addresses, strict=True)):
            found = torch.empty(HEADS, 8 * PAGE_SIZE, DIM, dtype=DTYPE, device="cuda")
            report.run(f"dequantize, {name}", dequantize_into, found, pages.select(slice(0, 8)))
            exact = dequantize_values(stored, f) if side else dequantize_keys(stored, f).transpose(2, 3)
            exact = exact.transpose(0, 1).flatten(1, 2).to(DTYPE)
            report.check(f"dequantized {'values' if side else 'keys'}, {name}", relative(found, exact), 0.0)
        sink_logits = torch.randn(HEADS * GROUP, device="cuda")
        backends = [{"backend": backend} for backend in ("triton", "flash", "cudnn")]
        for extras in ({}, {"window": 1000}, {"softcap": 20.0, "sink_logits": sink_logits}):
            case = f"512 queries over 2,432 tokens, {name}" + "".join(f", {extra}" for extra in extras)
            arguments = (history.queries, history.parts, *history.own, SCALING)
            expected = report.run(f"{case}, reference", history_reference, *arguments, **extras)
            for backend in backends if not extras else [{}]:
                place = ", ".join([case, *backend.values()])
                found = report.run(place, history_attention, *arguments, **extras, **backend, workspace_tokens=1024)
                if found is not None and expected is not None:
                    report.check(place, relative(found, expected), TOLERANCE)


def peers_of(history: History) -> dict[str, Callable[[], Any]]:
    """torch's attention over history and chunk in bf16: flash in one call, cuDNN in two without a merge."""
    keys, values = history.dense()
    queries, before = history.queries[None], keys.shape[1] - CHUNK
    grouped = queries.reshape(1, HEADS, GROUP * CHUNK, DIM)
    wide = [side.repeat_interleave(GROUP, 0)[None] for side in (keys, values)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention

    def by_cudnn() -> list[torch.Tensor]:
        past = [side[None, :, :before] for side in (keys, values)]
        own = [side[:, :, before:] for side in wide]
        return [
            cudnn(grouped, *past, None, True, 0.0, False, False, scale=SCALING)[0],
            cudnn(queries, *own, None, True, 0.0, True, False, scale=SCALING)[0],
        ]

    return {
        # Its causal mask ends at the last query and the last key.
        "flash": lambda: flash(queries, *wide, 0.0, True, False, scale=SCALING)[0],
        "cudnn, not merged": by_cudnn,
    }


def measure(report: Report) -> None:
    """Chunks of 4,096 over long histories: every format and backend against the fastest peer."""
    for tokens in HISTORIES:
        case, peers, exact = f"{CHUNK:,} queries over {tokens:,} tokens", {}, None
        for name in FORMATS:
            torch.cuda.empty_cache()
            history = report.run(f"{case}, {name}", History, name, tokens, CHUNK)
            if history is None:
                continue
            first = name == next(iter(FORMATS))
            if first:
                calls = report.run(f"{case}, peers", peers_of, history) or {}
                exact = report.run(f"{case}, flash", calls["flash"]) if calls else None
                found = {peer: report.run(f"{case}, {peer}", seconds_of, call) for peer, call in calls.items()}
                peers = {peer: seconds for peer, seconds in found.items() if seconds}
                report.row(case=case, peers_us={peer: seconds * 1e6 for peer, seconds in peers.items()})
                calls.clear()
                torch.cuda.empty_cache()
            for option, arguments in OPTIONS.items() if first else list(OPTIONS.items())[:2]:
                _measure_one(report, f"{case}, {name}, {option}", history, arguments, peers, exact if first else None)
            del history


def _measure_one(
    report: Report,
    case: str,
    history: History,
    options: dict[str, Any],
    peers: dict[str, float],
    exact: torch.Tensor | None,
) -> None:
    found = report.run(case, history.attend, **options)
    if found is None:
        return
    if exact is not None:
        report.check(f"{case}, against flash over bf16", relative(found, exact[0]), TOLERANCE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    seconds = report.run(case, seconds_of, history.attend, **options)
    if seconds is None:
        return
    figures = {"ours_us": seconds * 1e6, "peak_bytes": torch.cuda.max_memory_allocated() - allocated}
    if peers:
        fastest = min(peers, key=peers.get)
        figures |= {"peer": fastest, "ratio": seconds / peers[fastest], "bar": BAR, "bar_is": "most"}
    report.row(case=case, **figures)


def measure_parts(report: Report) -> None:
    """What dequantization alone takes, and where short chunks are better off with pages as they are stored."""
    for name in FORMATS:
        history = report.run(f"dequantize, {name}", History, name, HISTORIES[0], 16)
        if history is None:
            continue
        room = torch.empty(HEADS, history.pages * PAGE_SIZE, DIM, dtype=DTYPE, device="cuda")
        for side, pages in zip(("keys", "values"), history.addresses, strict=True):
            case = f"dequantize {side} of {HISTORIES[0]:,} tokens, {name}"
            seconds = report.run(case, seconds_of, dequantize_into, room, pages)
            if seconds:
                moved = room.nbytes + pages.base.nbytes
                report.row(case=case, ours_us=seconds * 1e6, bytes_per_second=moved / seconds)
    for tokens, queries in [(tokens, queries) for tokens in (SHORT_HISTORY, HISTORIES[0]) for queries in SHORT]:
        case = f"{queries} queries over {tokens:,} tokens, oscar-g128"
        history = report.run(case, History, "oscar-g128", tokens, queries)
        stored_attention = history and report.run(case, history.stored_attention)
        if stored_attention is None:
            continue
        whole, parts = report.run(case, history.attend), report.run(case, stored_attention)
        if whole is not None and parts is not None:
            stored = torch.cat([part[0].float() for part in parts], 1)
            report.check(f"{case}, both ways", relative(whole, stored), TOLERANCE)
        seconds = [report.run(case, seconds_of, call) for call in (history.attend, stored_attention)]
        dequantized, stored = (None if one is None else one * 1e6 for one in seconds)
        report.row(case=case, dequantized_us=dequantized, as_stored_us=stored)


def write(report: Report, path: Path) -> None:
    """What there is so far."""
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    results = {"machine": machine} | {
        name: getattr(report, name) for name in ("checks", "rows", "errors", "left_out", "seconds")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_history.py needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    report = Report()
    for section in (check, measure, measure_parts):
        report.run(section.__name__, section, report)
        if arguments.json:
            write(report, arguments.json)
    bad = [one["case"] for one in report.checks if not one["passed"]]
    print(f"{len(report.checks)} checks, {len(bad)} failed, {len(report.errors)} errors, {report.seconds:.0f} s")
    print(f"left out after {BUDGET:.0f} s: {report.left_out or 'nothing'}")
    return 1 if bad or report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
