"""Attention over a paged cache: one softmax over quantized pages and full-precision tokens of ragged sequences.

`attention_reference` is the oracle. `paged_attention` streams: every tile of pages and every dense run contributes a
partial (maximum, sum of exponentials, weighted values) per sequence, and partials are merged, so that nothing larger
than a tile is ever dequantized. Prompts that have nothing quantized behind them go to `kernels/prompt/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvconvert.kernels.pages import (
    ChannelScales,
    KeyFormat,
    KeyPages,
    ValueFormat,
    ValuePages,
    dequantize_keys,
    dequantize_values,
    key_codes,
    key_scales,
    value_codes,
)
from kvconvert.kernels.spans import Span, SpanFormat, clamped_rows, shift_extremes, span_scores, weighted_span_values

# Bytes of scores and gathered queries that one tile may take; measured: larger tiles leave the last-level cache.
TILE_BYTES = 8 << 20


@dataclass(frozen=True)
class PageTile:
    """Some pages of some sequences.

    Keys and values of the same tokens; either may still be in full precision where their windows differ.

    Attributes:
        keys: N key pages, or full-precision keys [N, H, P, D].
        values: N value pages, or full-precision values [N, H, P, E].
        rows: int64 [N], the batch row that each page belongs to.
        visible: bool [N, H or 1, T, P], which tokens each of the T queries may see; None when all may see all.
    """

    keys: KeyPages | torch.Tensor
    values: ValuePages | torch.Tensor
    rows: torch.Tensor
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class DenseRun:
    """Full-precision tokens of one sequence.

    Attributes:
        row: the batch row.
        keys: [H, n, D]; values: [H, n, E].
        visible: bool [H or 1, T, n]; None when all queries may see all tokens.
    """

    row: int
    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None = None


def attention_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence in float64.

    Args:
        queries: [Hq, T, D]; query head h reads KV head h // (Hq / H).
        keys: [H, n, D]; values: [H, n, E].
        visible: bool [T, n] or None for all.
        scaling: factor of the dot products, usually 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sink_logits: [Hq] logits of a virtual token with no value (gpt-oss).

    Returns:
        float64 [Hq, T, E]; zeros where a query sees nothing.
    """
    repeat = queries.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(repeat, 0) for x in (keys, values))
    scores = queries.double() @ keys.transpose(1, 2) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return weights[..., : keys.shape[1]] @ values


@dataclass(frozen=True)
class SpanRun:
    """All spans of one sequence, whose scores are shifted together (CalibQuant).

    Attributes:
        row: the batch row.
        spans: in order; format: of all of them.
        tau1, tau2: see `shift_extremes`.
        visible: bool [1, T, n] over the tokens of all spans; None when all queries may see all.
        clamped_rows: int64 scalar, to which the number of rows is added whose different scores the shift made equal.
    """

    row: int
    spans: list[Span]
    format: SpanFormat
    tau1: float = 0.0
    tau2: float = 0.0
    visible: torch.Tensor | None = None
    clamped_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerFormat:
    """How one layer's pages are to be read.

    Attributes:
        keys, values: their formats.
        boosted: int64 [H, boosted], the key channels with more bits where these are fixed for the layer.
        static_keys, static_values: the scales of all pages, where the formats say that these are static.
    """

    keys: KeyFormat
    values: ValueFormat
    boosted: torch.Tensor | None = None
    static_keys: ChannelScales | None = None
    static_values: ChannelScales | None = None


def pages_per_tile(num_query_heads: int, num_queries: int, format: LayerFormat) -> int:
    """How many pages one tile should hold, so that its scores and dequantized codes stay within `TILE_BYTES`."""
    keys, values = format.keys, format.values
    scores = num_query_heads * num_queries * (keys.page_size + keys.head_dim)
    codes = keys.heads * keys.page_size * max(keys.head_dim, values.head_dim)
    return max(1, TILE_BYTES // (4 * (scores + codes)))


def paged_attention(
    queries: torch.Tensor,
    tiles: Iterable[PageTile],
    dense: Iterable[DenseRun],
    format: LayerFormat,
    scaling: float,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    spans: Iterable[SpanRun] = (),
) -> torch.Tensor:
    """Attention of a batch of ragged sequences, each query over its own sequence's pages and dense tokens.

    Args:
        queries: [B, Hq, T, D], rotated if the keys are.
        tiles: the pages, in any order and grouping.
        dense: the full-precision tokens, at most one softmax block per run.
        format: of the layer's pages.
        scaling, softcap, sink_logits: as in `attention_reference`.
        spans: at most one run per row.

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
    for run in dense:
        scores = grouped[run.row] @ run.keys.float().transpose(1, 2)
        visible = None if run.visible is None else run.visible[None]
        weights, maximum = _exponentials(scores[None], scaling, softcap, visible, length)
        row = torch.tensor([run.row], device=queries.device)
        state.add(row, maximum, weights.sum(-1), weights @ run.values.float())
    for run in spans:
        scores = torch.cat([span_scores(grouped[run.row], span, run.format) for span in run.spans], -1).mul_(scaling)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if run.tau1 or run.tau2:
            if run.clamped_rows is not None:
                run.clamped_rows.add_(clamped_rows(scores, run.tau1, run.tau2).sum())
            scores = shift_extremes(scores, run.tau1, run.tau2)
        visible = None if run.visible is None else run.visible[None]
        weights, maximum = _exponentials(scores[None], 1.0, None, visible, length)
        parts = weights[0].split([span.tokens for span in run.spans], -1)
        output = sum(weighted_span_values(w, span, run.format) for w, span in zip(parts, run.spans, strict=True))
        state.add(torch.tensor([run.row], device=queries.device), maximum, weights.sum(-1), output[None])
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
