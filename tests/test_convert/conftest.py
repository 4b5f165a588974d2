"""What the tests of conversions share: a directory for each file, one text, one model, and its calibration.

As in all of these files, torch is imported by fixtures: the process that hands tests to others needs none of it.
"""

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    from tiny.checkpoints import save_text

    return save_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama in several shards, only to be read."""
    from tiny.checkpoints import save_checkpoint

    return save_checkpoint(
        tmp_path_factory.mktemp("shared") / "model", max_position_embeddings=512, max_shard_size="200KB"
    )


@pytest.fixture(scope="session")
def finished(tmp_path_factory, model, text):
    """Its calibration, only to be read."""
    from calibrations import run

    return run(model, tmp_path_factory.mktemp("finished") / "work", text)
