"""Other programs' quantized checkpoints as sources: their codes are kept, and a KV plan is added.

Experts that are too large for memory are kept in files, and the result is the same.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from calibrations import contents, run
from safetensors.torch import load_file, save_file
from tiny.checkpoints import REFERENCE
from tiny.mixtures import tiny_mixture
from tiny.packed import KINDS, write_packed

import kvconvert
from kvconvert import calibrate, export
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert import layer_runner
from kvconvert.convert.checks import check_layers_fit
from kvconvert.errors import CheckpointError, KvconvertError, RecipeError, UsageError
from kvconvert.io import tensorfile
from kvconvert.io.tensorfile import Mapped
from kvconvert.kernels.linear.awq_format import dequantize_weight
from kvconvert.kernels.packing import pack_words, unpack_words
from kvconvert.models.source import open_source
from kvconvert.planning.plan import plan
from kvconvert.recipes.recipe import Recipe, WeightsRecipe

PARTS = ("qweight", "qzeros", "scales")
METHODS = {"awq": "awq", "gptq": "gptq", "gptq_v2": "gptq"}
CELLS = [(kind, 4) for kind in KINDS] + [("gptq_v2", 8), ("compressed-tensors", 8)]


def converted(source, folder):
    calibrate(source, folder / "work", recipe="kv-only", samples=1, seq_len=16, progress=False)
    return export(folder / "work", folder / "bundle", progress=False)


def change(directory, tensors=None, **quantization):
    """Change the source's `quantization_config`, and its tensors by a function."""
    if tensors is not None:
        held = load_file(directory / "model.safetensors")
        tensors(held)
        save_file(held, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= quantization
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(8,), (3, 16), (2, 5, 40)])
def test_words_hold_their_codes_the_first_lowest(shape, bits):
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    packed = pack_words(codes, bits)
    assert packed.shape == (*shape[:-1], shape[-1] * bits // 32)
    assert packed.dtype == torch.int32
    assert torch.equal(unpack_words(packed, bits), codes)
    assert (packed.flatten()[0] & (2**bits - 1)) == codes.flatten()[0]


@pytest.mark.parametrize(("kind", "bits"), CELLS)
def test_weights_are_read_as_they_are_stored(tmp_path, kind, bits):
    model = write_packed(tmp_path, kind, bits)
    source, state = open_source(str(tmp_path)), model.state_dict()
    packings = source.packings()
    assert len(packings) == 14
    for name, packing in packings.items():
        assert (packing.bits, packing.group_size, packing.method) == (bits, 16, METHODS.get(kind, "source"))
        assert torch.equal(source.read([name])[name], state[name]), name
        assert torch.equal(dequantize_weight(source.read_packed(name)), state[name]), name
    assert {*source.tensors} == {*state}


@pytest.fixture(scope="module")
def from_awq(tmp_path_factory):
    folder = tmp_path_factory.mktemp("awq")
    expected = write_packed(folder / "model", "awq")
    return folder / "model", expected, converted(folder / "model", folder)


def check_bundle(directory, expected, kind, bits):
    manifest = open_bundle(directory, verify="full").manifest
    covered = [module for module in manifest.modules if module.method != "kept"]
    assert len(covered) == 14
    assert {module.reason for module in covered} == {"quantized in the source, whose codes are kept"}
    assert (manifest.weights.method, manifest.weights.bits) == (METHODS.get(kind, "source"), bits)
    assert manifest.transforms == []
    assert "kept as they are" in manifest.source.stored_as
    assert all(scheme.rotate_values == "online" for scheme in manifest.schemes())
    model, _ = kvconvert.load(directory, dtype=torch.float32)
    ids = torch.arange(40)[None] * 7
    with torch.no_grad():
        logits, reference = model(ids, use_cache=False).logits, expected(ids).logits
    assert torch.allclose(logits, reference, atol=1e-5 * reference.abs().amax().item(), rtol=0)


def test_a_bundle_holds_the_source_s_weights_and_a_plan(from_awq):
    _, expected, directory = from_awq
    check_bundle(directory, expected, "awq", 4)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "bits"), CELLS[1:])
def test_bundles_of_other_programs_weights(tmp_path, kind, bits):
    expected = write_packed(tmp_path / "model", kind, bits)
    check_bundle(converted(tmp_path / "model", tmp_path), expected, kind, bits)


def test_awq_tensors_are_copied_byte_for_byte(from_awq):
    model, _, bundle = from_awq
    source, found = load_file(model / "model.safetensors"), load_file(bundle / "model.safetensors")
    assert {*source} == {*found}
    assert all(
        torch.equal(tensor, found[name]) and tensor.dtype == found[name].dtype for name, tensor in source.items()
    )
    config = json.loads((bundle / "config.json").read_text())["quantization_config"]
    stated = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16, "zero_point": True}
    assert stated.items() <= config.items()
    assert config["modules_to_not_convert"] == ["lm_head"]


def test_zeros_of_gptq_are_added_to_as_whole_words(tmp_path):
    # z = 0 in the lowest field: less 1, the word borrows from the field above it
    model = write_packed(tmp_path, "gptq_v2")

    def less_one(tensors):
        for name in [name for name in tensors if name.endswith(".qzeros")]:
            tensors[name] = tensors[name] - 0x11111111

    change(tmp_path, less_one, checkpoint_format="gptq")
    source, state = open_source(str(tmp_path)), model.state_dict()
    assert all(torch.equal(source.read([name])[name], state[name]) for name in source.packings())


def test_a_recipe_that_would_quantize_again_is_refused(tmp_path):
    write_packed(tmp_path / "model", "awq")
    with pytest.raises(RecipeError, match=r"quantized already \(AWQ.*recipe default.*kv-only"):
        calibrate(tmp_path / "model", tmp_path / "work", progress=False)
    assert not (tmp_path / "work").exists()
    with pytest.raises(RecipeError, match=r"quantized already \(AWQ.*recipe default.*kv-only"):
        plan(tmp_path / "model", probe=False)


def test_quantized_weights_outside_decoder_layers_are_refused(tmp_path):
    write_packed(tmp_path / "model", "awq")

    def quantized_head(tensors):
        del tensors["lm_head.weight"]
        for part, shape in zip(PARTS, ((64, 512), (4, 512), (4, 4096)), strict=True):
            tensors[f"lm_head.{part}"] = torch.ones(shape, dtype=torch.float16 if part == "scales" else torch.int32)

    change(tmp_path / "model", quantized_head)
    with pytest.raises(CheckpointError, match="holds lm_head quantized"):
        calibrate(tmp_path / "model", tmp_path / "work", recipe="kv-only", progress=False)


Q = "model.layers.0.self_attn.q_proj"


def reverse_order(tensors):
    tensors[f"{Q}.g_idx"] = tensors[f"{Q}.g_idx"].flip(0)


def scale_beyond_half(tensors):
    tensors[f"{Q}.weight_scale"][0, 0] = 2.0**-30


def act_order(tensors):
    tensors[f"{Q}.weight_g_idx"] = torch.zeros(64, dtype=torch.int32)


def no_scales(tensors):
    del tensors[f"{Q}.scales"]


@pytest.mark.parametrize(
    ("kind", "tensors", "quantization", "message"),
    [
        ("awq", None, {"version": "gemv"}, "version gemv"),
        ("awq", None, {"zero_point": False}, "zero_point False"),
        ("awq", None, {"group_size": 32}, r"qzeros as I32 .6, 8.*implies I32 .3, 8"),
        ("awq", None, {"kvconvert": {}}, "is a kvconvert bundle"),
        ("awq", no_scales, {}, r"q_proj\.scales, which it needs"),
        ("gptq", reverse_order, {"desc_act": True}, r"q_proj with act-order \(desc_act\)"),
        ("gptq", None, {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("gptq", None, {"bits": 3}, "3 bits"),
        ("gptq", None, {"bits": 4.0}, "4.0 bits"),
        ("gptq", None, {"group_size": -1}, "groups of -1"),
        ("compressed-tensors", act_order, {}, r"act-order \(weight_g_idx\)"),
        ("compressed-tensors", None, {"format": "int-quantized"}, "format int-quantized"),
        ("compressed-tensors", None, {"transform_config": {"config_groups": {"u": {}}}}, "rotations at run time"),
        ("compressed-tensors", scale_beyond_half, {}, "fp16, the type of scales in bundles, does not hold exactly"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path, kind, tensors, quantization, message):
    write_packed(tmp_path, kind)
    change(tmp_path, tensors, **quantization)
    with pytest.raises(CheckpointError, match=message):
        open_source(str(tmp_path)).read(f"{Q}.weight")


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
