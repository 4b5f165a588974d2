"""What evictions keep of prompts, in as few launches as possible."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.select import keep_tokens, predicted_scores, select_tokens
from kvconvert.methods import KVScheme
from kvconvert.runtime.cache.forward_pass import UnreadFlags
from kvconvert.runtime.cache.pool import renew_all
from kvconvert.runtime.cache.sequence import SealEviction
from kvconvert.runtime.cache.store import LayerStore


def evict(works: Sequence[tuple[LayerStore, Sequence[SealEviction]]]) -> None:
    """Keep the sink tokens, heavy hitters and the newest tokens of each KV head. Rows of one sequence share launches,
    and where scores are predicted those of all layers do.
    """
    together: dict[Hashable, list[tuple[LayerStore, SealEviction]]] = {}
    for store, seals in works:
        for work in seals:
            layer = store.index if store.scorer is None else store.device
            together.setdefault((work.row // store.heads_apart, layer), []).append((store, work))
    for some in together.values():
        _evict(some)


def _evict(works: list[tuple[LayerStore, SealEviction]]) -> None:
    """Keep what rows of one sequence keep, all of which hold the same number of its tokens."""
    (store, first), rows = works[0], [own.rows[work.row] for own, work in works]
    masses = [row.attention_mass for row in rows]
    for row in rows:
        row.attention_mass = None
    if all(work.keeps_all for _, work in works):
        return
    sides = [row.keys for row in rows], [row.values for row in rows]
    keys, values = ([x for part in side for x in part.tokens(0, first.tokens).unbind(0)] for side in sides)
    counts = [work.sink_tokens + work.heavy_hitters + work.recent for _, work in works]
    heads = len(keys) // len(rows)
    if store.scorer is None:
        heavy = [work.heavy_hitters for _, work in works for _ in range(heads)]
        index = select_tokens(_joined(masses), heavy, first.recent, first.sink_tokens)
    else:
        scores = []
        for begin in range(0, len(works), store.heads_apart):
            own, part = works[begin][0], slice(begin, begin + store.heads_apart)
            exact = own.format.rotations.keys, first.sink_tokens, first.recent
            scores.append(predicted_scores(own.scorer, keys[part], values[part], *exact))
        every = _joined(scores)
        # Infinite in any case, and NaN if a score is.
        unread = UnreadFlags.of(every.sum()[None], [partial(_raise_scores, store.scheme)])
        store.group.unread_flags.append(unread)
        index = select_tokens(every, counts, 0)
    positions = store.sequences[first.row].positions.slice(0, first.tokens, index.device)
    kept = positions[index].to(torch.int32)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        row.kept = kept[number * heads : (number + 1) * heads, :count]
    new_keys, new_values = ([x for part in renew_all(side, counts) for x in part.unbind(0)] for side in sides)
    keep_tokens((keys, values), (new_keys, new_values), index)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The scores [H, n] of several rows; those of one need no copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unusable_scores(scheme: KVScheme) -> NumericError:
    """The error for a prompt of which a score is NaN."""
    return NumericError(
        f'selection = "{scheme.prompt.selection}" scores tokens of this prompt by NaN, so none can be chosen; the '
        "model or its KV plan is damaged, so fetch or calibrate it again."
    )


def _raise_scores(scheme: KVScheme, total: float) -> None:
    if math.isnan(total):
        raise unusable_scores(scheme)
