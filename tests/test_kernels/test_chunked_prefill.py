"""Attention of a prompt chunk over a history on a CPU, tile by tile, equals float64 over all of it at once."""

import pytest
import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.attention import attention_reference, causal_mask, merge
from kvconvert.kernels.chunked_prefill import PageReader, StoredPart, chunk_attention, unsupported
from kvconvert.kernels.chunked_prefill.parts import Workspace, tile_tokens
from kvconvert.kernels.pages import PAGE_SIZE, LayerFormat, PageFormat, dequantize_pages, quantize_pages

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
    output = chunk_attention(queries, parts, *chunk, 0.2, workspace_tokens=workspace_tokens)
    expected = expected_of(queries, every, 0.2)
    # float32 dot products of up to 256 terms
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=2e-5)


def test_sink_logits_take_their_share():
    queries, parts, chunk, every = case_of(2, 2, 64, 20, 2, 10)
    sink_logits = torch.tensor([-3.0, 0.0, 2.0, 40.0])
    output = chunk_attention(queries, parts, *chunk, 0.2, None, sink_logits, workspace_tokens=128)
    torch.testing.assert_close(output.double(), expected_of(queries, every, 0.2, sink_logits), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_computed_in_float32(dtype):
    queries, parts, chunk, every = case_of(2, 4, 64, 40, 3, 20, dtype)
    output = chunk_attention(queries, parts, *chunk, 0.2, workspace_tokens=128)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), expected_of(queries, every, 0.2), rtol=1e-4, atol=2e-5)


def test_large_scores_neither_overflow_nor_vanish():
    queries, parts, chunk, every = case_of(2, 2, 64, 20, 2, 10)
    output = chunk_attention(queries * 300, parts, *chunk, 1.0, workspace_tokens=128)
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
    assert unsupported(queries, LayerFormat(keys, values), torch.float32, 0.1) is None
    assert "soft caps" in unsupported(queries, LayerFormat(keys, values), torch.float32, 0.1, softcap=30.0)
    assert "windows" in unsupported(queries, LayerFormat(keys, values), torch.float32, 0.1, window=10)
    values = PageFormat.values(2, 48, PAGE_SIZE, 2, 48)
    assert "one head size" in unsupported(queries, LayerFormat(keys, values), torch.float32, 0.1)
    assert "no kernels" in unsupported(queries.to("meta"), LayerFormat(keys, values), torch.float32, 0.1)


def test_a_workspace_without_room_for_a_page_is_an_error():
    queries, parts, chunk, _ = case_of(2, 2, 64, 20, 2, 10)
    with pytest.raises(UsageError, match="no room for a page"):
        chunk_attention(queries, parts, *chunk, 0.2, workspace_tokens=64)


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
