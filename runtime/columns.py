"""Where the tokens of one sequence stand in the padded batch: a few runs of consecutive columns."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch


class TokenColumns:
    """The column of every stored token of one sequence, in ascending order.

    A column is the token's index in the padded input, which masks and sliding windows speak of; padding is never
    stored, so columns skip where padding stood. Sequences have almost always one run, hence integers on the host
    instead of a tensor.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []  # index of each run's first token
        self._columns: list[int] = []  # column of each run's first token
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def copy(self) -> TokenColumns:
        """An independent copy."""
        other = TokenColumns()
        other._firsts, other._columns, other._count = self._firsts.copy(), self._columns.copy(), self._count
        return other

    def append(self, column: int, count: int) -> None:
        """Append `count` tokens that stand in consecutive columns from `column` on."""
        if count <= 0:
            return
        if not self._firsts or self.column(self._count - 1) + 1 != column:
            self._firsts.append(self._count)
            self._columns.append(column)
        self._count += count

    def column(self, index: int) -> int:
        """The column of the token at `index`."""
        run = bisect_right(self._firsts, index) - 1
        return self._columns[run] + index - self._firsts[run]

    def before(self, column: int) -> int:
        """How many tokens stand before `column`."""
        run = bisect_left(self._columns, column) - 1
        if run < 0:
            return 0
        end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count
        return min(end, self._firsts[run] + column - self._columns[run])

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens."""
        runs = bisect_left(self._firsts, count)
        del self._firsts[runs:], self._columns[runs:]
        self._count = min(self._count, count)

    def span(self, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """The columns of tokens start..stop-1, int64."""
        parts = []
        while start < stop:
            run = bisect_right(self._firsts, start) - 1
            end = min(stop, self._firsts[run + 1] if run + 1 < len(self._firsts) else self._count)
            column = self._columns[run] + start - self._firsts[run]
            parts.append(torch.arange(column, column + end - start, device=device))
            start = end
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)
