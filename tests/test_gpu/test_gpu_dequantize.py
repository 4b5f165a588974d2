"""The kernels that dequantize pages give the reference's numbers, rounded to the dtype, to the last bit."""

import pytest
import torch
from decode_cases import Case, Stored

from kvconvert.kernels.pages import (
    PAGE_SIZE,
    PageAddresses,
    PageFormat,
    dequantize_into,
    dequantize_pages,
    quantize_pages,
    unsupported_dequantization,
)
from kvconvert.kernels.spans import SpanFormat, key_blocks, quantize_span, span_keys, span_values, value_blocks

# Chunks of prompts over every kind of history are in the default run: tests/test_gpu/test_gpu_prompt_chunks.py.
pytestmark = pytest.mark.full

FULL = pytest.mark.full
CASES = [
    Case(),
    Case(key_group=32, value_group=32, norm="joint", dtype=torch.bfloat16),
    Case(heads=3, key_dim=80, value_dim=48, key_group=16, value_group=24, norm="per_head", dtype=torch.float16),
    Case(key_dim=64, value_dim=96, key_bits=1, value_bits=1, key_group=64, value_group=96, dtype=torch.float16),
    Case(key_dim=96, value_dim=80, key_bits=4, value_bits=4, key_group=16, value_group=16, norm="joint"),
    Case(key_dim=48, value_dim=64, key_bits=8, value_bits=8, key_group=32, value_group=32, dtype=torch.bfloat16),
    Case(key_dim=48, value_dim=80, key_bits=3, value_bits=3, key_group=32, value_group=16, norm="per_head"),
    Case(key_bits=3, value_bits=2, norm="joint", dtype=torch.bfloat16),
    Case(key_dim=96, value_dim=96, key_bits=4, value_bits=3, value_group=96, dtype=torch.float16),
    Case(boosted=16, dtype=torch.bfloat16),
    Case(key_dim=80, boosted=13, fixed_channels=True, key_group=32, dtype=torch.float16),
    Case(key_dim=64, value_dim=64, value_group=64, key_bits=1, boosted=5),
    Case(key_dim=64, value_dim=64, value_group=64, key_bits=1, boosted=8, fixed_channels=True),
    Case(static=True, key_dim=80, value_dim=96, key_bits=4, value_bits=8, dtype=torch.bfloat16),
    Case(static=True, key_dim=64, value_dim=48, key_bits=1, value_bits=2, dtype=torch.float16),
    Case(scale_bits=8, key_bits=2, value_bits=1, norm="joint", dtype=torch.bfloat16),
    Case(scale_bits=8, key_dim=80, key_bits=3, value_bits=4, value_group=32, boosted=0, dtype=torch.float16),
    Case(scale_bits=8, boosted=16, key_group=64),
    Case(key_bits=16, value_bits=2, dtype=torch.bfloat16),
    Case(key_bits=2, value_bits=16, key_dim=48, value_dim=80, dtype=torch.float32),
    pytest.param(Case(key_dim=256, value_dim=256, value_group=32, dtype=torch.bfloat16), marks=FULL),
    pytest.param(Case(key_dim=192, value_dim=192, value_group=64, boosted=24, dtype=torch.float16), marks=FULL),
]


def addresses(stored: Stored) -> tuple[PageAddresses, PageAddresses]:
    """All key pages and all value pages of a case, which lie in its pools out of order."""
    tables = stored.tables()
    found = []
    for side, (base, offsets, f) in enumerate(
        ((tables.key_base, tables.keys, stored.format.keys), (tables.value_base, tables.values, stored.format.values))
    ):
        scales = None if tables.shared is None else tables.shared[0, 2 * side : 2 * side + 2]
        found.append(PageAddresses(f, base, offsets[:-1], scales, tables.boosted if side == 0 else None))
    return tuple(found)


def rounded(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float32 as kernels store it in a dtype: to nearest, but bfloat16 cut off under the interpreter."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        x = (x.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return x.to(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_out_of_order_give_the_references_numbers(device, case):
    stored = Stored(case, device)
    for side, pages in enumerate(addresses(stored)):
        expected = torch.cat(
            [tokens[side][:, : count * PAGE_SIZE] for tokens, count in zip(stored.sequences, case.pages, strict=True)],
            1,
        )
        # The workspace is larger than what is written, and what lies behind stays as it is.
        room = torch.full((case.heads, expected.shape[1] + 7, expected.shape[2]), 77.0, dtype=case.dtype, device=device)
        dequantize_into(room[:, 3:-4], pages)
        assert torch.equal(room[:, 3:-4].cpu(), rounded(expected, case.dtype, device))
        assert (room[:, :3] == 77).all()
        assert (room[:, -4:] == 77).all()


@pytest.mark.parametrize(("bits", "dim"), [(4, 512), (2, 48), (2, 320)])
def test_codes_packed_by_token(device, bits, dim):
    f = PageFormat.keys(1, dim, PAGE_SIZE, bits, PAGE_SIZE, by_token=True)
    pages = quantize_pages(torch.randn(3, 1, PAGE_SIZE, dim), f)
    record = pages.record.to(device)
    output = torch.empty(1, 3 * PAGE_SIZE, dim, device=device)
    dequantize_into(output, PageAddresses(f, record, torch.arange(3, device=device) * (record.stride(0) // 8)))
    assert torch.equal(output.cpu(), dequantize_pages(pages).transpose(0, 1).flatten(1, 2))


@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_of_other_sizes(device, page_size):
    keys, values = torch.randn(3, 2, page_size, 64), torch.randn(3, 2, page_size, 64)
    for tokens, f in (
        (keys, PageFormat.keys(2, 64, page_size, 2, 16, "joint", boosted=8)),
        (values, PageFormat.values(2, 64, page_size, 1, 32)),
    ):
        pages = quantize_pages(tokens, f)
        record = pages.record.to(device)
        offsets = torch.arange(3, device=device) * (record.stride(0) // 8)
        output = torch.empty(2, 3 * page_size, 64, device=device)
        dequantize_into(output, PageAddresses(f, record, offsets))
        assert torch.equal(output.cpu(), dequantize_pages(pages).transpose(0, 1).flatten(1, 2))


@pytest.mark.parametrize(("bits", "tokens"), [(1, 300), (2, 129), (3, 130), (4, 128)])
def test_blocks_of_spans_stop_at_the_last_token(device, bits, tokens):
    f = SpanFormat(bits, bits)
    span = quantize_span(torch.randn(2, tokens, 64, device=device), torch.randn(2, tokens, 48, device=device), f)
    keys, values = key_blocks(2, 64, bits), value_blocks(2, 48, bits)
    for codes, scale, offset, blocks, expected in (
        (*span.keys, keys, span_keys(span, f)),
        (*span.values, values, span_values(span, f)),
    ):
        start = codes.data_ptr()
        offsets = torch.arange(len(codes), device=device) * (codes.stride(0) // 8)
        scales = torch.tensor([(part.data_ptr() - start) // 16 for part in (scale, offset)], device=device)
        output = torch.empty(2, tokens, blocks.head_dim, device=device)
        dequantize_into(output, PageAddresses(blocks, codes, offsets, scales))
        assert torch.equal(output, expected)


def test_pages_given_as_tensors_take_the_reference_and_fill_what_room_there_is():
    f = PageFormat.keys(2, 64, PAGE_SIZE, 2, 32, "joint")
    pages = quantize_pages(torch.randn(40, 2, PAGE_SIZE, 64), f)
    output = torch.full((2, 40 * PAGE_SIZE - 5, 64), float("nan"), dtype=torch.bfloat16)
    dequantize_into(output, pages)
    expected = dequantize_pages(pages).transpose(0, 1).flatten(1, 2)[:, :-5]
    assert torch.equal(output, expected.to(torch.bfloat16))


def test_float16_saturates(device):
    f = PageFormat.keys(1, 16, PAGE_SIZE, 8, 128, "joint")
    keys = torch.full((1, 1, PAGE_SIZE, 16), 65504.0, dtype=torch.float16)
    keys[:, :, ::2] = 60000.0
    pages = quantize_pages(keys, f)
    # Norms are rounded to float16; one is made as large as that can be.
    pages.norm.fill_(65504.0)
    pages.offset.fill_(1.001)
    assert not dequantize_pages(pages).half().isfinite().all()
    addressed = PageAddresses(f, pages.record.to(device), torch.zeros(1, dtype=torch.int64, device=device))
    for source in (addressed, pages):
        output = torch.empty(1, PAGE_SIZE, 16, dtype=torch.float16, device=device)
        dequantize_into(output, source)
        assert (output == 65504).all()


def test_what_is_not_served_is_named(device):
    f = PageFormat.keys(2, 64, PAGE_SIZE, 2, 32)
    assert unsupported_dequantization(f, torch.bfloat16, device) is None
    assert "float64" in unsupported_dequantization(f, torch.float64, device)
    assert "multiples" in unsupported_dequantization(PageFormat.keys(2, 12, PAGE_SIZE, 2, 32), torch.float16, device)
    assert "multiples" in unsupported_dequantization(PageFormat.keys(2, 264, PAGE_SIZE, 2, 32), torch.float16, device)
    assert "48" in unsupported_dequantization(PageFormat.keys(2, 64, 48, 2, 16), torch.float16, device)
