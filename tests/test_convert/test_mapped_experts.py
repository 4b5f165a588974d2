"""Experts that are too large for memory are kept in files, and the result is the same."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from calibrations import contents, run
from tiny.checkpoints import REFERENCE
from tiny.mixtures import tiny_mixture

from kvconvert.convert import layer_runner
from kvconvert.convert.checks import check_layers_fit
from kvconvert.errors import KvconvertError, UsageError
from kvconvert.io import tensorfile
from kvconvert.io.tensorfile import Mapped
from kvconvert.models.source import open_source
from kvconvert.recipes.recipe import Recipe, WeightsRecipe


@pytest.fixture(scope="module")
def mixture(place):
    tiny_mixture("mixtral", num_local_experts=4, num_hidden_layers=1).save_pretrained(place / "mixture")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, place / "mixture" / name)
    return place / "mixture"


@pytest.fixture
def copies(monkeypatch):
    """Bytes of every tensor that was kept in a file; with room for none in memory."""
    made, empty = [], Mapped._empty
    monkeypatch.setattr(tensorfile, "_SMALLEST", 1)
    monkeypatch.setattr(Mapped, "_empty", lambda self, size: made.append(size) or empty(self, size))
    return made


@pytest.mark.parametrize("method", ["awq", pytest.param("awq+gptq", marks=pytest.mark.full)])
def test_experts_in_files_become_the_same_bundle(tmp_path, mixture, text, monkeypatch, copies, method):
    recipe = Recipe(weights=WeightsRecipe(method=method, group_size=32))
    run(mixture, tmp_path / "memory", text, recipe)
    assert not copies
    monkeypatch.setattr(layer_runner, "EXPERT_BYTES", 0)
    run(mixture, tmp_path / "files", text, recipe)
    assert len(copies) >= 4 * 3 * 4, "weight, codes, zeros and scales of every expert's Linears"
    assert contents(tmp_path / "files") == contents(tmp_path / "memory")


def test_a_disk_without_room_for_experts_is_one_sentence(tmp_path, mixture, text, monkeypatch, copies):
    def refuse(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(layer_runner, "EXPERT_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(KvconvertError, match=r"The disk is full: [\d,]+ bytes in .*hidden could not be reserved"):
            run(mixture, tmp_path / "work", text)
    run(mixture, tmp_path / "work", text)
    assert (tmp_path / "work" / "layers" / "00000.json").exists()


def test_a_layer_larger_than_the_gpu_is_refused(mixture):
    source = open_source(str(mixture))
    runner = layer_runner.LayerRunner(source, torch.device("cpu"))
    size = 4 * sum(tensor.numel() for tensor in runner.model.get_submodule("model.layers.0").parameters())
    check_layers_fit(runner, size)
    with pytest.raises(UsageError, match=r"^model\.layers\.0 takes .* more than the GPU's .*`device` cpu"):
        check_layers_fit(runner, size - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_has_the_numbers_and_the_layout_of_a_conversion(tmp_path, dtype, copies):
    place = Mapped(Path(tmp_path))
    base = torch.randn(4, 6, 8).bfloat16()
    for tensor in (base, base.transpose(1, 2), base[:, ::2], base[1]):
        found, expected = place.copy(tensor, dtype), tensor.to(dtype, copy=True)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        found.mul_(2)
        assert torch.equal(found, expected * 2)
    assert not list(tmp_path.iterdir())
