"""A valid tiny bundle, written once, and a copy of it to damage."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    from tiny.bundle import write_tiny_bundle

    directory = tmp_path_factory.mktemp("pristine") / "bundle"
    write_tiny_bundle(directory)
    return directory


@pytest.fixture
def bundle(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "bundle"))
