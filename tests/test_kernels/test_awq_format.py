"""AWQ's file layout, and kvconvert's own of 2, 3 and 8 bits, read by code that shares nothing with the packer."""

import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import (
    AwqWeight,
    dequantize_weight,
    fake_quantize_weight,
    pack_awq,
    pack_planes,
    quantize_weight,
    unpack_awq,
    unpack_bits,
    unpack_channels,
    unpack_planes,
)
from kvconvert.kernels.quantizer import GroupRangeError


def read_code(row: list[int], channel: int, outputs: int, bits: int) -> int:
    """The layouts' definition, of one row: nibble i of AWQ's column c is channel 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    if bits == 4:
        return row[channel // 8] % 2**32 // 16 ** [0, 2, 4, 6, 1, 3, 5, 7].index(channel % 8) % 16
    if bits == 8:
        return row[channel]
    upper = row[channel // 4] // 4 ** (channel % 4) % 4
    return upper if bits == 2 else 2 * upper + row[outputs // 4 + channel // 8] // 2 ** (channel % 8) % 2


def read_weight(packed: AwqWeight, bits: int, group_size: int) -> torch.Tensor:
    codes, zeros, scales = packed.qweight.tolist(), packed.qzeros.tolist(), packed.scales.double()
    inputs, outputs = len(codes), scales.shape[1]
    weight = torch.empty(outputs, inputs, dtype=torch.float64)
    for i in range(inputs):
        for o in range(outputs):
            g = i // group_size
            code, zero = read_code(codes[i], o, outputs, bits), read_code(zeros[g], o, outputs, bits)
            weight[o, i] = (code - zero) * scales[g, o]
    return weight


def test_packing_follows_the_published_nibble_order() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 15, 14, 13, 12, 11, 10, 9, 8]], dtype=torch.uint8)
    assert [hex(word % 2**32) for word in pack_awq(codes)[0].tolist()] == ["0x75316420", "0x8ace9bdf"]


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (2, [0, 3, 0, 1, 2, 0, 3, 1], "0x4c 0x72"),
        (3, [0, 1, 3, 5, 7, 5, 2, 1], "0x90 0x1b 0xbe"),
        (8, [0, 255, 3, 8, 12, 7, 9, 14], "0x0 0xff 0x3 0x8 0xc 0x7 0x9 0xe"),
    ],
)
def test_packing_follows_the_documented_order(bits: int, codes: list[int], packed: str) -> None:
    assert " ".join(map(hex, pack_planes(torch.tensor([codes]), bits)[0].tolist())) == packed


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unpacking_inverts_packing_for_strided_codes_too(bits: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (40, 24), dtype=torch.uint8)
    for given in (codes, codes.T):
        packed = pack_awq(given) if bits == 4 else pack_planes(given, bits)
        assert packed.dtype == (torch.int32 if bits == 4 else torch.uint8)
        assert packed.is_contiguous()
        assert torch.equal(unpack_awq(packed) if bits == 4 else unpack_planes(packed, bits), given)


@pytest.mark.parametrize("group_size", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_an_independent_reader_sees_the_weight_that_was_meant(bits: int, group_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(24, 64) + torch.linspace(-2, 2, 24)[:, None]).to(dtype)
    packed = quantize_weight(weight, bits, group_size)
    columns = 3 if bits == 4 else 3 * bits
    assert packed.bits == bits
    assert [tensor.shape for tensor in packed] == [(64, columns), (64 // group_size, columns), (64 // group_size, 24)]
    assert packed.scales.dtype == torch.float16
    assert all(tensor.is_contiguous() for tensor in packed)
    seen = read_weight(packed, bits, group_size)
    assert torch.equal(dequantize_weight(packed, torch.float64), seen)
    assert torch.equal(fake_quantize_weight(weight.float(), bits, group_size).double(), seen)
    assert torch.equal(unpack_channels(packed, 8, 24), unpack_bits(packed.qweight, bits)[:, 8:])
    step = packed.scales.T.double().repeat_interleave(group_size, 1)
    # A zero is rounded to an integer, which may push one end of the range half a step past the last code.
    assert ((seen - weight.double()).abs() <= 1.01 * step).all()
    assert ((seen - weight.double()).abs() <= 0.51 * step).double().mean() > (0.9 if bits > 3 else 0.7)


@pytest.mark.parametrize("shift", [5.0, -5.0])
def test_one_sided_groups_keep_zero_in_their_range_and_do_not_saturate(shift: float) -> None:
    torch.manual_seed(0)
    weight = torch.rand(8, 32) + shift
    packed = quantize_weight(weight, 4, 32)
    zeros = unpack_awq(packed.qzeros)
    assert (zeros == (0 if shift > 0 else 15)).all()
    step = packed.scales.T.float()
    assert ((dequantize_weight(packed) - weight).abs() <= 0.51 * step).all()


def test_an_all_zero_group_is_zero_with_a_scale_that_no_check_mistakes_for_damage() -> None:
    weight = torch.randn(8, 64)
    weight[3, :32] = 0
    packed = quantize_weight(weight, 4, 32)
    assert float(packed.scales[0, 3]) == 1.0
    assert (packed.scales > 0).all()
    assert not dequantize_weight(packed)[3, :32].any()
    assert not fake_quantize_weight(weight, 3, 32)[3, :32].any()


def test_groups_too_small_for_fp16_keep_a_positive_scale() -> None:
    weight = torch.linspace(-1e-8, 1e-8, 8 * 32).view(8, 32)
    packed = quantize_weight(weight, 4, 32)
    assert (packed.scales > 0).all()
    assert (dequantize_weight(packed) - weight).abs().max() <= 2**-24


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_fake_quantization_uses_the_whole_grid_of_any_width(bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 256)
    weight[..., ::128] = 0
    fake = fake_quantize_weight(weight, bits, 128)
    assert not fake[..., ::128].any()
    for group in fake.view(-1, 128):
        used = len(group.unique())
        assert used <= 2**bits
        # Rounding the zero to an integer may leave one end of the grid unused.
        assert used >= 2**bits - 1 or bits > 3
    error = (fake - weight).abs().mean()
    finer = (fake_quantize_weight(weight, min(bits + 1, 8), 128) - weight).abs().mean()
    assert finer < error or bits == 8


def test_a_clip_bound_acts_before_the_range_is_taken() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    clip = torch.full((8, 2), 0.75)
    by_hand = torch.cat([fake_quantize_weight(w.clamp(-0.75, 0.75), 4, 32) for w in weight.split(32, 1)], 1)
    assert torch.equal(fake_quantize_weight(weight, 4, 32, clip), by_hand)
    assert torch.equal(dequantize_weight(quantize_weight(weight, 4, 32, clip)), by_hand)
    loose = torch.full((8, 2), 100.0)
    assert torch.equal(fake_quantize_weight(weight, 4, 32, loose), fake_quantize_weight(weight, 4, 32))


def test_inputs_are_left_alone() -> None:
    weight = torch.randn(8, 64)
    before = weight.clone()
    fake_quantize_weight(weight, 4, 32)
    quantize_weight(weight, 4, 32)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e6])
def test_what_fp16_scales_cannot_hold_is_refused_with_its_position(bad: float) -> None:
    weight = torch.randn(16, 64)
    weight[9, 40] = bad
    for call in (quantize_weight, fake_quantize_weight):
        with pytest.raises(GroupRangeError, match="9, 1") as caught:
            call(weight, 4, 32)
        assert caught.value.index == (9, 1)


def test_arguments_that_do_not_fit_are_refused() -> None:
    for call in (
        lambda: quantize_weight(torch.zeros(8, 64), 5, 32),
        lambda: quantize_weight(torch.zeros(8, 60), 4, 32),
        lambda: quantize_weight(torch.zeros(12, 64), 4, 32),
        lambda: fake_quantize_weight(torch.zeros(8, 64), 1, 32),
        lambda: fake_quantize_weight(torch.zeros(8, 64), 4, 0),
    ):
        with pytest.raises(UsageError):
            call()
    for codes, bits, said in ((torch.zeros(4, 12), 3, "by eight"), (torch.zeros(4, 16), 4, "2, 3 or 8 bits, not 4")):
        with pytest.raises(UsageError, match=said):
            pack_planes(codes, bits)
