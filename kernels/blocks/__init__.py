"""Pages and full-precision tokens in blocks of one size, which each sequence finds by its row of a block table.

`kvconvert/vllm/blocks.py` says what lies where. Offsets are in units of 16 bytes and count from the first block of a
layer, so that one table serves all layers whose records have the same sizes. For devices that run Triton.
"""

from __future__ import annotations

import torch

from kvconvert.kernels.blocks.tables import ROW, BlockGeometry, DecodePlaces


def locate(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    most_pages: int,
    geometry: BlockGeometry,
    head_sizes: tuple[int, int, int],
    dtype: torch.dtype,
    found: DecodePlaces,
) -> None:
    """Write where everything lies that sequences with one new token read and write.

    Args:
        block_table: int32 [rows, entries].
        rows: int64 [B, 6] of each sequence: its tokens, the new one included, 0 for none; pages quantized on both
            sides; half-quantized ones; all of these; where they begin in the tables; its row of the block table.
        most_pages: pages that a sequence has at most.
        geometry: how blocks are divided.
        head_sizes: KV heads, and channels of their keys and values.
        dtype: the dtype of full-precision tokens.
        found: int64 tensors for as many sequences, see there; what a sequence without tokens gets is block 0.
    """
    from kvconvert.kernels.blocks import triton

    triton.locate(block_table, rows, most_pages, geometry, head_sizes, dtype, found)


def copy_tokens(
    records: torch.Tensor,
    places: torch.Tensor,
    words: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    to_blocks: bool,
) -> None:
    """Copy full-precision tokens between blocks and a workspace.

    Args:
        records: int64 [n], offset of each token's record.
        places: int64 [n, 2], each token's place in the workspace, and 1 for its keys alone, 2 for its values alone, 3
            for both.
        words: the layer's blocks in any dtype.
        keys, values: [H, W, D] and [H, W, E], channels side by side.
        to_blocks: from the workspace.
    """
    from kvconvert.kernels.blocks import triton

    if len(records):
        triton.copy_tokens(records, places, words, keys, values, to_blocks)


__all__ = ["ROW", "BlockGeometry", "DecodePlaces", "copy_tokens", "locate"]
