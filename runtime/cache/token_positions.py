"""The positions of one sequence's tokens in the padded input, as a few runs of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch


class TokenPositions:
    """The positions of some tokens of one sequence, in ascending order; never changed, only replaced.

    A position is the token's index in the padded input, which masks and sliding windows refer to; padding is never
    stored, so positions skip it. Sequences almost always have one run, hence integers on the host instead of a tensor.
    """

    __slots__ = ("_count", "_firsts", "_positions")

    def __init__(self, firsts: tuple[int, ...] = (), positions: tuple[int, ...] = (), count: int = 0):
        self._firsts, self._positions, self._count = firsts, positions, count

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenPositions):
            return NotImplemented
        return (self._firsts, self._positions, self._count) == (other._firsts, other._positions, other._count)

    __hash__ = None

    def append(self, position: int, count: int) -> TokenPositions:
        """These, then `count` tokens at consecutive positions from `position` on."""
        if count <= 0:
            return self
        if self._firsts and self._positions[-1] + self._count - self._firsts[-1] == position:
            return TokenPositions(self._firsts, self._positions, self._count + count)
        return TokenPositions((*self._firsts, self._count), (*self._positions, position), self._count + count)

    def part(self, start: int, stop: int) -> TokenPositions:
        """Those of tokens start..stop-1."""
        found = TokenPositions()
        while start < stop:
            run = bisect_right(self._firsts, start) - 1
            end = min(stop, self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count)
            found = found.append(self._positions[run] + start - self._firsts[run], end - start)
            start = end
        return found

    def extend(self, other: TokenPositions) -> TokenPositions:
        """These, then others."""
        joined = self
        for position, count in other.runs():
            joined = joined.append(position, count)
        return joined

    def take(self, parts: list[tuple[int, int]]) -> tuple[TokenPositions, TokenPositions]:
        """Those of tokens start..stop-1 of each part (start, stop), ascending, and the rest."""
        at, taken, rest = 0, TokenPositions(), TokenPositions()
        for start, stop in parts:
            rest = rest.extend(self.part(at, start))
            taken = taken.extend(self.part(start, stop))
            at = stop
        return taken, rest.extend(self.part(at, self._count))

    def shift(self, by: int) -> TokenPositions:
        """All of them, `by` further."""
        return TokenPositions(self._firsts, tuple(position + by for position in self._positions), self._count)

    def runs(self) -> list[tuple[int, int]]:
        """(first position, how many) of each run."""
        ends = (*self._firsts[1:], self._count)[: len(self._firsts)]
        return [(p, end - first) for p, first, end in zip(self._positions, self._firsts, ends, strict=True)]

    def position(self, index: int) -> int:
        """The position of token `index`."""
        run = bisect_right(self._firsts, index) - 1
        return self._positions[run] + index - self._firsts[run]

    def before(self, position: int) -> int:
        """How many tokens have a position below `position`."""
        run = bisect_left(self._positions, position) - 1
        if run < 0:
            return 0
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count
        return min(end, self._firsts[run] + position - self._positions[run])

    def slice(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Positions of tokens start..stop-1: int64 [n]."""
        runs = [torch.arange(first, first + count) for first, count in self.part(max(0, start), max(0, stop)).runs()]
        return (torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)).to(device)
