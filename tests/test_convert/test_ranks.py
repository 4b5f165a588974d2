"""Several processes calibrate what one process calibrates, byte for byte."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from calibrations import KV_ONLY, contents
from several_ranks import in_ranks
from tiny.checkpoints import REFERENCE, save_checkpoint
from tiny.mixtures import tiny_mixture
from tiny.processors import write_vision_model

from kvconvert.calibration.ranks import Ranks
from kvconvert.errors import UsageError
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.recipes.recipe import KVCalibration, Recipe, WeightsRecipe

WEIGHTS = {name: WeightsRecipe(method=name, group_size=32) for name in ("awq", "gptq", "awq+gptq", "none")}
STATIC = KVScheme(key_bits=4, value_bits=4, static_scales="calibrated", key_rounding="error_feedback")
# Between them every pass with every way to combine what ranks observe.
RECIPES = {
    "awq+gptq-kitty": Recipe(weights=WEIGHTS["awq+gptq"], kv=PRESETS["kitty"]),
    "awq-minikv": Recipe(weights=WEIGHTS["awq"], kv=PRESETS["minikv-pyramid"]),
    "gptq-oscar": Recipe(weights=WEIGHTS["gptq"], kv=PRESETS["oscar"]),
    "awq-static": Recipe(weights=WEIGHTS["awq"], kv=STATIC),
    "calibquant": Recipe(
        weights=WEIGHTS["none"], kv=PRESETS["calibquant-1bit"], calibration=KVCalibration(tau_grid=[0, 1, 2])
    ),
}


def compare(folder, sizes, *arguments, **options):
    """Calibrate with one process and with others, and compare everything that they write."""
    model, *rest = arguments
    for size in (1, *sizes):
        assert in_ranks(size, folder / f"store{size}", model, folder / str(size), *rest, **options) == [0] * size
    for size in sizes:
        assert contents(folder / str(size)) == contents(folder / "1")


@pytest.mark.quick("awq+gptq-kitty")
@pytest.mark.parametrize("name", ["awq+gptq-kitty", "awq-minikv"])
def test_two_ranks_write_the_bytes_of_one_process(name, tmp_path, text):
    model = save_checkpoint(tmp_path / "model", max_position_embeddings=512, num_hidden_layers=1)
    compare(tmp_path, (2,), model, text, RECIPES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_two_and_three_ranks_write_the_bytes_of_one_process(name, tmp_path, model, text):
    compare(tmp_path, (2, 3), model, text, RECIPES[name])


@pytest.mark.full
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_ranks_calibrate_each_expert_on_the_tokens_of_all(method, tmp_path, text):
    """Some of them get too few tokens for statistics of their own."""
    model = tmp_path / "model"
    tiny_mixture("mixtral", num_local_experts=8).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, model / name)
    compare(tmp_path, (2, 3), model, text, Recipe(weights=WEIGHTS[method]), seq_len=120)


@pytest.mark.full
def test_ranks_share_samples_with_images(tmp_path):
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    recipe = Recipe(weights=WEIGHTS["awq"], kv=PRESETS["calibquant-2bit-visual"])
    compare(tmp_path, (2,), model, None, recipe)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_stops_the_others_and_any_number_of_ranks_goes_on(tmp_path, model, text, victim):
    rest = (text, RECIPES["awq+gptq-kitty"])
    codes = in_ranks(2, tmp_path / "store", model, tmp_path / "killed", *rest, fault=(victim, "killed"))
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1
    message = (tmp_path / f"store.{1 - victim}").read_text()
    assert f"Rank {1 - victim} of 2 stops: the process of rank {victim} has ended" in message
    assert in_ranks(1, tmp_path / "none", model, tmp_path / "whole", *rest) == [0]
    for size in (1, 2, 3):
        work = shutil.copytree(tmp_path / "killed", tmp_path / f"resumed{size}")
        assert in_ranks(size, tmp_path / f"resume{size}", model, work, *rest) == [0] * size
        assert contents(work) == contents(tmp_path / "whole")


@pytest.mark.full
def test_an_error_of_one_rank_is_said_with_its_name(tmp_path, model, text):
    assert in_ranks(2, tmp_path / "store", model, tmp_path / "work", text, fault=(1, "fail")) == [1, 1]
    assert (tmp_path / "store.1").read_text() == "KvconvertError: Rank 1 of 2: The disk is full"
    assert "Rank 0 of 2 stops: the process of rank 1 has ended" in (tmp_path / "store.0").read_text()


@pytest.mark.full
def test_what_all_ranks_refuse_is_said_once_and_what_one_refuses_by_its_name(tmp_path, model, text):
    def messages(name, data=text, recipe=KV_ONLY, **options):
        assert 0 not in in_ranks(2, tmp_path / name, model, tmp_path / "work", data, recipe, **options)
        return [Path(tmp_path / f"{name}.{rank}").read_text() for rank in (0, 1)]

    searches = messages("auto", recipe=Recipe.load("auto").with_budget(kv_bits=3.0))
    assert "The recipe auto searches in one process, and torchrun started 2" in searches[0]
    assert searches[1] == "SystemExit: 2"
    few = messages("few", samples=2)
    assert "sequences run in batches of up to " in few[0]
    assert few[0].endswith("start 1 at most, or give more `samples`.")
    seeds = messages("seeds", own={1: {"seed": 1}})
    assert seeds[0].startswith("UsageError: Ranks 0 and 1 were given different inputs: the calibration data differs")
    alone = messages("alone", own={1: {"samples": 10**6}})
    assert alone[0].startswith("SystemExit")
    assert ": Rank 1 of 2: " in alone[1]
    assert not (tmp_path / "work").exists()


class _Second(Ranks):
    rank, size = 1, 3


def test_shares_are_whole_batches_and_every_item_has_an_owner():
    ranks = _Second()
    assert ranks.shares(64, 8) == [(0, 16), (16, 40), (40, 64)]
    assert ranks.shares(5, 2) == [(0, 2), (2, 4), (4, 5)]
    with pytest.raises(UsageError, match=r"3 processes .* 4 calibration sequences run in batches .*; start 2 at most"):
        ranks.shares(4, 2)
    items = list("abcdefg")
    assert ranks.mine(items) == [item for i, item in enumerate(items) if ranks.owner(i) == ranks.rank]


@pytest.mark.full
def test_torchrun_on_the_reference_model_says_things_once_and_gives_the_same_bytes(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def calibrate(work, *launcher):
        options = ["-o", str(work), "--samples", "16"]
        command = [sys.executable, *launcher, "-m", "kvconvert", "calibrate", str(REFERENCE), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    launched = calibrate(tmp_path / "2", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert launched.stdout.count("Calibrated") == 1
    assert launched.stderr.count("Weights in groups of") == 1
    calibrate(tmp_path / "1")
    assert contents(tmp_path / "2") == contents(tmp_path / "1")
