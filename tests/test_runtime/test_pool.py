"""Pages of a pool: numbers, references, views and addresses."""

import copy
import ctypes

import pytest
import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.pages import PageFormat, dequantize_pages, quantize_pages
from kvconvert.runtime.cache.pool import PageNumbers, PageStorage

CPU = torch.device("cpu")
FORMAT = PageFormat.keys(2, 16, 128, 2, 32, token_norm="joint")


def key_pool(f=FORMAT, dtype=torch.bfloat16, capacity=None) -> PageStorage:
    numbers = PageNumbers()
    if capacity is not None:
        numbers.limit(capacity)
    return PageStorage(f, dtype, CPU, numbers)


def some_pages(count: int, f=FORMAT):
    return quantize_pages(torch.randn(count, 2, 128, 16).bfloat16(), f)


def store(pool: PageStorage, pages) -> tuple[int, ...]:
    """Write pages to reserved records and return their numbers."""
    numbers, at = pool.numbers.reserve(len(pages)), 0
    for run in pool.runs(numbers):
        run.copy_(pages.buffer[at : at + len(run)])
        at += len(run)
    return numbers


def bytes_at(base: torch.Tensor, offset: int, count: int) -> bytes:
    return ctypes.string_at(base.data_ptr() + 16 * offset, count)


@pytest.mark.parametrize("bits", [2, 16])
def test_offsets_lead_from_any_tensor_to_the_record_of_each_page_in_every_chunk(bits):
    f = PageFormat.keys(2, 16, 128, bits, 32)
    pool, base = key_pool(f), torch.empty(64, dtype=torch.int16)
    pages = some_pages(23, f)
    numbers = [number for part in (3, 6, 14) for number in store(pool, pages.select(slice(0, part)))]
    assert len(pool._chunks) > 2
    order = torch.randperm(23).tolist()
    for i, offset in zip(order, pool.offsets([numbers[i] for i in order], base).tolist(), strict=True):
        page = pages.buffer[i if i < 3 else i - 3 if i < 9 else i - 9]
        assert bytes_at(base, offset, page.nbytes) == page.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", [[2, 2, 3, 5], [0, 1, 2, 3], [4, 4], [3, 2, 1], [1, 0, 2], [0, 4, 1, 5]], ids=str)
def test_pages_are_read_in_any_order_and_as_often_as_they_are_asked_for(order):
    """Rows share pages of a prefix, so that a tile may hold one page twice."""
    pool, pages = key_pool(), some_pages(6)
    numbers = store(pool, pages)
    assert torch.equal(pool.read([numbers[i] for i in order]).buffer, pages.buffer[order])


def test_growing_leaves_pages_where_they_are():
    pool, base = key_pool(), torch.empty(1, dtype=torch.int16)
    numbers = store(pool, some_pages(5))
    before = pool.offsets(numbers, base)
    for _ in range(4):
        pool.numbers.reserve(30)
        pool.follow()
    assert pool.offsets(numbers, base).tolist() == before.tolist()


def test_views_of_reserved_pages_are_where_reading_finds_them():
    pool = key_pool()
    store(pool, some_pages(3))
    hole = store(pool, some_pages(2))
    store(pool, some_pages(2))
    pool.numbers.release(hole)
    numbers = pool.numbers.reserve(12)
    pages, at = some_pages(12), 0
    runs = pool.runs(numbers)
    assert sum(map(len, runs)) == 12
    for run in runs:
        run.copy_(pages.record[at : at + len(run)])
        at += len(run)
    assert torch.equal(dequantize_pages(pool.read(numbers)), dequantize_pages(pages))
    assert torch.equal(pool.read(numbers[::-1]).record, pages.record.flip(0))


def test_views_split_at_chunks_and_gaps_and_nowhere_else():
    pool = key_pool(capacity=10)
    numbers = pool.numbers.reserve(10)
    assert [len(run) for run in pool.runs(numbers)] == [10]
    assert [len(run) for run in pool.runs([0, 1, 2, 5, 6, 4])] == [3, 2, 1]
    assert pool.runs([]) == []
    growing = key_pool()
    assert [len(run) for run in growing.runs(growing.numbers.reserve(4) + growing.numbers.reserve(4))] == [4, 4]


def test_reserved_pages_have_one_reference_and_are_free_after_its_release():
    pool = PageNumbers()
    pool.limit(4)
    numbers = pool.reserve(3)
    assert pool.used == 3
    pool.retain(numbers[:1])
    pool.release(numbers)
    assert pool.used == 1
    with pytest.raises(CacheError, match="1 of 4 are in use and 4 more"):
        pool.reserve(4)
    assert pool.used == 1


def test_layers_that_follow_the_same_numbers_hold_the_same_pages():
    numbers = PageNumbers()
    early = PageStorage(FORMAT, torch.bfloat16, CPU, numbers)
    taken = [numbers.reserve(n) for n in (3, 9, 30)]
    late = PageStorage(FORMAT, torch.bfloat16, CPU, numbers)
    for part in taken:
        assert [len(run) for run in early.runs(part)] == [len(run) for run in late.runs(part)]
    assert early.bytes_allocated == late.bytes_allocated == len(numbers) * early.page_bytes


def test_the_smallest_of_several_capacities_holds():
    numbers = PageNumbers()
    for capacity in (9, 5, 7):
        numbers.limit(capacity)
    assert len(numbers.reserve(5)) == 5
    with pytest.raises(CacheError, match="5 of 5"):
        numbers.reserve(1)


def test_a_page_costs_its_record():
    f = PageFormat.values(3, 24, 128, 1, 24)
    numbers = PageNumbers()
    numbers.limit(7)
    pool = PageStorage(f, torch.float32, CPU, numbers)
    assert pool.page_bytes == 3 * (64 * 3 + 128 * 2) * 2
    assert pool.bytes_allocated == 7 * pool.page_bytes


def test_pages_side_by_side_are_views_of_what_is_written_later_also_in_a_copy_of_the_pool():
    pool, pages = key_pool(), some_pages(4)
    numbers = store(pool, pages)
    assert pool.read(numbers) is pool.read(numbers)
    other = copy.deepcopy(pool)
    for run in pool.runs(numbers):
        run.zero_()
    assert not pool.read(numbers).buffer.any()
    assert torch.equal(other.read(numbers).buffer, pages.buffer)
