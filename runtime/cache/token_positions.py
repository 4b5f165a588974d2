"""The positions of one sequence's tokens in the padded input, as a few runs of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch


class TokenPositions:
    """The position of every stored token of one sequence, in ascending order.

    A position is the token's index in the padded input, which masks and sliding windows refer to; padding is never
    stored, so positions skip it. Sequences almost always have one run, hence integers on the host instead of a tensor.
    Tokens that survived an eviction come first and have positions per KV head, in a tensor.
    """

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None  # int32 [H, n]
        self._firsts: list[int] = []  # index of each run's first token, kept tokens not counted
        self._positions: list[int] = []  # position of each run's first token
        self._count = 0

    def __len__(self) -> int:
        return self.kept_count + self._count

    @property
    def kept_count(self) -> int:
        """Tokens that survived an eviction."""
        return 0 if self.kept is None else self.kept.shape[1]

    def copy(self) -> TokenPositions:
        """An independent copy."""
        other = TokenPositions()
        other.kept, other._count = self.kept, self._count
        other._firsts, other._positions = self._firsts.copy(), self._positions.copy()
        return other

    def append(self, position: int, count: int) -> None:
        """Append `count` tokens at consecutive positions from `position` on."""
        if count <= 0:
            return
        if not self._firsts or self._position(self._count - 1) + 1 != position:
            self._firsts.append(self._count)
            self._positions.append(position)
        self._count += count

    def keep(self, index: torch.Tensor) -> None:
        """Keep only the tokens `index` [H, n] of each head; nothing may have been kept before."""
        every = self.slice(0, len(self), index.device)
        self.kept = every[index].to(torch.int32)
        self._firsts, self._positions, self._count = [], [], 0

    def take(self, parts: list[tuple[int, int]]) -> TokenPositions:
        """Remove tokens start..stop-1 of each part (start, stop), ascending, and return their positions."""
        offset, at = self.kept_count, 0
        taken, rest = TokenPositions(), TokenPositions()
        for start, stop in parts:
            rest._extend(self, at, start - offset)
            taken._extend(self, start - offset, stop - offset)
            at = stop - offset
        rest._extend(self, at, self._count)
        self._firsts, self._positions, self._count = rest._firsts, rest._positions, rest._count
        return taken

    def _extend(self, other: TokenPositions, start: int, stop: int) -> None:
        while start < stop:
            run = bisect_right(other._firsts, start) - 1
            end = min(stop, other._firsts[run + 1] if run + 1 < len(other._firsts) else other._count)
            self.append(other._positions[run] + start - other._firsts[run], end - start)
            start = end

    def _position(self, index: int) -> int:
        run = bisect_right(self._firsts, index) - 1
        return self._positions[run] + index - self._firsts[run]

    def position(self, index: int) -> int:
        """The position of token `index`; of a kept one, the largest over KV heads."""
        if index < self.kept_count:
            return int(self.kept[:, index].max())
        return self._position(index - self.kept_count)

    def before(self, position: int) -> int:
        """How many tokens have a position below `position`; kept tokens all count."""
        run = bisect_left(self._positions, position) - 1
        if run < 0:
            return self.kept_count
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count
        return self.kept_count + min(end, self._firsts[run] + position - self._positions[run])

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens, all kept ones among them."""
        count -= self.kept_count
        runs = bisect_left(self._firsts, count)
        del self._firsts[runs:], self._positions[runs:]
        self._count = min(self._count, count)

    def slice(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Positions of tokens start..stop-1: int64 [n], or [H, n] where kept tokens are among them."""
        offset = self.kept_count
        parts = TokenPositions()
        parts._extend(self, max(0, start - offset), max(0, stop - offset))
        runs = [
            torch.arange(
                position, position + (parts._firsts[i + 1] if i + 1 < len(parts._firsts) else parts._count) - first
            )
            for i, (first, position) in enumerate(zip(parts._firsts, parts._positions, strict=True))
        ]
        plain = (torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)).to(device)
        if start >= offset:
            return plain
        kept = self.kept[:, start : min(stop, offset)].to(device, torch.int64)
        return torch.cat([kept, plain.expand(len(kept), -1)], 1)
