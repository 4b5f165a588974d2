"""Attention tile by tile over pages and residual windows equals float64 attention over the same dequantized tokens."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvconvert.kernels.attention import attention_reference
from kvconvert.kernels.decode import TILE_BYTES, PageTile, ResidualTokens, SpanTokens, paged_attention, pages_per_tile
from kvconvert.kernels.pages import LayerFormat, PageFormat, dequantize_pages, quantize_pages
from kvconvert.kernels.spans import SpanFormat, quantize_span, span_keys, span_values

# (heads, query heads per KV head, key dim, value dim, key bits, value bits, key group, value group, norm, queries)
CASES = [
    (2, 2, 64, 64, 2, 2, 32, 32, "joint", 1),
    (2, 1, 64, 64, 2, 2, 128, 64, "joint", 1),
    (1, 16, 128, 128, 2, 2, 32, 32, "per_head", 1),
    (3, 4, 80, 80, 2, 2, 64, 16, "none", 3),
    (2, 2, 48, 96, 1, 8, 16, 24, "none", 1),
    (2, 3, 96, 48, 8, 1, 128, 48, "joint", 129),
    (1, 1, 256, 256, 2, 4, 32, 32, "joint", 63),
    (2, 2, 64, 64, 16, 2, 128, 32, "none", 5),
    (2, 2, 64, 64, 2, 16, 32, 64, "joint", 1),
    (2, 2, 48, 80, 3, 2, 32, 16, "joint", 1),
    (2, 2, 128, 64, 4, 3, 128, 64, "none", 1),
    (1, 2, 64, 96, 3, 3, 16, 96, "none", 129),
]


def build(case, pages_per_row=(3, 1, 0), residual_per_row=(70, 0, 33), seed=0):
    """Rows with their own numbers of pages and full-precision tokens; also each row's dequantized keys and values."""
    heads, group, key_dim, value_dim, key_bits, value_bits, key_group, value_group, norm, length = case
    generator = torch.Generator().manual_seed(seed)
    boosted = 5 if key_bits == 2 and norm == "none" else 0
    keys_as = PageFormat.keys(heads, key_dim, 128, key_bits, key_group, norm, boosted=boosted)
    format = LayerFormat(keys_as, PageFormat.values(heads, value_dim, 128, value_bits, value_group))
    count = sum(pages_per_row)
    keys = torch.randn(count, heads, 128, key_dim, generator=generator)
    values = torch.randn(count, heads, 128, value_dim, generator=generator)
    pages = quantize_pages(keys, format.keys), quantize_pages(values, format.values)
    rows = torch.tensor([row for row, n in enumerate(pages_per_row) for _ in range(n)])
    residuals = [
        ResidualTokens(
            torch.tensor([row]),
            torch.randn(1, heads, n, key_dim, generator=generator),
            torch.randn(1, heads, n, value_dim, generator=generator),
        )
        for row, n in enumerate(residual_per_row)
        if n
    ]
    queries = torch.randn(len(pages_per_row), heads * group, length, key_dim, generator=generator)
    stored = []
    for row in range(len(pages_per_row)):
        own = (rows == row).nonzero().flatten()
        k = dequantize_pages(pages[0].select(own)).transpose(0, 1).reshape(heads, -1, key_dim)
        v = dequantize_pages(pages[1].select(own)).permute(1, 0, 2, 3).reshape(heads, -1, value_dim)
        for part in residuals:
            if part.rows[0] == row:
                k, v = torch.cat([k, part.keys[0]], 1), torch.cat([v, part.values[0]], 1)
        stored.append((k, v))
    return format, pages, rows, residuals, queries, stored


def tiles_of(pages, rows, sizes):
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        yield PageTile(pages[0].select(part), pages[1].select(part), rows[part])
        start += size


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("sizes", [(4,), (1, 2, 1)], ids=["one tile", "three tiles"])
def test_equals_the_reference(case, sizes):
    format, pages, rows, residuals, queries, stored = build(case)
    scaling = case[2] ** -0.5
    got = paged_attention(queries, tiles_of(pages, rows, sizes), residuals, format, scaling)
    for row, (keys, values) in enumerate(stored):
        expected = attention_reference(queries[row], keys, values, None, scaling).output
        # float32 dot products of up to 256 terms
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("softcap", "with_sink_logits"), [(None, True), (5.0, False), (2.0, True)])
def test_softcap_and_sinks(softcap, with_sink_logits):
    format, pages, rows, residuals, queries, stored = build(CASES[3])
    sink_logits = torch.randn(12) * 3 if with_sink_logits else None
    got = paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, 0.3, softcap, sink_logits)
    for row, (keys, values) in enumerate(stored):
        expected = attention_reference(queries[row], keys, values, None, 0.3, softcap, sink_logits).output
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)


def test_masks_hide_tokens_in_pages_and_residual_windows():
    case = CASES[3]
    format, pages, rows, residuals, queries, stored = build(case)
    length = case[-1]
    generator = torch.Generator().manual_seed(3)
    page_mask = torch.rand(len(rows), 1, length, 128, generator=generator) < 0.5
    page_mask[0] = False  # a page that nobody sees
    masked = [
        ResidualTokens(r.rows, r.keys, r.values, torch.rand(1, 1, length, r.keys.shape[2], generator=generator) < 0.5)
        for r in residuals
    ]
    got = paged_attention(queries, [PageTile(*pages, rows, page_mask)], masked, format, 0.2)
    for row, (keys, values) in enumerate(stored):
        parts = [page_mask[i] for i in range(len(rows)) if rows[i] == row] + [
            r.visible[0] for r in masked if r.rows[0] == row
        ]
        expected = attention_reference(queries[row], keys, values, torch.cat(parts, 2), 0.2).output
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("lengths", [(7, 7, 7), (9, 1, 4)], ids=["one length", "padded"])
def test_residual_windows_of_many_rows_in_one_batch(lengths):
    format, pages, rows, _, queries, _ = build(CASES[3], residual_per_row=(0, 0, 0))
    longest, length = max(lengths), CASES[3][-1]
    keys, values = torch.randn(3, 3, longest, 80), torch.randn(3, 3, longest, 80)
    visible = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None].expand(3, 1, length, longest)
    order = torch.tensor([2, 0, 1])
    one_length = len(set(lengths)) == 1
    batch = ResidualTokens(order, keys[order], values[order], None if one_length else visible[order])
    got = paged_attention(queries, tiles_of(pages, rows, (4,)), [batch], format, 0.2)
    for row, count in enumerate(lengths):
        own = rows == row
        k = dequantize_pages(pages[0].select(own)).transpose(0, 1).reshape(3, -1, 80)
        v = dequantize_pages(pages[1].select(own)).permute(1, 0, 2, 3).reshape(3, -1, 80)
        k, v = torch.cat([k, keys[row, :, :count]], 1), torch.cat([v, values[row, :, :count]], 1)
        expected = attention_reference(queries[row], k, v, None, 0.2).output
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)


def test_memory_is_shared_by_calls_and_not_by_threads():
    """A result does not change when other layers are attended to afterwards, on this thread or on another one."""
    cases = [build(case, seed=seed) for seed, case in enumerate(CASES[:4])]

    def attend(case):
        format, pages, rows, residuals, queries, _ = case
        return paged_attention(queries, tiles_of(pages, rows, (2, 2)), residuals, format, 0.2)

    alone = [attend(case) for case in cases]
    copies = [result.clone() for result in alone]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(attend, cases * 8))
    for index, result in enumerate(together):
        torch.testing.assert_close(result, copies[index % len(cases)])
    assert all(torch.equal(*pair) for pair in zip(alone, copies, strict=True))


def test_memory_made_in_inference_mode_serves_other_calls():
    format, pages, rows, residuals, queries, _ = build(CASES[0])
    with torch.inference_mode():
        first = paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, 0.2)
    assert torch.equal(paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, 0.2), first)


def test_a_query_that_sees_nothing_gives_zeros():
    format, pages, rows, _, queries, _ = build(CASES[0], pages_per_row=(1, 0), residual_per_row=(0, 0))
    hidden = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    got = paged_attention(queries, [PageTile(*pages, rows, hidden)], [], format, 1.0)
    assert torch.equal(got, torch.zeros_like(got))


def test_large_scores_do_not_overflow():
    format, pages, rows, residuals, queries, stored = build(CASES[0])
    got = paged_attention(queries * 1e3, tiles_of(pages, rows, (2, 2)), residuals, format, 1.0)
    assert torch.isfinite(got).all()
    expected = attention_reference(queries[0] * 1e3, *stored[0], None, 1.0).output
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-3, atol=1e-3)  # scores of 1e4: float32 leaves 1e-3


def test_tiles_stay_within_their_budget():
    format = LayerFormat(PageFormat.keys(8, 128, 128, 2, 32), PageFormat.values(8, 128, 128, 2, 32))
    assert pages_per_tile(32, 1, format) * 8 * 128 * 128 * 4 <= TILE_BYTES
    assert pages_per_tile(32, 10**6, format) == 1


@pytest.mark.parametrize("paged", ["keys", "values"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=["one query", "three queries"])
def test_one_side_may_be_in_full_precision(case, paged):
    format, pages, rows, _, queries, _ = build(case, pages_per_row=(2,), residual_per_row=(0,))
    heads, key_dim, value_dim = case[0], case[2], case[3]
    keys, values = torch.randn(2, heads, 128, key_dim), torch.randn(2, heads, 128, value_dim)
    tile = PageTile(pages[0], values, rows) if paged == "keys" else PageTile(keys, pages[1], rows)
    got = paged_attention(queries, [tile], [], format, 0.2)
    if paged == "keys":
        keys = dequantize_pages(pages[0])
    else:
        values = dequantize_pages(pages[1])
    flat = [x.transpose(0, 1).flatten(1, 2) for x in (keys, values)]
    expected = attention_reference(queries[0], *flat, None, 0.2).output
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-4, atol=2e-5)


def shifted_by_hand(scores, tau1, tau2):
    """CalibQuant's g, score by score, for one row."""
    low, high = min(scores), max(scores)
    if high == low:
        return [x - tau1 for x in scores]
    slope = max(0.0, ((high - tau2) - (low - tau1)) / (high - low))
    return [low - tau1 + slope * (x - low) for x in scores]


@pytest.mark.parametrize(("tau1", "tau2"), [(0.0, 0.0), (0.0, 1.5), (1.0, 0.5), (0.0, 50.0)])
@pytest.mark.parametrize(
    ("bits", "dims", "length"),
    [((1, 2), (48, 80), 1), ((4, 1), (64, 64), 3), ((8, 8), (32, 32), 1), ((3, 3), (48, 32), 1)],
)
def test_spans_beside_residual_tokens_equal_float64_attention_over_shifted_scores(tau1, tau2, bits, dims, length):
    torch.manual_seed(0)
    heads, group, scaling = 2, 2, 0.3
    span_as = SpanFormat(*bits, key_clip_ratio=0.9, value_clip_ratio=0.8, tau1=tau1, tau2=tau2)
    spans = [quantize_span(torch.randn(heads, n, dims[0]), torch.randn(heads, n, dims[1]), span_as) for n in (37, 1)]
    residual = ResidualTokens(torch.tensor([0]), torch.randn(1, heads, 9, dims[0]), torch.randn(1, heads, 9, dims[1]))
    queries = torch.randn(1, heads * group, length, dims[0])
    format = LayerFormat(PageFormat.keys(heads, dims[0], 128, 2, 32), PageFormat.values(heads, dims[1], 128, 2, 16))
    all_spans = SpanTokens(0, spans, span_as)
    got = paged_attention(queries, [], [residual], format, scaling, spans=[all_spans])[0]

    stored = torch.cat([span_keys(s, span_as) for s in spans], 1).double()
    weighted = torch.cat([span_values(s, span_as) for s in spans] + [residual.values[0]], 1).double()
    for head in range(heads * group):
        kv = head // group
        for t in range(length):
            query = queries[0, head, t].double()
            in_spans = shifted_by_hand((stored[kv] @ query * scaling).tolist(), tau1, tau2)
            others = residual.keys[0, kv].double() @ query * scaling
            weights = torch.cat([torch.tensor(in_spans, dtype=torch.float64), others]).softmax(0)
            torch.testing.assert_close(got[head, t].double(), weights @ weighted[kv], rtol=1e-4, atol=2e-5)
