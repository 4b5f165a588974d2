"""Static pages: scales that are known beforehand and belong to the layer's channels."""

import pytest
import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.decode import PageTile, ResidualTokens, paged_attention
from kvconvert.kernels.pages import (
    ChannelScales,
    LayerFormat,
    PageFormat,
    SideTensors,
    dequantize_pages,
    new_pages,
    quantize_pages,
)
from kvconvert.kernels.quantizer import affine_grid, quantize_static


def scales_for(x, bits, value_clip_ratio=1.0) -> ChannelScales:
    """The scales of tokens [N, H, P, channels]."""
    return ChannelScales(*affine_grid(x.amin((0, 2)), x.amax((0, 2)), bits, value_clip_ratio))


def by_hand(x, bits, scales) -> torch.Tensor:
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
def test_pages_come_back_as_the_formula_says(bits, dim, dtype):
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
    assert ((got_keys - by_hand(keys, bits[0], key_scales)).abs() < 1e-4).float().mean() > 0.999
    assert ((got_values - by_hand(values, bits[1], value_scales)).abs() < 1e-4).float().mean() > 0.999
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
    got = paged_attention(queries, tiles, [residual], format, 0.3)
    stored_keys = dequantize_pages(key_pages, format.key_tensors)
    stored_values = dequantize_pages(value_pages, format.value_tensors)
    for row in range(2):
        k, v = (x[rows == row].transpose(0, 1).flatten(1, 2) for x in (stored_keys, stored_values))
        if row == 0:
            k, v = torch.cat([k, residual.keys[0]], 1), torch.cat([v, residual.values[0]], 1)
        expected = attention_reference(queries[row], k, v, None, 0.3).output
        # float32 dot products
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)
