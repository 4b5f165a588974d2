"""Decode attention tile by tile in plain PyTorch: the CPU's path, and the slower one of every other device.

Every tile of pages and every batch of residual windows contributes a partial (maximum, sum of exponentials, weighted
values) per sequence, and partials are merged, so that nothing larger than a tile is ever dequantized.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvconvert.kernels.decode.page_products import page_scores, weighted_page_values
from kvconvert.kernels.decode.stored import PageTile, ResidualTokens, SpanTokens
from kvconvert.kernels.pages.center import projected_scores
from kvconvert.kernels.pages.formats import LayerFormat
from kvconvert.kernels.spans.reference import shift_scores, span_scores, weighted_span_values

# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 3 << 20


def pages_per_tile(num_query_heads: int, num_queries: int, format: LayerFormat) -> int:
    """How many pages one tile should hold, so that its scores and dequantized codes stay within `TILE_BYTES`."""
    keys, values = format.keys, format.values
    scores = num_query_heads * num_queries * (keys.page_size + keys.head_dim)
    codes = keys.heads * keys.page_size * max(keys.head_dim, values.head_dim)
    return max(1, TILE_BYTES // (4 * (scores + codes)))


def paged_attention(
    queries: torch.Tensor,
    tiles: Iterable[PageTile],
    residuals: Iterable[ResidualTokens],
    format: LayerFormat,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    spans: Iterable[SpanTokens] = (),
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's stored tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        tiles: the pages, in any order and grouping.
        residuals: the full-precision tokens, one softmax block each.
        format: of the layer's pages.
        scaling, softcap, sink_logits: as in `attention_reference`.
        spans: at most one entry per row.

    Returns:
        float32 [B, Hq, T, E]; zeros where a query sees nothing.
    """
    batch, query_heads, length, _ = queries.shape
    heads = format.keys.heads
    # All queries that read one KV head are rows of one matrix, so a code is unpacked once for the whole group.
    grouped = queries.float().reshape(batch, heads, query_heads // heads * length, -1)
    # Soft caps need the scores themselves.
    scaled = grouped if softcap else grouped * scaling
    center = format.key_center
    projected = None if center is None else scaled @ center.matrix.float()
    state = _Softmax(grouped, format.values.head_dim)

    def weights_of(rows: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        if softcap:
            scores = scores.mul_(scaling / softcap).tanh_().mul_(softcap)
        return state.weights(rows, _hide(scores, visible, length))

    for tile in tiles:
        asking = scaled if batch == 1 else scaled[tile.rows]
        scores = page_scores(asking, tile.keys, format)
        if projected is not None and not isinstance(tile.keys, torch.Tensor):
            here = projected if batch == 1 else projected[tile.rows]
            scores += projected_scores(here, tile.positions, format.keys.page_size, center)
        weights = weights_of(tile.rows, scores, tile.visible)
        state.add(tile.rows, weighted_page_values(weights, tile.values, format))
    for part in residuals:
        asking = scaled if batch == 1 else scaled[part.rows]
        scores = asking @ part.keys.float().transpose(2, 3)
        state.add(part.rows, weights_of(part.rows, scores, part.visible) @ part.values.float())
    for part in spans:
        row = torch.tensor([part.row], device=queries.device)
        scores = torch.cat([span_scores(grouped[part.row], span, part.format) for span in part.spans], -1).mul_(scaling)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = shift_scores(scores, part.format, part.clamped_rows)[None]
        weights = state.weights(row, _hide(scores, None if part.visible is None else part.visible[None], length))
        parts = weights[0].split([span.tokens for span in part.spans], -1)
        output = sum(weighted_span_values(w, span, part.format) for w, span in zip(parts, part.spans, strict=True))
        state.add(row, output[None])
    return state.finish(sink_logits, length).reshape(batch, query_heads, length, -1)


def _hide(scores: torch.Tensor, visible: torch.Tensor | None, length: int) -> torch.Tensor:
    """Scores [N, H, R, n], R = query heads per KV head * T, with -inf where `visible` [N, H or 1, T, n] is false."""
    if visible is None:
        return scores
    n, heads, rows, tokens = scores.shape
    by_query = scores.view(n, heads, rows // length, length, tokens)
    return by_query.masked_fill_(~visible.unsqueeze(2), float("-inf")).view(n, heads, rows, tokens)


class _Softmax:
    """The running softmax of every query of the batch: maximum, sum of exponentials and weighted values so far.

    Maxima begin at the lowest finite number: -inf minus it is -inf, whose exponential is 0 and not NaN.
    """

    def __init__(self, grouped: torch.Tensor, value_dim: int):
        shape = grouped.shape[:3]
        self.maximum = grouped.new_full(shape, torch.finfo(torch.float32).min)
        self.total = grouped.new_zeros(shape)
        self.output = grouped.new_zeros(*shape, value_dim)

    def weights(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Count N blocks of scores [N, H, R, n] of batch rows [N], which they replace by exp(score - maximum so far).

        What was counted before is brought to the new maximum; `add` has to follow.
        """
        own = scores.amax(-1)
        if len(self.maximum) == 1:
            merged = torch.maximum(self.maximum, own.amax(0))
            of_rows = merged
        else:
            merged = self.maximum.scatter_reduce(0, rows.view(-1, 1, 1).expand_as(own), own, "amax")
            of_rows = merged[rows]
        self._rescale((self.maximum - merged).exp_())
        self.maximum = merged
        weights = scores.sub_(of_rows.unsqueeze(-1)).exp_()
        self._add(self.total, rows, weights.sum(-1))
        return weights

    def add(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Add the values [N, H, R, E] that the last `weights` gave."""
        self._add(self.output, rows, output)

    @staticmethod
    def _add(target: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor) -> None:
        if len(target) == 1:
            target.add_(parts.sum(0))
        else:
            target.index_add_(0, rows, parts)

    def _rescale(self, factor: torch.Tensor) -> None:
        self.total.mul_(factor)
        self.output.mul_(factor.unsqueeze(-1))

    def finish(self, sink_logits: torch.Tensor | None, length: int) -> torch.Tensor:
        """[B, H, R, E]."""
        if sink_logits is not None:
            logits = sink_logits.float().view(1, self.maximum.shape[1], -1, 1)
            logits = logits.expand(-1, -1, -1, length).reshape(1, self.maximum.shape[1], -1)
            merged = torch.maximum(self.maximum, logits)
            self._rescale((self.maximum - merged).exp())
            self.total += (logits - merged).exp()
        return self.output.div_(self.total.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(-1))
