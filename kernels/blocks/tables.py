"""How blocks are divided, and the tables that kernels write about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Columns of the rows that `locate` is given.
ROW = 6


@dataclass(frozen=True)
class BlockGeometry:
    """How blocks are divided; sizes are in units of 16 bytes.

    Attributes:
        sink_blocks, token_blocks: entries of a sequence's row of the block table that hold its sink tokens, and those
            after them that hold its other full-precision tokens; its pages follow.
        tokens_per_block: full-precision tokens that a block holds.
        sink_tokens: sink tokens of a sequence.
        block_units, token_units: from one block to the next, and from one token of a block to the next.
        key_units: the size of a page's keys, behind which its values lie.
    """

    sink_blocks: int
    token_blocks: int
    tokens_per_block: int
    sink_tokens: int
    block_units: int
    token_units: int
    key_units: int


@dataclass(frozen=True)
class DecodePlaces:
    """The tables that `locate` writes for layers with the same geometry, parts of one int64 tensor.

    Attributes:
        places: [B, capacity] the full-precision tokens of each sequence in the order in which decode kernels read them:
            sink tokens, tokens of half-quantized pages, the newest; repeated at the end.
        targets: [B, 4] for `rotate_and_append`: the new token's keys and, behind those of all heads, its values.
        key_pages, value_pages: the pages of all sequences, one sequence after another.
    """

    places: torch.Tensor
    targets: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor

    @classmethod
    def empty(cls, rows: int, capacity: int, pages: int, device: torch.device) -> DecodePlaces:
        """Zeros for this number of sequences, full-precision tokens of each, and entries of the pages' tables."""
        sizes = rows * capacity, rows * 4, pages, pages
        places, targets, *sides = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
        return cls(places.view(rows, capacity), targets.view(rows, 4), *sides)


def geometry_table(geometries: dict[BlockGeometry, DecodePlaces]) -> torch.Tensor:
    """The geometries as `locate` reads them, int64 [G, 4]: tokens of a block, units of a block and of a page's keys,
    and the distance of each geometry's tensors from those of the first, in elements.
    """
    first, *_ = (found.places for found in geometries.values())
    rows = [
        (g.tokens_per_block, g.block_units, g.key_units, (found.places.data_ptr() - first.data_ptr()) // first.itemsize)
        for g, found in geometries.items()
    ]
    return torch.tensor(rows, device=first.device)
