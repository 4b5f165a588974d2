"""Tables of addresses lead to everything that a layer stores, in the order that they state."""

import copy
import ctypes
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from kvconvert import KVCache, KVScheme
from kvconvert.kernels.attention import Scoring, attention_reference
from kvconvert.kernels.decode.plan import plan_work
from kvconvert.kernels.pages import dequantize_pages, new_pages
from kvconvert.kernels.spans import Span, SpanSide, span_keys, span_values
from kvconvert.runtime.cache import group_tables as tables_module
from kvconvert.runtime.cache.attend import attend, commit
from kvconvert.runtime.cache.compress import end_forward
from kvconvert.runtime.cache.forward_pass import ModalityMask, PassTokens
from kvconvert.runtime.cache.group_tables import GroupTables
from kvconvert.runtime.cache.pool import BUFFER_GROWTH, GPU_GROWTH
from kvconvert.runtime.cache.steps import entries_needed
from kvconvert.runtime.cache.store import LayerStore

CONFIG = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
CONFIG.image_token_id = 1
SCHEMES = {
    "norms and sink tokens": KVScheme(sink_tokens=3, token_norm="joint"),
    "keys stay longer": KVScheme(key_recent_tokens=300, sink_tokens=5, value_bits=4, value_group_size=16),
    "values stay longer": KVScheme(value_recent_tokens=260, key_bits=1, value_bits=1, boost_fraction=0.25),
    "16 bits": KVScheme(key_bits=16, value_bits=4, key_recent_tokens=20, value_recent_tokens=20),
    "spans": replace(KVScheme.preset("calibquant-1bit"), tau2=0.0, sink_tokens=2),
    "visual spans": replace(KVScheme.preset("calibquant-1bit-visual"), tau2=0.0, sink_tokens=2),
    "eviction": replace(KVScheme.preset("minikv"), key_group_size=32),
}
PADDING = torch.ones(3, 1000, dtype=torch.bool)
PADDING[1, :70] = PADDING[1, 330:340] = PADDING[2, :290] = False


def window(batch, head, query, key):
    return (key <= query) & (key > query - 250)


def advance(
    layer, tokens: int, mask_function=None, padding: torch.Tensor = PADDING
) -> tuple[torch.Tensor, torch.Tensor, PassTokens]:
    """Store random tokens and attend with random queries, as a model would; queries, output and chunk."""
    generator = torch.Generator().manual_seed(layer.store.logical)
    rows = len(layer.store.rows) or 3
    start = layer.store.logical
    keys, values = (torch.randn(rows, 2, tokens, 16, generator=generator).bfloat16() for _ in range(2))
    if layer.store.scheme.modality != "all":
        layer.store.group.modality_mask = ModalityMask(torch.rand(rows, tokens, generator=generator) > 0.4)
    layer.update(keys, values)
    chunk = PassTokens(torch.arange(start, start + tokens), padding[:rows, : start + tokens], mask_function)
    commit(layer.store, chunk)
    queries = torch.randn(rows, 4, tokens, 16, generator=generator)
    # A fresh prompt goes through torch's own attention, which wants one dtype; few float32 queries measure exactly.
    queries = queries.bfloat16() if tokens > 10 else queries
    return queries, attend(layer.store, queries, chunk, Scoring(0.25)), chunk


def raw(base: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` numbers from `start` bytes after `base`."""
    address = base.data_ptr() + start
    return torch.frombuffer(bytearray(ctypes.string_at(address, count * dtype.itemsize)), dtype=dtype)


def tables_of(store: LayerStore) -> GroupTables:
    """The group's tables, written for what the layer has stored now."""
    group = store.group
    tables = group.registry.tables(group, entries_needed(group.sequences))
    tables.serve(group)
    return tables


def page(tables, offset: int, f, dtype):
    """One page's dequantized tokens [H, P, channels]."""
    room = new_pages(1, f, dtype, torch.device("cpu"))
    room.buffer.copy_(raw(tables.base, 16 * offset, room.buffer.numel(), room.buffer.dtype).view(room.buffer.shape))
    return dequantize_pages(room)[0]


def followed(layer, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row, float32 [H, n, 16], read through the tables alone, in the order of masks."""
    tables, (described,) = tables_of(layer.store), tables_of(layer.store).described
    plan, (keys, values) = tables.plans[row], (tables.keys[0].tolist(), tables.values[0].tolist())
    key_address, key_stride, value_address, value_stride, sink_tokens, *skips = described[row, :7].tolist()
    count = layer.store.sequences[row].residual
    spans = [segment for segment in plan.segments if layer.store.format.span]
    pages = [entry for part in plan.segments if part not in spans for entry in range(part.begin, part.end)]
    half = list(range(plan.half_quantized_begin, plan.half_quantized_begin + plan.half_quantized))
    sides, residuals = [], []
    for offsets, address, stride, skip, f in (
        (keys, key_address, key_stride, skips[0], layer.store.format.keys),
        (values, value_address, value_stride, skips[1], layer.store.format.values),
    ):
        unit, tokens = 8 * layer.store.dtype.itemsize, sink_tokens + skip + count
        heads = [
            raw(tables.base, (address + head * stride) * unit, tokens * 16, layer.store.dtype) for head in range(2)
        ]
        buffer = torch.stack(heads).view(2, -1, 16).float()
        parts = [page(tables, offsets[entry], f, layer.store.dtype) for entry in pages]
        if skip:
            assert [offsets[entry] for entry in half] == [0] * len(half)
            begin = (sink_tokens + skip) % 128
            parts.append(buffer[:, begin : begin + 128 * len(half)])
        else:
            parts += [page(tables, offsets[entry], f, layer.store.dtype) for entry in half]
        sides.append(parts)
        residuals.append(torch.cat([buffer[:, :sink_tokens], buffer[:, sink_tokens + skip : skip + count]], 1))
    assert (plan.half_quantized_token, plan.residual_token) == (
        128 * len(pages), 128 * (len(pages) + len(half)) + sum(segment.tokens for segment in spans)
    )  # fmt: skip
    for segment in spans:
        assert segment.first_token == sum(part.shape[1] for part in sides[0])
        codes = []
        for offsets, lanes, rows in ((keys, 16, 8), (values, 2, 64)):
            blocks = [
                raw(tables.base, 16 * int(offset), 2 * lanes * rows, torch.int16).view(2, lanes, rows)
                for offset in offsets[segment.begin : segment.end]
            ]
            codes.append(torch.stack(blocks))
        scales = [
            raw(tables.base, 16 * o, 32, torch.float16).view(2, 16) for o in tables.shared[0][segment.scales].tolist()
        ]
        span = Span(segment.tokens, SpanSide(codes[0], *scales[:2]), SpanSide(codes[1], *scales[2:]))
        sides[0].append(span_keys(span, layer.store.format.span))
        sides[1].append(span_values(span, layer.store.format.span))
    return tuple(torch.cat([*parts, last], 1) for parts, last in zip(sides, residuals, strict=True))


def check(layer, queries, output, chunk, padding: torch.Tensor = PADDING) -> None:
    mask = layer.store.stored_mask(chunk)
    for row in range(len(layer.store.sequences)):
        keys, values = followed(layer, row)
        assert keys.shape == values.shape
        visible = None
        if mask is not None:
            visible = mask[row, :, :, : keys.shape[1]].bool()
            assert not mask[row, :, :, keys.shape[1] :].any()
            visible = visible.expand(2, -1, -1).repeat_interleave(2, 0)
        sequence = layer.store.sequences[row]
        if sequence.pages and sequence.hidden(0):
            # Sink tokens are among the residual tokens, and not attended to in their page.
            visible = torch.ones(1, keys.shape[1], dtype=torch.bool) if visible is None else visible.clone()
            visible[..., : sequence.hidden(0)] = False
        real = padding[row, chunk.query_positions]
        expected = attention_reference(queries[row], keys, values, visible, 0.25).output
        torch.testing.assert_close(output[row, :, real].double(), expected[:, real], rtol=1e-4, atol=2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("mask_function", [None, window])
def test_following_the_tables_gives_what_attention_gives(name, mask_function):
    layer = KVCache(CONFIG, SCHEMES[name]).layers[0]
    kinds = set()
    for tokens in (420, 1, 1, 90, 1, 3, 140, 1):
        queries, output, chunk = advance(layer, tokens, mask_function)
        if tokens < 10:
            check(layer, queries, output, chunk)
            plans = tables_of(layer.store).plans
            kinds |= {("pages", "spans")[bool(layer.store.format.span)] for plan in plans if plan.segments}
            kinds |= {"half" for plan in plans if plan.half_quantized}
        end_forward(layer.store)
    expected = {"spans"} if "spans" in name else {"pages", "half"} if "longer" in name else {"pages"}
    assert kinds == expected


def test_one_token_that_attends_to_everything_needs_no_mask():
    layer = KVCache(CONFIG, SCHEMES["16 bits"]).layers[0]
    advance(layer, 300)
    end_forward(layer.store)
    assert layer.store.stored_mask(advance(layer, 1)[2]) is None


def test_tables_stay_where_they_are_and_are_written_when_a_page_is_or_rows_move(monkeypatch):
    monkeypatch.setitem(BUFFER_GROWTH, "cpu", GPU_GROWTH)
    layer = KVCache(CONFIG, SCHEMES["norms and sink tokens"]).layers[0]
    written = []
    write = GroupTables.write
    monkeypatch.setattr(GroupTables, "write", lambda *given: written.append(given[-1]) or write(*given))
    advance(layer, 500)
    end_forward(layer.store)
    tables = tables_of(layer.store)
    addresses = [t.data_ptr() for t in (tables.keys, tables.values, tables.described, tables.appends, tables.step)]
    written.clear()
    for number in range(128):
        given = advance(layer, 1)
        if number % 16 == 0:
            check(layer, *given)
        end_forward(layer.store)
        assert tables_of(layer.store) is tables
    # Three rows of different lengths: when a page is written, and before that where buffers have to grow for it.
    assert {tuple(rows) for rows in written} == {(0,), (1,), (2,)}
    assert len(written) <= 6
    assert addresses == [
        t.data_ptr() for t in (tables.keys, tables.values, tables.described, tables.appends, tables.step)
    ]
    pages = [plan.segments[0].tokens for plan in tables.plans]
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert [plan.segments[0].tokens for plan in tables_of(layer.store).plans] == [pages[row] for row in (2, 0, 0)]


def test_work_is_divided_again_only_when_tables_change_or_residual_windows_have_grown_a_lot(monkeypatch):
    monkeypatch.setitem(BUFFER_GROWTH, "cpu", GPU_GROWTH)
    layer = KVCache(CONFIG, SCHEMES["spans"]).layers[0]
    divided = []
    monkeypatch.setattr(tables_module, "plan_work", lambda *given: divided.append(1) or plan_work(*given))
    advance(layer, 400)
    plans = []
    for _ in range(300):
        advance(layer, 1)
        end_forward(layer.store)
        plans.append(tables_of(layer.store).work(layer.store.group, layer.store.sequences, 8))
    assert len(divided) == 3
    assert len({plan.items.data_ptr() for plan in plans}) <= 2
    assert tables_of(layer.store).work(layer.store.group, layer.store.sequences, 4).items is not plans[-1].items


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_divided_work_has_room_for_more_and_items_that_do_nothing(programs):
    layer = KVCache(CONFIG, SCHEMES["values stay longer"]).layers[0]
    advance(layer, 500)
    end_forward(layer.store)
    tables = tables_of(layer.store)
    expected = plan_work(tables.plans, programs)
    got = tables.work(layer.store.group, layer.store.sequences, programs)
    n = len(expected.items)
    assert torch.equal(got.items[:n], expected.items)
    assert not got.items[n:].any()
    assert torch.equal(got.slot_rows, expected.slot_rows)
    assert got.slots >= expected.slots
    assert got.most_slots >= expected.most_slots


def test_tables_follow_beams_and_crops():
    layer = KVCache(CONFIG, SCHEMES["values stay longer"]).layers[0]
    layer.activate_past_recording()
    everything = torch.ones(3, 1000, dtype=torch.bool)
    advance(layer, 430, padding=everything)
    end_forward(layer.store)
    layer.reorder_cache(torch.tensor([1, 1, 0]))
    check(layer, *advance(layer, 5, padding=everything), everything)
    end_forward(layer.store)
    layer.crop(-3)
    check(layer, *advance(layer, 1, padding=everything), everything)


def test_a_copied_cache_has_tables_of_its_own():
    layer = KVCache(CONFIG, SCHEMES["norms and sink tokens"]).layers[0]
    advance(layer, 500)
    end_forward(layer.store)
    tables_of(layer.store)
    copied = copy.deepcopy(layer)
    layer.store.key_pages.read(layer.store.sequences[0].keys.pages).record.fill_(-1)
    for row in layer.store.rows:
        row.keys.tensor.fill_(1e9)
    check(copied, *advance(copied, 1))
