"""Options, JSON files that keep what is in them, and sections that need a GPU, for the commands of this folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Section = Callable[[dict[str, Any]], None]


def option_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def read(path: Path | None) -> Any:
    """The contents of a JSON file; an empty dictionary where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def save(path: Path | None, report: Any) -> None:
    """Write a report, if there is a file to write it to."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The GPU and the versions of what computes on it."""
    import triton

    properties = torch.cuda.get_device_properties("cuda")
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def need_gpu() -> None:
    """End the command where there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} needs a CUDA device, and torch finds none here.")


def run_sections(description: str, sections: Mapping[str, Section], more: Callable[[], dict[str, Any]]) -> int:
    """The command of a benchmark that has sections: each fills a report.

    With `--only` the others' figures stay in the file as they are. `more` is what the report says of the machine beside
    `machine()`. The exit status is 1 where a section failed.
    """
    parser = option_parser(description)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--only", nargs="*", choices=sections, help="leave out the other sections")
    arguments = parser.parse_args()
    need_gpu()
    report, passed = read(arguments.json), True
    report["machine"] = machine() | more()
    print(json.dumps(report["machine"], indent=2), flush=True)
    for name in arguments.only or sections:
        begin = time.perf_counter()
        try:
            sections[name](report)
        except Exception:
            # The other sections' figures are worth having; the exit status tells.
            traceback.print_exc()
            passed = False
        torch.cuda.empty_cache()
        seconds = report.setdefault("seconds", {})[name] = time.perf_counter() - begin
        print(f"{name}: {seconds:.0f} s", flush=True)
        save(arguments.json, report)
    return int(not passed)
