"""Selection by reconstruction (KVzip): prompts are read again and scored, or their scores predicted, and the heads of
all layers share one budget.

Every KV head is a row of its own here: row `b * heads + h` of a layer is head h of sequence b, so that each holds as
many tokens as the scores leave it. While a group's `repetition` is set, tokens that reach its layers are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvconvert.cache.plan_tensors import score_quantiles
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import expected_pages, repeated_attention, share_pages
from kvconvert.methods.scheme import Evict
from kvconvert.runtime.cache.eviction import unusable_scores
from kvconvert.runtime.cache.store import Group, LayerStore

_LENGTHS = 256  # of prompts whose budgets are remembered
PART = 512  # tokens of the prompt that a repeated token attends to; 512 and 1,024 keep alike


def score_and_attend(
    store: LayerStore,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Attention of the repeated tokens of all rows, whose scores are added to what rows hold.

    Args:
        store: the store of one layer.
        queries: [rows, G, T, D]; keys: [rows, 1, T, D]; values: [rows, 1, T, E]; none rotated.
        scoring: the layer's scoring, which has no sink logits.

    Returns:
        [rows, G, T, E], zeros where a token is padding.
    """
    start, stop = store.group.repetition
    if store.format.rotations.keys:
        queries, keys = hadamard_transform(queries), hadamard_transform(keys)
    if store.format.rotations.values:
        values = hadamard_transform(values)
    output = queries.new_zeros(*queries.shape[:3], values.shape[3])
    for begin in range(0, len(store.rows), store.heads_apart):
        sequence, rows = store.sequences[begin], slice(begin, begin + store.heads_apart)
        # Sink tokens are kept whatever they score.
        first, end = max(sequence.before(start), sequence.sink_tokens), sequence.before(stop)
        if first >= end:
            continue
        at, count = store.positions(begin, first, end) - start, sequence.keys.buffered
        stored = [(row.keys.tokens(0, count)[0], row.values.tokens(0, count)[0]) for row in store.rows[rows]]
        attended, scores = repeated_attention(
            queries[rows][:, :, at],
            (keys[rows, 0][:, at], values[rows, 0][:, at]),
            tuple(map(torch.stack, zip(*stored, strict=True))),
            first,
            PART,
            sequence.sink_tokens,
            scoring,
        )
        output[rows, :, at] = attended
        for row, own in zip(store.rows[rows], scores, strict=True):
            if row.attention_mass is None:
                row.attention_mass = own.new_zeros(1, count)
            row.attention_mass[0, first:end] = own
    return hadamard_transform(output, inverse=True) if store.format.rotations.values else output


class PredictedBudgets:
    """How many tokens of a prompt each KV head keeps where scores are predicted: as many as would be its share of the
    text that the networks were fitted to. So no layer waits for the others, or the host for the GPU.

    Args:
        stores: the stores of all layers.
    """

    def __init__(self, stores: Sequence[LayerStore]):
        self._stores = stores
        self._quantiles: np.ndarray | None = None
        self._found: dict[int, tuple[list[list[int]], int]] = {}  # by the prompt's tokens

    def of(self, tokens: int, layer: int) -> tuple[list[int], int]:
        """Tokens that each KV head of a layer keeps of a prompt of `tokens`, and how many of them are the newest."""
        if tokens not in self._found:
            if len(self._found) == _LENGTHS:
                self._found.clear()
            self._found[tokens] = self._share(tokens)
        kept, newest = self._found[tokens]
        return kept[layer], newest

    def _share(self, tokens: int) -> tuple[list[list[int]], int]:
        heads, scheme = self._stores[0].heads_apart, self._stores[0].scheme
        pages = len(self._stores) * scheme.prompt.shared_pages(tokens, heads, scheme.sink_tokens, PAGE_SIZE)
        if not pages:
            return [[tokens] * heads] * len(self._stores), 0
        if self._quantiles is None:
            parts = [score_quantiles(heads, store.plan) for store in self._stores]
            self._quantiles = torch.cat(parts).numpy()
        newest = _newest(scheme.prompt, tokens, scheme.sink_tokens)
        found = expected_pages(self._quantiles, pages, tokens, scheme.sink_tokens + newest, PAGE_SIZE)
        kept = [PAGE_SIZE * count for count in found]
        return [kept[first : first + heads] for first in range(0, len(kept), heads)], newest


def _newest(shares: Evict, tokens: int, sink_tokens: int) -> int:
    """Newest tokens that are kept of a prompt: no more than whole pages hold beside the sink tokens."""
    return min(shares.budget(tokens)[1], (tokens - 1) // PAGE_SIZE * PAGE_SIZE - sink_tokens)


def share_budget(groups: list[Group], heads: int) -> None:
    """Decide how many tokens of its open prompt each KV head of all layers keeps, once all are scored.

    Args:
        groups: of all layers, one layer each.
        heads: KV heads of a layer, which are consecutive rows.

    Raises:
        NumericError: a score is NaN.
    """
    for begin in range(0, groups[0].rows, heads):
        sequence = groups[0].sequences[begin]
        if sequence.open_from is None:
            continue
        n, shares = sequence.keys.buffered, groups[0].scheme.prompt
        pages = len(groups) * shares.shared_pages(n, heads, sequence.sink_tokens, PAGE_SIZE)
        rows = [(group, begin + head) for group in groups for head in range(heads)]
        if not pages:
            kept = [n] * len(rows)
        else:
            masses = [group.stores[0].rows[row].attention_mass for group, row in rows]
            newest = _newest(shares, n, sequence.sink_tokens)
            scores = torch.cat([mass.to(masses[0].device) for mass in masses])
            scores[:, : sequence.sink_tokens] = scores[:, n - newest :] = math.inf
            for (group, row), mass, own in zip(rows, masses, scores, strict=True):
                group.stores[0].rows[row].attention_mass = own[None].to(mass.device)
            if not skips_launches() and bool(scores.isnan().any()):
                raise unusable_scores(groups[0].scheme)
            kept = [PAGE_SIZE * count for count in share_pages(scores, pages, PAGE_SIZE)]
        for (group, row), count in zip(rows, kept, strict=True):
            group.policy.kept[row] = count
