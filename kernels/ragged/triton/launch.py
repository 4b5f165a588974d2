"""Launches of a pass over several sequences."""

from __future__ import annotations

import torch
import triton

from kvconvert.kernels.blocks import copy_tokens
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.pages.triton.center import launch_centers
from kvconvert.kernels.pages.triton.dequantize import dequantize_addressed
from kvconvert.kernels.prompt.triton.launch import aligned, ragged_attention
from kvconvert.kernels.ragged.tables import COPIED_TOKENS, RaggedTables, TokensInBlocks
from kvconvert.kernels.ragged.triton.kernels import append_kernel, copy_kernel
from kvconvert.kernels.rotate import Rotations
from kvconvert.kernels.rotate.matrices import hadamard_signs
from kvconvert.kernels.rotate.triton.launch import columns_for, inner_for, tile_of

# Tokens of a program of the append.
ROWS = 32
# Tile elements per thread of a copy.
PER_THREAD = 32


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
    queries, keys, values = (aligned(x) for x in (queries, keys, values))
    dtype, (query_heads, count, dim), (heads, _, value_dim) = keys.dtype, queries.shape, values.shape
    output = torch.empty_like(queries) if rotations.keys else queries
    key_signs = hadamard_signs(dim, dtype, keys.device) if rotations.keys else (keys, 1.0)
    value_signs = hadamard_signs(value_dim, dtype, keys.device) if rotations.values else (values, 1.0)
    constants = append_constants(format, dtype, *rotations)
    lines = 2 * heads + (query_heads if rotations.keys else 0)
    append_kernel[(triton.cdiv(count, constants["ROWS"]) * lines,)](
        queries, output, keys, values, tables.base, tables.buffers, tables.tokens, key_signs[0], value_signs[0],
        key_signs[1], value_signs[1], count, *queries.stride()[:2], *output.stride()[:2], *keys.stride()[:2],
        *values.stride()[:2], **constants, num_warps=4,
    )  # fmt: skip
    return output


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
    (query_heads, count, _), f = queries.shape, format
    if workspace is None:
        sides = f.keys, f.values
        workspace = tuple(queries.new_empty(side.heads, tables.capacity, side.head_dim) for side in sides)
    keys, values = workspace
    fill_workspace(tables, f, keys, values)
    if output is None:
        output = queries.new_empty(count, query_heads, f.values.head_dim)
    ragged_attention(queries, keys, values, tables.tiles, output, scaling, softcap, sink_logits, window)
    return output


def fill_workspace(tables: RaggedTables, format: LayerFormat, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Put everything that the sequences have stored where `tables` say, as `attend` does before it attends.

    Args:
        tables: the tables of the pass.
        format: the format of the layer's pages.
        keys, values: the workspace, as for `attend`.
    """
    f = format
    dequantize_addressed(tables.key_pages, keys, tables.key_places)
    if f.key_tensors.center is not None and len(tables.key_pages):
        size = f.keys.page_size
        launch_centers(keys, keys.stride(1), tables.center_pages, tables.centers, f.key_tensors.center, size, sign=1)
    dequantize_addressed(tables.value_pages, values, tables.value_places)
    copies = tables.copies
    if isinstance(copies, TokensInBlocks):
        copy_tokens(copies.records, copies.places, copies.words, keys, values, to_blocks=False)
        return
    copy_kernel[(len(copies) * f.keys.heads,)](
        tables.base, tables.buffers, copies, keys, values, keys.stride(0) // 8, values.stride(0) // 8,
        **copy_constants(f), num_warps=copy_warps(f),
    )  # fmt: skip


def append_constants(format: LayerFormat, dtype: torch.dtype, keys_rotate: bool, values_rotate: bool) -> dict[str, int]:
    """Compile-time arguments of `append_kernel`."""
    size, value_size = format.keys.head_dim, format.values.head_dim
    return {
        "HEADS": format.keys.heads,
        "SIZE": size,
        "SIZE_TILE": tile_of(size),
        "VALUE_SIZE": value_size,
        "VALUE_TILE": tile_of(value_size),
        "COLUMNS": columns_for(size, dtype),
        "INNER": inner_for(size, dtype),
        "VALUE_COLUMNS": columns_for(value_size, dtype),
        "VALUE_INNER": inner_for(value_size, dtype),
        "ROWS": ROWS,
        "ROTATE_KEYS": keys_rotate,
        "ROTATE_VALUES": values_rotate,
    }


def copy_constants(format: LayerFormat) -> dict[str, int]:
    """Compile-time arguments of `copy_kernel`."""
    size, value_size = format.keys.head_dim, format.values.head_dim
    sizes = {"SIZE": size, "SIZE_TILE": triton.next_power_of_2(size)}
    sizes |= {"VALUE_SIZE": value_size, "VALUE_TILE": triton.next_power_of_2(value_size)}
    return {"HEADS": format.keys.heads, **sizes, "COPIED": COPIED_TOKENS}


def copy_warps(format: LayerFormat) -> int:
    """Warps of `copy_kernel`."""
    widest = triton.next_power_of_2(max(format.keys.head_dim, format.values.head_dim))
    return max(1, COPIED_TOKENS * widest // (32 * PER_THREAD))
