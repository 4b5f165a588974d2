"""The kernels of 2-, 3- and 8-bit Linears equal dequantize-then-multiply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny.weights import product_error, random_rows, random_weight

from kvconvert.kernels.device import fallbacks
from kvconvert.kernels.elementwise import Gate
from kvconvert.kernels.experts import experts_reference, routed_experts, store_experts, unsupported
from kvconvert.kernels.linear import QuantizedLinear, share_input
from kvconvert.kernels.linear.awq_format import dequantize_weight
from kvconvert.kernels.linear.packed_layout import LEAST_PART, PARTS, k_block_for, pack_weight, unpack_codes
from kvconvert.kernels.linear.triton.few_rows import few_rows
from kvconvert.kernels.linear.triton.many_rows import dequantize, prompt, unpacked

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BITS = (2, 3, 8)
# The interpreter truncates to bfloat16, where a GPU rounds.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 1e-2}
# Inputs, outputs, group size, length of k blocks if another than usual: k blocks of several groups, outputs that do not
# fill a tile and inputs that do not fill a k block, groups of several k blocks, k blocks of two groups of 128.
SHAPES = [(160, 40, 32, None), (64, 8, 64, None), (384, 72, 128, None), (512, 96, 256, None), (384, 40, 128, 256)]
every_shape = [SHAPES[0], *(pytest.param(*shape, marks=pytest.mark.full) for shape in SHAPES[1:])]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "outputs", "group_size", "k_block"), SHAPES)
def test_the_layout_is_turned_back_exactly(bits, inputs, outputs, group_size, k_block) -> None:
    weight = random_weight(inputs, outputs, group_size, bits)
    for chunk_codes in (1 << 24, 64 * inputs):
        packed = pack_weight(weight, chunk_codes, k_block if bits < 8 else None)
        assert (packed.inputs, packed.group_size, packed.bits) == (inputs, group_size, bits)
        assert torch.equal(unpack_codes(packed, chunk_codes), weight.qweight)


def test_k_blocks_are_the_longest_that_need_least_padding() -> None:
    lengths = {(3, 128, 4096): 256, (3, 64, 576): 128, (3, 32, 32): 128, (2, 32, 576): 64, (2, 32, 4096): 128}
    lengths |= {(2, 384, 768): 128, (4, 512, 1024): 128, (8, 64, 576): 64, (8, 128, 4096): 128}
    for (bits, group_size, inputs), length in lengths.items():
        assert k_block_for(group_size, bits, inputs) == length
        part = length // PARTS[bits]
        assert part >= LEAST_PART
        assert group_size % part == 0


def test_padded_inputs_never_reach_the_output(device: torch.device) -> None:
    packed = pack_weight(random_weight(160, 40, 32, 3, device))
    # Inputs 160 to 255 are parts 5 to 7 of the only k block, of which 6 and 7 have bits 12 to 15 of all lanes.
    lanes = packed.lanes | -4096
    x = random_rows(3, 160, torch.float16, device)
    for kernel in (few_rows, prompt, unpacked):
        assert torch.equal(kernel(x, replace(packed, lanes=lanes)), kernel(x, packed)), kernel.__name__


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "outputs", "group_size", "k_block"), every_shape)
@pytest.mark.parametrize("rows", [3, *(pytest.param(rows, marks=pytest.mark.full) for rows in (1, 16, 33, 130))])
def test_every_kernel_equals_dequantize_then_multiply(
    device: torch.device, dtype, bits, inputs, outputs, group_size, k_block, rows
) -> None:
    weight = random_weight(inputs, outputs, group_size, bits, device)
    x, packed = random_rows(rows, inputs, dtype, device), pack_weight(weight, k_block=k_block if bits < 8 else None)
    values, expected = dequantize(packed, dtype), dequantize_weight(weight, dtype)
    assert ((values - expected).abs() <= 2**-7 * expected.abs()).all()
    for kernel in (few_rows, prompt, unpacked):
        assert product_error(kernel(x, packed), x, weight) < TOLERANCE[dtype], kernel.__name__


def test_the_linear_takes_the_kernels_and_keeps_what_is_stored(device: torch.device) -> None:
    weight, x = random_weight(128, 40, 64, 3, device), random_rows(2, 128, torch.float16, device)
    module = QuantizedLinear.from_weight(weight)
    fallbacks.clear()
    assert module.path(2, torch.float16, device) == "few rows"
    assert product_error(module(x), x, weight) < TOLERANCE[torch.float16]
    assert module.qweight is None
    assert torch.equal(module.state_dict()["qweight"], weight.qweight)
    assert not fallbacks


def test_linears_of_one_width_share_a_product_and_others_do_not(device: torch.device) -> None:
    x = random_rows(2, 128, torch.bfloat16, device)
    weights = [random_weight(128, outputs, 64, bits, device) for outputs, bits in ((32, 3), (40, 3), (64, 2))]
    same, other = [QuantizedLinear.from_weight(w) for w in weights[:2]], QuantizedLinear.from_weight(weights[2])
    assert share_input([*same, other]) == "widths of weights differ"
    assert share_input(same) is None
    with torch.no_grad():
        for module, weight in zip(same, weights, strict=False):
            assert product_error(module(x), x, weight) < TOLERANCE[torch.bfloat16]


@pytest.mark.full
@pytest.mark.parametrize("bits", [(3, 3), (2, 8)])
@pytest.mark.parametrize("tokens", [2, 90])
def test_experts_at_other_widths_equal_the_reference(device: torch.device, bits, tokens) -> None:
    experts = [
        [
            QuantizedLinear.from_weight(random_weight(inputs, outputs, 64, width, device))
            for inputs, outputs, width in ((64, 64, bits[0]), (64, 64, bits[0]), (64, 64, bits[1]))
        ]
        for _ in range(2)
    ]
    dense = [[dequantize_weight(part.awq_weight(), torch.float64) for part in expert] for expert in experts]
    stored, kind = store_experts([tuple(expert) for expert in experts]), Gate("silu")
    x = random_rows(tokens, 64, torch.float16, device) / 8  # whose gated products stay within fp16
    chosen, scores = torch.arange(tokens, device=device)[:, None] % 2, torch.ones(tokens, 1, device=device)
    assert unsupported(x, stored, kind) is None
    gate_up, down = torch.stack([torch.cat(parts[:2]) for parts in dense]), torch.stack([p[2] for p in dense])
    exact = experts_reference(x.double(), chosen, scores.double(), gate_up, down, kind)
    y = routed_experts(x, chosen, scores, stored, kind)
    assert float((y.double() - exact).norm() / exact.norm()) < 2e-3
