"""The keys by which an indexer chooses the tokens that sparse attention attends to: one per token, in one layer.

They are looked at as a whole at every step, so they lie one after another, at 8 bits where the layer's keys and values
are quantized: codes of -127 to 127 and a scale of each key, from its largest channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvconvert.runtime.cache.pool import TokenBuffer

_LARGEST = 127


class IndexerKeys:
    """Those of every sequence of a batch, padding included.

    Args:
        bits: 8, or 16 for keys in the model's dtype.

    Attributes:
        counts: keys of each sequence.
    """

    def __init__(self, bits: int):
        self.bits = bits
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.counts: list[int] = []
        # Of each sequence its keys, or its codes and scales: [1, n, channels] each.
        self._rows: list[list[TokenBuffer]] = []

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for row in self._rows for buffer in row)

    @property
    def bytes_used(self) -> int:
        """Bytes of the keys that there are."""
        pairs = zip(self._rows, self.counts, strict=True)
        return sum(count * buffer.token_bytes for row, count in pairs for buffer in row)

    @property
    def numbers(self) -> int:
        """Numbers of the keys that there are."""
        pairs = zip(self._rows, self.counts, strict=True)
        return sum(count * row[0].tensor.shape[2] for row, count in pairs if row)

    def count(self, row: int) -> int:
        """Keys of a sequence."""
        return self.counts[row] if row < len(self.counts) else 0

    def append(self, keys: Tensor, rows: Sequence[int], batch: int) -> Tensor:
        """Store new keys, and return those of all tokens so far [b, n, D], each row's from the beginning.

        Args:
            keys: [b, T, D].
            rows: which these are of `batch` rows; the others hold no sequence, and forget their keys.
        """
        parts = [keys.detach()] if self.bits == 16 else _quantized(keys.detach())
        self.resize(batch)
        for row in {*range(batch)} - {*rows}:
            self.counts[row], self._rows[row] = 0, []
        every = keys.new_zeros(len(keys), max(self.counts) + keys.shape[1], keys.shape[2])
        for number, row in enumerate(rows):
            before = self.counts[row]
            after = self.counts[row] = before + keys.shape[1]
            if not self._rows[row]:
                self._rows[row] = [TokenBuffer(part.new_empty(1, 0, part.shape[2])) for part in parts]
            stored = []
            for buffer, part in zip(self._rows[row], parts, strict=True):
                buffer.reserve(after, before)
                buffer.tensor[0, before:after] = part[number]
                stored.append(buffer.tokens(0, after)[0])
            every[number, :after] = stored[0] if self.bits == 16 else stored[0] * stored[1]
        return every

    def resize(self, rows: int) -> None:
        """Have as many rows, the first of which are those there were."""
        more = max(0, rows - len(self.counts))
        self.counts = [*self.counts[:rows], *[0] * more]
        self._rows = [*self._rows[:rows], *([] for _ in range(more))]

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep the sequences of these rows, in this order; repeated ones get keys of their own."""
        self.counts = [self.counts[row] for row in rows]
        self._rows = [[buffer.copy() for buffer in self._rows[row]] for row in rows]

    def move(self, moves: Mapping[int, int]) -> None:
        """Move the keys of sequences to free rows; `moves` has the new row by the old one."""
        for old, new in moves.items():
            self.counts[new], self.counts[old] = self.counts[old], 0
            self._rows[new], self._rows[old] = self._rows[old], []

    def remove(self, tokens: int) -> None:
        """Remove the newest tokens of every sequence."""
        self.counts = [max(0, count - tokens) for count in self.counts]

    def take(self, row: int, other: IndexerKeys, rows: int) -> None:
        """Let a row of `rows` have those of the only sequence of another layer, which is reset afterwards."""
        self.resize(rows)
        if other.counts:
            self.counts[row], self._rows[row] = other.counts[0], other._rows[0]

    def copies(self, earlier: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Those of the only sequence, part by part, [1, n, channels] each.

        Args:
            earlier: what this gave of the first tokens of the same sequence, and which is not copied again.
        """
        if not self.counts:  # a layer that attends to what an earlier one chose
            return {"index.0.0": torch.empty(1, 0, 1)}
        found, begin = dict(earlier or {}), 0
        for name, tensor in found.items():
            begin = max(begin, int(name.split(".")[2]) + tensor.shape[1])
        for number, buffer in enumerate(self._rows[0]):
            found[f"index.{number}.{begin}"] = buffer.tokens(begin, self.counts[0]).clone()
        return found

    def stored(self) -> list[Tensor]:
        """What is stored of the first sequence, part by part, with room for more tokens [1, n, channels]."""
        return [buffer.tensor for buffer in self._rows[0]]

    def hold(self, copies: Mapping[str, Tensor]) -> None:
        """Go on from what `copies` gave."""
        parts: dict[str, list[Tensor]] = {}
        for name in sorted(copies, key=lambda name: int(name.split(".")[2])):
            parts.setdefault(name.split(".")[1], []).append(copies[name])
        self.clear()
        for number in sorted(parts):
            whole = torch.cat(parts[number], 1)
            self._rows = self._rows or [[]]
            self._rows[0].append(TokenBuffer(whole))
            self.counts = [whole.shape[1]]


def _quantized(keys: Tensor) -> list[Tensor]:
    """Codes int8 [B, T, D] and scales [B, T, 1], in the keys' dtype."""
    scales = (keys.abs().amax(-1, keepdim=True).float() / _LARGEST).clamp(min=torch.finfo(keys.dtype).tiny)
    scales = scales.to(keys.dtype)
    codes = (keys.float() / scales.float()).round().clamp(-_LARGEST, _LARGEST)
    return [codes.to(torch.int8), scales]
