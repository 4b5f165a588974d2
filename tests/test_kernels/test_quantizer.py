"""The group quantizer against its formula, in float64 and one group at a time.

Whether tensors are finite, however large and of whatever dtype.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconvert.errors import NumericError, UsageError
from kvconvert.kernels.code_bits import fields_per_lane, packed_rows
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.quantizer import GroupRangeError, all_finite, dequantize, pack_grid, quantize, unpack_grid


def formula(group: torch.Tensor, bits: int, clip_ratio: float) -> tuple[list[int], float, float]:
    """DESIGN's formula for one group, in Python floats."""
    low, high = float(group.min()), float(group.max())
    middle = (low + high) / 2
    low, high = middle - (middle - low) * clip_ratio, middle + (high - middle) * clip_ratio
    levels = 2**bits - 1
    scale = float(torch.tensor((high - low) / levels, dtype=torch.float64).half())
    offset = float(torch.tensor(low, dtype=torch.float64).half())
    codes = [0 if scale == 0 else min(max(round((v - offset) / scale), 0), levels) for v in group.tolist()]
    return codes, scale, offset


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("clip_ratio", [1.0, 0.7])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_every_group_follows_the_formula(bits: int, clip_ratio: float, dim: int) -> None:
    torch.manual_seed(bits)
    # Multiples of 1/64 keep float32 arithmetic exact up to the division, so that ties round alike in both.
    x = (torch.randn(12, 24, 12) * 256).round() / 64
    result = quantize(x, bits, 6, dim, clip_ratio)
    assert result.codes.dtype == torch.uint8
    assert result.scale.dtype == result.offset.dtype == torch.float16
    moved, codes = x.movedim(dim, -1), result.codes.movedim(dim, -1)
    scale, offset = result.scale.movedim(dim, -1), result.offset.movedim(dim, -1)
    compared = differing = 0
    for i in range(0, moved.shape[0], 5):
        for j in range(0, moved.shape[1], 5):
            for group in range(moved.shape[-1] // 6):
                members = slice(6 * group, 6 * group + 6)
                expected, expected_scale, expected_minimum = formula(moved[i, j, members].double(), bits, clip_ratio)
                # float32 against float64 may fall to either side of an fp16 or a code's rounding boundary.
                assert float(scale[i, j, group]) == pytest.approx(expected_scale, rel=1.1e-3, abs=1e-7)
                assert float(offset[i, j, group]) == pytest.approx(expected_minimum, rel=1.1e-3, abs=1e-7)
                compared += 6
                differing += sum(a != b for a, b in zip(codes[i, j, members].tolist(), expected, strict=True))
    assert differing <= compared // 100


def test_codes_come_from_the_stored_scale_and_minimum() -> None:
    x = torch.tensor([[1000.3, 1000.4, 1001.1, 1003.3]])
    codes, scale, offset = quantize(x, 2, 4, -1)
    assert float(offset) == 1000.5
    assert float(scale) == 1.0
    # Against the unrounded offset 1000.3, the third value would still be nearest to code 1.
    assert codes.tolist() == [[0, 0, 1, 3]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_values_within_the_range_come_back_within_half_a_step(bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 128, 48)
    for group_size, dim in ((32, 2), (24, -1), (48, 3), (128, -2)):
        result = quantize(x, bits, group_size, dim)
        error = (dequantize(*result, group_size, dim) - x).abs()
        step = result.scale.float().repeat_interleave(group_size, dim)
        # fp16 keeps 11 bits of offset and scale: the end of the range may lie that much beyond the last code.
        assert (error <= step / 2 + 4 * 2**-11 * x.abs().max()).all()


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.3e4, 7e-9, 65504.0])
def test_a_constant_group_comes_back_as_its_own_fp16_rounding(value: float) -> None:
    x = torch.full((3, 64), value)
    codes, scale, offset = quantize(x, 2, 32, -1, clip_ratio=0.8)
    assert not codes.any()
    assert not scale.any()
    assert torch.equal(dequantize(codes, scale, offset, 32, -1), x.half().float())


@pytest.mark.parametrize("spread", [1e-7, 3e-8, 1e-9, 1e-42])
@pytest.mark.parametrize("offset", [0.0, 1e-7, 0.5])
def test_a_group_too_narrow_for_fp16_stays_finite_and_near(spread: float, offset: float) -> None:
    x = offset + torch.linspace(0, spread, 32).unsqueeze(0)
    codes, scale, offset = quantize(x, 2, 32, -1)
    back = dequantize(codes, scale, offset, 32, -1)
    assert back.isfinite().all()
    # fp16 cannot tell numbers apart that are closer than this: half a subnormal step, or 2^-11 of the value.
    assert (back - x).abs().max() <= spread + 3e-8 + offset * 2**-11


def test_the_largest_fp16_values_do_not_become_infinite() -> None:
    x = torch.tensor([[0.0, 100.0, 30000.0, 65504.0]])
    quantized = quantize(x, 2, 4, -1)
    back = dequantize(*quantized, 4, -1, torch.float16)
    assert back.isfinite().all()
    assert float(back.max()) == 65504.0


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (float("nan"), "NaN"),
        (float("inf"), "NaN"),
        (float("-inf"), "NaN"),
        (1e6, "spans"),
        (-7e4, "spans"),
        (3e38, "spans"),
    ],
)
@pytest.mark.parametrize("clip_ratio", [1.0, 0.5])
def test_what_fp16_cannot_hold_is_refused_with_its_position(bad: float, said: str, clip_ratio: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 8)
    x[1, 2, 40, 3] = bad
    # Shrinking the range about its midpoint must not hide these; -7e4 would come to lie inside fp16's range.
    if bad == -7e4 and clip_ratio < 1:
        x[1, 2, 40, 3] = 3 * bad
    with pytest.raises(GroupRangeError, match=said) as caught:
        quantize(x, 2, 32, 2, clip_ratio)
    assert isinstance(caught.value, NumericError)
    assert caught.value.index == (1, 2, 1, 3)


def test_opposite_extremes_of_float32_are_refused_rather_than_overflowing() -> None:
    with pytest.raises(GroupRangeError, match="spans"):
        quantize(torch.tensor([-3.4e38, 3.4e38]), 8, 2, 0)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(4, 30)
    for call in (
        lambda: quantize(x, 5, 10, 1),
        lambda: quantize(x, 2, 32, 1),
        lambda: quantize(x, 2, 0, 1),
        lambda: quantize(x, 2, 10, 1, clip_ratio=0.0),
        lambda: quantize(x, 2, 10, 1, clip_ratio=1.5),
    ):
        with pytest.raises(UsageError):
            call()


def test_no_tokens_make_no_groups() -> None:
    codes, scale, offset = quantize(torch.zeros(2, 0, 8), 2, 32, 1)
    assert codes.shape == (2, 0, 8)
    assert scale.shape == offset.shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_inputs_dtype_and_strides_do_not_matter(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 64, 5).to(dtype)
    plain, strided = quantize(x.float(), 4, 16, 1), quantize(x.transpose(0, 2).contiguous().transpose(0, 2), 4, 16, 1)
    for a, b in zip(plain, strided, strict=True):
        assert torch.equal(a, b)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-6e4, 6e4, width=32), min_size=8, max_size=8),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1.0, 0.85]),
)
def test_any_finite_group_comes_back_finite_and_inside_its_own_range(
    values: list[float], bits: int, clip_ratio: float
) -> None:
    x = torch.tensor(values)
    codes, scale, offset = quantize(x, bits, 8, 0, clip_ratio)
    back = dequantize(codes, scale, offset, 8, 0)
    assert back.isfinite().all()
    assert int(codes.max()) < 2**bits
    # The range's ends may move by the fp16 rounding of offset and scale (an ulp of the larger end, times the
    # levels).
    slack = 2**-11 * (x.abs().max() + (x.max() - x.min())) + 2**bits * 6e-8
    assert (back >= x.min() - slack).all()
    assert (back <= x.max() + slack).all()


def test_scales_of_eight_bits_are_what_a_unit_can_spell() -> None:
    """Every unit comes back as it was, and codes are computed from what it spells."""
    units = torch.arange(-(2**15), 2**15).to(torch.int16)
    scale, offset = unpack_grid(units)
    known = scale.isfinite() & offset.isfinite() & (scale > 0) & ((units & 127 > 0) | (units >= 0))
    assert known.sum() > 50_000
    assert torch.equal(pack_grid(scale[known], offset[known]), units[known])
    x = 3 * torch.randn(200, 64) + 4 * torch.randn(200, 1)
    fine, coarse = (quantize(x, 2, 64, -1, scale_bits=bits) for bits in (16, 8))
    assert torch.equal(coarse.scale, unpack_grid(pack_grid(coarse.scale, coarse.offset))[0])
    assert torch.equal(coarse.offset, unpack_grid(pack_grid(coarse.scale, coarse.offset))[1])
    errors = [float((dequantize(*part, 64, -1) - x).square().mean()) for part in (fine, coarse)]
    assert errors[1] < 1.05 * errors[0]


def test_a_offset_far_from_zero_widens_a_scale_of_eight_bits() -> None:
    x = torch.tensor([[0.0] * 4, [3.7] * 4, [-1000.0, -999.9, -999.8, -1000.0]])
    back = dequantize(*quantize(x, 2, 4, -1, scale_bits=8), 4, -1)
    assert torch.equal(back[0], x[0])
    assert (back - x).abs().max() <= 1000 / 200
    assert ((back[1] - x[1]).abs() <= 3.7 / 200).all()


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


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_number_is_found_wherever_it_is(dtype, value):
    for size in (1, 7, 4099):
        for place in {0, size // 2, size - 1}:
            tensor = torch.randn(size, dtype=torch.float64).to(dtype)
            assert all_finite(tensor)
            tensor[place] = value
            assert not all_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_and_none_are_finite(dtype):
    limits = torch.finfo(dtype)
    assert all_finite(torch.tensor([[limits.min, limits.max, limits.tiny, -0.0]], dtype=dtype))
    assert all_finite(torch.zeros(3, 0, dtype=dtype))


def test_a_view_with_strides_is_read_as_it_is():
    tensor = torch.zeros(6, 8)
    tensor[3, 5] = float("nan")
    assert all_finite(tensor[::2])
    assert not all_finite(tensor.T[1::2])
