"""Selection by reconstruction (KVzip): prompts are read again and scored, or their scores predicted, and all heads
share one budget.

Every KV head is a row of its own here: row `b * heads + h` of a layer is head h of sequence b, so that each holds as
many tokens as the scores leave it. While a group's `repetition` is set, tokens that reach its layers are not stored.
"""

from __future__ import annotations

import math

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.launches import skips_launches
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import repeated_attention, share_pages
from kvconvert.runtime.cache.store import Group, LayerStore

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


def predict_scores(groups: list[Group], heads: int) -> None:
    """Predict how much a repetition would attend to each token of open prompts; arguments as of `share_budget`."""
    for group in groups:
        store = group.stores[0]
        for begin in range(0, group.rows, heads):
            sequence = group.sequences[begin]
            if sequence.open_from is None:
                continue
            rows = store.rows[begin : begin + heads]
            keys, values = (
                torch.stack([side.tokens(0, sequence.keys.buffered)[0] for side in sides])
                for sides in ([row.keys for row in rows], [row.values for row in rows])
            )
            if store.format.rotations.keys:
                keys = hadamard_transform(keys, inverse=True)
            for row, own in zip(rows, store.scorer.scores(keys, values), strict=True):
                row.attention_mass = own[None]


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
            whole = (n - 1) // PAGE_SIZE * PAGE_SIZE  # tokens of whole pages
            newest = min(shares.budget(n)[1], whole - sequence.sink_tokens)
            scores = torch.cat([mass.to(masses[0].device) for mass in masses])
            scores[:, : sequence.sink_tokens] = scores[:, n - newest :] = math.inf
            for (group, row), mass, own in zip(rows, masses, scores, strict=True):
                group.stores[0].rows[row].attention_mass = own[None].to(mass.device)
            if not skips_launches() and bool(scores.isnan().any()):
                raise NumericError(
                    f'selection = "{shares.selection}" scores tokens of this prompt by NaN, so none can be chosen; '
                    "the model or its KV plan is damaged, so fetch or calibrate it again."
                )
            kept = [PAGE_SIZE * count for count in share_pages(scores, pages, PAGE_SIZE)]
        for (group, row), count in zip(rows, kept, strict=True):
            group.policy.kept[row] = count
