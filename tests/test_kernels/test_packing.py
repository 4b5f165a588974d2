import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.code_bits import fields_per_lane, packed_rows
from kvconvert.kernels.packing import pack_codes, unpack_codes


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "across"), [(0, 1), (1, 0), (-1, 1), (2, -3)])
def test_unpacking_inverts_packing(bits: int, dim: int, across: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 2**bits, (48, 32, 80), dtype=torch.uint8)
    words = pack_codes(codes, bits, dim, across)
    assert words.dtype == torch.int16
    assert words.shape[dim] == codes.shape[dim] // fields_per_lane(bits)
    assert words.shape[across] == packed_rows(codes.shape[across], bits)
    assert torch.equal(unpack_codes(words, bits, dim, codes.shape[dim], across), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bit_field_j_of_lane_l_holds_code_jL_plus_l(bits: int) -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 2**bits, (1, 160), dtype=torch.uint8)
    per_lane = 16 // bits
    lanes = 160 // per_lane
    for lane, word in enumerate(pack_codes(codes, bits, 1, across=0)[0].tolist()):
        expected = sum(int(codes[0, j * lanes + lane]) << (j * bits) for j in range(per_lane))
        assert word % 2**16 == expected


def test_one_bit_codes_of_both_halves_of_the_other_axis_share_a_field() -> None:
    torch.manual_seed(2)
    codes = torch.randint(0, 2, (6, 32), dtype=torch.uint8)
    words = pack_codes(codes, 1, 1, across=0)
    assert words.shape == (3, 4)
    for row in range(3):
        for lane in range(4):
            expected = sum(
                int(codes[row, j * 4 + lane]) << (2 * j) | int(codes[row + 3, j * 4 + lane]) << (2 * j + 1)
                for j in range(8)
            )
            assert int(words[row, lane]) % 2**16 == expected


def test_an_odd_number_of_rows_is_completed_by_zeros_at_one_bit() -> None:
    codes = torch.ones(5, 16, dtype=torch.uint8)
    words = pack_codes(codes, 1, 1, across=0)
    assert words.shape == (3, 2)
    assert unpack_codes(words, 1, 1, 16, across=0).tolist() == [[1] * 16] * 5 + [[0] * 16]


@pytest.mark.parametrize("rows", [6, 7])
def test_three_bits_are_two_planes_side_by_side(rows: int) -> None:
    torch.manual_seed(3)
    codes = torch.randint(0, 8, (rows, 32), dtype=torch.uint8)
    words = pack_codes(codes, 3, 1, across=0)
    upper, lowest = words.split([rows, packed_rows(rows, 1)])
    assert torch.equal(upper, pack_codes(codes >> 1, 2, 1, across=0))
    assert torch.equal(lowest, pack_codes(codes & 1, 1, 1, across=0))
    assert torch.equal(unpack_codes(words, 3, 1, 32, across=0), codes)
    # Without its second plane a page is one of 2 bits, with twice the step and half a step more at each code.
    assert torch.equal(unpack_codes(upper, 2, 1, 32, across=0), codes // 2)


def test_all_ones_survive_the_sign_bit() -> None:
    for bits in (1, 2, 3, 4, 8):
        codes = torch.full((2, 32), 2**bits - 1, dtype=torch.uint8)
        words = pack_codes(codes, bits, 1, across=0)
        assert words.unique().tolist() == [-1]
        assert torch.equal(unpack_codes(words, bits, 1, 32, across=0), codes)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_strided_codes_pack_like_contiguous_ones(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (16, 24), dtype=torch.uint8)
    assert torch.equal(pack_codes(codes.T, bits, 1, 0), pack_codes(codes.T.contiguous(), bits, 1, 0))


def test_lengths_and_widths_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(20, 2, dtype=torch.uint8)
    for call in (
        lambda: pack_codes(codes, 2, 0, across=1),
        lambda: pack_codes(codes, 3, 0, across=1),
        lambda: pack_codes(codes, 5, 1, across=0),
        lambda: unpack_codes(torch.zeros(4, 2, dtype=torch.int16), 2, 0, 24, across=1),
    ):
        with pytest.raises(UsageError):
            call()
