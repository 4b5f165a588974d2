"""A layer's part of a pass over chunks of several prompts: few launches, however many prompts and stored tokens.

New tokens are rotated and stored in their sequences' buffers (`append`). Then everything that a sequence has stored is
dequantized or copied to a workspace, one sequence after another, and one launch attends to it (`attend`).

`kernels/chunked_prefill` serves a single sequence with any number of stored tokens, tile by tile; `kernels/decode` few
queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvconvert.kernels.chunked_prefill import unsupported_by_kernels
from kvconvert.kernels.launches import deferred
from kvconvert.kernels.page_formats import PAGE_SIZE, LayerFormat
from kvconvert.kernels.ragged.tables import COPIED_TOKENS, TILE_QUERIES, RaggedTables, TokensInBlocks

if TYPE_CHECKING:
    from kvconvert.kernels.ragged.triton import append, attend, fill_workspace
else:
    append, attend, fill_workspace = deferred("ragged.triton", "append", "attend", "fill_workspace")


def unsupported(format: LayerFormat, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `append` and `attend` do not serve a layer's tokens; None if they do.

    Args:
        format: the format of the layer's pages.
        dtype, device: those of stored full-precision tokens and of queries.
    """
    if format.keys.page_size != PAGE_SIZE:
        return f"pages of {format.keys.page_size} tokens have no kernel"
    queries = torch.empty(1, 1, format.keys.head_dim, dtype=dtype, device=device)
    return unsupported_by_kernels(queries, format, dtype, 1.0)
