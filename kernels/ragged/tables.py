"""The tables that the kernels of a pass over chunks of several prompts follow.

They are written once per pass, for all layers. All are of int64 and have entries that do nothing where there is less
than they have room for, so that launches of one size serve passes of any division.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
