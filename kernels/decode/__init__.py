"""Attention over everything that a cache has stored: one softmax over pages, spans and full-precision tokens.

Prompts that have nothing quantized before them go to `kernels/prompt/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvconvert.kernels import device
from kvconvert.kernels.decode.cpu import divided_pages, paged_attention, pages_per_tile
from kvconvert.kernels.decode.plan import (
    MOST_ROWS,
    PageTables,
    PageTile,
    ResidualTokens,
    ResidualWindows,
    SpanTokens,
    StoredTokens,
    Visibility,
)
from kvconvert.kernels.device import runs_triton
from kvconvert.kernels.page_formats import PAGE_SIZE, LayerFormat

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_CHANNELS = 256
# Queries of one launch: bounds masks and partial results when a prompt follows stored tokens.
QUERIES_AT_ONCE = 256
# Room for what a key center adds to the scores of one launch, which may have fewer queries for it.
CENTER_BYTES = 64 << 20


def unsupported(queries: torch.Tensor, format: LayerFormat, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels cannot serve queries [B, Hq, T, D] over a layer; None if they can.

    Args:
        queries: as for `decode_attention`.
        format: the format of the layer's pages, or with spans that of pages of these heads.
        dtype: the dtype of stored full-precision tokens.
    """
    reason = device.unsupported(queries.device)
    if reason is not None:
        return reason
    key, value, group = format.keys, format.values, queries.shape[1] // format.keys.heads
    for name, size in (("key", key.head_dim), ("value", value.head_dim)):
        if size % 8 or size > MOST_CHANNELS:
            return f"{name} heads of {size} channels are not a multiple of 8 up to {MOST_CHANNELS}"
    if group > MOST_ROWS:
        return f"{group} query heads per KV head are more than {MOST_ROWS}"
    if key.boosted and key.bits == 1:
        return "boosted channels of 1-bit keys have no kernel"
    if key.page_size != PAGE_SIZE:
        return f"pages of {key.page_size} tokens have no kernel"
    if dtype not in KERNEL_DTYPES:
        return f"there is no kernel for {dtype}"
    return None if queries.dtype == dtype else f"queries are {queries.dtype} and stored tokens {dtype}"


def decode_attention(
    queries: torch.Tensor,
    stored: StoredTokens,
    format: LayerFormat,
    dtype: torch.dtype,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    clamped_rows: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    fall_back: Callable[[str, str], None] = device.fall_back,
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's stored tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        stored: what they attend to.
        format: how the layer stores tokens.
        dtype: the dtype of stored full-precision tokens.
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap, sink_logits: as in `attention_reference`; sink_logits [Hq].
        clamped_rows: as in `SpanTokens`.
        output: [B, Hq, T, E] in the queries' dtype, channels side by side, where kernels put the result; made if not
            given.
        fall_back: called with operation and reason where a GPU's attention takes the slower path.

    Returns:
        [B, Hq, T, E] in the queries' dtype or float32; zeros where a query sees nothing.
    """
    reason = unsupported(queries, format, dtype)
    if reason is not None:
        if queries.is_cuda or runs_triton(queries.device):
            fall_back("attention over the cache", reason)
        tiles = stored.page_tiles(queries.shape[1], queries.shape[2])
        residuals, spans = stored.residual_tokens(), stored.spans()
        return paged_attention(queries, tiles, residuals, format, scaling, softcap, sink_logits, spans)
    from kvconvert.kernels.decode.triton import launch

    windows, group = stored.residual_windows(), queries.shape[1] // format.keys.heads
    if output is None:
        output = queries.new_empty(*queries.shape[:3], format.values.head_dim)
    at_once = QUERIES_AT_ONCE
    if format.key_tensors.center is not None and queries.shape[2] > 1:
        entries = len(stored.page_tables(1).keys)
        room = launch.centered_queries(CENTER_BYTES, entries, format.keys.heads, group, queries)
        at_once = min(QUERIES_AT_ONCE, room)
    for start in range(0, queries.shape[2], at_once):
        part = queries[:, :, start : start + at_once]
        visibility = stored.visibility(slice(start, start + at_once))
        programs = launch.programs_for(queries.device, format, group, part.shape[2])
        launch.decode_attention(
            part,
            stored.page_tables(programs),
            windows,
            format,
            scaling,
            softcap=softcap,
            sink_logits=sink_logits,
            visibility=visibility,
            clamped_rows=clamped_rows,
            output=output[:, :, start : start + at_once],
        )
    return output
