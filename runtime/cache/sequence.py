"""The stored tokens of one sequence in one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvconvert.kernels.spans import Span
from kvconvert.runtime.cache.token_positions import TokenPositions


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


@dataclass
class KVSide:
    """Keys or values of one sequence: sink tokens and residual window in full precision, and numbers of pages.

    Attributes:
        buffer: [H, capacity, channels]: the sink tokens, then the tokens after the last page.
        growth: how the buffer grows and shrinks.
        buffered: tokens in the buffer.
        pages: their numbers in the pool, oldest first.
    """

    buffer: torch.Tensor
    growth: BufferGrowth = CPU_GROWTH
    buffered: int = 0
    pages: list[int] = field(default_factory=list)

    def extend(self, count: int) -> int:
        """Make room for `count` more tokens, count them as stored, and return the index of the first."""
        first, self.buffered = self.buffered, self.buffered + count
        if self.buffered > self.buffer.shape[1]:
            self._move(self.buffered, [slice(0, first)])
        return first

    def _move(self, tokens: int, kept: list[slice]) -> None:
        """Copy the kept parts, one after another, to a new buffer with room for `tokens` tokens."""
        new = self.buffer.new_empty(self.buffer.shape[0], self._room(tokens), self.buffer.shape[2])
        at = 0
        for part in kept:
            count = part.stop - part.start
            new[:, at : at + count] = self.buffer[:, part]
            at += count
        self.buffer = new

    def _room(self, tokens: int) -> int:
        return -(-tokens // self.growth.step) * self.growth.step

    def shrinks_to(self, tokens: int) -> bool:
        """Whether the buffer moves to a smaller one when this many tokens remain."""
        return self.buffer.shape[1] > self._room(tokens) + self.growth.spare

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of the buffer, and little more room than they need."""
        self.buffered = tokens
        if self.shrinks_to(tokens):
            self._move(tokens, [slice(0, tokens)])

    def remove(self, parts: list[tuple[int, int]]) -> None:
        """Remove tokens start..stop-1 of each part (start, stop), ascending; the buffer may move to a smaller one."""
        ends = [*(start for start, _ in parts), self.buffered]
        rest = [slice(0, ends[0]), *(slice(stop, end) for (_, stop), end in zip(parts, ends[1:], strict=True))]
        kept = sum(part.stop - part.start for part in rest)
        if self.shrinks_to(kept):
            self._move(kept, rest)
        elif kept > ends[0]:
            self.buffer[:, ends[0] : kept] = torch.cat([self.buffer[:, part] for part in rest[1:]], 1)
        self.buffered = kept

    def replace(self, tokens: torch.Tensor) -> None:
        """Hold exactly these tokens [H, n, channels] in the buffer."""
        self.buffer = self.buffer.new_empty(self.buffer.shape[0], self._room(tokens.shape[1]), self.buffer.shape[2])
        self.buffered = tokens.shape[1]
        self.buffer[:, : self.buffered] = tokens

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """Tokens start..stop-1 of the buffer, a view [H, n, channels]."""
        return self.buffer[:, start:stop]

    def copy(self) -> KVSide:
        """A copy with a buffer of its own, sharing the pages (whose references the caller counts)."""
        return KVSide(self.buffer.clone(), self.growth, self.buffered, self.pages.copy())


def remove_tokens(parts: list[tuple[KVSide, int, int]]) -> None:
    """`KVSide.remove` of tokens start..stop-1 for each (side, start, stop), in few launches for all."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for side, start, stop in parts:
        kept, moved = side.buffered - (stop - start), side.buffered - stop
        # Tokens that overlap with their destination have to be copied twice.
        if side.shrinks_to(kept) or not 0 < moved <= stop - start:
            side.remove([(start, stop)])
            continue
        # Heads lie apart, and only contiguous tensors share a launch.
        targets += side.buffer[:, start:kept].unbind(0)
        sources += side.buffer[:, stop : side.buffered].unbind(0)
        side.buffered = kept
    if targets:
        torch._foreach_copy_(targets, sources)


@dataclass
class Sequence:
    """All stored tokens of one sequence: [sink tokens | dropped pages | pages | residual window], and spans.

    Attributes:
        keys, values: pages and buffer of each; their residual windows may differ.
        sink_tokens: sink tokens at the beginning of both buffers.
        dropped: pages that left a sliding window for good.
        positions: of sink tokens, pages and residual window, dropped pages included; ascending.
        spans: whole prompts, each with the positions of its tokens.
        open_from: buffer index at which a prompt begins that is not sealed yet; None when there is none.
        attention_mass: attention that the open prompt's tokens have received so far, float32 [H, n]; None unless the
            scheme evicts.
        modality_runs: of the open prompt, (position, how many) of the tokens whose modality goes to spans.
    """

    keys: KVSide
    values: KVSide
    sink_tokens: int = 0
    dropped: int = 0
    positions: TokenPositions = field(default_factory=TokenPositions)
    spans: list[tuple[Span, TokenPositions]] = field(default_factory=list)
    open_from: int | None = None
    attention_mass: torch.Tensor | None = None
    modality_runs: list[tuple[int, int]] = field(default_factory=list)

    def extend(self, count: int, sink_tokens: int) -> tuple[int, int]:
        """Make room for `count` tokens in both buffers and return the index of the first in each.

        The first `sink_tokens` of the sequence become sink tokens.
        """
        first = self.keys.extend(count), self.values.extend(count)
        if self.untouched:
            self.sink_tokens = min(sink_tokens, self.keys.buffered)
        return first

    @property
    def untouched(self) -> bool:
        """Whether all tokens are still in the buffers, in the order of their arrival."""
        compressed = self.keys.pages or self.values.pages or self.dropped or self.spans
        return not compressed and self.positions.kept is None

    @property
    def pages(self) -> int:
        """Pages that exist for keys or for values."""
        return max(len(self.keys.pages), len(self.values.pages))

    def stored(self, size: int) -> int:
        """Tokens stored, for pages of `size` tokens; one whose key is in a page and whose value is not counts once."""
        return len(self.positions) - self.dropped * size + sum(span.tokens for span, _ in self.spans)

    def buffer_tokens(self, side: KVSide, page: int, count: int, size: int) -> torch.Tensor:
        """Tokens of `count` pages from page `page` on (0 is the first one not dropped), out of a side's buffer."""
        start = self.sink_tokens + (page - len(side.pages)) * size
        return side.tokens(start, start + count * size)

    def residual(self, side: KVSide, size: int) -> torch.Tensor:
        """Sink tokens, then the residual window after the last page of either side: [H, n, channels]."""
        start = self.sink_tokens + (self.pages - len(side.pages)) * size
        if start == self.sink_tokens:
            return side.tokens(0, side.buffered)
        return torch.cat([side.tokens(0, self.sink_tokens), side.tokens(start, side.buffered)], 1)

    def residual_positions(self, size: int, device: torch.device) -> torch.Tensor:
        """Positions of the tokens of `residual`: int64 [n] or [H, n]."""
        first = self.positions.slice(0, self.sink_tokens, device)
        rest = self.positions.slice(self.sink_tokens + (self.dropped + self.pages) * size, len(self.positions), device)
        if first.dim() != rest.dim():
            heads = max(first, rest, key=torch.Tensor.dim).shape[0]
            first, rest = (x if x.dim() == 2 else x.expand(heads, -1) for x in (first, rest))
        return torch.cat([first, rest], -1)

    def page_positions(self, page: int, size: int, device: torch.device) -> torch.Tensor:
        """Positions of the tokens of page `page` (0 is the first one not dropped): int64 [P] or [H, P]."""
        first = self.sink_tokens + (self.dropped + page) * size
        return self.positions.slice(first, first + size, device)

    def copy(self) -> Sequence:
        """A copy that shares pages and spans and owns its buffers."""
        return Sequence(
            self.keys.copy(),
            self.values.copy(),
            self.sink_tokens,
            self.dropped,
            self.positions.copy(),
            self.spans.copy(),
            self.open_from,
            None if self.attention_mass is None else self.attention_mass.clone(),
            self.modality_runs.copy(),
        )
