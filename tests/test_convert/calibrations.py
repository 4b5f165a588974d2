"""Short calibrations of tiny models, and what kills leave of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvconvert.convert.pipeline import calibrate
from kvconvert.io import disk
from kvconvert.recipes.recipe import Recipe, WeightsRecipe

AWQ = Recipe(weights=WeightsRecipe(method="awq", group_size=32))
KV_ONLY = Recipe(weights=WeightsRecipe(method="none"))


def run(model, work, text, recipe=AWQ, **options):
    settings = {"samples": 3, "seq_len": 24, "progress": False} | options
    return calibrate(str(model), work, recipe=recipe, data=text, **settings)


def contents(work):
    """Every file below a directory, by relative name."""
    return {str(f.relative_to(work)): f.read_bytes() for f in sorted(Path(work).rglob("*")) if f.is_file()}


def killed_at_every_rename(
    monkeypatch: pytest.MonkeyPatch, work: Path, into: Path, calibrate: Callable[[], Any]
) -> list[Path]:
    """Calibrate in `work` and copy it before each rename, unfinished temporary files included.

    Returns:
        The copies below `into`, in order: what a kill at that moment would have left.
    """
    copies: list[Path] = []

    def copy(operation: str, path: Path) -> None:
        if operation == "rename":
            copies.append(shutil.copytree(work, into / f"{len(copies):02}"))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "observe", copy)
        calibrate()
    return copies
