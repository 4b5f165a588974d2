"""The stored tokens of one sequence in one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvconvert.kernels.spans import Span
from kvconvert.runtime.cache.token_positions import TokenColumns

# The full-precision buffer of a sequence grows in steps of this many tokens, which bounds its unused room. On a GPU
# steps are as long as a page, and one step may stay unused: kernels keep the addresses of buffers.
STEP = 16
GPU_STEP = 128


@dataclass
class KVSide:
    """Keys or values: [sink_tokens | tokens after the last page] in full precision, and numbers of pages.

    Attributes:
        buffer: [H, capacity, channels].
        dense: tokens in the buffer.
        pages: their numbers, oldest first.
    """

    buffer: torch.Tensor
    dense: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Tokens by which the buffer grows."""
        return GPU_STEP if self.buffer.is_cuda else STEP

    @property
    def spare(self) -> int:
        """Unused tokens, beyond those of the last step, with which a shrinking buffer stays where it is."""
        return GPU_STEP if self.buffer.is_cuda else 0

    def extend(self, count: int) -> int:
        """Make room for `count` more tokens, count them as stored, and return the index of the first."""
        first, self.dense = self.dense, self.dense + count
        if self.dense > self.buffer.shape[1]:
            self._move(self.dense, [slice(0, first)])
        return first

    def _move(self, tokens: int, kept: list[slice]) -> None:
        """Copy what is kept, one part after another, to a new buffer with room for so many tokens."""
        new = self.buffer.new_empty(self.buffer.shape[0], self._room(tokens), self.buffer.shape[2])
        at = 0
        for part in kept:
            count = part.stop - part.start
            new[:, at : at + count] = self.buffer[:, part]
            at += count
        self.buffer = new

    def _room(self, tokens: int) -> int:
        return -(-tokens // self.step) * self.step

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of the buffer, and little more room than they need."""
        self.dense = tokens
        if self.buffer.shape[1] > self._room(tokens) + self.spare:
            self._move(tokens, [slice(0, tokens)])

    def remove(self, parts: list[tuple[int, int]]) -> None:
        """Take tokens start..stop-1 of each part (start, stop), ascending, out of the buffer.

        It shrinks to little more than what remains.
        """
        ends = [*(start for start, _ in parts), self.dense]
        rest = [slice(0, ends[0]), *(slice(stop, end) for (_, stop), end in zip(parts, ends[1:], strict=True))]
        kept = sum(part.stop - part.start for part in rest)
        if self.buffer.shape[1] > self._room(kept) + self.spare:
            self._move(kept, rest)
        elif kept > ends[0]:
            self.buffer[:, ends[0] : kept] = torch.cat([self.buffer[:, part] for part in rest[1:]], 1)
        self.dense = kept

    def replace(self, tokens: torch.Tensor) -> None:
        """Let the buffer hold exactly these tokens [H, n, channels]."""
        self.buffer = self.buffer.new_empty(self.buffer.shape[0], self._room(tokens.shape[1]), self.buffer.shape[2])
        self.dense = tokens.shape[1]
        self.buffer[:, : self.dense] = tokens

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Tokens start..stop-1 of the buffer, a view [H, n, channels]."""
        return self.buffer[:, start:stop]

    def pages_at(self, start: int, count: int, size: int) -> torch.Tensor:
        """Tokens of `count` pages of `size` from token `start` on, a view [count, H, size, channels]."""
        return self.tokens(start, start + count * size).unflatten(1, (count, size)).transpose(0, 1)

    def copy(self) -> KVSide:
        """A copy with a buffer of its own, sharing the pages (whose references the caller counts)."""
        return KVSide(self.buffer.clone(), self.dense, self.pages.copy())


def remove_tokens(parts: list[tuple[KVSide, int, int]]) -> None:
    """Take tokens start..stop-1 out of each (side, start, stop), as `KVSide.remove` does, in few launches for all."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for side, start, stop in parts:
        kept, moved = side.dense - (stop - start), side.dense - stop
        shrinks = side.buffer.shape[1] > side._room(kept) + side.spare
        # What overlaps with its place has to be copied twice.
        if shrinks or not 0 < moved <= stop - start:
            side.remove([(start, stop)])
            continue
        # Heads lie apart, and only contiguous tensors share a launch.
        targets += side.buffer[:, start:kept].unbind(0)
        sources += side.buffer[:, stop : side.dense].unbind(0)
        side.dense = kept
    if targets:
        torch._foreach_copy_(targets, sources)


@dataclass
class Sequence:
    """All stored tokens of one sequence: [sink_tokens | dropped pages | pages | residual], columns ascending; and spans.

    Attributes:
        keys, values: pages and buffer of each; their full-precision windows may differ.
        sink_tokens: sink tokens at the beginning of both buffers.
        dropped: pages that left a sliding window for good.
        columns: of sink_tokens, pages and residual, dropped pages included.
        spans: whole prompts, each with the columns of its tokens.
        open_from: buffer index at which a prompt begins that is not sealed yet; None when there is none.
        received: attention received so far by the open prompt's tokens, float32 [H, n]; None when nobody asks.
        marked: of the open prompt, (column, how many) of the tokens whose modality goes to spans.
    """

    keys: KVSide
    values: KVSide
    sink_tokens: int = 0
    dropped: int = 0
    columns: TokenColumns = field(default_factory=TokenColumns)
    spans: list[tuple[Span, TokenColumns]] = field(default_factory=list)
    open_from: int | None = None
    received: torch.Tensor | None = None
    marked: list[tuple[int, int]] = field(default_factory=list)

    def extend(self, count: int, sink_tokens: int) -> tuple[int, int]:
        """Make room for `count` tokens in both buffers and return the index of the first in each.

        The first `sink_tokens` of the sequence become sink_tokens.
        """
        first = self.keys.extend(count), self.values.extend(count)
        if self.untouched:
            self.sink_tokens = min(sink_tokens, self.keys.dense)
        return first

    @property
    def untouched(self) -> bool:
        """Whether every token is still in full precision and in its place."""
        compressed = self.keys.pages or self.values.pages or self.dropped or self.spans
        return not compressed and self.columns.kept is None

    @property
    def pages(self) -> int:
        """Pages that exist for keys or for values."""
        return max(len(self.keys.pages), len(self.values.pages))

    def stored(self, size: int) -> int:
        """Tokens stored, for pages of `size`; one whose key and value are in different stores counts once."""
        return len(self.columns) - self.dropped * size + sum(span.tokens for span, _ in self.spans)

    def buffer_tokens(self, side: KVSide, page: int, count: int, size: int) -> torch.Tensor:
        """Tokens of `count` pages from position `page` (0 is the first one not dropped) out of a side's buffer."""
        start = self.sink_tokens + (page - len(side.pages)) * size
        return side.tokens(start, start + count * size)

    def tail(self, side: KVSide, size: int) -> torch.Tensor:
        """Sinks, and the tokens after the last page of either side: [H, n, channels]."""
        start = self.sink_tokens + (self.pages - len(side.pages)) * size
        if start == self.sink_tokens:
            return side.tokens(0, side.dense)
        return torch.cat([side.tokens(0, self.sink_tokens), side.tokens(start, side.dense)], 1)

    def tail_columns(self, size: int, device: torch.device) -> torch.Tensor:
        """Columns of `tail`: int64 [n] or [H, n]."""
        first = self.columns.span(0, self.sink_tokens, device)
        rest = self.columns.span(self.sink_tokens + (self.dropped + self.pages) * size, len(self.columns), device)
        if first.dim() != rest.dim():
            heads = max(first, rest, key=torch.Tensor.dim).shape[0]
            first, rest = (x if x.dim() == 2 else x.expand(heads, -1) for x in (first, rest))
        return torch.cat([first, rest], -1)

    def page_columns(self, page: int, size: int, device: torch.device) -> torch.Tensor:
        """Columns of the page at position `page`: int64 [P] or [H, P]."""
        first = self.sink_tokens + (self.dropped + page) * size
        return self.columns.span(first, first + size, device)

    def copy(self) -> Sequence:
        """A copy that shares pages and spans and owns its buffers."""
        return Sequence(
            self.keys.copy(),
            self.values.copy(),
            self.sink_tokens,
            self.dropped,
            self.columns.copy(),
            self.spans.copy(),
            self.open_from,
            None if self.received is None else self.received.clone(),
            self.marked.copy(),
        )
