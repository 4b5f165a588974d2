"""What lies before a prompt chunk, and how it comes tile by tile into a workspace of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvconvert.errors import UsageError
from kvconvert.kernels.page_formats import NO_TENSORS, PAGE_SIZE, SideTensors
from kvconvert.kernels.pages import (
    KeyCenter,
    PageAddresses,
    PageFormat,
    PageTensors,
    add_centers,
    dequantize_into,
)

# Room for the dequantized keys and values of one tile.
WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True)
class PageReader:
    """Pages that are read as tensors, some at a time.

    Attributes:
        read: gives the pages of a slice of page numbers, 0 being the first of the part.
        format: the format of the pages.
        tensors: as for `dequantize_pages`.
    """

    read: Callable[[slice], PageTensors]
    format: PageFormat
    tensors: SideTensors = NO_TENSORS


# Full-precision tokens [H, n, channels], or pages of which all but the last are full.
Source = torch.Tensor | PageAddresses | PageReader


@dataclass(frozen=True)
class StoredPart:
    """Consecutive tokens of one sequence.

    Where one side is still in full precision, the other may be in pages.

    Attributes:
        tokens: n > 0.
        keys, values: of D and of E channels.
        center: what pages of keys leave out, see `kernels/pages/center.py`; None for whole keys.
        position: the position of the first token, where there is a center.
        exact: full-precision keys [H, n, D] and values [H, n, E] of its first tokens, n below a page's, which take the
            place of what pages hold of them; None where pages hold all.
    """

    tokens: int
    keys: Source
    values: Source
    center: KeyCenter | None = None
    position: int = 0
    exact: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def step(self) -> int:
        """Tokens at whose multiples the part can be divided."""
        return max(1 if isinstance(source, torch.Tensor) else source.format.page_size for source in self.sides)

    @property
    def sides(self) -> tuple[Source, Source]:
        """Keys and values."""
        return self.keys, self.values


def stored_parts(
    counts: tuple[int, int],
    pages: Callable[[int, int], Sequence[Source]],
    exact: Sequence[torch.Tensor],
    center: KeyCenter | None,
    position: int = 0,
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[StoredPart]:
    """Everything that a sequence has stored from its first page on, oldest first.

    Args:
        counts: the number of its pages of keys, and of values.
        pages: gives the keys and values of pages begin to end - 1, of which a side with fewer pages is not read.
        exact: full-precision keys [H, n, D] and values [H, m, E] that follow the last page of each side.
        center, position: as for `StoredPart`, of the first page.
        sinks: as `StoredPart.exact`, of the first page.
    """
    both, total = min(counts), max(counts)
    half = (total - both) * PAGE_SIZE
    mixed = [
        tokens[:, :half] if count < total else paged
        for tokens, count, paged in zip(exact, counts, pages(both, total), strict=True)
    ]
    newest = [tokens[:, half:] if count < total else tokens for tokens, count in zip(exact, counts, strict=True)]
    found = [
        StoredPart(both * PAGE_SIZE, *pages(0, both), center, position, sinks),
        StoredPart(half, *mixed, center, position + both * PAGE_SIZE, None if both else sinks),
        StoredPart(newest[0].shape[1], *newest),
    ]
    return [part for part in found if part.tokens]


class Workspace:
    """Dequantized keys and values of one tile at a time.

    Args:
        device: the tokens' device.
        heads, key_dim, value_dim: KV heads, and their channels D and E.
        dtype: the dtype of what the workspace holds.
        tokens: tokens of a tile; None for as many as `WORKSPACE_BYTES` hold, a power of two.

    Attributes:
        keys: [H, tokens, D]; values: [H, tokens, E].
        capacity: tokens of a whole tile.
    """

    def __init__(
        self, device: torch.device, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, tokens: int | None
    ):
        self.capacity = tokens or tile_tokens(heads, key_dim, value_dim, dtype)
        self.keys, self.values = (
            torch.empty(heads, self.capacity, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim)
        )

    def write(self, part: StoredPart, start: int, count: int, at: int) -> None:
        """Put `count` tokens of a part, from its token `start` on, at token `at` of the workspace."""
        for source, room in zip(part.sides, (self.keys, self.values), strict=True):
            _write(source, start, room[:, at : at + count])
        if part.center is not None and not isinstance(part.keys, torch.Tensor):
            size = part.keys.format.page_size
            add_centers(self.keys[:, at : at + count], part.position + start, size, part.center)
        if part.exact is not None and start == 0:
            for tokens, room in zip(part.exact, (self.keys, self.values), strict=True):
                room[:, at : at + tokens.shape[1]] = tokens

    def tiles(self, parts: Sequence[StoredPart]) -> Iterator[int]:
        """Fill the workspace again and again with what the parts hold; yields the number of tokens of each tile.

        Raises:
            UsageError: a tile has no room for one page.
        """
        filled = 0
        for part in parts:
            if part.step > self.capacity:
                raise UsageError(f"A workspace of {self.capacity:,} tokens has no room for a page of {part.step}.")
            start = 0
            while start < part.tokens:
                count = min(self.capacity - filled, part.tokens - start)
                if start + count < part.tokens:
                    count -= count % part.step
                if count == 0:
                    yield filled
                    filled = 0
                    continue
                self.write(part, start, count, filled)
                start, filled = start + count, filled + count
        if filled:
            yield filled


def tile_tokens(heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile: the power of two that `WORKSPACE_BYTES` hold, at least 1,024."""
    tokens = WORKSPACE_BYTES // (heads * (key_dim + value_dim) * dtype.itemsize)
    return max(1024, 1 << tokens.bit_length() - 1)


def _write(source: Source, start: int, output: torch.Tensor) -> None:
    count = output.shape[1]
    if isinstance(source, torch.Tensor):
        output.copy_(source[:, start : start + count])
        return
    size = source.format.page_size
    pages = slice(start // size, -(-(start + count) // size))
    if isinstance(source, PageAddresses):
        dequantize_into(output, source.select(pages))
    else:
        dequantize_into(output, source.read(pages), source.tensors)
