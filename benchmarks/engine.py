"""Whole models on one GPU: steps, prompts and continuous batching, each beside bf16 in the same run.

    python benchmarks/engine.py --json benchmarks/results/engine.json

Takes at most nine minutes on an H200. Models are random, of an 8B Llama's shape (32 layers, 4-bit weights in groups of
128, `oscar-g128`) and of eight layers of Mixtral's. Where a case begins with tokens in the cache, these are random
numbers that went through the cache's own path (quantized, packed), because a prompt would cost minutes and change no
time. `--only` runs some sections and keeps the others' figures in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from engine_cases import eager, engine, mixtures, prompts, steps

SECTIONS: dict[str, Callable[[dict], None]] = {
    "steps": steps,
    "eager": eager,
    "prompts": prompts,
    "engine": engine,
    "mixtures": mixtures,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="leave out the other sections")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/engine.py needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 1
    results: dict[str, Any] = {"rows": {}, "seconds": {}}
    if arguments.json and arguments.json.exists():
        results = json.loads(arguments.json.read_text(encoding="utf8"))
    results["machine"] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(results["machine"]), flush=True)
    failed = False
    for name in arguments.only or SECTIONS:
        begin, rows = time.perf_counter(), {}
        try:
            SECTIONS[name](rows)
        except Exception:
            # The other sections' figures are worth having; the exit code tells.
            traceback.print_exc()
            failed = True
        torch.cuda.empty_cache()
        results["rows"][name], results["seconds"][name] = rows, time.perf_counter() - begin
        print(f"{name}: {results['seconds'][name]:.0f} s", flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
