"""Embeddings and heads of 8 bits: rows are what their codes stand for, and products those of the rows."""

import pytest
import torch
from torch import nn

from kvconvert.kernels.vocabulary import VocabularyRows


def weight(tokens, channels, dtype, device):
    generator = torch.Generator().manual_seed(tokens)
    spread = torch.rand(tokens, 1, generator=generator) * 0.2
    return (spread * torch.randn(tokens, channels, generator=generator)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "channels"), [(70, 96), (129, 40), (64, 256)])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_logits_are_those_of_the_rows(device, dtype, tokens, channels, rows):
    table = VocabularyRows.of(weight(tokens, channels, dtype, device))
    x = torch.randn(rows, 1, channels, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    exact = x[:, 0].double() @ (table.codes.double() * table.scales[:, None].double()).T
    found = table.logits(x)
    assert found.shape == (rows, 1, tokens)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found[:, 0].double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))
    torch.testing.assert_close(table.reference(x[:, 0]), found[:, 0], rtol=tolerance, atol=tolerance * 4)


def test_rows_are_rounded_to_the_nearest_of_their_own_range(device):
    given = weight(50, 64, torch.float32, device)
    given[7] = 0
    table = VocabularyRows.of(given)
    every = table.embeddings(torch.arange(50, device=device).view(5, 10), torch.float32)
    assert every.shape == (5, 10, 64)
    error = (every.view(50, 64) - given).abs()
    assert bool((error <= given.abs().amax(1, keepdim=True) / 254 * 1.001).all())
    assert not every.view(50, 64)[7].any()
    assert torch.equal(every, nn.functional.embedding(torch.arange(50, device=device).view(5, 10), every.view(50, 64)))
