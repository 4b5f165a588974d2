import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.packing import codes_per_lane, pack_codes, unpack_codes


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unpacking_inverts_packing(bits: int, dim: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (48, 32, 80), dtype=torch.uint8)
    words = pack_codes(codes, bits, dim)
    assert words.dtype == torch.int16
    assert words.shape[dim] == codes.shape[dim] // codes_per_lane(bits)
    assert torch.equal(unpack_codes(words, bits, dim, codes.shape[dim]), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bit_field_j_of_lane_l_holds_code_jL_plus_l(bits: int) -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 2**bits, (160,), dtype=torch.uint8)
    per_lane = 16 // bits
    lanes = 160 // per_lane
    for lane, word in enumerate(pack_codes(codes, bits, 0).tolist()):
        expected = sum(int(codes[j * lanes + lane]) << (j * bits) for j in range(per_lane))
        assert word % 2**16 == expected


def test_all_ones_survive_the_sign_bit() -> None:
    for bits in (1, 2, 4, 8):
        codes = torch.full((32,), 2**bits - 1, dtype=torch.uint8)
        assert pack_codes(codes, bits, 0).tolist() == [-1] * (32 * bits // 16)
        assert torch.equal(unpack_codes(pack_codes(codes, bits, 0), bits, 0, 32), codes)


def test_strided_codes_pack_like_contiguous_ones() -> None:
    codes = torch.randint(0, 4, (16, 24), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes.T, 2, 1), pack_codes(codes.T.contiguous(), 2, 1))


def test_lengths_and_widths_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(20, dtype=torch.uint8)
    for call in (
        lambda: pack_codes(codes, 2, 0),
        lambda: pack_codes(codes, 3, 0),
        lambda: unpack_codes(torch.zeros(4, dtype=torch.int16), 2, 0, 24),
    ):
        with pytest.raises(UsageError):
            call()
