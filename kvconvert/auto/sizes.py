"""Bytes that a layer's cache takes with a given number of tokens in it, from the layout of its pages."""

from __future__ import annotations

import torch

from kvconvert.kernels.pages import LayerFormat, empty_keys, empty_values
from kvconvert.methods import KVScheme

FULL_PRECISION = torch.bfloat16


def stored_bytes(scheme: KVScheme, pages: LayerFormat, context: int, sliding_window: int | None) -> tuple[int, int]:
    """Bytes of keys and of values of one sequence once `context` tokens have been read; 16-bit full precision.

    Args:
        scheme: of pages, without eviction.
        pages: the scheme's formats for the layer.
        context: tokens read.
        sliding_window: of the layer, whose pages are dropped when no later token attends to them; None without.
    """
    sinks, size = min(context, scheme.sink_tokens), scheme.page_size
    beyond = context - sinks
    dropped = 0
    if sliding_window:
        dropped = min(max(0, (context - sliding_window + 1 - sinks) // size), beyond // size)
    sides = []
    for recent, form, empty in (
        (scheme.key_recent_tokens, pages.keys, empty_keys),
        (scheme.value_recent_tokens, pages.values, empty_values),
    ):
        token = form.heads * form.head_dim * FULL_PRECISION.itemsize
        complete = max(0, (beyond - recent) // size)
        exact = sinks + beyond - max(complete, dropped) * size
        page = empty(1, form, FULL_PRECISION, torch.device("meta")).nbytes
        sides.append(max(0, complete - dropped) * page + exact * token)
    return sides[0], sides[1]
