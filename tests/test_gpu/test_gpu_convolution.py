"""Short convolutions of sequences side by side equal those of each alone."""

import pytest
import torch
from torch.nn import functional

from kvconvert.kernels.convolution import (
    SideBySide,
    convolve,
    convolve_reference,
    convolve_step,
    convolve_step_reference,
    unsupported,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Tokens of each sequence, channels, weights of a channel, tokens that are kept.
SHAPES = [([1], 8, 4, 4), ([5, 1, 33], 200, 4, 3), ([2, 1, 1, 70, 3], 130, 3, 5), ([64, 31], 64, 2, 1)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plain", [True, False])
def test_kernels_equal_the_reference(device, shape, dtype, plain):
    lengths, channels, taps, kept = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (sum(lengths), 2 * channels), (channels, taps), (channels,), (len(lengths), channels, kept)
    x, weight, bias, states = (torch.randn(*size, generator=generator).to(device, dtype) for size in sizes)
    x, bias = x[:, channels:], None if plain else bias
    assert unsupported(x, weight, states) is None
    y, after = convolve(x, weight, bias, states, SideBySide(lengths, x.device), silu=not plain)
    expected = convolve_reference(*(t if t is None else t.cpu() for t in (x, weight, bias, states)), lengths, not plain)
    assert y.dtype == after.dtype == dtype
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 3e-3, "atol": 3e-3}
    torch.testing.assert_close(y.cpu(), expected[0], **tolerance)
    assert torch.equal(after.cpu(), expected[1])


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (5, 200, 4, 3), (3, 130, 3, 5), (2, 64, 2, 1)], ids=str)
@pytest.mark.parametrize("plain", [True, False])
def test_a_step_equals_the_reference(device, shape, dtype, plain):
    rows, channels, taps, kept = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, 2 * channels), (channels, taps), (channels,), (rows, channels, kept)
    x, weight, bias, states = (torch.randn(*size, generator=generator).to(device, dtype) for size in sizes)
    x, bias, after = x[:, channels:], None if plain else bias, states.clone()
    found = convolve_step(x, weight, bias, after, silu=not plain)
    expected = convolve_step_reference(x, weight, bias, states, not plain)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 3e-3, "atol": 3e-3}
    torch.testing.assert_close(found, expected, **tolerance)
    assert torch.equal(after, states)


def test_the_reference_is_a_convolution_over_what_each_sequence_had_before():
    generator = torch.Generator().manual_seed(1)
    lengths, weight = [3, 7], torch.randn(6, 4, generator=generator, dtype=torch.float64)
    before, new = (torch.randn(2, 6, n, generator=generator, dtype=torch.float64) for n in (5, 7))
    tokens = torch.cat([new[0, :, :3].T, new[1].T])
    y, after = convolve_reference(tokens, weight, None, before[:, :, 1:], lengths, False)
    for row, own in enumerate(y.split(lengths)):
        whole = torch.cat([before[row], new[row, :, : len(own)]], 1)
        expected = [(whole[:, end - 4 : end] * weight).sum(1) for end in range(6, 6 + len(own))]
        torch.testing.assert_close(own, torch.stack(expected))
        assert torch.equal(after[row], whole[:, -4:])
    silu = convolve_reference(tokens, weight, None, before, lengths, True)[0]
    torch.testing.assert_close(silu, functional.silu(y))
