"""Time the Triton kernels on this GPU beside their peers in the same run; `tests/test_gpu` checks what they compute.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Takes at most nine minutes on one GPU, compilation included, and needs no transformers. Times are medians of CUDA-event
timings of graph replays, with inputs beyond the L2 cache in buffers that take turns.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "test_gpu"))  # cases shared with the tests

import gpu_decode
import gpu_linear
import gpu_prompt
import gpu_quantize
from gpu_timing import copy_bandwidth, matmul_rate
from runner import run_sections

MODULES = (gpu_decode, gpu_quantize, gpu_prompt, gpu_linear)


def section(module: ModuleType, report: dict[str, Any]) -> None:
    """Measure all cases of a section."""
    rows = report.setdefault("rows", {})[module.__name__.removeprefix("gpu_")] = []
    for row in module.measure(torch.device("cuda")):
        rows.append(row)
        ratio = f"ratio {row['ratio']:.3f}" if "ratio" in row else ""
        print(f"{row['case']}: {row['ours_us']:.1f} us", ratio, flush=True)


if __name__ == "__main__":
    sections = {module.__name__.removeprefix("gpu_"): partial(section, module) for module in MODULES}
    rates = {"copy_bytes_per_second": copy_bandwidth, "bf16_matmul_flops": matmul_rate}
    sys.exit(run_sections(__doc__, sections, lambda: {name: rate() for name, rate in rates.items()}))
