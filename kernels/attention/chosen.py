"""Sparse attention: which tokens each query attends to, of what an indexer has chosen for it.

Attention functions get choices as numbers of tokens, or of blocks of tokens, among all of a sequence, counted from its
first one (DeepSeek-V3.2's lightning indexer, arXiv 2512.02556, chooses tokens, MiniMax M3's blocks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """What was chosen for the queries of a pass.

    Attributes:
        numbers: [B, H, T, k], of tokens or blocks, negative where there are fewer; H is 1, or the number of KV heads.
        block: tokens of a block.
    """

    numbers: Tensor
    block: int = 1

    def is_all_of(self, tokens: int) -> bool:
        """Whether there is room in the choice for so many tokens, so that none is left out."""
        return self.numbers.shape[-1] * self.block >= tokens

    def of_row(self, row: int, queries: Tensor, tokens: Tensor) -> Tensor:
        """bool [H, t, n]: whether queries number `queries` [t] of a row attend to tokens number `tokens` [n]."""
        numbers = self.numbers[row, :, queries].long()
        last = int(tokens.max()) // self.block + 1 if len(tokens) else 1
        # What lies beyond, and what stands for nothing, goes to a column that is dropped.
        numbers = numbers.masked_fill((numbers < 0) | (numbers > last), last + 1)
        chosen = torch.zeros(*numbers.shape[:-1], last + 2, dtype=torch.bool, device=numbers.device)
        chosen.scatter_(-1, numbers, True)
        return chosen[..., tokens.to(numbers.device) // self.block]

    def part(self, tokens: slice, rows: int) -> Choice:
        """That of some tokens of a packed pass [1, H, N, k], which are so many rows of equally many."""
        own = self.numbers[0, :, tokens]
        return replace(self, numbers=own.unflatten(1, (rows, -1)).transpose(0, 1))

    def mask(self, visible: Tensor | None, query_heads: int, tokens: int) -> Tensor:
        """A mask over the `tokens` tokens of one prompt without those that were not chosen, bool [B, Hq or 1, T, n].

        Args:
            visible: the model's own mask, bool or additive and broadcast to that; None for causal attention.
            query_heads: Hq.
            tokens: n, the T queries' among them, at the end.
        """
        batch, heads, length, _ = self.numbers.shape
        device = self.numbers.device
        every = torch.arange(tokens, device=device)
        chosen = torch.stack([self.of_row(row, every[:length], every) for row in range(batch)])
        if heads > 1:
            chosen = chosen.repeat_interleave(query_heads // heads, 1)
        if visible is None:
            visible = every <= every[tokens - length :, None]
        return chosen & (visible if visible.dtype == torch.bool else visible >= 0)


def choice_of(indices: Tensor | None, block_indices: Tensor | None, block: int | None) -> Choice | None:
    """What a model of transformers hands to its attention function: tokens [B, T, k], blocks [B, H, T, k], or nothing.

    Args:
        indices, block_indices: arguments of these names.
        block: tokens of a block.
    """
    if block_indices is not None:
        return Choice(block_indices, block)
    return None if indices is None else Choice(indices.unsqueeze(1))
