"""The kernels of Linears of 2 to 8 bits equal dequantize-then-multiply, and their layout loses nothing."""

import copy
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from tiny.weights import product_error, random_rows, random_weight

from kvconvert.errors import UsageError
from kvconvert.kernels import linear as dispatch
from kvconvert.kernels.device import capability, fallbacks, multiprocessors
from kvconvert.kernels.elementwise import Gate
from kvconvert.kernels.experts import experts_reference, routed_experts, store_experts
from kvconvert.kernels.experts import unsupported as experts_unsupported
from kvconvert.kernels.linear import QuantizedLinear, keep_values, share_input
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, quantize_weight
from kvconvert.kernels.linear.packed_layout import LEAST_PART, PARTS, k_block_for, pack_weight, unpack_codes
from kvconvert.kernels.linear.triton.few_rows import few_rows
from kvconvert.kernels.linear.triton.many_rows import PromptShape, dequantize, prompt, split_shape, unpacked

# Relative error of a whole output: the result's rounding, which the interpreter does by truncation for bfloat16, and
# for prompts the weights' as well.
FEW_ROWS_TOLERANCE = {torch.float16: 4e-4, torch.bfloat16: 4.5e-3}
PROMPT_TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 9e-3}
# At other widths than 4 bits; the interpreter truncates to bfloat16, where a GPU rounds.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 1e-2}
DTYPES = list(FEW_ROWS_TOLERANCE)
BITS = (2, 3, 4, 8)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Inputs, outputs, group size, length of k blocks if another than usual. Outputs that fill a part of a tile, one, and
# several; inputs of one k block, of an odd number, that do not fill one; k blocks of several groups, of two groups of
# 128; groups of several k blocks; every kind of group.
SHAPES = [
    (64, 8, 32, None),
    (160, 40, 32, None),
    (64, 8, 64, None),
    (192, 40, 64, None),
    (128, 32, 128, None),
    (384, 72, 128, None),
    (512, 96, 256, None),
    (384, 40, 128, 256),
]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "outputs", "group_size", "k_block"), SHAPES)
def test_the_layout_is_turned_back_exactly_and_made_in_pieces_without_a_seam(
    bits, inputs, outputs, group_size, k_block
) -> None:
    weight = random_weight(inputs, outputs, group_size, bits)
    whole = pack_weight(weight, k_block=k_block if bits < 4 else None)
    for chunk_codes in (1 << 24, 64 * inputs):
        packed = pack_weight(weight, chunk_codes, k_block if bits < 4 else None)
        assert (packed.inputs, packed.group_size, packed.bits) == (inputs, group_size, bits)
        assert torch.equal(packed.lanes, whole.lanes)
        assert torch.equal(unpack_codes(packed, chunk_codes), weight.qweight)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("inputs", "outputs", "group_size", "k_block"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 130])
def test_every_kernel_equals_dequantize_then_multiply(
    device: torch.device, dtype, bits, inputs, outputs, group_size, k_block, rows
) -> None:
    weight = random_weight(inputs, outputs, group_size, bits, device)
    x, packed = random_rows(rows, inputs, dtype, device), pack_weight(weight, k_block=k_block if bits < 4 else None)
    values, expected = dequantize(packed, dtype), dequantize_weight(weight, dtype)
    if bits == 4 and (device.type == "cuda" or dtype == torch.float16):
        assert torch.equal(values, expected), "rounded once"
    assert ((values - expected).abs() <= 2**-7 * expected.abs()).all()
    for kernel in (few_rows, prompt, partial(unpacked, chunk=64 * inputs)):  # pieces of outputs, the last one short
        four = FEW_ROWS_TOLERANCE if kernel is few_rows else PROMPT_TOLERANCE
        assert product_error(kernel(x, packed), x, weight) < (four if bits == 4 else TOLERANCE)[dtype], kernel


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_values_change_no_bit(device: torch.device, dtype: torch.dtype) -> None:
    inputs, outputs = 256, 200
    weight, x = random_weight(inputs, outputs, 64, device=device), random_rows(17, inputs, dtype, device)
    packed = pack_weight(weight)
    kept = replace(packed, values=dequantize(packed, dtype))
    for chunk in (64 * inputs, 1 << 26):
        assert torch.equal(unpacked(x, kept, chunk), unpacked(x, packed, chunk))
    other = x.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
    assert torch.equal(unpacked(other, kept), unpacked(other, packed))


def test_values_are_kept_of_each_weight_once_and_go_with_the_layout(device: torch.device) -> None:
    weights = [random_weight(256, outputs, 64, device=device) for outputs in (64, 32, 96)]
    q, k, o = map(QuantizedLinear.from_weight, weights)
    x = random_rows(700, 256, torch.bfloat16, device)
    expected = [linear(x) for linear in (q, k, o)]
    share_input([q, k])
    assert keep_values([q, k, o], torch.bfloat16) == 2 * 256 * (64 + 32 + 96)
    assert q.storage.packed()[0].values.shape == (96, 256)
    assert o.gpu_weight().values.shape == (96, 256)
    for linear, y in zip((q, k, o), expected, strict=True):
        assert torch.equal(linear(x), y)
    moved = o.to(torch.float16)
    assert moved.gpu_values is None
    assert keep_values([o.to(torch.float32)], torch.float32) == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(64, 64, 32), (640, 200, 128), (1536, 104, 64)])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 31, 32, 33, 63, 64, 65, 129, 300])
def test_every_kernel_over_many_numbers_of_rows(
    device: torch.device, dtype: torch.dtype, inputs: int, outputs: int, group_size: int, rows: int
) -> None:
    weight, x = random_weight(inputs, outputs, group_size, device=device), random_rows(rows, inputs, dtype, device)
    packed = pack_weight(weight)
    if rows <= 65:
        assert product_error(few_rows(x, packed), x, weight) < FEW_ROWS_TOLERANCE[dtype]
    assert product_error(prompt(x, packed), x, weight) < PROMPT_TOLERANCE[dtype]
    assert product_error(unpacked(x, packed), x, weight) < PROMPT_TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 33])
def test_outliers_beyond_fp16_survive_in_bfloat16(device: torch.device, rows: int) -> None:
    weight, x = random_weight(256, 40, 128, device=device), random_rows(rows, 256, torch.bfloat16, device)
    x[0, 17], x[-1, 200] = 1e5, -3e30
    kernel = few_rows if rows == 1 else prompt
    y = kernel(x, pack_weight(weight))
    exact = x.double() @ dequantize_weight(weight, torch.float64).T
    error = (y.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < PROMPT_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("inputs", "outputs", "group_size", "splits"),
    [(160, 40, 32, 2), (512, 8, 256, 2), (128, 8, 128, 5)],
    ids=["a short last split", "groups of two k blocks", "fewer groups than splits"],
)
def test_inputs_may_be_split_between_programs(
    device: torch.device, inputs: int, outputs: int, group_size: int, splits: int
) -> None:
    weight, x = (
        random_weight(inputs, outputs, group_size, device=device),
        random_rows(19, inputs, torch.float16, device),
    )
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(2)).to(device, torch.float16)
    packed, shape = pack_weight(weight), PromptShape(rows=16, tiles=4, warps=4, stages=3, splits=splits)
    y = prompt(x, packed, shape)
    assert product_error(y, x, weight) < PROMPT_TOLERANCE[torch.float16]
    assert torch.equal(prompt(x, packed, shape), y)
    assert ((prompt(x, packed, shape, bias) - (y + bias)).abs() <= 2**-10 * (y.abs() + bias.abs())).all()


@pytest.mark.parametrize(
    ("inputs", "group_size", "rows", "splits"),
    [(1088, 64, 3, 2), (1536, 256, 33, 3), (1152, 128, 65, 2)],
    ids=["a short last split", "groups of two k blocks", "more rows than a program has"],
)
def test_the_chosen_splits_equal_dequantize_then_multiply(
    device: torch.device, inputs: int, group_size: int, rows: int, splits: int
) -> None:
    weight, x = random_weight(inputs, 8, group_size, device=device), random_rows(rows, inputs, torch.bfloat16, device)
    packed, groups = pack_weight(weight), inputs // group_size
    assert split_shape(rows, 1, groups, group_size, multiprocessors(device), capability(device)).splits == splits
    bias = torch.arange(8.0).to(device, torch.bfloat16)
    assert product_error(prompt(x, packed, bias=bias) - bias, x, weight) < 2 * PROMPT_TOLERANCE[torch.bfloat16]


def test_small_activations_and_scales_lose_nothing_in_fp16(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = quantize_weight(torch.randn(32, 128, generator=generator) * 2e-4, 4, 128)
    weight = AwqWeight(*(tensor.to(device) for tensor in weight))
    # Down to subnormals; the outputs stay normal.
    x = random_rows(2, 128, torch.float16, device)
    x[:, ::2] *= 2.0**-16
    y = few_rows(x * 64, pack_weight(weight))
    assert product_error(y, x * 64, weight) < 2 * FEW_ROWS_TOLERANCE[torch.float16]


def test_the_same_call_gives_the_same_bits(device: torch.device) -> None:
    weight, x = random_weight(512, 96, 64, device=device), random_rows(5, 512, torch.bfloat16, device)
    packed = pack_weight(weight)
    for kernel in (few_rows, prompt, unpacked):
        assert torch.equal(kernel(x, packed), kernel(x, packed))


def test_rows_that_are_not_contiguous_or_not_aligned(device: torch.device) -> None:
    weight, x = random_weight(64, 32, 32, device=device), random_rows(4, 192, torch.float16, device)
    packed = pack_weight(weight)
    for view in (x[:, 64:128], x[::2, :64], x.flatten()[3 : 3 + 4 * 64].view(4, 64)):
        assert product_error(few_rows(view, packed), view, weight) < FEW_ROWS_TOLERANCE[torch.float16]
        assert product_error(prompt(view, packed), view, weight) < PROMPT_TOLERANCE[torch.float16]


def test_what_the_kernels_cannot_do_is_refused(device: torch.device) -> None:
    packed = pack_weight(random_weight(64, 32, 32, device=device))
    assert "fp16 and bf16" in dispatch.unsupported(device, torch.float32, 32)
    assert "not of 96" in dispatch.unsupported(device, torch.float16, 96)
    assert "no kernels for meta" in dispatch.unsupported(torch.device("meta"), torch.float16, 32)
    assert dispatch.unsupported(device, torch.float16, 32) is None
    with pytest.raises(UsageError, match=r"\[rows, 64\]"):
        prompt(torch.zeros(1, 32, device=device, dtype=torch.float16), packed)
    with pytest.raises(UsageError, match="groups of 32"):
        pack_weight(random_weight(96, 32, 96, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_linear_takes_the_kernels_and_keeps_its_promises(device: torch.device, dtype: torch.dtype) -> None:
    weight = random_weight(256, 72, 64, device=device)
    module = QuantizedLinear.from_weight(weight, torch.randn(72).to(device, dtype))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert [module.path(rows, dtype, device) for rows in (1, 64, 65)] == ["few rows", "few rows", "unpacked"]
    for outputs, most in ((4096, 256), (6144, 512)):
        large = QuantizedLinear(4096, outputs, 128, device="meta")
        paths = ["few rows", "few rows", "fused", "fused", "unpacked"]
        assert [large.path(rows, dtype, device) for rows in (1, 16, 17, most, most + 1)] == paths
    fallbacks.clear()
    for rows in (3, 65):
        x = random_rows(rows, 256, dtype, device)
        y = module(x)
        assert product_error(y - module.bias, x, weight) < 2 * PROMPT_TOLERANCE[dtype]
    assert not fallbacks
    assert module.qweight is None
    assert module.int4pack is None
    stored = sum(buffer.nbytes for buffer in module.buffers())
    # 72 outputs are padded to 96.
    assert stored < 1.8 * sum(tensor.nbytes for tensor in weight)
    after = module.state_dict()
    assert sorted(after) == sorted(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(module.awq_weight().qweight, weight.qweight)
    restored = QuantizedLinear(256, 72, 64, bias=True, device=device)
    restored.load_state_dict(after)
    restored.bias = module.bias
    for other in (copy.deepcopy(module), restored, module.to(dtype), module.cpu().to(device)):
        assert torch.equal(other(x), y)
    other_weight = random_weight(256, 72, 32, device=device)
    with pytest.raises(RuntimeError):
        module.load_state_dict(QuantizedLinear.from_weight(other_weight).state_dict(), strict=False)
    assert module(x.new_empty(0, 256)).shape == (0, 72)


def test_the_linear_leaves_the_gpu_layout_for_the_cpus_paths() -> None:
    from kvconvert.kernels.device import interpreted

    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    weight = random_weight(256, 64, 64)
    module, x = QuantizedLinear.from_weight(weight), random_rows(2, 256, torch.bfloat16, torch.device("cpu"))
    y = module(x)
    with interpreted():
        assert product_error(module(x), x, weight) < FEW_ROWS_TOLERANCE[torch.bfloat16]
        assert module.gpu_lanes is not None
        assert module.int4pack is None
    assert torch.equal(module(x), y)
    assert module.gpu_lanes is None


def test_gradients_reach_the_input_through_the_kernels(device: torch.device) -> None:
    weight = random_weight(64, 32, 32, device=device)
    module = QuantizedLinear.from_weight(weight)
    x = random_rows(3, 64, torch.float16, device).requires_grad_()
    y = module(x)
    upstream = torch.randn(3, 32).to(device, torch.float16)
    y.backward(upstream)
    exact = upstream.double() @ dequantize_weight(weight, torch.float64)
    assert float((x.grad.double() - exact).norm() / exact.norm()) < FEW_ROWS_TOLERANCE[torch.float16]


def test_what_has_no_kernel_is_served_by_the_reference_with_one_warning_each(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    fallbacks.clear()
    odd, plain = (random_weight(192, 32, group_size, device=device) for group_size in (96, 32))
    with caplog.at_level(logging.WARNING, logger="kvconvert"):
        for _ in range(2):
            x = random_rows(2, 192, torch.float16, device)
            assert QuantizedLinear.from_weight(odd).path(2, torch.float16, device) == "reference"
            assert product_error(QuantizedLinear.from_weight(odd)(x), x, odd) < FEW_ROWS_TOLERANCE[torch.float16]
            assert product_error(QuantizedLinear.from_weight(plain)(x.float()), x, plain) < 1e-5
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    assert "not of 96" in messages[0]
    assert "float32" in messages[1]


def test_padding_never_reaches_the_output(device: torch.device) -> None:
    weight = random_weight(64, 40, 32, device=device)
    packed = pack_weight(weight)
    lanes = packed.lanes.clone()
    # Rows 8 to 15 of the last tile's lanes are padding in both classes.
    lanes[1, :, 8:] = -1
    spoilt = replace(packed, lanes=lanes)
    x = random_rows(3, 64, torch.float16, device)
    for kernel in (few_rows, prompt):
        assert torch.equal(kernel(x, spoilt), kernel(x, packed))


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
    assert experts_unsupported(x, stored, kind) is None
    gate_up, down = torch.stack([torch.cat(parts[:2]) for parts in dense]), torch.stack([p[2] for p in dense])
    exact = experts_reference(x.double(), chosen, scores.double(), gate_up, down, kind)
    y = routed_experts(x, chosen, scores, stored, kind)
    assert float((y.double() - exact).norm() / exact.norm()) < 2e-3
