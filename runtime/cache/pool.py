"""Where tokens of a layer lie: pages, by numbers that all layers of a group share, and the full-precision tokens of a
sequence in a buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvconvert.errors import CacheError
from kvconvert.kernels.page_formats import page_bytes
from kvconvert.kernels.pages import PageFormat, PageTensors, empty_pages, pages_of

# Pools grow by a sixteenth of what they hold, at least four pages: few chunks at any length, little unused room.
SMALLEST_CHUNK = 4
GROWTH = 16
# Stretches of pages whose views a storage remembers.
MOST_PARTS = 64
# Bytes: what offsets of pages count. Records, and the pages that have none, begin at multiples of it.
UNIT = 16


class PageNumbers:
    """Which pages of one side are in use, for all layers of a group; sequences share pages by reference counts.

    Attributes:
        name: of the layers, for messages.
        starts: number of the first page of each chunk of storage.
        capacity: most pages, or None to grow.
    """

    def __init__(self) -> None:
        self.name = "the cache"
        self.capacity: int | None = None
        self.starts: list[int] = []
        self._references: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._references)

    @property
    def used(self) -> int:
        """Pages that some sequence refers to."""
        return len(self._references) - len(self._free)

    def limit(self, capacity: int) -> None:
        """Make room for `capacity` pages at once, and never for more.

        Layers may be told different capacities; the smallest holds.
        """
        if self.capacity is not None and capacity >= self.capacity:
            return
        if self.capacity is None and capacity:
            self._grow(capacity)
        elif self.capacity is not None:
            self._free = [number for number in self._free if number < capacity]
            del self._references[capacity:]
        self.capacity = capacity

    def _grow(self, count: int) -> None:
        start = len(self._references)
        self.starts.append(start)
        self._references += [0] * count
        # Popped from the end: low numbers first, so that pages written one after another lie one after another.
        self._free = list(range(start + count - 1, start - 1, -1)) + self._free

    def reserve(self, count: int) -> tuple[int, ...]:
        """Take `count` pages, uninitialised and each with one reference, and return their numbers.

        Raises:
            CacheError: the capacity is fixed and there is no room left.
        """
        missing = count - len(self._free)
        if missing > 0:
            if self.capacity is not None:
                raise CacheError(
                    f"{self.name} is out of pages: {self.used} of {self.capacity} are in use and {count} more "
                    "are needed; give the cache more kv_memory, or run fewer or shorter sequences."
                )
            self._grow(max(missing, SMALLEST_CHUNK, (len(self._references) + missing) // GROWTH))
        numbers = tuple(self._free.pop() for _ in range(count))
        for number in numbers:
            self._references[number] = 1
        return numbers

    def retain(self, numbers: Sequence[int]) -> None:
        """Add a reference to each page."""
        for number in numbers:
            self._references[number] += 1

    def release(self, numbers: Sequence[int]) -> None:
        """Drop a reference to each page; pages without any are free again."""
        for number in numbers:
            self._references[number] -= 1
            if self._references[number] == 0:
                self._free.append(number)


class PageStorage:
    """One layer's pages of one side, addressed by number.

    It follows the numbers chunk by chunk and never moves a page, so growing copies nothing and addresses stay valid.

    Args:
        format: of the pages.
        dtype: of the model, which pages of 16 bits have.
        device: of the pages.
        numbers: which pages there are.
    """

    def __init__(self, format: PageFormat, dtype: torch.dtype, device: torch.device, numbers: PageNumbers):
        self.format, self.dtype, self.device, self.numbers = format, dtype, device, numbers
        self.page_bytes = page_bytes(format, dtype.itemsize)
        self._chunks: list[torch.Tensor] = []
        self._zeros = np.zeros(0, np.int64)
        self._parts: dict[tuple[tuple[int, ...], int], list[PageTensors | list[torch.Tensor]]] = {}
        self.follow()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has chunks of its own.
        return self.__dict__ | {"_zeros": np.zeros(0, np.int64), "_parts": {}}

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def follow(self) -> None:
        """Make room for all pages that the numbers know of."""
        starts = self.numbers.starts
        for chunk in range(len(self._chunks), len(starts)):
            stop = starts[chunk + 1] if chunk + 1 < len(starts) else len(self.numbers)
            self._chunks.append(empty_pages(stop - starts[chunk], self.format, self.dtype, self.device))

    def read(self, numbers: Sequence[int]) -> PageTensors:
        """The pages of these numbers, in order; a view where they are contiguous, else a copy."""
        return self.parts(tuple(numbers), len(numbers))[0]

    def parts(self, numbers: tuple[int, ...], most: int) -> list[PageTensors]:
        """The same in parts: views of contiguous pages, and copies of up to `most` pages of shorter runs."""
        known = self._parts.get((numbers, most))
        if known is None:
            runs: list[list[torch.Tensor]] = []
            for run in self.runs(numbers):
                if runs and sum(map(len, runs[-1])) + len(run) <= most:
                    runs[-1].append(run)
                else:
                    runs.append([run])
            # A step of decoding reads what the step before it has read.
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            known = [part if len(part) > 1 else pages_of(part[0], self.format) for part in runs]
            self._parts[numbers, most] = known
        return [pages_of(torch.cat(part), self.format) if isinstance(part, list) else part for part in known]

    def runs(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Records or 16-bit codes of the pages of these numbers, to read or write in place, in order: one view per
        contiguous run.
        """
        self.follow()
        runs, begin, starts = [], 0, self.numbers.starts
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1 or numbers[end] in starts:
                chunk = bisect_right(starts, numbers[begin]) - 1
                first = numbers[begin] - starts[chunk]
                runs.append(self._chunks[chunk][first : first + end - begin])
                begin = end
        return runs

    def offsets(self, numbers: Sequence[int], base: torch.Tensor) -> np.ndarray:
        """Where each page's record begins, int64, in units of 16 bytes from the first byte of `base`, on the same
        device.

        Chunks are separate allocations, so offsets may lie far outside of `base` and be negative. They do not change
        while the storage lives. `base` has to begin at a multiple of 16 bytes, as every allocation of torch
        does.
        """
        self.follow()
        number = np.asarray(numbers, dtype=np.int64)
        if not self._chunks:
            return number
        size, starts = self.page_bytes // UNIT, self.numbers.starts
        if len(self._zeros) != len(starts):
            # Where page 0 would be if the page's chunk were the only one.
            at = [chunk.data_ptr() // UNIT - start * size for chunk, start in zip(self._chunks, starts, strict=True)]
            self._zeros = np.array(at, dtype=np.int64)
        zeros = self._zeros[np.searchsorted(starts, number, side="right") - 1]
        return zeros + (number * size - base.data_ptr() // UNIT)


@dataclass(frozen=True)
class BufferGrowth:
    """How a full-precision buffer grows and shrinks.

    Attributes:
        step: tokens by which it grows, which bounds its unused room.
        spare: unused tokens, beyond those of the last step, up to which a shrinking buffer stays where it is.
    """

    step: int
    spare: int


CPU_GROWTH = BufferGrowth(16, 0)
# Kernels keep the addresses of buffers, so steps are as long as a page, and one step may stay unused.
GPU_GROWTH = BufferGrowth(128, 128)
BUFFER_GROWTH = {"cpu": CPU_GROWTH, "cuda": GPU_GROWTH}


class TokenBuffer:
    """Room for keys or values of one sequence: sink tokens, then the tokens after the last page.

    How many of its tokens are in use is recorded in the sequence (`Side.buffered`), and an argument here.

    Args:
        tensor: [H, capacity, channels].
        growth: how it grows and shrinks; None for what suits its device.
    """

    __slots__ = ("address", "growth", "head_stride", "tensor")

    def __init__(self, tensor: torch.Tensor, growth: BufferGrowth | None = None):
        self.growth = growth or BUFFER_GROWTH.get(tensor.device.type, CPU_GROWTH)
        self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        # Tables read these at every flush, and reading them from the tensor takes much longer. An empty one has no
        # address.
        self.address, self.head_stride = tensor.data_ptr() if tensor.numel() else 0, tensor.stride(0)

    def __deepcopy__(self, memo: dict) -> TokenBuffer:
        return self.copy()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.tensor.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all heads."""
        return self.tensor.shape[0] * self.tensor.shape[2] * self.tensor.element_size()

    def copy(self) -> TokenBuffer:
        """A copy with room of its own."""
        return TokenBuffer(self.tensor.clone(), self.growth)

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Tokens start..stop-1, a view [H, n, channels]."""
        return self.tensor[:, start:stop]

    def reserve(self, tokens: int, used: int) -> bool:
        """Make room for `tokens` tokens in all, of which the first `used` are there; whether the room has moved."""
        if tokens <= self.tensor.shape[1]:
            return False
        self._move(tokens, [slice(0, used)])
        return True

    def _move(self, tokens: int, kept: list[slice]) -> None:
        """Copy the kept parts, one after another, to new room for `tokens` tokens."""
        new = self.tensor.new_empty(self.tensor.shape[0], self._room(tokens), self.tensor.shape[2])
        at = 0
        for part in kept:
            count = part.stop - part.start
            new[:, at : at + count] = self.tensor[:, part]
            at += count
        self._hold(new)

    def _room(self, tokens: int) -> int:
        return -(-tokens // self.growth.step) * self.growth.step

    def shrinks_to(self, tokens: int) -> bool:
        """Whether the buffer moves to a smaller room when this many tokens remain."""
        return self.tensor.shape[1] > self._room(tokens) + self.growth.spare

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens, and little more room than they need."""
        if self.shrinks_to(tokens):
            self._move(tokens, [slice(0, tokens)])

    def remove(self, parts: list[tuple[int, int]], used: int) -> None:
        """Remove tokens start..stop-1 of each part (start, stop), ascending, out of `used` ones."""
        rest, begin, kept = [], 0, 0
        for start, stop in (*parts, (used, used)):
            rest.append(slice(begin, start))
            begin, kept = stop, kept + start - begin
        if self.shrinks_to(kept):
            # With room for the next page, so that a sequence that has been read need not move while it grows.
            self._move(kept + self.growth.spare, rest)
        elif kept > (first := rest[0].stop):
            self.tensor[:, first:kept] = torch.cat([self.tensor[:, part] for part in rest[1:]], 1)


def renew_all(buffers: Sequence[TokenBuffer], counts: Sequence[int]) -> list[torch.Tensor]:
    """Replace the tokens of some buffers by uninitialized room for others, in one allocation.

    Args:
        buffers: buffers of equal heads and channels.
        counts: the number of tokens that each one gets.

    Returns:
        for each buffer a view of that room, [H, count, channels], to be filled.
    """
    heads, _, channels = buffers[0].tensor.shape
    rooms = [buffer._room(count) for buffer, count in zip(buffers, counts, strict=True)]
    parts = buffers[0].tensor.new_empty(heads * sum(rooms), channels).split([heads * room for room in rooms])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer._hold(part.unflatten(0, (heads, -1)))
    return [buffer.tensor[:, :count] for buffer, count in zip(buffers, counts, strict=True)]


def remove_tokens(parts: list[tuple[TokenBuffer, int, int, int]]) -> None:
    """`TokenBuffer.remove` of tokens start..stop-1 of each (buffer, start, stop, used), in few launches for all."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for buffer, start, stop, used in parts:
        kept, moved = used - (stop - start), used - stop
        shrinks = buffer.shrinks_to(kept)
        if not moved and not shrinks:
            continue
        # Tokens that overlap with their destination have to be copied twice.
        if shrinks or moved > stop - start:
            buffer.remove([(start, stop)], used)
            continue
        # Heads lie apart, and only contiguous tensors share a launch.
        targets += buffer.tensor[:, start:kept].unbind(0)
        sources += buffer.tensor[:, stop:used].unbind(0)
    if targets:
        torch._foreach_copy_(targets, sources)
