"""Keys rounded with error feedback: what the formula promises, and every path against the sequential reference.

The constant part of keys: what it is at each position, and attention over pages without it."""

from __future__ import annotations

import pytest
import torch
from tiny.key_centers import constant_part, frequencies
from torch import Tensor

from kvconvert.calibration.keys import feedback_matrices
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode import PageTile, paged_attention
from kvconvert.kernels.pages import (
    ChannelScales,
    LayerFormat,
    PageFormat,
    SideTensors,
    add_centers,
    dequantize_pages,
    key_center,
    normalised_keys,
    page_centers,
    quantize_pages,
)
from kvconvert.kernels.pages.center import projected_scores
from kvconvert.kernels.pages.reference import page_codes, round_with_feedback, round_with_feedback_reference
from kvconvert.kernels.quantizer import quantize
from kvconvert.kernels.spans import SpanFormat, quantize_span_reference, span_keys


def moments(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """E[q^T q] float64 [heads, dim, dim] of queries that lie mostly in a quarter of the directions."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(heads, dim, max(1, dim // 4), generator=generator, dtype=torch.float64)
    return few @ few.transpose(1, 2) + 0.2 * torch.eye(dim, dtype=torch.float64)


def feedback(heads: int, dim: int) -> torch.Tensor:
    return feedback_matrices(moments(heads, dim))[0].half()


def random_keys(pages: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
    torch.manual_seed(dim)
    x = torch.randn(pages, heads, tokens, dim) * (0.5 + torch.rand(dim))
    x[-1, -1, 3] = 0
    return x


def damped(moments: torch.Tensor) -> torch.Tensor:
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    return moments + 0.1 * mean[:, None, None] * torch.eye(moments.shape[1], dtype=torch.float64)


def test_each_channel_is_rounded_to_what_is_best_after_the_errors_before_it():
    """By the definition, without a factorisation: later channels, were they free, would be set to a minimum of
    d H d^T given the differences d so far; a channel is rounded from there.
    """
    heads, dim, tokens = 2, 7, 128
    h, x = damped(moments(heads, dim)), random_keys(1, heads, tokens, dim)
    grid = quantize(x.transpose(2, 3), 2, 32, dim=3)
    found = round_with_feedback_reference(
        x.transpose(2, 3), grid.scale, grid.offset, 3, feedback_matrices(moments(heads, dim))[0]
    )
    scale, offset = (part[0].double().repeat_interleave(32, 2).transpose(1, 2) for part in grid[1:])
    exact, differences = x[0].double(), torch.zeros(heads, tokens, dim, dtype=torch.float64)
    for i in range(dim):
        best = -torch.linalg.solve(h[:, i:, i:], h[:, i:, :i] @ differences[:, :, :i].transpose(1, 2))
        target = exact[:, :, i] + best[:, 0]
        code = ((target - offset[:, :, i]) / scale[:, :, i]).round().clamp(0, 3)
        assert torch.equal(found[0, :, i].double(), code)
        differences[:, :, i] = code * scale[:, :, i] + offset[:, :, i] - exact[:, :, i]


@pytest.mark.parametrize(("dim", "group", "bits"), [(8, 32, 2), (40, 128, 1), (80, 16, 4)], ids=str)
def test_blocks_of_channels_give_the_codes_of_one_channel_after_another(dim, group, bits):
    """But where the order of sums decides between two codes, which then lets later ones of that token differ."""
    x = random_keys(3, 2, 128, dim).transpose(2, 3)
    grid = quantize(x, bits, group, dim=3)[1:]
    largest = torch.full((3, 2, dim), 2**bits - 1).index_fill(2, torch.tensor([1, dim - 1]), 4**bits - 1)
    for limit in (2**bits - 1, largest):
        found, expected = (
            function(x, *grid, limit, feedback(2, dim))
            for function in (round_with_feedback, round_with_feedback_reference)
        )
        assert found.dtype == torch.uint8
        assert (found != expected).any(2).float().mean() < 0.01


def test_the_error_that_queries_see_falls_and_the_plain_error_rises():
    h, x = moments(2, 64), random_keys(4, 2, 128, 64)
    f, seen, plain = PageFormat.keys(2, 64, 128, 2, 128), [], []
    for matrices in (None, feedback(2, 64)):
        d = dequantize_pages(quantize_pages(x, f, SideTensors(feedback=matrices))).double() - x
        seen.append(float(torch.einsum("nhpd,hde,nhpe->", d, h, d)))
        plain.append(float(d.square().sum()))
    assert seen[1] < 0.6 * seen[0]
    assert plain[1] > plain[0]


FORMATS = {
    "joint": PageFormat.keys(2, 24, 128, 2, 32, token_norm="joint", clip_ratio=0.85),
    "per head, 1 bit": PageFormat.keys(2, 24, 128, 1, 128, token_norm="per_head"),
    "boosted": PageFormat.keys(2, 24, 128, 2, 128, boosted=5),
    "boosted, 1 bit, fixed": PageFormat.keys(2, 24, 128, 1, 128, boosted=5, fixed_channels=True),
    "static": PageFormat.keys(2, 24, 128, 4, 128, static=True),
}


@pytest.mark.parametrize("f", FORMATS.values(), ids=FORMATS)
def test_only_the_codes_of_a_page_change(f):
    """Norms, scales, offsets and boosted channels are those of the unmodified page; codes are the reference's."""
    x = random_keys(2, 2, 128, 24)
    fixed = torch.tensor([[0, 3, 4, 11, 23], [1, 2, 7, 8, 22]]) if f.fixed_channels else None
    static = ChannelScales(torch.full((2, 24), 0.4).half(), torch.full((2, 24), -3.0).half()) if f.static else None
    fixings = fixed, static
    near, fed = (quantize_pages(x, f, SideTensors(*fixings, matrices)) for matrices in (None, feedback(2, 24)))
    for name, tensor in near.tensors():
        assert torch.equal(tensor, getattr(fed, name)) == (name not in ("codes", "high")), name
    keys = normalised_keys(x, f)
    if f.token_norm != "none":
        keys = x * torch.where(near.norm > 0, near.norm.float().reciprocal(), 0.0).unsqueeze(3)
    chosen = near.channels.long() if near.channels is not None else fixed.expand(2, -1, -1) if f.boosted else None
    largest = torch.full((2, 2, 24), 2**f.bits - 1)
    if chosen is not None:
        largest.scatter_(2, chosen, 4**f.bits - 1)
    grid = (near.scale, near.offset) if static is None else [p.expand(2, -1, -1).unsqueeze(3) for p in static]
    expected = round_with_feedback_reference(keys.transpose(2, 3), *grid, largest, feedback(2, 24))
    assert (page_codes(fed, fixed) != expected).any(2).float().mean() < 0.01
    if f.token_norm == "per_head":
        assert not dequantize_pages(fed)[-1, -1, 3].any()  # a token of zeros stays one


def test_uncorrelated_queries_leave_rounding_as_it_is():
    x, f = random_keys(2, 2, 128, 24), PageFormat.keys(2, 24, 128, 2, 32)
    identity = feedback_matrices(torch.diag_embed(torch.rand(2, 24)))[0].half()
    assert torch.equal(quantize_pages(x, f, SideTensors(feedback=identity)).codes, quantize_pages(x, f).codes)


def test_a_token_of_a_span_is_rounded_by_itself():
    f, x = SpanFormat(2, 2), random_keys(1, 2, 131, 24)[0]
    span = quantize_span_reference(x, x, f, feedback(2, 24))
    grid = [part[None, :, :, None] for part in (span.keys.scale, span.keys.offset)]
    codes = round_with_feedback_reference(x.transpose(1, 2)[None], *grid, 3, feedback(2, 24))[0].transpose(1, 2)
    expected = codes * span.keys.scale.float().unsqueeze(1) + span.keys.offset.float().unsqueeze(1)
    assert (span_keys(span, f) != expected).any(2).float().mean() < 0.01
    assert (span_keys(quantize_span_reference(x, x, f), f) != expected).any(2).float().mean() > 0.5


def test_matrices_are_those_of_the_inverse_moments():
    h = moments(2, 24)
    matrices, left = feedback_matrices(h)
    assert torch.equal(matrices, matrices.triu())
    assert torch.equal(matrices.diagonal(dim1=1, dim2=2), torch.ones(2, 24, dtype=torch.float64))
    # F^T diag(U_ii^2) F is the inverse of the damped moments
    inverse = torch.linalg.inv(damped(h))
    conditional = torch.linalg.inv(torch.linalg.cholesky(inverse, upper=True)).diagonal(dim1=1, dim2=2)
    found = matrices.transpose(1, 2) @ torch.diag_embed(conditional.pow(-2)) @ matrices
    torch.testing.assert_close(found, inverse)
    assert ((left > 0) & (left < 1)).all()


def test_without_queries_nothing_is_fed_back():
    matrices, left = feedback_matrices(torch.zeros(1, 5, 5))
    assert torch.equal(matrices[0], torch.eye(5, dtype=torch.float64))
    assert float(left) == pytest.approx(1)


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
    found = projected_scores(queries @ center.matrix.float(), starts, 32, center)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
    got = paged_attention(queries, [PageTile(*pages, rows, None, positions)], [], format, Scoring(0.1, softcap))
    whole = dequantize_pages(pages[0]) + page_centers(positions, 128, center)
    for row in range(2):
        own = rows == row
        k, v = (x[own].transpose(0, 1).flatten(1, 2) for x in (whole, dequantize_pages(pages[1])))
        expected = attention_reference(queries[row], k, v, None, 0.1, softcap).output
        # float32 scores of some 30 before the softmax
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-3, atol=2e-4)
