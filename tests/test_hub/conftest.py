"""The stand-in for the Hub, with the Hub's client pointed at it, and a bundle to send there."""

import shutil
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "format-1"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from tiny.hub import standing_in

    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def golden(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "bundle"))
