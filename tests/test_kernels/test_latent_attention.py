"""Attention over stored latents, tile by tile, equals float64 over keys and values made of the same latents."""

import pytest
import torch

from kvconvert.kernels.chunked_prefill import PageReader, StoredPart
from kvconvert.kernels.latent import latent_attention
from kvconvert.kernels.pages import PAGE_SIZE, PageFormat, dequantize_pages, quantize_pages

SCALING = 0.11
# Heads, latent channels, RoPE channels, queries, pages, full-precision tokens, exact tokens of the first page, tile.
CASES = [
    (4, 64, 16, 1, 5, 37, 4, 256),
    (3, 48, 8, 1, 1, 1, 0, None),
    (16, 128, 32, 7, 3, 129, 4, 128),
    (5, 64, 16, 40, 0, 40, 0, 128),
]


def case_of(heads, rank, rope, queries, pages, residual, exact, bits=4, dtype=torch.float32, seed=0):
    """Queries of latents and of RoPE parts, the stored parts, and latents and RoPE parts as they read back."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    formats = PageFormat.keys(1, rank, PAGE_SIZE, bits, 64), PageFormat.values(1, rope, PAGE_SIZE, 8, rope)
    stored = (
        quantize_pages(random(pages, 1, PAGE_SIZE, rank), formats[0]),
        quantize_pages(random(pages, 1, PAGE_SIZE, rope), formats[1]),
    )
    readers = [
        PageReader(lambda numbers, side=side: side.select(numbers), f) for side, f in zip(stored, formats, strict=True)
    ]
    window, first = ((random(1, count, rank), random(1, count, rope)) for count in (residual, exact))
    parts = [StoredPart(pages * PAGE_SIZE, *readers, exact=first if exact else None), StoredPart(residual, *window)]
    every = []
    for paged, own, head in zip(
        (
            dequantize_pages(stored[0]).transpose(0, 1).flatten(1, 2),
            dequantize_pages(stored[1]).transpose(0, 1).flatten(1, 2),
        ),
        window,
        first,
        strict=True,
    ):
        paged[:, :exact] = head
        every.append(torch.cat([paged, own], 1)[0])
    queries = random(heads, queries, rank), random(heads, queries, rope)
    return *queries, [part for part in parts if part.tokens], *every


def expected_of(latent_queries, rope_queries, latents, rope):
    """float64, over all tokens at once: each query sees the tokens up to its own."""
    rope, latents = rope.double(), latents.double()
    scores = (latent_queries.double() @ latents.T + rope_queries.double() @ rope.T) * SCALING
    length, tokens = scores.shape[1:]
    hidden = torch.ones(length, tokens, dtype=torch.bool).triu(tokens - length + 1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ latents


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_latents_is_that_of_float64(case):
    *shape, tile = case
    latent_queries, rope_queries, parts, latents, rope = case_of(*shape)
    found = latent_attention(latent_queries, rope_queries, parts, SCALING, tile)
    torch.testing.assert_close(
        found.double(), expected_of(latent_queries, rope_queries, latents, rope), rtol=1e-4, atol=1e-5
    )


def test_absorbed_projections_are_attention_over_expanded_keys_and_values():
    _, rope_queries, parts, latents, rope = case_of(4, 64, 16, 3, 2, 21, 4)
    generator = torch.Generator().manual_seed(1)
    up_keys, up_values = (torch.randn(4, size, 64, generator=generator, dtype=torch.float64) / 8 for size in (24, 20))
    plain = torch.randn(4, 3, 24, generator=generator, dtype=torch.float64)
    keys = torch.cat([latents.double() @ up_keys.mT, rope.double().expand(4, -1, -1)], -1)
    scores = torch.cat([plain, rope_queries.double()], -1) @ keys.mT * SCALING
    tokens = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(3, tokens, dtype=torch.bool).triu(tokens - 2), -torch.inf)
    expected = scores.softmax(-1) @ (latents.double() @ up_values.mT)
    found = latent_attention((plain @ up_keys).float(), rope_queries, parts, SCALING).double() @ up_values.mT
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
