"""What `kvconvert plan` says against what then happens: memory, disk and time of `calibrate` and `export`.

    python benchmarks/plan.py [SHAPE:LAYERS:RECIPE ...] [--samples 16] [--length 256] [--device cpu]
        [--json FILE]

SHAPE is one of benchmarks/memory.py, RECIPE a preset or a recipe file. A random checkpoint is written, planned with
and without a probe, calibrated and exported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from memory import SHAPES, run, write_checkpoint

CASES = ("0.5b:6:default", "0.5b:6:rtn", "0.5b:6:weights-only", "1.5b:4:default")


def planned(model: Path, *arguments: str) -> dict[str, Any]:
    """What `plan --json` says."""
    command = [sys.executable, "-m", "kvconvert", "plan", str(model), "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(case: str, samples: int, length: int, device: str) -> dict[str, Any]:
    """One case."""
    name, layers, recipe = case.split(":")
    with tempfile.TemporaryDirectory(prefix="kvconvert-plan-") as folder:
        model, work, bundle = (Path(folder) / part for part in ("model", "work", "bundle"))
        model.mkdir()
        write_checkpoint(model, SHAPES[name], int(layers))
        options = ("--recipe", recipe, "--samples", str(samples), "--seq-len", str(length), "--device", device)
        computed, probed = planned(model, *options, "--no-probe"), planned(model, *options)
        calibrated = run("calibrate", str(model), "-o", str(work), *options)
        exported = run("export", str(work), "-o", str(bundle))
        manifest = json.loads((bundle / "kvconvert.json").read_text())
    return {
        "case": case,
        "samples": samples,
        "length": length,
        "device": device,
        "device_memory": {"formula": computed["memory"]["device"], "probe": probed["memory"]["device"]},
        "host_memory": {
            "formula": computed["memory"]["calibrate"],
            "probe": probed["memory"]["calibrate"],
            "calibrate": calibrated["peak_anonymous_bytes"],
            "formula_export": computed["memory"]["export"],
            "export": exported["peak_anonymous_bytes"],
        },
        "bundle_bytes": {"plan": computed["disk"]["bundle"], "bundle": manifest["weights"]["bytes"]},
        "seconds": {"plan": round(probed["seconds"], 1), "real": round(calibrated["wall_s"] + exported["wall_s"], 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="SHAPE:LAYERS:RECIPE")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = []
    for case in args.cases:
        found = measure(case, args.samples, args.length, args.device)
        results.append(found)
        print(json.dumps(found), flush=True)
        if args.json:
            setting = {"torch": torch.__version__, "cpus": os.cpu_count()}
            args.json.write_text(json.dumps({"setting": setting, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
