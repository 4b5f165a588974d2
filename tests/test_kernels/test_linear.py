"""The packed Linear: every path equals dequantize-then-multiply, and its packing survives what models do to modules.

Unquantized Linears of 16-bit models on a CPU: the same function as `nn.Linear`, summed in float32.
"""

from __future__ import annotations

import copy
import io
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny.weights import random_weight, relative_error
from torch import nn

from kvconvert.errors import UsageError
from kvconvert.kernels import device
from kvconvert.kernels import device as devices
from kvconvert.kernels.device import fallbacks
from kvconvert.kernels.linear import DenseLinear, QuantizedLinear, cpu, w4a16_reference
from kvconvert.kernels.linear.awq_format import dequantize_weight, quantize_weight, unpack_awq
from kvconvert.kernels.linear.cpu import FEW_ROWS, int4pack_block, tiled_dense_product, unpack_int4pack

# Relative error of a whole output, by input dtype. float32: sums of hundreds of products. float16: the result's
# rounding. bfloat16: weights or scales and offsets, and the result, each rounded to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-4, torch.bfloat16: 5e-3, torch.float64: 1e-12}
# Outputs that end in blocks of 8, 16 and 48; all group sizes; tiles with and without a remainder.
SHAPES = [(64, 8, 32), (256, 24, 64), (128, 176, 128), (256, 256, 32), (96, 112, 96), (512, 64, 256), (192, 1000, 64)]

needs_int4pack = pytest.mark.skipif(int4pack_block() is None, reason="torch's int4 layout is unknown on this processor")


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_every_path_equals_dequantize_then_multiply(
    bits: int, inputs: int, outputs: int, group_size: int, rows: int
) -> None:
    weight = random_weight(inputs, outputs, group_size, bits)
    generator = torch.Generator().manual_seed(rows)
    for dtype in TOLERANCE:
        # A float16 weight of few codes makes sums that cancel.
        tolerance = TOLERANCE[dtype] * (1 if bits == 4 else 1.5 if dtype.itemsize == 2 else 1)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        exact = x.double() @ dequantize_weight(weight, torch.float64).T + bias.double()
        module = QuantizedLinear.from_weight(weight, bias)
        y = module(x)
        assert y.dtype == dtype
        assert relative_error(y, exact) < tolerance
        assert relative_error(w4a16_reference(x, weight, bias), exact) < tolerance
        for tile_weights in (cpu.TILE_WEIGHTS, 1):
            # By tiles, from whichever layout the first call left.
            tiled = cpu.tiled_product(x, module.qweight, module.int4pack, module.qzeros, module.scales, tile_weights)
            assert relative_error(tiled + bias, exact) < tolerance
        assert torch.equal(module.awq_weight().qweight, weight.qweight)


@pytest.mark.parametrize("instructions", [False, True])
def test_tiles_in_bfloat16_with_and_without_instructions_for_it(instructions, monkeypatch) -> None:
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: instructions)
    weight = random_weight(256, 80, 64)
    x = torch.randn(70, 256).bfloat16()
    exact = x.double() @ dequantize_weight(weight, torch.float64).T
    y = cpu.tiled_product(x, weight.qweight, None, weight.qzeros, weight.scales)
    assert y.dtype == torch.bfloat16
    # In float32 only the result is rounded, in bfloat16 the weights are, too.
    assert relative_error(y, exact) < (TOLERANCE[torch.bfloat16] if instructions else 2.5e-3)


@needs_int4pack
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (96, 112), (2048, 640), (64, 1024)])
def test_packing_equals_torchs_own(inputs: int, outputs: int) -> None:
    weight = random_weight(inputs, outputs, 32)
    codes = unpack_awq(weight.qweight).T.contiguous().int()
    expected = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    assert torch.equal(cpu.pack_int4(weight)[0], expected)


@needs_int4pack
def test_bfloat16_and_few_rows_take_the_int4_product_where_it_fits() -> None:
    module = QuantizedLinear(256, 64, 128)
    few, many = cpu.INT4PACK_ROWS, cpu.INT4PACK_ROWS + 1
    assert module.path(1, torch.bfloat16) == module.path(few, torch.bfloat16) == "int4pack"
    assert (
        module.path(many, torch.bfloat16) == module.path(1, torch.float32) == module.path(1, torch.float16) == "tiled"
    )
    assert QuantizedLinear(256, 72, 128).path(1, torch.bfloat16) == "tiled"
    assert QuantizedLinear(256, 64, 16).path(1, torch.bfloat16) == "tiled"
    assert module.path(1, torch.bfloat16, "meta") == module.path(1, torch.float32, "meta") == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_batch_shape_and_no_rows(dtype: torch.dtype) -> None:
    module = QuantizedLinear.from_weight(random_weight(64, 48, 32))
    x = torch.randn(2, 3, 5, 64, dtype=dtype)
    y = module(x)
    assert y.shape == (2, 3, 5, 48)
    for index in ((0, 0, 0), (1, 2, 4)):
        # Other row counts sum in another order.
        assert relative_error(module(x[index]), y[index].double()) < TOLERANCE[dtype]
    assert module(x.new_empty(2, 0, 64)).shape == (2, 0, 48)
    assert torch.equal(module(x.transpose(0, 2)), module(x.transpose(0, 2).contiguous()))


@needs_int4pack
@pytest.mark.parametrize("outputs", [16, 48, 64, 80, 112, 256])
def test_torchs_layout_is_turned_back_exactly(outputs: int) -> None:
    codes = torch.randint(0, 16, (outputs, 96), dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(unpack_int4pack(packed), codes)


@needs_int4pack
def test_the_int4_layout_replaces_qweight_and_nothing_else_notices() -> None:
    weight = random_weight(256, 80, 64)
    module = QuantizedLinear.from_weight(weight)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    y = module(x)
    assert module.qweight is None
    stored = sum(buffer.nbytes for buffer in module.buffers())
    assert stored < 1.3 * sum(tensor.nbytes for tensor in weight)
    after = module.state_dict()
    assert sorted(after) == sorted(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    copied, restored = copy.deepcopy(module), QuantizedLinear(256, 80, 64)
    restored.load_state_dict(after)
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    unpickled = torch.load(pickled, weights_only=False)
    for other in (copied, restored, unpickled, module.to("cpu")):
        assert torch.equal(other(x), y)
    module.load_state_dict(QuantizedLinear.from_weight(random_weight(256, 80, 64)).state_dict())
    assert torch.equal(module(x), y)
    other_weight = quantize_weight(torch.randn(80, 256), 4, 64)
    module.load_state_dict(QuantizedLinear.from_weight(other_weight).state_dict())
    assert torch.equal(module.awq_weight().qweight, other_weight.qweight)
    assert not torch.equal(module(x), y)


@needs_int4pack
@pytest.mark.parametrize(("bits", "path"), [(2, "int4pack"), (3, "int4pack"), (8, "tiled")])
def test_fewer_bits_take_the_int4_product_and_are_stored_as_they_were(bits: int, path: str) -> None:
    weight = random_weight(256, 64, 64, bits)
    module, x = QuantizedLinear.from_weight(weight), torch.randn(2, 256).bfloat16()
    assert module.path(2, torch.bfloat16) == path
    y = module(x)
    assert (module.qweight is None) == (path == "int4pack")
    assert torch.equal(module.state_dict()["qweight"], weight.qweight)
    restored = QuantizedLinear(256, 64, 64, bits=bits)
    restored.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), restored):
        assert torch.equal(other(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16])
def test_casting_the_model_leaves_the_scales_and_the_result_alone(dtype: torch.dtype) -> None:
    model = nn.Sequential(QuantizedLinear.from_weight(random_weight(128, 32, 64), torch.randn(32)))
    x = torch.randn(3, 128)
    # Halves, which every dtype holds exactly.
    model[0].bias.mul_(2).round_().div_(2)
    y, scales = model(x), model[0].scales.clone()
    model.to(dtype)
    assert model[0].scales.dtype == torch.float16
    assert model[0].bias.dtype == dtype
    assert torch.equal(model[0].scales, scales)
    model.to(torch.bfloat16).half().float()
    assert torch.equal(model[0].scales, scales)
    assert torch.equal(model(x), y)


def test_building_on_meta_and_materialising_later() -> None:
    weight = random_weight(128, 32, 64)
    with torch.device("meta"):
        module = QuantizedLinear(128, 32, 64, bias=True)
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
    module = module.to(torch.bfloat16).to_empty(device="cpu")
    assert module.scales.dtype == torch.float16
    module.load_state_dict({**weight._asdict(), "bias": torch.zeros(32)})
    assert relative_error(module(torch.eye(128)), dequantize_weight(weight, torch.float64).T) < 1e-6


def test_a_call_on_another_device_says_that_it_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks.clear()
    module = QuantizedLinear(64, 16, 32, device="meta")
    with caplog.at_level(logging.WARNING, logger="kvconvert"):
        for _ in range(2):
            assert module(torch.empty(3, 64, device="meta")).shape == (3, 16)
    assert ["slower" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_the_input_without_keeping_dequantized_weights(dtype: torch.dtype) -> None:
    weight = random_weight(64, 32, 32)
    module = QuantizedLinear.from_weight(weight, torch.randn(32, dtype=dtype))
    x = torch.randn(2, 3, 64, dtype=dtype, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        y = module(x)
    assert not kept
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert relative_error(x.grad, upstream.double() @ dequantize_weight(weight, torch.float64)) < TOLERANCE[dtype]


def test_a_module_first_used_in_inference_mode_works_outside_it() -> None:
    module = QuantizedLinear.from_weight(random_weight(64, 32, 32))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        y = module(x)
    assert torch.equal(module(x.clone().requires_grad_()).detach(), y)
    module.float()
    assert torch.equal(module(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_straight_into_the_module_through_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    method = f"packed-linear-test-{dtype}"

    @register_quantization_config(method)
    class Config(QuantizationConfigMixin):
        def __init__(self, **values: object) -> None:
            self.quant_method = method

    @register_quantizer(method)
    class Quantizer(HfQuantizer):
        requires_calibration = True
        is_trainable = False

        def is_serializable(self) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: object) -> None:
            for name, module in list(model.named_modules()):
                if isinstance(module, nn.Linear) and name != "lm_head":
                    with torch.device("meta"):
                        packed = QuantizedLinear(module.in_features, module.out_features, 32)
                    model.set_submodule(name, packed)

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config).eval()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "_proj" in name:
            weight = quantize_weight(tensor * 5, 4, 32)
            tensors |= {name.replace("weight", key): value for key, value in weight._asdict().items()}
            tensor.copy_(dequantize_weight(weight))
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    packed = loaded.model.layers[1].mlp.down_proj
    assert isinstance(packed, QuantizedLinear)
    assert packed.scales.dtype == torch.float16
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = model.to(dtype)(ids).logits
        error = relative_error(loaded(ids).logits, expected.double())
    assert error < (1e-5 if dtype == torch.float32 else 0.03)
    saved = loaded.state_dict()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors if "_proj" in name)


def test_sizes_and_widths_that_cannot_be_held_are_refused() -> None:
    with pytest.raises(UsageError, match="2, 3, 4 or 8 bits, not 5"):
        QuantizedLinear(64, 64, 32, bits=5)
    with pytest.raises(UsageError, match="does not divide"):
        QuantizedLinear(100, 16, 64)
    with pytest.raises(UsageError, match="by eight"):
        QuantizedLinear(64, 12, 32)


@pytest.fixture(params=[False, True], ids=["without instructions", "with instructions"])
def processor(request, monkeypatch):
    """Whether the processor multiplies bfloat16 by itself."""
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_product_in_float64(processor, dtype, rows, bias):
    linear = nn.Linear(96, 130, bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96).to(dtype)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    y = DenseLinear.of(linear)(x)
    assert y.dtype == dtype
    assert y.shape == exact.shape
    if rows:
        # The result's rounding; with a bias, torch's own product may round before it adds.
        assert relative_error(y, exact) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("tile_weights", [1, 96 * 7, 1 << 20])
def test_tiles_of_any_size_give_the_product(tile_weights):
    rows, weight, bias = torch.randn(5, 96).bfloat16(), torch.randn(45, 96).bfloat16(), torch.randn(45).bfloat16()
    exact = rows.double() @ weight.double().T + bias.double()
    assert relative_error(tiled_dense_product(rows, weight, bias, tile_weights), exact) < 4e-3


def test_many_rows_are_summed_in_float32_where_the_processor_has_no_instructions(monkeypatch):
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    called = []
    original = torch.nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: called.append(args[0].dtype) or original(*args))
    linear = DenseLinear.of(nn.Linear(64, 32).bfloat16().requires_grad_(False))
    linear(torch.randn(FEW_ROWS + 1, 64).bfloat16())
    assert called == []
    linear(torch.randn(FEW_ROWS, 64).bfloat16())
    linear.float()(torch.randn(9, 64))
    assert called == [torch.bfloat16, torch.float32]


def test_shares_its_parameters_and_gives_gradients():
    linear = nn.Linear(64, 32).bfloat16()
    dense = DenseLinear.of(linear)
    assert dense.weight is linear.weight
    assert sorted(dense.state_dict()) == sorted(linear.state_dict())
    x = torch.randn(2, 9, 64).bfloat16().requires_grad_()
    dense(x).sum().backward()
    assert x.grad.shape == x.shape
    assert linear.weight.grad is not None
