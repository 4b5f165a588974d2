"""A layer's part of a pass over chunks of several prompts: few launches, however many prompts and stored tokens.

New tokens are rotated and stored in their sequences' buffers (`append`). Then everything that a sequence has stored is
dequantized or copied to a workspace, one sequence after another, and one launch attends to it (`attend`).

`kernels/chunked_prefill` serves a single sequence with any number of stored tokens, tile by tile; `kernels/decode` few
queries.
"""

from __future__ import annotations

import torch

from kvconvert.kernels import prompt
from kvconvert.kernels.pages import LayerFormat, unsupported_dequantization
from kvconvert.kernels.pages.formats import PAGE_SIZE
from kvconvert.kernels.ragged.tables import COPIED_TOKENS, TILE_QUERIES, RaggedTables, TokensInBlocks
from kvconvert.kernels.rotate import Rotations


def unsupported(format: LayerFormat, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `append` and `attend` do not serve a layer's tokens; None if they do.

    Args:
        format: the format of the layer's pages.
        dtype, device: those of stored full-precision tokens and of queries.
    """
    keys, values = format.keys, format.values
    reasons = [unsupported_dequantization(side, dtype, device) for side in (keys, values)]
    if keys.page_size != PAGE_SIZE:
        reasons.append(f"pages of {keys.page_size} tokens have no kernel")
    tokens = [torch.empty(1, 1, side.head_dim, dtype=dtype, device="meta") for side in (keys, values)]
    queries = torch.empty(1, 1, keys.head_dim, dtype=dtype, device=device)
    reasons.append(prompt.unsupported(queries, *tokens, 1.0))
    return next((reason for reason in reasons if reason is not None), None)


def append(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: RaggedTables,
    format: LayerFormat,
    rotations: Rotations,
) -> torch.Tensor:
    """Store new keys and values in their sequences' buffers and rotate what the scheme rotates, in one launch.

    Args:
        queries: [Hq, N, D]; rotated as the keys are.
        keys, values: [H, N, D] and [H, N, E].
        tables: the tables of the pass.
        format: the format of the layer's pages.
        rotations: which are rotated.

    Returns:
        the queries, rotated or as they were, [Hq, N, D].
    """
    from kvconvert.kernels.ragged.triton import launch

    return launch.append(queries, keys, values, tables, format, rotations)


def attend(
    queries: torch.Tensor,
    tables: RaggedTables,
    format: LayerFormat,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    *,
    window: int | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's queries over its own stored tokens, the new ones included.

    Args:
        queries: [Hq, N, D], rotated if the keys are.
        tables: the tables of the pass.
        format: the format of the layer's pages.
        scaling, softcap, sink_logits: as for `prompt_attention`.
        window: tokens that a query sees, its own included, each sequence's being consecutive; None for all before it.
        workspace: keys [H, capacity, D] and values [H, capacity, E] of a workspace that may hold some tokens already;
            made if not given.
        output: where the result goes, contiguous; made if not given.

    Returns:
        [N, Hq, E] in the queries' dtype; anything where no tile has the query.
    """
    from kvconvert.kernels.ragged.triton import launch

    return launch.attend(
        queries, tables, format, scaling, softcap, sink_logits, window=window, workspace=workspace, output=output
    )


def fill_workspace(tables: RaggedTables, format: LayerFormat, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put everything that the sequences have stored where `tables` say, as `attend` does before it attends.

    Args:
        tables: the tables of the pass.
        format: the format of the layer's pages.
        keys, values: the workspace, as for `attend`.
    """
    from kvconvert.kernels.ragged.triton import launch

    launch.fill_workspace(tables, format, keys, values)


__all__ = [
    "COPIED_TOKENS",
    "TILE_QUERIES",
    "RaggedTables",
    "TokensInBlocks",
    "append",
    "attend",
    "fill_workspace",
    "unsupported",
]
