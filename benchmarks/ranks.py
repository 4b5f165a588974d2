"""Time of `calibrate` by one and by several processes, and whether they write the same.

    python benchmarks/ranks.py MODEL [--ranks 1 2] [--device cuda] [--recipe weights-only] [--samples 64]
        [--data FILE] [--json FILE]

Each number of ranks is a fresh process, or torchrun, on a fresh working directory, one after another. On GPUs every
rank has its own, so there have to be as many as the largest number. What is compared with the first run: every file of
the working directory, and the layers' chosen schemes, scale ratios and plan tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def calibrate(arguments: argparse.Namespace, ranks: int, work: Path) -> dict[str, Any]:
    """Seconds on the wall and of processors, of one calibration by `ranks` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    options = ["-o", str(work), "--recipe", arguments.recipe, "--device", arguments.device]
    options += ["--samples", str(arguments.samples), "--seq-len", str(arguments.seq_len)]
    options += ["--data", arguments.data] if arguments.data else []
    # One thread as torchrun has it, for equal bytes; on a GPU it makes no difference.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, *launcher, "-m", "kvconvert", "calibrate", arguments.model, *options]
    subprocess.run(command, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"ranks": ranks, "seconds": round(time.perf_counter() - start, 1), "processor_seconds": round(processor, 1)}


def differences(work: Path, other: Path) -> dict[str, list[str]]:
    """Names of files whose bytes differ, and of layers whose chosen values do."""
    names = sorted({str(f.relative_to(d)) for d in (work, other) for f in d.rglob("*") if f.is_file()})
    files = [
        name
        for name in names
        if not (work / name).exists()
        or not (other / name).exists()
        or (work / name).read_bytes() != (other / name).read_bytes()
    ]
    layers = sorted((work / "layers").glob("?????.json"))
    chosen = [file.stem for file in layers if choices(file) != choices(other / "layers" / file.name)]
    plans = []
    for file in sorted((work / "layers").glob("*.plan.safetensors")):
        one, two = load_file(file), load_file(other / "layers" / file.name)
        if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one):
            plans.append(file.name[:5])
    return {"files": files, "layers_with_other_choices": chosen, "layers_with_other_plans": plans}


def choices(file: Path) -> Any:
    """A layer's scheme and scale ratios."""
    record = json.loads(file.read_text())
    scales = [
        {name: scale["ratio"] for name, scale in made.get("scales", {}).items()}
        for made in record["statistics"].values()
    ]
    return record["scheme"], scales


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--data")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and torch.cuda.device_count() < max(arguments.ranks):
        parser.error(f"{max(arguments.ranks)} ranks need as many GPUs, and torch finds {torch.cuda.device_count()}")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{os.cpu_count()} CPU cores"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        works = [Path(folder) / str(ranks) for ranks in arguments.ranks]
        for ranks, work in zip(arguments.ranks, works, strict=True):
            run = calibrate(arguments, ranks, work) | differences(works[0], work)
            found["runs"].append(run)
            print(json.dumps(run), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
