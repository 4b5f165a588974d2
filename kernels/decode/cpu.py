"""Decode attention tile by tile in plain PyTorch: the CPU's path, and the slower one of every other device.

Every tile of pages and every residual window contributes a partial (maximum, sum of exponentials, weighted values) per
sequence, and partials are merged, so that nothing larger than a tile is ever dequantized.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvconvert.kernels.decode.stored import PageTile, ResidualTokens, SpanTokens
from kvconvert.kernels.pages.formats import LayerFormat
from kvconvert.kernels.pages.records import KeyPages, ValuePages
from kvconvert.kernels.pages.reference import dequantize_keys, dequantize_values, key_codes, key_scales, value_codes
from kvconvert.kernels.spans.reference import shift_scores, span_scores, weighted_span_values

# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 8 << 20


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
    state = _Softmax(grouped, format.values.head_dim)
    for tile in tiles:
        scores = _page_scores(grouped[tile.rows], tile.keys, format)
        weights, maximum = _exponentials(scores, scaling, softcap, tile.visible, length)
        state.add(tile.rows, maximum, weights.sum(-1), _weighted_page_values(weights, tile.values, format))
    for part in residuals:
        scores = grouped[part.row] @ part.keys.float().transpose(1, 2)
        visible = None if part.visible is None else part.visible[None]
        weights, maximum = _exponentials(scores[None], scaling, softcap, visible, length)
        row = torch.tensor([part.row], device=queries.device)
        state.add(row, maximum, weights.sum(-1), weights @ part.values.float())
    for part in spans:
        scores = torch.cat([span_scores(grouped[part.row], span, part.format) for span in part.spans], -1).mul_(scaling)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = shift_scores(scores, part.format, part.clamped_rows)
        visible = None if part.visible is None else part.visible[None]
        weights, maximum = _exponentials(scores[None], 1.0, None, visible, length)
        parts = weights[0].split([span.tokens for span in part.spans], -1)
        output = sum(weighted_span_values(w, span, part.format) for w, span in zip(parts, part.spans, strict=True))
        state.add(torch.tensor([part.row], device=queries.device), maximum, weights.sum(-1), output[None])
    return state.finish(sink_logits, length).reshape(batch, query_heads, length, -1)


def _exponentials(
    scores: torch.Tensor, scaling: float, softcap: float | None, visible: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - row maximum) and that maximum, for raw dot products [N, H, R, n] with R = query heads per KV head *
    T.
    """
    scores.mul_(scaling)
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        n, heads, rows, tokens = scores.shape
        scores.view(n, heads, rows // length, length, tokens).masked_fill_(~visible.unsqueeze(2), float("-inf"))
    maximum = scores.amax(-1)
    # A query that sees nothing here has maximum -inf; subtracting 0 instead keeps its exponentials at 0, not NaN.
    return scores.sub_(maximum.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_(), maximum


class _Softmax:
    """The running softmax of every query of the batch: maximum, sum of exponentials and weighted values so far."""

    def __init__(self, grouped: torch.Tensor, value_dim: int):
        shape = grouped.shape[:3]
        self.maximum = grouped.new_full(shape, float("-inf"))
        self.total = grouped.new_zeros(shape)
        self.output = grouped.new_zeros(*shape, value_dim)

    def add(self, rows: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, output: torch.Tensor) -> None:
        """Merge N partials: `rows` [N], `maximum` and `total` [N, H, R], `output` [N, H, R, E]."""
        index = rows.view(-1, 1, 1).expand_as(maximum)
        merged = self.maximum.scatter_reduce(0, index, maximum, "amax")
        finite = merged.nan_to_num(neginf=0.0)
        self._rescale((self.maximum - finite).exp())
        self.maximum = merged
        weight = (maximum - finite[rows]).exp()
        self.total.index_add_(0, rows, total * weight)
        self.output.index_add_(0, rows, output * weight.unsqueeze(-1))

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
        return self.output / self.total.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)


def _page_scores(queries: torch.Tensor, pages: KeyPages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Dot products of queries [N, H, R, D] with page keys: [N, H, R, P].

    With few queries the scales are folded into the query, which leaves the codes as they are; with many, one
    dequantized page serves them all.
    """
    if isinstance(pages, torch.Tensor):
        return queries @ pages.float().transpose(2, 3)
    f = format.keys
    groups = f.page_size // f.group_size
    if f.bits == 16 or queries.shape[2] * groups > f.page_size:
        return queries @ dequantize_keys(pages, f, format.boosted, format.static_keys)
    codes = key_codes(pages, f, format.boosted).float()
    scale, zero_point = (part.float() for part in key_scales(pages, format.static_keys))
    offset = queries @ zero_point
    scores = torch.empty(*queries.shape[:3], f.page_size, device=queries.device)
    for g in range(groups):
        tokens = slice(g * f.group_size, (g + 1) * f.group_size)
        scores[..., tokens] = (queries * scale[..., g].unsqueeze(2)) @ codes[..., tokens]
        scores[..., tokens] += offset[..., g : g + 1]
    return scores if pages.norm is None else scores.mul_(pages.norm.float().unsqueeze(2))


def _weighted_page_values(weights: torch.Tensor, pages: ValuePages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Sum of page values by weights [N, H, R, P]: [N, H, R, E].

    Scales go into the weights when these are few. Those of static pages, which tokens share, leave the product.
    """
    if isinstance(pages, torch.Tensor):
        return weights @ pages.float()
    f, static = format.values, format.static_values
    if f.static:
        codes = value_codes(pages, f).float()
        offset = weights.sum(-1, keepdim=True) * static.zero_point.float().unsqueeze(1)
        return (weights @ codes).mul_(static.scale.float().unsqueeze(1)).add_(offset)
    groups = f.head_dim // f.group_size
    if f.bits == 16 or weights.shape[2] * groups > f.head_dim:
        return weights @ dequantize_values(pages, f)
    codes = value_codes(pages, f).float()
    scale, offset = pages.scale.float(), weights @ pages.zero_point.float()
    output = torch.empty(*weights.shape[:3], f.head_dim, device=weights.device)
    for g in range(groups):
        channels = slice(g * f.group_size, (g + 1) * f.group_size)
        output[..., channels] = (weights * scale[..., g].unsqueeze(2)) @ codes[..., channels]
        output[..., channels] += offset[..., g : g + 1]
    return output
