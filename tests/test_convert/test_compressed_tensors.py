"""Export for engines that read compressed-tensors: the same codes in another layout, and fp8 scales of the KV cache."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny.llama import write_tiny_llama
from transformers import AutoModelForCausalLM

import kvconvert
from kvconvert import calibrate, export
from kvconvert.convert.compressed_tensors import export_compressed_tensors, pack_quantized
from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, pack_bits, unpack_bits

NEEDS = 'needs pip install ".[compressed-tensors]"'


def unpacked(words, count):
    """Codes along the last dimension, the first of a word lowest: the format's description, one at a time."""
    bits = 32 * words.shape[-1] // count
    n = 32 // bits
    return torch.stack([(words[..., i // n] >> (bits * (i % n))) & (2**bits - 1) for i in range(count)], dim=-1)


def weight_of(tensors, module):
    """A Linear's weight from a compressed-tensors checkpoint."""
    outputs, inputs = tensors[f"{module}.weight_shape"].tolist()
    codes = unpacked(tensors[f"{module}.weight_packed"], inputs)
    zeros = unpacked(tensors[f"{module}.weight_zero_point"].T, outputs).T
    scales = tensors[f"{module}.weight_scale"].float()
    size = inputs // scales.shape[1]
    return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("source"))


def calibrated(source, folder, weights='method = "rtn"\ngroup_size = 16', cache='preset = "oscar"'):
    (folder / "tiny.toml").write_text(f"[weights]\n{weights}\n\n[kv]\n{cache}\n")
    calibrate(str(source), folder / "work", recipe=folder / "tiny.toml", samples=1, seq_len=16, progress=False)
    return folder / "work"


@pytest.fixture(scope="module")
def work(source, tmp_path_factory):
    return calibrated(source, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module")
def checkpoint(work, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint") / "out"
    assert export_compressed_tensors(work, directory, progress=False) is False
    return directory


def random_weight(inputs, outputs, group, bits):
    generator = torch.Generator().manual_seed(0)
    rows = inputs, inputs // group
    codes, zeros = (pack_bits(torch.randint(0, 2**bits, (n, outputs), generator=generator), bits) for n in rows)
    return AwqWeight(codes, zeros, torch.rand(inputs // group, outputs, generator=generator).half() + 0.01)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(32, 8, 16), (24, 40, 8), (64, 16, 64)])
def test_codes_zeros_and_scales_are_kept(inputs, outputs, group, bits):
    packed = random_weight(inputs, outputs, group, bits)
    tensors = {f"x.{name}": tensor for name, tensor in pack_quantized(packed).items()}
    assert torch.equal(weight_of(tensors, "x"), dequantize_weight(packed))


def test_the_checkpoint_holds_the_weights_of_the_bundle(work, checkpoint, tmp_path):
    bundle = load_file(export(work, tmp_path / "bundle", progress=False) / "model.safetensors")
    found = load_file(checkpoint / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in bundle if name.endswith(".qweight")]
    assert len(modules) == 14
    for module in modules:
        packed = AwqWeight(*(bundle[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")))
        assert torch.equal(weight_of(found, module), dequantize_weight(packed)), module
    kept = {name for name in bundle if name.rpartition(".")[0] not in modules}
    assert all(torch.equal(found[name], bundle[name]) for name in kept)
    assert len(found) == len(kept) + 4 * len(modules)


def test_it_is_no_bundle_and_says_what_is_in_it(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    assert not names & {"kvconvert.json", "kvconvert", "bundle"}
    config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["lm_head"]
    assert config["kv_cache_scheme"] is None


def test_scales_of_keys_and_values_cover_what_calibration_found(source, tmp_path):
    work = calibrated(source, tmp_path, cache='static_scales = "calibrated"\nkey_bits = 8\nvalue_bits = 8')
    bundle = export(work, tmp_path / "bundle", progress=False)
    assert export_compressed_tensors(work, tmp_path / "out", progress=False) is True
    plan = load_file(bundle / "kvconvert" / "plan.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for layer in range(2):
        for side, name in (("key", "k_scale"), ("value", "v_scale")):
            low = plan[f"layers.{layer}.static_{side}_zero_point"].float()
            high = low + 255 * plan[f"layers.{layer}.static_{side}_scale"].float()
            largest = 448 * found[f"model.layers.{layer}.self_attn.{name}"]
            assert largest.item() == pytest.approx(max(-low.min().item(), high.max().item()), rel=1e-6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["type"] == "float"


def test_unquantized_weights_are_refused_and_nothing_is_left(source, tmp_path):
    work = calibrated(source, tmp_path, weights='method = "none"')
    with pytest.raises(UsageError, match="nothing is quantized"):
        export_compressed_tensors(work, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_widths_that_the_format_or_its_reader_lacks_are_refused(source, tmp_path):
    narrow = calibrated(source, tmp_path, weights='method = "rtn"\ngroup_size = 16\nbits = 3')
    with pytest.raises(UsageError, match=r"has 3 bits; compressed-tensors export writes 4 or 8 bits"):
        export_compressed_tensors(narrow, tmp_path / "out", progress=False)
    rule = '[[weights.modules]]\nmatch = "*.down_proj"\nbits = 8'
    (tmp_path / "two").mkdir()
    mixed = calibrated(source, tmp_path / "two", weights=f'method = "rtn"\ngroup_size = 16\n{rule}')
    with pytest.raises(UsageError, match="weights of 4 and 8 bits"):
        export_compressed_tensors(mixed, tmp_path / "out", progress=False)


def scheme_of(bits, group):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")


@pytest.mark.parametrize("bits", [4, 8])
def test_the_formats_own_package_packs_and_unpacks_the_same(bits):
    pytest.importorskip("compressed_tensors", reason=NEEDS)
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    packed = random_weight(48, 40, 16, bits)
    ours, weight = pack_quantized(packed), dequantize_weight(packed)
    found = PackedQuantizationCompressor.decompress(ours, scheme_of(bits, 16))["weight"]
    # the package multiplies in float16, where ours is rounded once
    assert torch.equal(found.half(), weight.half())
    zeros = unpack_bits(packed.qzeros, bits).T.to(torch.int16) - 2 ** (bits - 1)
    state = {"weight": weight, "weight_scale": packed.scales.T.float(), "weight_zero_point": zeros.to(torch.int8)}
    theirs = PackedQuantizationCompressor.compress(state, scheme_of(bits, 16))
    assert {*theirs} == {*ours}
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor if name != "weight_scale" else tensor.half()), name
        assert ours[name].dtype == tensor.dtype or name == "weight_scale"


@pytest.mark.parametrize("bits", [pytest.param(4, marks=pytest.mark.full), 8])
def test_transformers_loads_the_checkpoint_with_the_formats_own_package(source, tmp_path, bits):
    pytest.importorskip("compressed_tensors", reason=NEEDS)
    work = calibrated(source, tmp_path, weights=f'method = "rtn"\ngroup_size = 16\nbits = {bits}')
    export_compressed_tensors(work, tmp_path / "out", progress=False)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours, _ = kvconvert.load(export(work, tmp_path / "bundle", progress=False), dtype=torch.float32)
    ids = torch.arange(40)[None] * 7
    with torch.no_grad():
        expected, logits = ours(ids, use_cache=False).logits, found(ids, use_cache=False).logits
    # theirs rounds each weight to float16, the dtype of the scales
    assert (logits - expected).abs().amax() <= 2e-3 * expected.abs().amax()
