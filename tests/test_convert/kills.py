"""What kills leave of a calibration: its working directory copied before each rename, by which everything appears."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvconvert.convert import workdir


def killed_at_every_rename(
    monkeypatch: pytest.MonkeyPatch, work: Path, into: Path, calibrate: Callable[[], Any]
) -> list[Path]:
    """Calibrate in `work` and copy it before each rename, unfinished temporary files included.

    Returns:
        The copies below `into`, in order: what a kill at that moment would have left.
    """
    copies: list[Path] = []
    replace = workdir.os.replace

    def copy_and_replace(source: Path, target: Path) -> None:
        copies.append(shutil.copytree(work, into / f"{len(copies):02}"))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(workdir.os, "replace", copy_and_replace)
        calibrate()
    return copies
