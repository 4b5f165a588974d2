"""Whole models on one GPU: steps, prompts and continuous batching, each beside bf16 in the same run.

    python benchmarks/engine.py --json benchmarks/results/engine.json

Takes at most nine minutes on an H200. Models are random, of an 8B Llama's shape (32 layers, 4-bit weights in groups of
128, `oscar-g128`). Where a case begins with tokens in the cache, these are random numbers that went through the cache's
own path (quantized, packed), because a prompt would cost minutes and change no time. `--only` runs some sections and
keeps the others' figures in the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from engine_cases import engine, prompts, steps
from runner import run_sections


def section(measure: Callable[[dict], None], report: dict[str, Any]) -> bool:
    """Rows of one section, which stay there as far as they came if it fails."""
    rows = report.setdefault("rows", {})[measure.__name__] = {}
    measure(rows)
    return True


if __name__ == "__main__":
    sections = {measure.__name__: partial(section, measure) for measure in (steps, prompts, engine)}
    sys.exit(run_sections(__doc__, sections, lambda: {"transformers": transformers.__version__}))
