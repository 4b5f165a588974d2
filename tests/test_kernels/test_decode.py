"""Attention tile by tile over pages and residual windows equals float64 attention over the same dequantized tokens.

Work items cover every page, half-quantized page and residual token once, in items of nearly equal cost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode import TILE_BYTES, PageTile, ResidualTokens, SpanTokens, paged_attention, pages_per_tile
from kvconvert.kernels.decode.plan import (
    HALF_QUANTIZED_COST,
    OPEN_END,
    RESIDUAL_TOKENS,
    Item,
    Segment,
    SequencePlan,
    WorkPlan,
    most_items,
    plan_work,
)
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
    got = paged_attention(queries, tiles_of(pages, rows, sizes), residuals, format, Scoring(scaling))
    for row, (keys, values) in enumerate(stored):
        expected = attention_reference(queries[row], keys, values, None, scaling).output
        # float32 dot products of up to 256 terms
        torch.testing.assert_close(got[row].double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("softcap", "with_sink_logits"), [(None, True), (5.0, False), (2.0, True)])
def test_softcap_and_sinks(softcap, with_sink_logits):
    format, pages, rows, residuals, queries, stored = build(CASES[3])
    sink_logits = torch.randn(12) * 3 if with_sink_logits else None
    got = paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, Scoring(0.3, softcap, sink_logits))
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
    got = paged_attention(queries, [PageTile(*pages, rows, page_mask)], masked, format, Scoring(0.2))
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
    got = paged_attention(queries, tiles_of(pages, rows, (4,)), [batch], format, Scoring(0.2))
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
        return paged_attention(queries, tiles_of(pages, rows, (2, 2)), residuals, format, Scoring(0.2))

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
        first = paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, Scoring(0.2))
    assert torch.equal(paged_attention(queries, tiles_of(pages, rows, (4,)), residuals, format, Scoring(0.2)), first)


def test_a_query_that_sees_nothing_gives_zeros():
    format, pages, rows, _, queries, _ = build(CASES[0], pages_per_row=(1, 0), residual_per_row=(0, 0))
    hidden = torch.zeros(1, 1, 1, 128, dtype=torch.bool)
    got = paged_attention(queries, [PageTile(*pages, rows, hidden)], [], format, Scoring(1.0))
    assert torch.equal(got, torch.zeros_like(got))


def test_large_scores_do_not_overflow():
    format, pages, rows, residuals, queries, stored = build(CASES[0])
    got = paged_attention(queries * 1e3, tiles_of(pages, rows, (2, 2)), residuals, format, Scoring(1.0))
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
    got = paged_attention(queries, [tile], [], format, Scoring(0.2))
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
    got = paged_attention(queries, [], [residual], format, Scoring(scaling), spans=[all_spans])[0]

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


def covered(plan, row):
    """Table entries, half-quantized pages and residual tokens of a sequence's items, in order."""
    entries, half_quantized, residual = [], [], []
    for item in plan.items[plan.item_rows[row] : plan.item_rows[row + 1]].tolist():
        assert item[0] == row
        entries += range(item[1], item[2])
        half_quantized += range(item[3], item[4])
        residual.append((item[5], item[6]))
    return entries, half_quantized, [part for part in residual if part[0] < part[1]]


@pytest.mark.parametrize("programs", [1, 3, 7, 1000])
def test_everything_is_covered_once(programs):
    sequences = [
        SequencePlan((Segment(0, 10, 1280),), 70, half_quantized=2, half_quantized_begin=10),
        SequencePlan((), 0),
        SequencePlan((Segment(12, 15, 300, 1), Segment(15, 16, 100, 2)), 33),
    ]
    plan = plan_work(sequences, programs)
    for row, sequence in enumerate(sequences):
        entries, half_quantized, residual = covered(plan, row)
        assert entries == [entry for part in sequence.segments for entry in range(part.begin, part.end)]
        assert half_quantized == list(range(sequence.half_quantized))
        assert residual[0][0] == 0 or not sequence.residual
        assert [stop for _, stop in residual[:-1]] == [start for start, _ in residual[1:]]
        assert residual[-1][1] == OPEN_END


def test_slots_are_consecutive_and_counted():
    plan = plan_work([SequencePlan((Segment(0, 9, 1152),), 40), SequencePlan((Segment(9, 10, 128),), 5)], 6)
    slots = [s for item in plan.items.tolist() for s in item[7:10] if s >= 0]
    assert slots == list(range(plan.slots))
    assert plan.slot_rows.tolist()[-1] == plan.slots
    assert plan.most_slots == max(plan.slot_rows.diff().tolist())


def test_items_stay_within_the_programs_and_near_each_other():
    sequences = [SequencePlan((Segment(0, 63, 8064),), 128) for _ in range(32)]
    plan = plan_work(sequences, 198)
    assert len(plan.items) <= 198
    units = []
    for _, begin, end, half_quantized_begin, half_quantized_end, start, stop, *_ in plan.items.tolist():
        residual = min(stop, 128) - start
        units.append(
            end
            - begin
            + HALF_QUANTIZED_COST * (half_quantized_end - half_quantized_begin)
            + -(-max(0, residual) // RESIDUAL_TOKENS)
        )
    assert max(units) <= min(units) + 1


@pytest.mark.parametrize("pages", [1, 5, 40, 56, 63, 100])
@pytest.mark.parametrize("half_quantized", [0, 1, 2])
def test_what_cannot_be_divided_takes_no_second_wave(pages, half_quantized):
    sequences = [
        SequencePlan((Segment(0, pages, 128 * pages),), 160, half_quantized=half_quantized, half_quantized_begin=pages)
        for _ in range(32)
    ]
    assert len(plan_work(sequences, 132).items) <= 132


def test_an_item_holds_pages_of_one_segment_only():
    plan = plan_work([SequencePlan((Segment(0, 3, 300, 4), Segment(3, 5, 200, 7)), 0)], 1)
    assert [item[10] for item in plan.items.tolist() if item[1] < item[2]] == [4, 7]
    assert [item[11] for item in plan.items.tolist() if item[1] < item[2]] == [300, 200]


def test_a_page_plan_knows_how_many_tokens_are_left_from_its_first_page():
    plan = plan_work([SequencePlan((Segment(0, 4, 450, first_token=9),), 0)], 2)
    first, second = [item for item in plan.items.tolist() if item[1] < item[2]]
    assert (first[11], second[11]) == (450, 450 - 128 * (second[1] - first[1]))
    assert second[12] == 9 + 128 * (second[1] - first[1])


@pytest.mark.parametrize("programs", [1, 7, 60, 198])
@pytest.mark.parametrize("sequences", [1, 3, 4, 5, 50, 300])
@pytest.mark.parametrize("half_quantized", [0, 2])
def test_no_more_items_than_are_announced(programs, sequences, half_quantized):
    lengths = [(7 * number) % 90 for number in range(sequences)]
    plan = plan_work(
        [
            SequencePlan(
                (Segment(0, pages, 128 * pages),) if pages else (), 388, half_quantized, half_quantized_begin=pages
            )
            for pages in lengths
        ],
        programs,
    )
    assert len(plan.items) <= most_items(sequences, programs)


def divided(sequence: SequencePlan, row: int, most: int) -> list[list[int]]:
    """Items of one sequence without slots, each of at most `most` units and of one segment, one after another."""
    items, room = [], 0

    def item_with(cost: int) -> list[int]:
        nonlocal room
        if room < cost or not items:
            items.append([row] + [0] * (len(Item) - 1))
            room = most
        room -= cost
        return items[-1]

    for part in sequence.segments:
        for done in range(0, part.end - part.begin, most):
            room, begin, end = 0, part.begin + done, min(part.end, part.begin + done + most)
            item = item_with(end - begin)
            item[Item.PAGES_FROM], item[Item.PAGES_TO], item[Item.SCALES] = begin, end, part.scales
            item[Item.TOKENS], item[Item.PAGES_MASK] = part.tokens - 128 * done, part.first_token + 128 * done
            item[Item.PAGES_HIDDEN] = 0 if done else part.hidden
    for page in range(sequence.half_quantized):
        item = item_with(HALF_QUANTIZED_COST)
        if item[Item.HALF_FROM] == item[Item.HALF_TO]:
            item[Item.HALF_FROM], item[Item.HALF_ENTRY] = page, sequence.half_quantized_begin
            item[Item.HALF_MASK] = sequence.half_quantized_token + 128 * page
            item[Item.HALF_HIDDEN] = 0 if page else sequence.half_quantized_hidden
        item[Item.HALF_TO] = page + 1
    for start in range(0, max(1, sequence.residual), RESIDUAL_TOKENS):
        item = item_with(1)
        if item[Item.RESIDUAL_TO] == 0:
            item[Item.RESIDUAL_FROM], item[Item.RESIDUAL_MASK] = start, sequence.residual_token
        item[Item.RESIDUAL_TO] = min(start + RESIDUAL_TOKENS, sequence.residual)
    items[-1][Item.RESIDUAL_TO] = OPEN_END
    return items


def is_division(plan: WorkPlan, sequences: list[SequencePlan], most: int) -> bool:
    each = [divided(sequence, row, most) for row, sequence in enumerate(sequences)]
    if plan.item_rows.diff().tolist() != [*map(len, each)]:
        return False
    expected = torch.tensor([item for own in each for item in own])
    others = [column for column in Item if not Item.PAGES_SLOT <= column <= Item.RESIDUAL_SLOT]
    return torch.equal(plan.items[:, others].long(), expected[:, others])


@pytest.mark.parametrize("programs", [1, 7, 198])
def test_all_sequences_at_once_are_divided_as_one_by_one(programs):
    dice = np.random.default_rng(programs)
    for count in (1, 2, 3, 5, 40):
        sequences = []
        for _ in range(count):
            segments, tokens = [], 0
            for number in range(dice.integers(0, 3)):
                own, begin = int(dice.integers(1, 4000)), int(dice.integers(0, 900))
                segments.append(Segment(begin, begin - (-own // 128), own, number, tokens, int(dice.integers(0, 5))))
                tokens += own
            sequences.append(SequencePlan(tuple(segments), *dice.integers([1, 0, 0, 0, 0, 0], [400, 3, 9, 9, 9, 5])))
        plan = plan_work(sequences, programs)
        assert any(is_division(plan, sequences, most) for most in range(1, 200))
