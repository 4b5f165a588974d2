"""The tables that the kernels of a pass over chunks of several prompts follow.

They are written once per pass, for all layers. All are of int64 and have entries that do nothing where there is less
than they have room for, so that launches of one size serve passes of any division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvconvert.kernels.page_formats import PAGE_SIZE
from kvconvert.kernels.pages.records import PageAddresses

# Columns of the tables.
TOKEN, COPY, TILE = 3, 5, 5
# Tokens that one entry of `copies` has at most, and queries that one of `tiles` has.
COPIED_TOKENS = 128
TILE_QUERIES = 64


@dataclass(frozen=True)
class TokensInBlocks:
    """Full-precision tokens that `kernels/blocks` copies to the workspace.

    Attributes:
        words: the layer's blocks.
        records, places: as for `copy_tokens`.
    """

    words: torch.Tensor
    records: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class RaggedTables:
    """One layer's tables of a pass over N tokens of S sequences.

    A sequence's keys and values come to lie side by side in a workspace: first what was stored before the pass, oldest
    first, then the new tokens.

    Attributes:
        base: a tensor of the tokens' dtype, from whose address buffers count.
        buffers: [S, 4] of each sequence's full-precision keys [H, capacity, D] the offset from `base` and the distance
            from head to head, then the same of its values, in elements.
        tokens: [N, 3] of each new token its sequence, and its index in the buffers of keys and of values; negative
            where it is not stored, and the sequence then any.
        key_pages, value_pages: those of all sequences that have been quantized, P and Q of them.
        key_places, value_places: [P] and [Q], the token of the workspace that a page begins at; negative for none.
        center_pages, centers: [P, 5] and [P, 3], the pages of keys as `launch_centers` takes them in a workspace
            [H, capacity, D]; read where keys have a center.
        copies: [C, 5] stretches of full-precision tokens: sequence, side (0 keys, 1 values), first index in the buffer,
            token of the workspace, number of tokens (at most `COPIED_TOKENS`); or tokens that no buffer holds.
        tiles: [T, 5] stretches of `TILE_QUERIES` queries or fewer: the first one's number in the pass, where its
            sequence's queries end, the first one's column, that is its number among its sequence's keys, where these
            begin in the workspace, and how many there are; the fewest keys first.
        capacity: tokens that the workspace has room for.
    """

    base: torch.Tensor
    buffers: torch.Tensor
    tokens: torch.Tensor
    key_pages: PageAddresses
    value_pages: PageAddresses
    key_places: torch.Tensor
    value_places: torch.Tensor
    center_pages: torch.Tensor
    centers: torch.Tensor
    copies: torch.Tensor | TokensInBlocks
    tiles: torch.Tensor
    capacity: int


class PackedSequences(NamedTuple):
    """What a pass has of each of S sequences, from which the host fills its tables: int64 [S] each.

    Attributes:
        firsts: the number of its first new token in the pass.
        lengths: the number of its new tokens.
        totals: the number of its tokens in the workspace, which end with the new ones.
        begins: where these begin in the workspace.
        keys, values: the number of its pages, which come first in the workspace.
        positions: the position of the first page's first token.
    """

    firsts: np.ndarray
    lengths: np.ndarray
    totals: np.ndarray
    begins: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    positions: np.ndarray

    def lines(self, capacity: int, head_dim: int) -> dict[str, np.ndarray]:
        """The tables of `RaggedTables` that say where pages go and what attends to what, by their names."""
        zeros = np.zeros_like(self.keys)
        owner, number = ranges(zeros, self.keys)
        places = self.places(owner, number)
        return {
            "key_places": places,
            "value_places": self.places(*ranges(zeros, self.values)),
            "center_pages": listed_pages(places, capacity, head_dim),
            "centers": listed_centers(self.positions[owner] + number * PAGE_SIZE),
            "tiles": self._tiles(),
        }

    def places(self, owner: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The token of the workspace at which each page begins, given its sequence and its number there."""
        return self.begins[owner] + number * PAGE_SIZE

    def new_tokens(self, count: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        """`RaggedTables.tokens` for a pass of `count` tokens.

        Args:
            count: tokens of the pass; those of no sequence are stored nowhere.
            keys, values: index of each sequence's first new token in its buffers.
        """
        table = np.full((count, TOKEN), -1, np.int64)
        table[:, 0] = 0  # kernels look a sequence up before they see that its token is stored nowhere
        owner, number = ranges(np.zeros_like(self.lengths), self.lengths)
        table[self.firsts[owner] + number] = np.column_stack([owner, keys[owner] + number, values[owner] + number])
        return table

    def _tiles(self) -> np.ndarray:
        owner, number = ranges(np.zeros_like(self.lengths), -(-self.lengths // TILE_QUERIES))
        start = number * TILE_QUERIES
        first, column = self.firsts[owner] + start, (self.totals - self.lengths)[owner] + start
        end = (self.firsts + self.lengths)[owner]
        tiles = np.column_stack([first, end, column, self.begins[owner], self.totals[owner]])
        return tiles[np.argsort(column, kind="stable")]


def listed_pages(places: np.ndarray, capacity: int, dim: int, hidden: np.ndarray | int = 0) -> np.ndarray:
    """Pages of a workspace [H, capacity, dim] as kernels/pages/triton/launch.py lists them, without their records."""
    table = np.zeros((len(places), 5), np.int64)
    table[:, 0], table[:, 1], table[:, 3], table[:, 4] = places * dim, capacity * dim, PAGE_SIZE, hidden
    return table


def listed_centers(positions: np.ndarray) -> np.ndarray:
    """Pages whose first tokens have these positions, as `launch_centers` takes them."""
    return np.column_stack([positions, np.zeros((len(positions), 2), np.int64)])


def ranges(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The integers of several ranges, one range after another: which range each is of, and the integers."""
    counts = np.maximum(end - begin, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts - begin)[owner]


def flattened(lines: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tables as one line of int64.

    Each begins at a multiple of 16 bytes, on which kernels are specialized.
    """
    return np.concatenate([np.resize(line, _even(line.size)) for line in lines.values()]).astype(np.int64, copy=False)


def unflattened(flat: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tables of these shapes, by their names, once `flattened` is on the device."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), sizes, flat.split([_even(size) for size in sizes]), strict=True)
    return {name: part[:size].view(shape) for (name, shape), size, part in parts}


def _even(count: int) -> int:
    return count + count % 2
