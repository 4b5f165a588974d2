"""The constant part of keys: what it is at each position, and attention over pages without it."""

import pytest
import torch
from tiny.key_centers import constant_part, frequencies
from torch import Tensor

from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.decode import PageTile, paged_attention
from kvconvert.kernels.pages import (
    LayerFormat,
    PageFormat,
    SideTensors,
    add_centers,
    dequantize_pages,
    key_center,
    page_centers,
    quantize_pages,
)
from kvconvert.kernels.pages.center import center_scores


def center_of(mean: Tensor, rotated: bool = False):
    half = torch.arange(mean.shape[1] // 2)
    return key_center(mean, frequencies(mean.shape[1]), torch.stack([half, half + len(half)], 1), rotated)


def test_it_is_rope_of_the_mean_at_near_and_far_positions():
    mean = 300 * torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 4, 130_003])
    found = page_centers(starts, 128, center_of(mean))
    for page, start in zip(found, starts.tolist(), strict=True):
        expected = constant_part(mean, torch.arange(start, start + 128))
        # float32 angles: of the fastest pair half of 2^-7 at 130,000
        error = (page - expected).norm() / expected.norm()
        assert error < (1e-6 if start < 5 else 1e-3)


@pytest.mark.parametrize("rotated", [False, True])
def test_scores_are_products_with_it(rotated):
    generator = torch.Generator().manual_seed(0)
    center = center_of(torch.randn(2, 64, generator=generator), rotated)
    queries, starts = torch.randn(1, 2, 5, 64, generator=generator), torch.tensor([4, 1284])
    expected = queries @ page_centers(starts, 32, center).transpose(2, 3)
    torch.testing.assert_close(center_scores(queries, starts, 32, center), expected, rtol=1e-4, atol=1e-4)


def test_what_is_taken_away_comes_back_whatever_pages_are_computed_at_a_time():
    generator = torch.Generator().manual_seed(0)
    center = center_of(torch.randn(2, 16, generator=generator))
    keys = torch.randn(2, 16 * 70, 16, generator=generator)
    left = keys.clone()
    add_centers(left, 3, 16, center, sign=-1)
    expected = keys - page_centers(3 + 16 * torch.arange(70), 16, center).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(left, expected)
    add_centers(left, 3, 16, center)
    torch.testing.assert_close(left, keys)


@pytest.mark.parametrize(("bits", "norm", "boosted"), [(2, "none", 16), (3, "joint", 0), (8, "per_head", 0)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_attention_over_pages_equals_attention_over_whole_keys(bits, norm, boosted, softcap):
    generator = torch.Generator().manual_seed(0)
    center = center_of(300 * torch.randn(2, 64, generator=generator) / 8)
    format = LayerFormat(
        PageFormat.keys(2, 64, 128, bits, 128, norm, boosted=boosted),
        PageFormat.values(2, 64, 128, 4, 64),
        SideTensors(center=center),
    )
    keys, values = (torch.randn(4, 2, 128, 64, generator=generator) for _ in range(2))
    pages = quantize_pages(keys, format.keys), quantize_pages(values, format.values)
    rows, positions = torch.tensor([0, 1, 0, 1]), torch.tensor([4, 130_000, 132, 7])
    queries = torch.randn(2, 6, 3, 64, generator=generator)
    got = paged_attention(queries, [PageTile(*pages, rows, None, positions)], [], format, 0.1, softcap)
    whole = dequantize_pages(pages[0]) + page_centers(positions, 128, center)
    for row in range(2):
        own = rows == row
        k, v = (x[own].transpose(0, 1).flatten(1, 2) for x in (whole, dequantize_pages(pages[1])))
        expected = attention_reference(queries[row], k, v, None, 0.1, softcap).output
        # float32 scores of some 30 before the softmax
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-3, atol=2e-4)
