"""Attention of a prompt chunk over a history on a CPU, tile by tile, equals float64 over all of it at once.

Attention of prompts without a GPU: torch's own and blocks of queries, against float64.

Attention over stored latents, tile by tile, equals float64 over keys and values made of the same latents.
"""

from __future__ import annotations

import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.attention import Scoring, attention_reference, causal_mask, merge
from kvconvert.kernels.chunked_prefill import PageReader, StoredPart, chunk_attention, unsupported
from kvconvert.kernels.chunked_prefill.parts import Workspace, tile_tokens
from kvconvert.kernels.latent import latent_attention
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat, dequantize_pages, quantize_pages
from kvconvert.kernels.prompt import BLOCK_SCORES, blockwise_attention, prompt_attention
from kvconvert.kernels.select import selective_attention

# Heads, query heads per KV head, head size, queries, pages, full-precision tokens.
CASES = [(2, 4, 64, 70, 5, 0), (3, 1, 80, 17, 1, 45), (1, 16, 48, 129, 0, 300), (2, 2, 256, 33, 3, 1)]


def case_of(heads, group, dim, queries, pages, residual, dtype=torch.float32, seed=0):
    """Queries, parts of a history in pages and in full precision, the chunk, and all keys and values dequantized."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    key_format = PageFormat.keys(heads, dim, PAGE_SIZE, 2, 32, "joint", boosted=5)
    value_format = PageFormat.values(heads, dim, PAGE_SIZE, 4, dim // 2)
    stored = (
        quantize_pages(random(pages, heads, PAGE_SIZE, dim), key_format),
        quantize_pages(random(pages, heads, PAGE_SIZE, dim), value_format),
    )
    full = random(heads, residual, dim), random(heads, residual, dim)
    readers = [
        PageReader(lambda numbers, side=side: side.select(numbers), f)
        for side, f in zip(stored, (key_format, value_format), strict=True)
    ]
    parts = [StoredPart(residual, *full), StoredPart(pages * PAGE_SIZE, *readers)]
    chunk = random(heads, queries, dim), random(heads, queries, dim)
    paged = (dequantize_pages(stored[0]).transpose(0, 1), dequantize_pages(stored[1]).transpose(0, 1))
    every = [torch.cat([a, b.flatten(1, 2), c], 1) for a, b, c in zip(full, paged, chunk, strict=True)]
    return random(heads * group, queries, dim), [part for part in parts if part.tokens], chunk, every


def expected_of(queries, every, scaling, sink_logits=None):
    visible = causal_mask(queries.shape[1], every[0].shape[1])
    return attention_reference(queries, *every, visible, scaling, None, sink_logits).output


@pytest.mark.parametrize("workspace_tokens", [128, 256, None])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_attention_over_everything_at_once(case, workspace_tokens):
    queries, parts, chunk, every = case_of(*case)
    output = chunk_attention(queries, parts, *chunk, Scoring(0.2), workspace_tokens=workspace_tokens)
    expected = expected_of(queries, every, 0.2)
    # float32 dot products of up to 256 terms
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=2e-5)


def test_sink_logits_take_their_share():
    queries, parts, chunk, every = case_of(2, 2, 64, 20, 2, 10)
    sink_logits = torch.tensor([-3.0, 0.0, 2.0, 40.0])
    output = chunk_attention(queries, parts, *chunk, Scoring(0.2, None, sink_logits), workspace_tokens=128)
    torch.testing.assert_close(output.double(), expected_of(queries, every, 0.2, sink_logits), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(dtype):
    queries, parts, chunk, every = case_of(2, 4, 64, 40, 3, 20, dtype)
    output = chunk_attention(queries, parts, *chunk, Scoring(0.2), workspace_tokens=128)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected_of(queries, every, 0.2), rtol=1e-4, atol=2e-5)


def test_large_scores_neither_overflow_nor_vanish():
    queries, parts, chunk, every = case_of(2, 2, 64, 20, 2, 10)
    output = chunk_attention(queries * 300, parts, *chunk, Scoring(1.0), workspace_tokens=128)
    expected = expected_of(queries * 300, every, 1.0)
    # Scores of some thousands, in float32
    assert float((output - expected).norm() / expected.norm()) < 1e-3


def test_merging_is_attention_over_both_sets():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, 40, generator=generator).double() * 5
    values = torch.randn(3, 40, 8, generator=generator).double()
    scores[0, 0, :15] = scores[0, 1] = scores[1, 2, 15:] = float("-inf")
    halves = []
    for part in (slice(0, 15), slice(15, 40)):
        weights = scores[..., part].softmax(-1).nan_to_num(0.0)
        halves += [weights @ values[:, part], scores[..., part].logsumexp(-1)]
    output, log_sum_exp = merge(*halves)
    torch.testing.assert_close(output.double(), scores.softmax(-1).nan_to_num(0.0) @ values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_sum_exp.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-6)


def test_a_tile_is_bounded_in_bytes_and_a_power_of_two():
    assert tile_tokens(8, 128, 128, torch.bfloat16) == 16384
    assert tile_tokens(32, 128, 128, torch.bfloat16) == 4096
    assert tile_tokens(5, 192, 128, torch.float16) == 16384
    assert tile_tokens(128, 256, 256, torch.float32) == 1024


def test_what_a_cpu_does_not_serve_is_named():
    queries = torch.zeros(1, 4, 20, 64)
    keys, values = PageFormat.keys(2, 64, PAGE_SIZE, 2, 32), PageFormat.values(2, 64, PAGE_SIZE, 2, 32)
    assert unsupported(queries, LayerFormat(keys, values), torch.float32, Scoring(0.1)) is None
    assert "soft caps" in unsupported(queries, LayerFormat(keys, values), torch.float32, Scoring(0.1, 30.0))
    assert "windows" in unsupported(queries, LayerFormat(keys, values), torch.float32, Scoring(0.1, window=10))
    values = PageFormat.values(2, 48, PAGE_SIZE, 2, 48)
    assert "one head size" in unsupported(queries, LayerFormat(keys, values), torch.float32, Scoring(0.1))
    assert "no kernels" in unsupported(queries.to("meta"), LayerFormat(keys, values), torch.float32, Scoring(0.1))


def test_a_workspace_without_room_for_a_page_is_an_error():
    queries, parts, chunk, _ = case_of(2, 2, 64, 20, 2, 10)
    with pytest.raises(UsageError, match="no room for a page"):
        chunk_attention(queries, parts, *chunk, Scoring(0.2), workspace_tokens=64)


def test_exact_tokens_take_the_places_of_what_pages_hold_of_them():
    torch.manual_seed(0)
    format = PageFormat.keys(2, 32, PAGE_SIZE, 2, 32), PageFormat.values(2, 32, PAGE_SIZE, 2, 32)
    tokens = torch.randn(2, 2, 2 * PAGE_SIZE, 32)
    pages = [
        quantize_pages(x.unflatten(1, (2, PAGE_SIZE)).transpose(0, 1), f) for x, f in zip(tokens, format, strict=True)
    ]
    readers = [PageReader(lambda part, p=p: p.select(part), f) for p, f in zip(pages, format, strict=True)]
    part = StoredPart(2 * PAGE_SIZE, *readers, exact=(tokens[0, :, :5], tokens[1, :, :5]))
    workspace = Workspace(torch.device("cpu"), 2, 32, 32, torch.float32, PAGE_SIZE)
    found = []
    for count in workspace.tiles([part]):
        found.append(torch.stack([workspace.keys[:, :count], workspace.values[:, :count]]).clone())
    read = [dequantize_pages(pages[0]), dequantize_pages(pages[1])]
    expected = torch.stack([x.transpose(0, 1).flatten(1, 2) for x in read])
    expected[:, :, :5] = tokens[:, :, :5]
    torch.testing.assert_close(torch.cat(found, 2), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 63, 129])
def test_prompts_attend_causally_to_themselves(dtype, length):
    queries, keys, values = torch.randn(6, length, 80), torch.randn(2, length, 80), torch.randn(2, length, 80)
    got, _ = prompt_attention(queries.to(dtype), keys.to(dtype), values.to(dtype), Scoring(0.1))
    expected = attention_reference(
        queries.to(dtype), keys.to(dtype), values.to(dtype), causal_mask(length, length), 0.1
    ).output
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block", [BLOCK_SCORES, 2500, 1])
@pytest.mark.parametrize(("length", "tokens"), [(1, 9), (40, 129), (63, 63), (0, 5)])
@pytest.mark.parametrize(
    "extras",
    [{}, {"softcap": 2.0}, {"sink_logits": torch.linspace(-1, 3, 6)}, {"window": 9}, {"window": 1}, {"window": 500}],
    ids=str,
)
def test_chunks_caps_sink_logits_and_windows_give_the_references_output_and_sums(block, length, tokens, extras):
    torch.manual_seed(3)
    queries, keys, values = torch.randn(6, length, 16), torch.randn(3, tokens, 16), torch.randn(3, tokens, 24)
    output = blockwise_attention(queries, keys, values, Scoring(0.25, **extras), block_scores=block)
    chosen, mass = selective_attention(queries, keys, values, Scoring(0.25, **extras))
    torch.testing.assert_close(chosen, output, rtol=1e-4, atol=1e-5)
    extras = dict(extras)
    visible = causal_mask(length, tokens, extras.pop("window", None))
    expected = attention_reference(queries, keys, values, visible, 0.25, **extras).output
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    sums = attention_reference(queries, keys, None, visible, 0.25, **extras).mass
    torch.testing.assert_close(mass.double(), sums, rtol=1e-4, atol=1e-5)
    assert mass.dtype == torch.float32


SCALING = 0.11
# Heads, latent channels, RoPE channels, queries, pages, full-precision tokens, exact tokens of the first page, tile.
LATENT_CASES = [
    (4, 64, 16, 1, 5, 37, 4, 256),
    (3, 48, 8, 1, 1, 1, 0, None),
    (16, 128, 32, 7, 3, 129, 4, 128),
    (5, 64, 16, 40, 0, 40, 0, 128),
]


def latents_of(heads, rank, rope, queries, pages, residual, exact, bits=4, dtype=torch.float32, seed=0):
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


def expected_of_latents(latent_queries, rope_queries, latents, rope):
    """float64, over all tokens at once: each query sees the tokens up to its own."""
    rope, latents = rope.double(), latents.double()
    scores = (latent_queries.double() @ latents.T + rope_queries.double() @ rope.T) * SCALING
    length, tokens = scores.shape[1:]
    hidden = torch.ones(length, tokens, dtype=torch.bool).triu(tokens - length + 1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ latents


@pytest.mark.parametrize("case", LATENT_CASES, ids=str)
def test_attention_over_latents_is_that_of_float64(case):
    *shape, tile = case
    latent_queries, rope_queries, parts, latents, rope = latents_of(*shape)
    found = latent_attention(latent_queries, rope_queries, parts, Scoring(SCALING), tile)
    torch.testing.assert_close(
        found.double(), expected_of_latents(latent_queries, rope_queries, latents, rope), rtol=1e-4, atol=1e-5
    )


def test_absorbed_projections_are_attention_over_expanded_keys_and_values():
    _, rope_queries, parts, latents, rope = latents_of(4, 64, 16, 3, 2, 21, 4)
    generator = torch.Generator().manual_seed(1)
    up_keys, up_values = (torch.randn(4, size, 64, generator=generator, dtype=torch.float64) / 8 for size in (24, 20))
    plain = torch.randn(4, 3, 24, generator=generator, dtype=torch.float64)
    keys = torch.cat([latents.double() @ up_keys.mT, rope.double().expand(4, -1, -1)], -1)
    scores = torch.cat([plain, rope_queries.double()], -1) @ keys.mT * SCALING
    tokens = scores.shape[-1]
    scores = scores.masked_fill(torch.ones(3, tokens, dtype=torch.bool).triu(tokens - 2), -torch.inf)
    expected = scores.softmax(-1) @ (latents.double() @ up_values.mT)
    found = latent_attention((plain @ up_keys).float(), rope_queries, parts, Scoring(SCALING)).double() @ up_values.mT
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
