"""What the tests of conversions share: a directory for each file, one text, one model, and its calibration."""

import pytest
from calibrations import run
from tiny.checkpoints import save_checkpoint, save_text


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return save_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama in several shards, only to be read."""
    return save_checkpoint(
        tmp_path_factory.mktemp("shared") / "model", max_position_embeddings=512, max_shard_size="200KB"
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model, text):
    """Its calibration, only to be read."""
    return run(model, tmp_path_factory.mktemp("finished") / "work", text)
