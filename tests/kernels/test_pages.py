"""Pages hold what their format says, computed from what is stored."""

import pytest
import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.pages import PageFormat, empty_pages, page_keys, page_values, quantize_pages, token_norms


def make_format(bits=(2, 2), heads=2, dims=(64, 64), groups=(32, 32), norm="none", **more) -> PageFormat:
    return PageFormat(heads, *dims, 128, *bits, *groups, norm, **more)


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


@pytest.mark.parametrize("dim", [48, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", [(1, 4), (2, 2), (4, 8), (8, 1)])
def test_pages_come_back_as_the_formula_says(dim, bits):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 128, dim), torch.randn(2, 2, 128, dim)
    group = 16 if dim % 32 else 32
    format = make_format(bits, dims=(dim, dim), groups=(64, group))
    pages = quantize_pages(keys, values, format)
    # float32 against float64: a value on the edge between two codes may fall either way, so nearly all rather than all
    expected = by_hand(keys.transpose(2, 3), bits[0], 64)
    assert ((page_keys(pages, format) - expected).abs() < 1e-4).float().mean() > 0.999
    assert ((page_values(pages, format) - by_hand(values, bits[1], group)).abs() < 1e-4).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sixteen_bits_store_the_input_exactly(dtype):
    keys, values = torch.randn(1, 2, 128, 48).to(dtype), torch.randn(1, 2, 128, 32).to(dtype)
    format = make_format((16, 16), dims=(48, 32), groups=(128, 32))
    pages = quantize_pages(keys, values, format)
    assert torch.equal(page_keys(pages, format), keys.transpose(2, 3).float())
    assert torch.equal(page_values(pages, format), values.float())


@pytest.mark.parametrize("scope", ["joint", "per_head"])
@pytest.mark.parametrize("measure", ["l2", "mean_abs"])
def test_norms_survive_tokens_of_very_different_size(scope, measure):
    torch.manual_seed(1)
    size = torch.logspace(-2, 2, 128)[torch.randperm(128)].view(1, 1, 128, 1)
    keys = torch.randn(1, 2, 128, 64) * size
    with_norm = make_format((4, 4), norm=scope, token_norm_measure=measure)
    without = make_format((4, 4))

    def relative_error(format):
        pages = quantize_pages(keys, keys, format)
        return ((page_keys(pages, format).transpose(2, 3) - keys).norm(dim=-1) / keys.norm(dim=-1)).max()

    assert relative_error(with_norm) < 0.25
    assert relative_error(without) > 1


def test_norms_are_means_over_the_stated_scope():
    keys = torch.randn(1, 3, 128, 16)
    assert token_norms(keys, "joint", "l2").shape == (1, 1, 128)
    assert token_norms(keys, "per_head", "mean_abs").shape == (1, 3, 128)
    torch.testing.assert_close(token_norms(keys, "joint", "l2")[0, 0, 5], keys[0, :, 5].square().mean().sqrt())
    torch.testing.assert_close(token_norms(keys, "per_head", "mean_abs")[0, 2, 7], keys[0, 2, 7].abs().mean())


@pytest.mark.parametrize("norm", ["none", "joint", "per_head"])
def test_stored_tensors_are_those_that_empty_pages_makes_room_for(norm):
    format = make_format((2, 4), heads=3, dims=(80, 48), groups=(32, 24), norm=norm)
    pages = quantize_pages(torch.randn(5, 3, 128, 80), torch.randn(5, 3, 128, 48), format)
    room = empty_pages(5, format, torch.float32, torch.device("cpu"))
    assert [(n, t.shape, t.dtype) for n, t in pages.tensors()] == [(n, t.shape, t.dtype) for n, t in room.tensors()]
    assert pages.nbytes == room.nbytes
    assert pages.select(slice(1, 3)).nbytes * 5 == pages.nbytes * 2


def test_two_bit_pages_cost_what_the_layout_promises():
    format = make_format(groups=(128, 64), norm="joint")
    codes = 2 * (2 * 128 * 64 * 2 // 8)
    metadata = 2 * 64 * 4 + 2 * 128 * 4 + 128 * 2
    assert empty_pages(1, format, torch.bfloat16, torch.device("cpu")).nbytes == codes + metadata


def test_a_norm_beyond_float16_is_an_error():
    keys = torch.full((1, 2, 128, 64), 1e5)
    with pytest.raises(NumericError, match="exceeds float16"):
        quantize_pages(keys, torch.zeros_like(keys), make_format(norm="joint"))


def test_a_shrunk_range_clamps_outliers_and_refines_the_rest():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 128, 64)

    def error(r):
        format = make_format(groups=(128, 64), key_range=r, value_range=r)
        return (page_values(quantize_pages(x, x, format), format) - x).square().mean()

    # For 64 near-Gaussian values at 2 bits the best uniform range is well inside (min, max) and well above nothing.
    assert error(0.75) < error(1.0)
    assert error(0.75) < error(0.2)
