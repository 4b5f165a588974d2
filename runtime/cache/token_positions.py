"""Where the tokens of one sequence stand in the padded batch: a few runs of consecutive columns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch


class TokenColumns:
    """The column of every stored token of one sequence, in ascending order.

    A column is the token's index in the padded input, which masks and sliding windows speak of; padding is never
    stored, so columns skip where padding stood. Sequences have almost always one run, hence integers on the host
    instead of a tensor. Tokens that survived an eviction come first and have columns per KV head, in a tensor.
    """

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None  # int32 [H, n]
        self._firsts: list[int] = []  # index of each run's first token, kept tokens not counted
        self._columns: list[int] = []  # column of each run's first token
        self._count = 0

    def __len__(self) -> int:
        return self.kept_count + self._count

    @property
    def kept_count(self) -> int:
        """Tokens that survived an eviction."""
        return 0 if self.kept is None else self.kept.shape[1]

    def copy(self) -> TokenColumns:
        """An independent copy."""
        other = TokenColumns()
        other.kept, other._count = self.kept, self._count
        other._firsts, other._columns = self._firsts.copy(), self._columns.copy()
        return other

    def append(self, column: int, count: int) -> None:
        """Append `count` tokens that stand in consecutive columns from `column` on."""
        if count <= 0:
            return
        if not self._firsts or self._column(self._count - 1) + 1 != column:
            self._firsts.append(self._count)
            self._columns.append(column)
        self._count += count

    def keep(self, index: torch.Tensor) -> None:
        """Keep only the tokens `index` [H, n] of each head; nothing may have been kept before."""
        every = self.span(0, len(self), index.device)
        self.kept = every[index].to(torch.int32)
        self._firsts, self._columns, self._count = [], [], 0

    def take(self, parts: list[tuple[int, int]]) -> TokenColumns:
        """Remove tokens start..stop-1 of each part (start, stop), ascending, and return their columns."""
        offset, at = self.kept_count, 0
        taken, rest = TokenColumns(), TokenColumns()
        for start, stop in parts:
            rest._extend(self, at, start - offset)
            taken._extend(self, start - offset, stop - offset)
            at = stop - offset
        rest._extend(self, at, self._count)
        self._firsts, self._columns, self._count = rest._firsts, rest._columns, rest._count
        return taken

    def _extend(self, other: TokenColumns, start: int, stop: int) -> None:
        while start < stop:
            run = bisect_right(other._firsts, start) - 1
            end = min(stop, other._firsts[run + 1] if run + 1 < len(other._firsts) else other._count)
            self.append(other._columns[run] + start - other._firsts[run], end - start)
            start = end

    def _column(self, index: int) -> int:
        run = bisect_right(self._firsts, index) - 1
        return self._columns[run] + index - self._firsts[run]

    def column(self, index: int) -> int:
        """The column of the token at `index`, of the head where it is newest."""
        if index < self.kept_count:
            return int(self.kept[:, index].max())
        return self._column(index - self.kept_count)

    def before(self, column: int) -> int:
        """How many tokens stand before `column`; kept tokens count as long past."""
        run = bisect_left(self._columns, column) - 1
        if run < 0:
            return self.kept_count
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count
        return self.kept_count + min(end, self._firsts[run] + column - self._columns[run])

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens, all kept ones among them."""
        count -= self.kept_count
        runs = bisect_left(self._firsts, count)
        del self._firsts[runs:], self._columns[runs:]
        self._count = min(self._count, count)

    def span(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The columns of tokens start..stop-1: int64 [n], or [H, n] where kept tokens are among them."""
        offset = self.kept_count
        parts = TokenColumns()
        parts._extend(self, max(0, start - offset), max(0, stop - offset))
        runs = [
            torch.arange(
                column, column + (parts._firsts[i + 1] if i + 1 < len(parts._firsts) else parts._count) - first
            )
            for i, (first, column) in enumerate(zip(parts._firsts, parts._columns, strict=True))
        ]
        plain = (torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)).to(device)
        if start >= offset:
            return plain
        kept = self.kept[:, start : min(stop, offset)].to(device, torch.int64)
        return torch.cat([kept, plain.expand(len(kept), -1)], 1)
