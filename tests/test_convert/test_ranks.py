"""Several processes calibrate what one process calibrates, byte for byte."""

import os
import signal

import pytest
from calibrations import AWQ, contents, run
from several_ranks import in_ranks
from tiny.checkpoints import save_checkpoint

from kvconvert.calibration.ranks import ALONE
from kvconvert.convert import layer_runner, workdir
from kvconvert.convert.export import export
from kvconvert.convert.recipe import KVCalibration, Recipe, WeightsRecipe
from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS

LENGTH = 150  # one page that some query reads
WEIGHTS = {name: WeightsRecipe(method=name, group_size=32) for name in ("awq", "gptq", "awq+gptq", "none")}
# Between them every pass with every way to combine what ranks observe.
RECIPES = {
    "awq+gptq-kitty": Recipe(weights=WEIGHTS["awq+gptq"], kv=PRESETS["kitty"]),
    "awq-minikv": Recipe(weights=WEIGHTS["awq"], kv=PRESETS["minikv-pyramid"]),
    "gptq": Recipe(weights=WEIGHTS["gptq"]),
}


@pytest.fixture(scope="module")
def model(place):
    return save_checkpoint(place / "model", max_position_embeddings=512)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(layer_runner, "BATCH_TOKENS", 2 * LENGTH)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("name", RECIPES)
def test_two_and_three_ranks_write_the_bytes_of_one_process(name, tmp_path, model, text):
    options = {"recipe": RECIPES[name], "samples": 5, "seq_len": LENGTH}  # three batches, the last incomplete
    for size in (1, 2, 3):
        codes = in_ranks(
            size, tmp_path / f"store{size}", lambda rank, w=size: run(model, tmp_path / str(w), text, **options)
        )
        assert codes == [0] * size
    expected = contents(tmp_path / "1")
    for size in (2, 3):
        assert contents(tmp_path / str(size)) == expected
