"""Check every Triton kernel on this GPU against its reference, then time it against its peers in the same run.

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


def section(module: ModuleType, report: dict[str, Any]) -> bool:
    """Check, then measure."""
    name, device = module.__name__.removeprefix("gpu_"), torch.device("cuda")
    checks = module.check(device)
    failed = [check for check in checks if not check["passed"]]
    print(f"{name}: {len(checks)} checks", *(f"  FAILED {check}" for check in failed), sep="\n", flush=True)
    report.setdefault("checks", {})[name] = {"made": len(checks), "failed": failed}
    report.setdefault("rows", {})[name] = []
    for row in module.measure(device):
        report["rows"][name].append(row)
        ratio = f"ratio {row['ratio']:.3f}" if "ratio" in row else ""
        print(f"{row['case']}: {row['ours_us']:.1f} us", ratio, flush=True)
    return not failed


if __name__ == "__main__":
    sections = {module.__name__.removeprefix("gpu_"): partial(section, module) for module in MODULES}
    rates = {"copy_bytes_per_second": copy_bandwidth, "bf16_matmul_flops": matmul_rate}
    sys.exit(run_sections(__doc__, sections, lambda: {name: rate() for name, rate in rates.items()}))
