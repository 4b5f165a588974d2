"""A directory for what the tests of one file share, and the text that they calibrate on."""

import pytest
from tiny.checkpoints import save_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def text(place):
    return save_text(place)
