"""Check every Triton kernel on this GPU against its reference, then time it against its peers in the same run.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Takes at most nine minutes on one GPU, compilation included, and needs no transformers. Times are medians of CUDA-event
timings of graph replays, with inputs beyond the L2 cache in buffers that take turns; decode steps are also timed one by
one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "test_gpu"))  # the random cases that checks share with the tests

import gpu_decode  # noqa: E402
import gpu_linear  # noqa: E402
import gpu_prompt  # noqa: E402
import gpu_quantize  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_timing import copy_bandwidth, matmul_rate  # noqa: E402

SECTIONS = {
    "decode": gpu_decode,
    "quantize": gpu_quantize,
    "prompt": gpu_prompt,
    "linear": gpu_linear,
    "steps": gpu_steps,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="leave out the other sections")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    begin = time.perf_counter()
    machine = {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "copy_bytes_per_second": copy_bandwidth(),
        "bf16_matmul_flops": matmul_rate(),
    }
    print(json.dumps(machine, indent=2), flush=True)
    results: dict[str, object] = {"machine": machine, "checks": {}, "rows": {}}
    failed = 0
    for name in arguments.only or SECTIONS:
        section = SECTIONS[name]
        checks = section.check(device)
        bad = [check for check in checks if not check["passed"]]
        failed += len(bad)
        print(f"{name}: {len(checks)} checks, {len(bad)} failed, {time.perf_counter() - begin:.0f} s", flush=True)
        for check in bad:
            print("  FAILED", check, flush=True)
        results["checks"][name] = checks
        results["rows"][name] = section.measure(device)
        torch.cuda.empty_cache()
        print(f"{name}: measured, {time.perf_counter() - begin:.0f} s", flush=True)
    results["seconds"] = time.perf_counter() - begin
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
