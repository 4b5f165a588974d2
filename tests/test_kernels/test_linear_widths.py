"""The packed Linear at 2, 3 and 8 bits: every path of the CPU equals dequantize-then-multiply."""

import copy

import pytest
import torch
from tiny.weights import random_weight, relative_error

from kvconvert.errors import UsageError
from kvconvert.kernels.linear import QuantizedLinear, cpu, w4a16_reference
from kvconvert.kernels.linear.awq_format import dequantize_weight
from kvconvert.kernels.linear.cpu import int4pack_block

# As in test_linear.py; a float16 weight of few codes makes sums that cancel.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3, torch.float64: 1e-12}
SHAPES = [(64, 8, 32), (96, 112, 96), (256, 256, 32), (192, 1000, 64)]


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), SHAPES)
@pytest.mark.parametrize("rows", [1, 70])
def test_every_path_equals_dequantize_then_multiply(
    bits: int, inputs: int, outputs: int, group_size: int, rows: int
) -> None:
    weight = random_weight(inputs, outputs, group_size, bits)
    generator = torch.Generator().manual_seed(rows)
    for dtype, tolerance in TOLERANCE.items():
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        exact = x.double() @ dequantize_weight(weight, torch.float64).T + bias.double()
        module = QuantizedLinear.from_weight(weight, bias)
        assert relative_error(module(x), exact) < tolerance
        assert relative_error(w4a16_reference(x, weight, bias), exact) < tolerance
        for tile_weights in (cpu.TILE_WEIGHTS, 1):
            # By tiles, from whichever layout the first call left.
            tiled = cpu.tiled_product(x, module.qweight, module.int4pack, module.qzeros, module.scales, tile_weights)
            assert relative_error(tiled + bias, exact) < tolerance
        assert torch.equal(module.awq_weight().qweight, weight.qweight)


@pytest.mark.skipif(int4pack_block() is None, reason="torch's int4 layout is unknown on this processor")
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


def test_other_widths_are_refused() -> None:
    with pytest.raises(UsageError, match="2, 3, 4 or 8 bits, not 5"):
        QuantizedLinear(64, 64, 32, bits=5)
