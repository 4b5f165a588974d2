"""The page pool of one layer: storage for key or value pages, a free list and reference counts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.pages import KeyPages, ValuePages

# A pool grows by a sixteenth of what it holds, at least four pages: few chunks at any length, little unused room.
SMALLEST_CHUNK = 4
GROWTH = 16
# Bytes: what offsets of pages count. Records, and the pages that have none, begin at multiples of it.
UNIT = 16

Pages = TypeVar("Pages", KeyPages, ValuePages)


class PagePool(Generic[Pages]):
    """Pages of one layer, addressed by number and shared between sequences by reference counts.

    The pool grows chunk by chunk and never moves a page, so growing copies nothing and addresses stay valid; with
    `capacity` it allocates everything at once and never grows.

    Args:
        empty: allocates a number of pages on a device.
        device: of the pages.
        capacity: pages, or None to grow.
        name: of the pool, for messages.
    """

    def __init__(
        self,
        empty: Callable[[int, torch.device], Pages],
        device: torch.device,
        capacity: int | None = None,
        name: str = "the cache",
    ):
        self.empty, self.device, self.capacity, self.name = empty, device, capacity, name
        self.page_bytes = empty(1, torch.device("meta")).nbytes
        self._chunks: list[Pages] = []
        self._starts: list[int] = []
        self._references: list[int] = []
        self._free: list[int] = []
        if capacity:
            self._grow(capacity)

    @property
    def pages_used(self) -> int:
        """Pages that some sequence refers to."""
        return len(self._references) - len(self._free)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def _grow(self, count: int) -> None:
        start = len(self._references)
        self._chunks.append(self.empty(count, self.device))
        self._starts.append(start)
        self._references += [0] * count
        # Popped from the end: low numbers first, so that pages written one after another lie one after another.
        self._free = list(range(start + count - 1, start - 1, -1)) + self._free

    def reserve(self, count: int) -> list[int]:
        """Take `count` pages, uninitialised and each with one reference, and return their numbers.

        Raises:
            CacheError: the pool has a fixed capacity and no room left.
        """
        missing = count - len(self._free)
        if missing > 0:
            if self.capacity is not None:
                raise CacheError(
                    f"{self.name} is out of pages: {self.pages_used} of {self.capacity} are in use and {count} more "
                    "are needed; give the cache more kv_memory, or run fewer or shorter sequences."
                )
            self._grow(max(missing, SMALLEST_CHUNK, (len(self._references) + missing) // GROWTH))
        numbers = [self._free.pop() for _ in range(count)]
        for number in numbers:
            self._references[number] = 1
        return numbers

    def retain(self, numbers: list[int]) -> None:
        """Add a reference to each page."""
        for number in numbers:
            self._references[number] += 1

    def release(self, numbers: list[int]) -> None:
        """Drop a reference to each page; pages without any are free again."""
        for number in numbers:
            self._references[number] -= 1
            if self._references[number] == 0:
                self._free.append(number)

    def read(self, numbers: list[int]) -> Pages:
        """The pages of these numbers, in order; a view where they are contiguous, else a copy."""
        parts = [self._chunks[chunk].select(where) for chunk, where in self._slots(numbers)]
        return type(parts[0]).cat(parts)

    def views(self, numbers: list[int]) -> list[Pages]:
        """The pages of these numbers as views to read or write in place, in order: one per contiguous run."""
        views = []
        begin = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1 or numbers[end] in self._starts:
                chunk = self._chunk(numbers[begin])
                first = numbers[begin] - self._starts[chunk]
                views.append(self._chunks[chunk].select(slice(first, first + end - begin)))
                begin = end
        return views

    def offsets(self, numbers: list[int], base: torch.Tensor) -> list[int]:
        """Where each page's record begins, in units of 16 bytes from the first byte of `base`, on the same device.

        Chunks are separate allocations, so offsets may lie far outside of `base` and be negative; they need 64 bits.
        They stay what they are as long as the page is in use. `base` has to begin at a multiple of 16 bytes, as every
        allocation of torch does.
        """
        origin, size = base.data_ptr(), self.page_bytes // UNIT
        # Pages count from where page 0 would be if the page's chunk were the only one.
        zeros = [
            (chunk.buffer.data_ptr() - origin) // UNIT - start * size
            for chunk, start in zip(self._chunks, self._starts, strict=True)
        ]
        return [zeros[self._chunk(number)] + number * size for number in numbers]

    def _chunk(self, number: int) -> int:
        """The chunk that holds a page."""
        return bisect_right(self._starts, number) - 1

    def _slots(self, numbers: list[int]) -> list[tuple[int, slice | torch.Tensor]]:
        """Consecutive stretches of `numbers` within one chunk, as slots: a slice where they are consecutive."""
        slots_by_chunk: list[tuple[int, slice | torch.Tensor]] = []
        begin = 0
        while begin < len(numbers):
            chunk = self._chunk(numbers[begin])
            low, high = self._starts[chunk], self._starts[chunk] + len(self._chunks[chunk])
            end = begin + 1
            while end < len(numbers) and low <= numbers[end] < high:
                end += 1
            slots = [number - low for number in numbers[begin:end]]
            consecutive = slots[-1] - slots[0] == len(slots) - 1 and slots == sorted(slots)
            where = slice(slots[0], slots[-1] + 1) if consecutive else torch.tensor(slots, device=self.device)
            slots_by_chunk.append((chunk, where))
            begin = end
        return slots_by_chunk
