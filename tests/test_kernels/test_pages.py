"""Pages hold what their format says, computed from what is stored.

Static pages: scales that are known beforehand and belong to the layer's channels.
"""

from __future__ import annotations

import pytest
import torch

from kvconvert.errors import NumericError, UsageError
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode import PageTile, ResidualTokens, paged_attention
from kvconvert.kernels.page_formats import PageLayout
from kvconvert.kernels.pages import (
    ChannelScales,
    LayerFormat,
    PageFormat,
    SideTensors,
    dequantize_pages,
    new_pages,
    quantize_pages,
)
from kvconvert.kernels.pages.reference import rank_channels, token_norms
from kvconvert.kernels.quantizer import affine_grid, quantize_static


def key_format(bits=2, heads=2, dim=64, group=32, **more) -> PageFormat:
    return PageFormat.keys(heads, dim, 128, bits, group, **more)


def value_format(bits=2, heads=2, dim=64, group=32, **more) -> PageFormat:
    return PageFormat.values(heads, dim, 128, bits, group, **more)


def by_hand(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Quantize and dequantize groups of the last dimension in float64, one group at a time."""
    flat = x.double().reshape(-1, group)
    out = torch.empty_like(flat)
    for i, values in enumerate(flat):
        low = float(values.min().half())
        scale = float(((values.max() - values.min()) / (2**bits - 1)).half())
        codes = torch.zeros_like(values) if scale == 0 else ((values - low) / scale).round().clamp(0, 2**bits - 1)
        out[i] = codes * scale + low
    return out.view(x.shape)


@pytest.mark.each_value
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", [(1, 4), (2, 2), (3, 3), (4, 8), (8, 1)])
def test_pages_come_back_as_the_formula_says(dim, bits):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 128, dim), torch.randn(2, 2, 128, dim)
    group = 16 if dim % 32 else 32
    keys_as, values_as = key_format(bits[0], dim=dim, group=64), value_format(bits[1], dim=dim, group=group)
    got_keys = dequantize_pages(quantize_pages(keys, keys_as)).mT
    got_values = dequantize_pages(quantize_pages(values, values_as))
    # float32 against float64: a value on the edge between two codes may fall either way, so nearly all rather than all
    assert ((got_keys - by_hand(keys.transpose(2, 3), bits[0], 64)).abs() < 1e-4).float().mean() > 0.999
    assert ((got_values - by_hand(values, bits[1], group)).abs() < 1e-4).float().mean() > 0.999


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_packed_by_token_are_those_packed_by_channel(bits):
    keys = torch.randn(2, 2, 128, 48)
    by_channel, by_token = (key_format(bits, dim=48, by_token=it) for it in (False, True))
    pages = quantize_pages(keys, by_token)
    # A word holds codes of channels 48 * bits / 16 apart.
    assert pages.codes.shape == (2, 2, 128, 48 * bits // 16)
    assert pages.nbytes == quantize_pages(keys, by_channel).nbytes
    assert torch.equal(dequantize_pages(pages), dequantize_pages(quantize_pages(keys, by_channel)))


@pytest.mark.parametrize("more", [{"bits": 3}, {"bits": 4, "boosted": 4}], ids=str)
def test_what_is_not_packed_by_token_is_said(more):
    with pytest.raises(UsageError, match="not packed by token"):
        PageLayout.of(key_format(dim=48, by_token=True, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sixteen_bits_store_the_input_exactly(dtype):
    keys, values = torch.randn(1, 2, 128, 48).to(dtype), torch.randn(1, 2, 128, 32).to(dtype)
    keys_as, values_as = key_format(16, dim=48), value_format(16, dim=32)
    assert torch.equal(dequantize_pages(quantize_pages(keys, keys_as)), keys.float())
    assert torch.equal(dequantize_pages(quantize_pages(values, values_as)), values.float())


@pytest.mark.parametrize("scope", ["joint", "per_head"])
@pytest.mark.parametrize("measure", ["l2", "mean_abs"])
def test_norms_survive_tokens_of_very_different_size(scope, measure):
    torch.manual_seed(1)
    size = torch.logspace(-2, 2, 128)[torch.randperm(128)].view(1, 1, 128, 1)
    keys = torch.randn(1, 2, 128, 64) * size
    with_norm, without = key_format(4, token_norm=scope, token_norm_measure=measure), key_format(4)

    def relative_error(format):
        return ((dequantize_pages(quantize_pages(keys, format)) - keys).norm(dim=-1) / keys.norm(dim=-1)).max()

    assert relative_error(with_norm) < 0.25
    assert relative_error(without) > 1


def test_norms_are_means_over_the_stated_scope():
    keys = torch.randn(1, 3, 128, 16)
    assert token_norms(keys, "joint", "l2").shape == (1, 1, 128)
    assert token_norms(keys, "per_head", "mean_abs").shape == (1, 3, 128)
    torch.testing.assert_close(token_norms(keys, "joint", "l2")[0, 0, 5], keys[0, :, 5].square().mean().sqrt())
    torch.testing.assert_close(token_norms(keys, "per_head", "mean_abs")[0, 2, 7], keys[0, 2, 7].abs().mean())


@pytest.mark.parametrize("norm", ["none", "joint", "per_head"])
@pytest.mark.parametrize(("boosted", "select"), [(0, "dynamic"), (10, "dynamic"), (10, "calibrated")])
def test_stored_tensors_are_those_that_empty_pages_make_room_for(norm, boosted, select):
    keys_as = key_format(heads=3, dim=80, token_norm=norm, boosted=boosted, fixed_channels=select == "calibrated")
    values_as = value_format(4, heads=3, dim=48, group=24)
    fixed = torch.arange(10).expand(3, 10)
    keys = quantize_pages(torch.randn(5, 3, 128, 80), keys_as, SideTensors(fixed))
    values = quantize_pages(torch.randn(5, 3, 128, 48), values_as)
    device = torch.device("cpu")
    for pages, room in (
        (keys, new_pages(5, keys_as, torch.float32, device)),
        (values, new_pages(5, values_as, torch.float32, device)),
    ):
        assert [(n, t.shape, t.dtype) for n, t in pages.tensors()] == [(n, t.shape, t.dtype) for n, t in room.tensors()]
        assert pages.nbytes == room.nbytes
        assert pages.select(slice(1, 3)).nbytes * 5 == pages.nbytes * 2


def test_two_bit_pages_cost_what_the_layout_promises():
    meta = torch.device("meta")
    codes = 2 * 128 * 64 * 2 // 8
    assert new_pages(1, key_format(group=128, token_norm="joint"), torch.bfloat16, meta).nbytes == codes + 512 + 256
    assert new_pages(1, value_format(group=64), torch.bfloat16, meta).nbytes == codes + 2 * 128 * 4
    boosted = key_format(group=128, boosted=16)
    assert new_pages(1, boosted, torch.bfloat16, meta).nbytes == codes + 512 + 2 * (16 * 32 + 16)


def test_three_bit_pages_cost_half_as_much_again_as_two_bit_codes():
    meta = torch.device("meta")
    codes = 2 * 128 * 64 * 3 // 8
    assert new_pages(1, key_format(3, group=128, token_norm="joint"), torch.bfloat16, meta).nbytes == codes + 512 + 256
    assert new_pages(1, value_format(3, group=64), torch.bfloat16, meta).nbytes == codes + 2 * 128 * 4


def test_three_bit_channels_have_no_double():
    with pytest.raises(UsageError, match="6 bits cannot be stored; boost keys of 1, 2 or 4 bits"):
        new_pages(1, key_format(3, boosted=8), torch.bfloat16, torch.device("meta"))


def test_padding_counts_as_bytes():
    # 12 float16 scales and offsets are padded to 16, 3 channels to 16 bytes
    odd = key_format(heads=3, dim=12, group=128, boosted=3)
    assert new_pages(1, odd, torch.bfloat16, torch.device("meta")).nbytes == 3 * (12 * 32 + 3 * 32 + 2 * 32 + 16)


@pytest.mark.parametrize("norm", ["none", "joint", "per_head"])
@pytest.mark.parametrize(
    ("bits", "boosted", "select"),
    [
        *((bits, 0, "dynamic") for bits in (1, 2, 3, 4, 8)),
        *((bits, 5, select) for bits in (1, 2, 4) for select in ("dynamic", "calibrated")),
    ],
)
def test_key_fields_lie_where_the_layout_says_and_nowhere_twice(bits, norm, boosted, select):
    f = key_format(bits, heads=3, dim=20, token_norm=norm, boosted=boosted, fixed_channels=select == "calibrated")
    layout = PageLayout.of(f)
    pages = new_pages(2, f, torch.float32, torch.device("cpu"))
    rows, high_rows = {1: 10, 3: 30}.get(bits, 20), (3 if boosted else 0) if bits == 1 else boosted
    assert (layout.rows, layout.high_rows, layout.lanes) == (rows, high_rows, 16 if bits == 3 else 8 * max(bits, 2))
    assert pages.codes.shape == (2, 3, layout.lanes, rows)
    assert (layout.high < 0, layout.norm_start < 0) == (not boosted, norm == "none")
    assert (layout.channels < 0) == (not boosted or select == "calibrated")
    heads = [page * layout.record + head * layout.head_stride for page in range(2) for head in range(3)]
    starts = {"codes": 0, "high": layout.high, "scale": layout.scale, "offset": layout.offset}
    starts |= {"norm": layout.norm_start, "channels": layout.channels}
    check_places(pages, heads, starts, {"norm": layout.norm_start} if norm == "joint" else {}, layout.record)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_value_fields_lie_where_the_layout_says_and_nowhere_twice(bits):
    f = value_format(bits, heads=3, dim=40, group=40)
    layout = PageLayout.of(f)
    pages = new_pages(2, f, torch.float32, torch.device("cpu"))
    rows = {1: 64, 3: 192}.get(bits, 128)
    assert pages.codes.shape == (2, 3, 40 * bits * 128 // 16 // rows, rows)
    heads = [page * layout.record + head * layout.head_stride for page in range(2) for head in range(3)]
    starts = {"codes": 0, "scale": layout.scale, "offset": layout.offset}
    check_places(pages, heads, starts, {}, layout.record)


def check_places(pages, heads, starts, once_per_page, size):
    """Each field begins at the stated unit, its items lie one after another, and no byte belongs to two fields."""
    pages.record.zero_()
    assert pages.record.shape == (2, size)
    assert size % 8 == 0
    raw = pages.record.flatten().view(torch.uint8)
    taken = torch.zeros_like(raw)
    for name, tensor in pages.tensors():
        begins = [page * size + once_per_page[name] for page in range(2)] if name in once_per_page else None
        begins = begins or [head + starts[name] for head in heads]
        # not flatten: it would copy where a joint norm follows the heads
        for part, begin in zip([head for page in tensor for head in page], begins, strict=True):
            assert begin % 8 == 0
            pattern = torch.randint(0, 256, (part.nbytes,), dtype=torch.uint8)
            # scales and offsets lie group after group
            stored = part.T if name in ("scale", "offset") else part
            stored.copy_(pattern.view(part.dtype).view(stored.shape))
            assert torch.equal(raw[2 * begin : 2 * begin + part.nbytes], pattern)
            taken[2 * begin : 2 * begin + part.nbytes] += 1
    assert taken.max() == 1


def test_key_lanes_hold_tokens_of_one_channel_and_value_lanes_channels_of_one_token():
    torch.manual_seed(0)
    keys, values = torch.randint(0, 4, (1, 2, 128, 8)), torch.randint(0, 4, (1, 2, 128, 16))
    # every group spans 0 to 3, so that numbers are their own codes
    keys[:, :, 0] = values[..., 0] = 0
    keys[:, :, 1] = values[..., 1] = 3
    key_words = quantize_pages(keys.float(), key_format(2, dim=8, group=128)).codes
    value_words = quantize_pages(values.float(), value_format(2, dim=16, group=16)).codes
    assert (key_words.shape, value_words.shape) == ((1, 2, 16, 8), (1, 2, 2, 128))
    shifts = 2 * torch.arange(8)
    for lane, row in ((0, 0), (13, 5), (15, 7)):
        assert int(key_words[0, 1, lane, row]) % 2**16 == int((keys[0, 1, lane::16, row] << shifts).sum())
    for lane, row in ((0, 0), (1, 127), (1, 64)):
        assert int(value_words[0, 1, lane, row]) % 2**16 == int((values[0, 1, row, lane::2] << shifts).sum())


def test_sixteen_bit_pages_are_one_tensor_without_a_record():
    pages = new_pages(3, key_format(16), torch.bfloat16, torch.device("cpu"))
    assert pages.record is None
    assert pages.buffer is pages.codes
    assert (pages.codes.shape, pages.codes.dtype) == ((3, 2, 128, 64), torch.bfloat16)


def test_chosen_pages_are_copies_and_slices_views_with_all_their_fields():
    f = key_format(token_norm="joint", boosted=7)
    keys = torch.randn(4, 2, 128, 64)
    pages = quantize_pages(keys, f)
    for index in (slice(1, 3), torch.tensor([3, 0, 3])):
        assert torch.equal(dequantize_pages(pages.select(index)), dequantize_pages(quantize_pages(keys[index], f)))
    assert pages.select(slice(1, 3)).codes.data_ptr() == pages.codes[1].data_ptr()


def test_a_norm_beyond_float16_is_an_error():
    with pytest.raises(NumericError, match="exceeds float16"):
        quantize_pages(torch.full((1, 2, 128, 64), 1e5), key_format(token_norm="joint"))


def test_a_shrunk_range_clamps_outliers_and_refines_the_rest():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 128, 64)

    def error(r):
        format = value_format(group=64, clip_ratio=r)
        return (dequantize_pages(quantize_pages(x, format)) - x).square().mean()

    # For 64 near-Gaussian values at 2 bits the best uniform range is well inside (min, max) and well above nothing.
    assert error(0.75) < error(1.0)
    assert error(0.75) < error(0.2)


@pytest.mark.parametrize("hidden", [4, 32, 40])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_what_is_hidden_in_a_page_has_no_part_in_its_scales_and_channels(hidden, group):
    torch.manual_seed(0)
    tokens = torch.randn(2, 2, 128, 32)
    outlying = tokens.clone()
    outlying[0, :, :hidden] *= 50
    keys, values = key_format(group=group, dim=32, boosted=4), value_format(dim=32)
    pages = [quantize_pages(x, keys, hidden=hidden) for x in (tokens, outlying)]
    assert torch.equal(*(page.buffer for page in pages))
    assert torch.equal(*(quantize_pages(x, values, hidden=hidden).buffer for x in (tokens, outlying)))
    # The first group that has other tokens, by hand, and the page after it as ever.
    begin = hidden // group * group
    seen = tokens[0, :, hidden : begin + group]
    scale = pages[0].scale[0, :, :, hidden // group].float()
    plain = [c for c in range(32) if c not in pages[0].channels[0, 0].tolist()]
    assert_close = torch.testing.assert_close
    assert_close(scale[0, plain], (seen.amax(1) - seen.amin(1))[0, plain] / 3, rtol=1e-3, atol=0)
    assert torch.equal(pages[0].buffer[1], quantize_pages(tokens[1:], keys).buffer[0])
    strongest = tokens[0, 0, hidden:].abs().mean(0).topk(4).indices.sort().values
    assert pages[0].channels[0, 0].tolist() == strongest.tolist()


def test_channels_are_ranked_by_mean_magnitude_with_ties_to_the_lower_index():
    keys = torch.zeros(1, 1, 128, 8)
    keys[..., 5], keys[..., 2], keys[..., 6] = 3.0, -4.0, 3.0
    assert rank_channels(keys, 2).tolist() == [[[2, 5]]]
    assert rank_channels(keys, 4).tolist() == [[[0, 2, 5, 6]]]
    assert rank_channels(keys, 0).shape == (1, 1, 0)
    # Equal channels whose sum is rounded, in a number that processors do not add up in one way.
    torch.manual_seed(0)
    equal = torch.rand(8, 1, 128, 1).expand(8, 1, 128, 80)
    assert rank_channels(equal, 21).tolist() == [[[*range(21)]]] * 8


@pytest.mark.each_value
@pytest.mark.parametrize("boosted", [1, 8, 15, 64])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_boosted_channels_come_back_at_twice_the_bits(bits, boosted):
    torch.manual_seed(0)
    keys = torch.randn(2, 2, 128, 64) * torch.linspace(0.1, 2, 64)
    format = key_format(bits, group=128, boosted=boosted)
    pages = quantize_pages(keys, format)
    got, expected = dequantize_pages(pages).mT, keys.transpose(2, 3)
    fine, coarse = by_hand(expected, 2 * bits, 128), by_hand(expected, bits, 128)
    chosen = torch.zeros(2, 2, 64, dtype=torch.bool).scatter(2, pages.channels.long(), True)
    want = torch.where(chosen.unsqueeze(3), fine, coarse)
    # a scale that float64 rounds to the neighbouring float16 moves its whole channel by a code times 2^-11
    assert ((got - want).abs() < 5e-3).float().mean() > 0.999
    assert chosen.sum(-1).unique().tolist() == [boosted]


def test_boosting_by_score_beats_boosting_other_channels():
    torch.manual_seed(0)
    size = torch.logspace(-1, 1, 64)[torch.randperm(64)]
    keys, queries = torch.randn(4, 2, 128, 64) * size, torch.randn(4, 2, 16, 64)
    exact = queries @ keys.transpose(2, 3)
    fixed = key_format(group=128, boosted=8, fixed_channels=True)

    def error(channels):
        tensors = SideTensors(channels)
        return (queries @ dequantize_pages(quantize_pages(keys, fixed, tensors), tensors).mT - exact).square().mean()

    by_score = rank_channels(keys.transpose(0, 1).flatten(1, 2)[None], 8)[0]
    others = [torch.stack([torch.randperm(64)[:8] for _ in range(2)]) for _ in range(5)]
    assert all(error(by_score) < 0.7 * error(channels) for channels in others)


def scales_for(x, bits, value_clip_ratio=1.0) -> ChannelScales:
    """The scales of tokens [N, H, P, channels]."""
    return ChannelScales(*affine_grid(x.amin((0, 2)), x.amax((0, 2)), bits, value_clip_ratio))


def static_by_hand(x, bits, scales) -> torch.Tensor:
    """Quantize and dequantize [N, H, P, channels] in float64, one channel at a time."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for head in range(x.shape[1]):
        for channel in range(x.shape[3]):
            scale, low = float(scales.scale[head, channel]), float(scales.offset[head, channel])
            values = x[:, head, :, channel].double()
            codes = ((values - low) / scale).round().clamp(0, 2**bits - 1) if scale else torch.zeros_like(values)
            out[:, head, :, channel] = codes * scale + low
    return out


@pytest.mark.parametrize("bits", [4, 8])
def test_what_lies_outside_is_clamped_and_a_constant_channel_gets_code_zero(bits):
    top = 2**bits - 1
    scale, offset = torch.tensor([0.5, 0.0]).half(), torch.tensor([-1.0, 3.0]).half()
    x = torch.tensor([[-1e30, -7.0], [-1.0, 3.0], [-0.3, 3.1], [top / 2 - 1, 9.0], [top / 2 - 0.7, 0.0], [1e30, 1e30]])
    assert quantize_static(x, bits, scale, offset).tolist() == [[0, 0], [0, 0], [1, 0], [top, 0], [top, 0], [top, 0]]


def test_codes_come_from_the_stored_scale():
    # 100 / 255 as float16 is 0.39209, with which 50 is code 127.52; with the exact quotient it would be 127.5 and even.
    scale, offset = affine_grid(torch.tensor(0.0), torch.tensor(100.0), 8)
    assert quantize_static(torch.tensor([50.0]), 8, scale, offset).tolist() == [round(50 / float(scale))]


@pytest.mark.parametrize("bits", [(4, 8), (8, 4)])
@pytest.mark.parametrize("dim", [48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_static_pages_come_back_as_the_formula_says(bits, dim, dtype):
    torch.manual_seed(0)
    keys, values = (torch.randn(3, 2, 128, dim).to(dtype) * torch.linspace(0.1, 5, dim) for _ in range(2))
    values[..., 7] = 1.5
    key_scales, value_scales = scales_for(keys.float(), bits[0], 0.7), scales_for(values.float(), bits[1])
    key_tensors, value_tensors = SideTensors(static=key_scales), SideTensors(static=value_scales)
    keys_as = PageFormat.keys(2, dim, 128, bits[0], 128, static=True)
    values_as = PageFormat.values(2, dim, 128, bits[1], dim, static=True)
    got_keys = dequantize_pages(quantize_pages(keys, keys_as, key_tensors), key_tensors)
    got_values = dequantize_pages(quantize_pages(values, values_as, value_tensors), value_tensors)
    # float32 against float64: a value on the edge between two codes may fall either way, so nearly all rather than all
    assert ((got_keys - static_by_hand(keys, bits[0], key_scales)).abs() < 1e-4).float().mean() > 0.999
    assert ((got_values - static_by_hand(values, bits[1], value_scales)).abs() < 1e-4).float().mean() > 0.999
    assert (got_values[..., 7] == 1.5).all()


def test_static_pages_hold_codes_alone():
    keys_as, values_as = (
        PageFormat.keys(2, 64, 128, 8, 128, static=True),
        PageFormat.values(2, 48, 128, 4, 48, static=True),
    )
    keys, values = torch.randn(5, 2, 128, 64), torch.randn(5, 2, 128, 48)
    for tokens, f, size in ((keys, keys_as, 64), (values, values_as, 24)):
        pages = quantize_pages(tokens, f, SideTensors(static=scales_for(tokens, f.bits)))
        room = new_pages(5, f, torch.float32, torch.device("cpu"))
        assert [(n, t.shape, t.dtype) for n, t in pages.tensors()] == [(n, t.shape, t.dtype) for n, t in room.tensors()]
        assert pages.nbytes == room.nbytes == 5 * 2 * 128 * size


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_an_error_that_knows_the_head(number):
    keys = torch.randn(2, 3, 128, 16)
    scales = scales_for(keys, 8)
    keys[1, 2, 5, 3] = number
    with pytest.raises(NumericError, match="NaN or infinity") as caught:
        quantize_pages(keys, PageFormat.keys(3, 16, 128, 8, 128, static=True), SideTensors(static=scales))
    assert caught.value.index[:2] == (1, 2)


@pytest.mark.parametrize("length", [1, 3, 129])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (4, 8), (16, 8), (8, 16)])
def test_attention_equals_float64_attention_over_the_dequantized_tokens(bits, length):
    torch.manual_seed(0)
    heads, key_dim, value_dim = 2, 48, 64
    keys, values = torch.randn(4, heads, 128, key_dim), torch.randn(4, heads, 128, value_dim) + 1
    static = [None if b == 16 else scales_for(x, b) for x, b in zip((keys, values), bits, strict=True)]
    format = LayerFormat(
        PageFormat.keys(heads, key_dim, 128, bits[0], 128, static=bits[0] < 16),
        PageFormat.values(heads, value_dim, 128, bits[1], value_dim, static=bits[1] < 16),
        *(SideTensors(static=scales) for scales in static),
    )
    key_pages = quantize_pages(keys, *format.side(True))
    value_pages = quantize_pages(values, *format.side(False))
    rows = torch.tensor([0, 1, 1, 1])
    residual = ResidualTokens(torch.tensor([0]), torch.randn(1, heads, 9, key_dim), torch.randn(1, heads, 9, value_dim))
    queries = torch.randn(2, 3 * heads, length, key_dim)
    tiles = [
        PageTile(key_pages.select(part), value_pages.select(part), rows[part]) for part in (slice(0, 3), slice(3, 4))
    ]
    got = paged_attention(queries, tiles, [residual], format, Scoring(0.3))
    stored_keys = dequantize_pages(key_pages, format.key_tensors)
    stored_values = dequantize_pages(value_pages, format.value_tensors)
    for row in range(2):
        k, v = (x[rows == row].transpose(0, 1).flatten(1, 2) for x in (stored_keys, stored_values))
        if row == 0:
            k, v = torch.cat([k, residual.keys[0]], 1), torch.cat([v, residual.values[0]], 1)
        expected = attention_reference(queries[row], k, v, None, 0.3).output
        # float32 dot products
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)
