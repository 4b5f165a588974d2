"""kvconvert's own layout of 2, 3 and 8 bits, read by code that shares nothing with the packer."""

import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.linear.awq_format import (
    AwqWeight,
    dequantize_weight,
    fake_quantize_weight,
    pack_planes,
    quantize_weight,
    unpack_bits,
    unpack_channels,
    unpack_planes,
)


def read_code(row: list[int], channel: int, outputs: int, bits: int) -> int:
    """The layout's definition, of one row of bytes."""
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


@pytest.mark.parametrize(
    ("bits", "bytes_"),
    [(2, "0x4c 0x72"), (3, "0x90 0x1b 0xbe"), (8, "0x0 0xff 0x3 0x8 0xc 0x7 0x9 0xe")],
)
def test_packing_follows_the_documented_order(bits: int, bytes_: str) -> None:
    codes = {2: [0, 3, 0, 1, 2, 0, 3, 1], 3: [0, 1, 3, 5, 7, 5, 2, 1], 8: [0, 255, 3, 8, 12, 7, 9, 14]}[bits]
    assert " ".join(map(hex, pack_planes(torch.tensor([codes]), bits)[0].tolist())) == bytes_


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_an_independent_reader_sees_the_weight_that_was_meant(bits: int) -> None:
    torch.manual_seed(bits)
    weight = torch.randn(24, 64) + torch.linspace(-2, 2, 24)[:, None]
    packed = quantize_weight(weight, bits, 32)
    assert packed.bits == bits
    assert packed.qweight.shape == (64, 3 * bits)
    assert packed.qzeros.shape == (2, 3 * bits)
    assert all(tensor.is_contiguous() for tensor in packed)
    seen = read_weight(packed, bits, 32)
    assert torch.equal(dequantize_weight(packed, torch.float64), seen)
    assert torch.equal(fake_quantize_weight(weight, bits, 32).double(), seen)
    assert torch.equal(unpack_channels(packed, 8, 24), unpack_bits(packed.qweight, bits)[:, 8:])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_unpacking_inverts_packing_for_strided_codes_too(bits: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (40, 24), dtype=torch.uint8)
    for given in (codes, codes.T):
        packed = pack_planes(given, bits)
        assert packed.is_contiguous()
        assert torch.equal(unpack_planes(packed, bits), given)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="by eight"):
        pack_planes(torch.zeros(4, 12), 3)
    with pytest.raises(UsageError, match="2, 3 or 8 bits, not 4"):
        pack_planes(torch.zeros(4, 16), 4)
